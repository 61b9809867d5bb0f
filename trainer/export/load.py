"""Loads the spec of a run folder, and one of its checkpoints, for an export.

Every file of the checkpoint is checked, and only tensors are read. The model is unsharded, in one
process without a process group; sizes are in bytes. Raises `ExportError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from pydantic_core import from_json
from torch import nn

from trainer.checkpoint.files import (
    CheckpointGone,
    CommittedCheckpoint,
    Folder,
    checkpoints_of,
    folder_at,
    list_committed,
    matches,
    read_commit,
    superseded_in,
)
from trainer.checkpoint.save_load import load
from trainer.checkpoint.state_dict import name_in_table_place, stored_sizes, table_of
from trainer.export.artifact import ExportError
from trainer.export.program import TABLE_FORMS
from trainer.export.requests import places_digest
from trainer.models.networks import build_model
from trainer.protocol.run_dir import RunDir
from trainer.protocol.untrusted import read_untrusted
from trainer.spec.job import JobSpec
from trainer.spec.training import Quantization

_WEIGHTS = "model."
_CPU = torch.device("cpu")


def read_run_spec(run_dir: RunDir, places: str | None = None) -> JobSpec:
    """The spec of the newest attempt in a run folder.

    Raises `ExportError` where there is none, and for one that names other `places` than these (of
    `places_digest`).
    """
    # As the driver resolved it, rather than as it was submitted.
    paths = list(run_dir.root.glob("attempts/*/resolved-spec.json"))
    paths = paths or list(run_dir.root.glob("attempts/*/spec.json"))
    if not paths:
        raise ExportError(
            f"{run_dir.root} is no folder of a job: there is no attempts/*/spec.json in it; name "
            "the folder that holds the job's 'checkpoints' and 'attempts'"
        )
    newest = max(paths, key=lambda path: path.lstat().st_mtime)
    try:
        spec = JobSpec.checked(from_json(read_untrusted(newest, run_dir.root)), {"stored": True})
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{newest} cannot be read: {error}; another version, or the job's own code, wrote it: "
            "remove it, and the spec of the attempt before counts"
        ) from None
    if places is not None and places_digest(spec) != places:
        raise ExportError(
            f"{newest} names another data.path or checkpoint.path than the job was submitted with; "
            "the job's own code wrote it: remove it, or submit a new job"
        )
    return spec


def find_checkpoint(run_dir: RunDir, wanted: str, places: str | None = None) -> CommittedCheckpoint:
    """The checkpoint `wanted`: `newest`, `best`, a step, or name or path of one; whole or refused.

    `newest` is the newest whole one, and `best` the newest where none was ever best, both without
    those that a rewind has left behind. One that is removed while it is checked does not count.
    `places` are those of `read_run_spec`; with them, links in the place of folders are refused, but
    for one that is put there while the checkpoint is read.
    Raises `ExportError`, and `StorageError` where remote storage is away.
    """
    while True:
        with suppress(CheckpointGone):  # so that it is not found again
            return _find_checkpoint(run_dir, wanted, places)


def _find_checkpoint(run_dir: RunDir, wanted: str, places: str | None) -> CommittedCheckpoint:
    if "/" in wanted:
        path = folder_at(wanted)
        if (commit := read_commit(path)) is None:
            raise ExportError(f"{path} is no whole checkpoint: it has no readable COMMIT.json")
        return _whole(CommittedCheckpoint(path, commit))
    folder: Folder = run_dir.checkpoints_dir
    if not run_dir.checkpoints_dir.is_dir() and (run_dir.root / "attempts").is_dir():
        folder = checkpoints_of(run_dir.root, read_run_spec(run_dir, places).checkpoint.path)
    committed = list_committed(folder)
    if places is not None:
        for path in (folder, *(each.path for each in committed)):
            if isinstance(path, Path) and path.is_symlink():
                raise ExportError(
                    f"{path} is a link, which may lead to checkpoints of another job; the job's "
                    "own code made it: remove it"
                )
    if not committed:
        if folder != run_dir.checkpoints_dir and isinstance(folder, Path) and not folder.is_dir():
            raise ExportError(
                f"this host does not see {folder}, where the job keeps its checkpoints: mount it "
                "here at that path, or let the job save"
            )
        raise ExportError(f"{folder} holds no checkpoint yet; let the job save")
    if wanted in ("newest", "best"):
        is_superseded = superseded_in(run_dir.root)
        counted = [each for each in committed if not is_superseded(each.path.name)]
        best = [each for each in counted if each.commit.is_best]
        if wanted == "best" and best:
            return _whole(best[-1])
        for each in reversed(counted):
            if _damaged_file(each) is None:
                return each
        raise ExportError(
            f"all {len(committed)} checkpoints in {folder} are damaged, or left behind by a rewind"
        )
    named = [each for each in committed if wanted in (each.path.name, str(each.commit.step))]
    if not named:
        steps = ", ".join(str(each.commit.step) for each in committed)
        raise ExportError(f"there is no checkpoint '{wanted}'; those of steps {steps} are there")
    return _whole(named[-1])


def _whole(found: CommittedCheckpoint) -> CommittedCheckpoint:
    if (damaged := _damaged_file(found)) is not None:
        raise ExportError(
            f"checkpoint {found.path.name} is damaged: {damaged} is not as it was written; name "
            "another one, or `newest` for the newest that is whole"
        )
    return found


def _damaged_file(found: CommittedCheckpoint) -> str | None:
    """Name of a file that is missing, has another size or checksum than was recorded, has no end,
    or is a link, which may lead to a file of another job."""
    if isinstance(found.path, Path):
        for path in found.path.glob("*"):
            if path.is_symlink() or path.is_fifo() or path.is_char_device():
                return path.name
    files = found.commit.files.items()
    return next((name for name, record in files if not matches(found.path, name, record)), None)


def stored_weights(folder: Folder) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of the model in a checkpoint, by its name in the model."""
    return {
        key.removeprefix(_WEIGHTS): tuple(size)
        for key, size in stored_sizes(folder).items()
        if key.startswith(_WEIGHTS)
    }


def with_table_sizes(spec: JobSpec, weights: Mapping[str, Sequence[int]]) -> JobSpec:
    """`spec` with the number of rows that each table has in a checkpoint.

    Raises `ExportError` where a table of the spec is not in it.
    """
    tables = {table.name for table in spec.embedding_tables}
    rows = {name: shape[0] for key, shape in weights.items() if (name := table_of(key, tables))}
    if missing := [t.name for t in spec.embedding_tables if t.name not in rows]:
        there = sorted({name for key in weights if (name := name_in_table_place(key))})
        raise ExportError(
            f"the checkpoint has no table '{missing[0]}'; it holds {', '.join(there)}. Was the "
            "spec changed since?"
        )
    sized = tuple(
        table.model_copy(update={"num_embeddings": rows[table.name]})
        for table in spec.embedding_tables
    )
    return spec.model_copy(update={"embedding_tables": sized})


def load_model(spec: JobSpec, folder: Folder) -> nn.Module:
    """The job's model on the CPU with the weights of the checkpoint in `folder`, in eval mode.

    Whatever T, L, placement and sharding wrote it. Raises `CheckpointMismatch` where the checkpoint
    is of another model, and what else `load` of checkpoints does.
    """
    model = build_model(spec, _CPU)
    materialize(model)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    load(folder, state)
    return model.eval()


def materialize(model: nn.Module) -> None:
    """Give every parameter on the meta device memory, unset; in float32.

    Outside FBGEMM's kernels no table of half precision can be looked up with weights.
    """
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                empty = torch.empty(parameter.shape, dtype=torch.float32)
                setattr(module, name, nn.Parameter(empty, requires_grad=False))


def num_table_elements(spec: JobSpec) -> int:
    return sum(int(t.num_embeddings) * t.embedding_dim for t in spec.embedding_tables)


def check_memory(spec: JobSpec, quantize: Quantization, available_bytes: int) -> None:
    """Raise `ExportError` where an export, at its peak, does not fit."""
    needed = TABLE_FORMS[quantize].peak_bytes * num_table_elements(spec)
    if needed > available_bytes:
        raise ExportError(
            f"exporting needs about {needed / 1e9:.1f} GB for an unsharded copy of the tables and "
            f"its {quantize} form, and {available_bytes / 1e9:.1f} GB are free here; export on a "
            "host with more memory (`shardloom export --run-dir DIR`)"
        )
