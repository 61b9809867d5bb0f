"""Tables in fewer bits: TorchRec's inference modules in the place of its trained ones.

int8 stores each row as bytes with a scale and a bias of its own: x ~ q * scale + bias with q in
0..255, scale = (max - min) / 255, so that an element is off by about half a
scale. Scale and bias are half-precision numbers, of which those below 6e-5 have few digits: rows
whose elements differ by less than about 0.016 are off by more than that.
"""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.inference.modules import quantize_embeddings
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from trainer.spec.export import Quantization

_DTYPES = {"int8": torch.qint8, "fp16": torch.half}


def quantized(model: nn.Module, quantize: Quantization) -> nn.Module:
    """`model` with every collection of tables in `quantize`, and float32 results.

    The dense part is shared with `model`. `none` gives `model` itself.
    """
    if quantize == "none":
        return model
    shared = _without_copying(model)
    swapped = quantize_embeddings(
        shared,
        dtype=_DTYPES[quantize],
        inplace=True,
        additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: QuantEmbeddingCollection},
    )
    for module in swapped.modules():
        _drop_second_names(module)
    return swapped


def _drop_second_names(module: nn.Module) -> None:
    """Forget the names by table that TorchRec gives to parts of the kernels' weights.

    They are views, for state dicts; torch.export would write each table once more for them.
    """
    if isinstance(module, QuantEmbeddingBagCollection):
        module.embedding_bags = nn.ModuleDict()
    if isinstance(module, QuantEmbeddingCollection):
        module.embeddings = nn.ModuleDict()


def _without_copying(module: nn.Module) -> nn.Module:
    """The same module tree as new modules over the same tensors, so that swapping parts of it
    leaves `module` as it is."""
    if isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
        return module
    twin = object.__new__(type(module))
    twin.__dict__ = dict(module.__dict__)
    twin._modules = {
        name: _without_copying(child) if child is not None else None
        for name, child in module._modules.items()
    }
    return twin
