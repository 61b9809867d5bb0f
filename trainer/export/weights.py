"""The whole model of a checkpoint in one process, without a process group."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from trainer.elastic.checkpoint_folder import Folder
from trainer.export.errors import NotEnoughMemory, NotExportable
from trainer.export.source import stored_weights, tensor_reader
from trainer.models.dlrm import build_model
from trainer.spec import JobSpec
from trainer.spec.export import Quantization

_CPU = torch.device("cpu")
# Peak of a whole export for each element of a table, measured (2 tables of 1M x 64, above what the
# libraries take): the float32 copy, one table more while it is read, the quantised one, and that
# again while the program is written, or loaded to be compared.
_BYTES_PER_ELEMENT = {"int8": 9, "fp16": 11, "none": 9}


def load_model(spec: JobSpec, folder: Folder) -> nn.Module:
    """The job's model on the CPU with the weights of the checkpoint in `folder`, in eval mode.

    Whatever T, L, placement and sharding wrote it. Raises `NotExportable` where the checkpoint is
    of another model.
    """
    model = build_model(spec, _CPU)
    materialize(model)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    _check_shapes(folder, model)
    try:
        dcp.load(state, storage_reader=tensor_reader(folder), no_dist=True)
    except (CheckpointException, OSError) as error:
        raise NotExportable(f"checkpoint {folder.name} cannot be loaded: {error}") from error
    return model.eval()


def materialize(model: nn.Module) -> None:
    """Give every parameter on the meta device memory, unset."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))


def _check_shapes(folder: Folder, model: nn.Module) -> None:
    stored = stored_weights(folder)
    for name, tensor in model.state_dict().items():
        if stored.get(name) != tuple(tensor.shape):
            found = list(stored[name]) if name in stored else "not there"
            raise NotExportable(
                f"checkpoint {folder.name} is of another model: {name} is {found} in it and "
                f"{list(tensor.shape)} by the spec; export with the spec of the job that wrote it"
            )


def bytes_needed(spec: JobSpec, quantize: Quantization) -> int:
    """Memory that an export takes at its peak for the tables of `spec`, whose sizes are known."""
    sizes = [int(t.num_embeddings) * t.embedding_dim for t in spec.embedding_tables]
    return _BYTES_PER_ELEMENT[quantize] * sum(sizes)


def check_memory(spec: JobSpec, quantize: Quantization, available_bytes: int) -> None:
    """Raise `NotEnoughMemory` where the unsharded tables do not fit."""
    needed = bytes_needed(spec, quantize)
    if needed > available_bytes:
        raise NotEnoughMemory(
            f"exporting needs about {needed / 1e9:.1f} GB for an unsharded copy of the tables and "
            f"its {quantize} form, and {available_bytes / 1e9:.1f} GB are free here; export on a "
            "host with more memory (`shardloom export --run-dir DIR`)"
        )


def available_bytes() -> int:
    """Memory that this process may still take: the host's free part, within its cgroup's limit."""
    limits = [_free_on_host()]
    group = Path("/sys/fs/cgroup")
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is not None and used is not None:
        limits.append(limit - used + _cached_bytes(group / "memory.stat"))
    return min(limits)


def _cached_bytes(path: Path) -> int:
    """Memory of the cgroup that holds files which can be read again."""
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(value) for name, value in pairs if name == "inactive_file"), 0)


def _free_on_host() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as in `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
