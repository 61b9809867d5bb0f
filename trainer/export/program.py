"""The model as a torch.export program over flat arrays, so that it runs without its source.

Inputs, in order: dense [B, D] float32; where there are pooled features, their ids [N] int64,
lengths [F * B] int32 feature by feature, and, where `spec.is_weighted`, a weight [N] float32 for
each id; then the same of sequences. Output: [B, K] in the units that the model learns. Sizes B and
N may be any from 2 on (torch.export takes sizes 0 and 1 for constants), see `PAD_ROWS`.

int8 stores each row as bytes with a scale and a bias of its own: x ~ q * scale + bias with q in
0..255, scale = (max - min) / 255, so that an element is off by about half a scale. Scale and bias
are half-precision numbers, of which those below 6e-5 have few digits: rows whose elements differ by
less than about 0.016 are off by more than that.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection

from trainer.data.batches import Batch, BatchKeys
from trainer.export.artifact import ExportError
from trainer.spec.data import FeatureSpec
from trainer.spec.job import JobSpec
from trainer.spec.training import Quantization

_EXAMPLE_ROWS = 5


class TableForm(NamedTuple):
    """How tables are exported: their type, None as they are, and what that takes.

    `peak_bytes` is the peak of a whole export for each element of a table, measured (2 tables of 1M
    x 64, above what the libraries take): the float32 copy, one table more while it is read, the
    quantised one, and that again while the program is written, or loaded to be compared.
    """

    dtype: torch.dtype | None
    peak_bytes: int


TABLE_FORMS: Mapping[Quantization, TableForm] = {
    "int8": TableForm(torch.qint8, 9),
    "fp16": TableForm(torch.half, 11),
    "none": TableForm(None, 9),
}


class FlatModel(nn.Module):
    """A model over the flat arrays of the module docstring."""

    def __init__(self, model: nn.Module, spec: JobSpec) -> None:
        super().__init__()
        self.model = model
        self._num_tasks = len(spec.model.tasks)
        self._keys = BatchKeys(spec)

    def forward(self, dense: torch.Tensor, *arrays: torch.Tensor) -> torch.Tensor:
        rest, keys = list(arrays), self._keys
        sparse = _take(rest, keys.pooled, keys.is_weighted)
        sequences = _take(rest, keys.sequences, keys.has_weighted_sequences)
        shape = (dense.shape[0], self._num_tasks)
        if sparse is None:
            empty = torch.zeros(0, dtype=torch.int64)
            sparse = KeyedJaggedTensor(keys=[], values=empty, lengths=empty.int())
        batch = Batch(
            dense=dense,
            sparse=sparse,
            label=dense.new_zeros(shape),
            label_offset=dense.new_zeros(shape),
            label_scale=dense.new_ones(shape),
            weight=dense.new_ones(dense.shape[0]),
            sequences=sequences,
        )
        return self.model(batch)[1]


def _take(rest: list[torch.Tensor], keys: list[str], is_weighted: bool) -> KeyedJaggedTensor | None:
    """The ids of `keys`, taken off the front of the arrays that are left."""
    if not keys:
        return None
    values, lengths = rest.pop(0), rest.pop(0)
    weights = rest.pop(0) if is_weighted else None
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, weights=weights)


def write_program(model: nn.Module, spec: JobSpec, path: Path) -> None:
    """Trace `model` into the new file `path`; raises `ExportError` with the cause, and OSError."""
    arrays = example_arrays(spec)
    sizes = {0: torch.export.Dim.DYNAMIC}
    shapes = (sizes, tuple(sizes for _ in arrays[1:]))
    flat = FlatModel(model, spec).eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(flat, arrays, dynamic_shapes=shapes, strict=False)
            with _ProgramFile(path) as file:
                torch.export.save(program, file)
    except Exception as error:  # the tracer raises whatever the model makes it raise
        cause = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ExportError(
            f"the model cannot be traced by torch.export: {type(error).__name__}: {cause}. Its "
            "forward must not depend on values of tensors (no .item(), no Python loop over rows) "
            "and take sizes from .shape, not from len()"
        ) from error
    if file.fault is not None:
        raise OSError(file.fault.errno, file.fault.strerror, str(path)) from file.fault


class _ProgramFile(io.FileIO):
    """A file that keeps its first write error: torch's writer would end the process by one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x")
        self.fault: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`, or drop it after an error; returns its size in bytes."""
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            while self.fault is None and len(left):
                left = left[super().write(left) :]
        except OSError as error:
            self.fault = error
        return size


def example_arrays(spec: JobSpec) -> tuple[torch.Tensor, ...]:
    """Inputs of `_EXAMPLE_ROWS` rows, with one id 0 in each feature."""
    arrays = [torch.zeros(_EXAMPLE_ROWS, len(spec.dense_features))]
    arrays += _example_ids(spec.pooled_features, spec.is_weighted)
    arrays += _example_ids(spec.sequence_features, spec.has_weighted_sequences)
    return tuple(arrays)


def _example_ids(features: Sequence[FeatureSpec], is_weighted: bool) -> list[torch.Tensor]:
    if not features:
        return []
    # One more id than lengths, lest the tracer takes both sizes for the same.
    num = len(features) * _EXAMPLE_ROWS
    lengths = torch.ones(num, dtype=torch.int32)
    lengths[0] = 2
    arrays = [torch.zeros(num + 1, dtype=torch.int64), lengths]
    return [*arrays, torch.ones(num + 1)] if is_weighted else arrays


def quantized(model: nn.Module, quantize: Quantization) -> nn.Module:
    """`model` with every collection of tables in `quantize`, and float32 results.

    The dense part is shared with `model`. `none` gives `model` itself.
    """
    dtype = TABLE_FORMS[quantize].dtype
    if dtype is None:
        return model
    shared = _without_copying(model)
    swapped = quantize_embeddings(
        shared,
        dtype=dtype,
        inplace=True,
        additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: QuantEmbeddingCollection},
    )
    # Drop TorchRec's views by table of the kernels' weights: torch.export would write each again.
    for module in swapped.modules():
        if isinstance(module, QuantEmbeddingBagCollection):
            module.embedding_bags = nn.ModuleDict()
        if isinstance(module, QuantEmbeddingCollection):
            module.embeddings = nn.ModuleDict()
    return swapped


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
