"""Asking the workers of the domain `job` to save and stop, so that they start again elsewhere.

    driver ──► stop-request.json {"run_index", "cause"}     read by rank 0 at every report
    rank 0 ──► stopping-RUN_INDEX                           when all ranks know of it

Both are files of the attempt. Workers that end well have completed the training, or left that mark.

Before a pause the domain `replica_group` is asked in the same way: its leader saves for all and
leaves the mark once the checkpoint is on storage; the driver then ends all groups.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.ray_worker import WorkerConfig
from trainer.run_dir import AttemptDir, RunDir


class StopRequest(BaseModel):
    """Worker group run `run_index` shall save and end; `cause` is one of `Resized`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_index: int = Field(ge=0)
    cause: str


def ask(files: AttemptDir, request: StopRequest) -> None:
    """Write the request; the file appears whole."""
    path = files.stop_request_path
    partial = path.with_name(f".partial-{path.name}")
    partial.write_text(request.model_dump_json())
    partial.replace(path)


def is_wanted(files: AttemptDir, run_index: int) -> bool:
    """Whether a request for this run lies there; one that cannot be read is none."""
    try:
        request = StopRequest.model_validate_json(files.stop_request_path.read_bytes())
    except (OSError, ValidationError):
        return False
    return request.run_index == run_index


def is_due(config: WorkerConfig, is_report_step: bool) -> bool:
    """Whether these workers shall save and stop now. Collective over all ranks on report steps."""
    is_due_now = is_asked(config, is_report_step)
    if is_due_now:
        mark_stopping(config)
    return is_due_now


def is_asked(config: WorkerConfig, is_report_step: bool) -> bool:
    """Whether a request for these workers lies there. Collective over all ranks on report steps."""
    import torch.distributed as dist

    if not is_report_step:
        return False
    answer = [is_wanted(_files_of(config), config.run_index) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    return bool(answer[0])


def mark_stopping(config: WorkerConfig) -> None:
    """Rank 0 leaves the mark by which the driver knows that these workers did as asked."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        _files_of(config).stopping_path(config.run_index).touch()


def _files_of(config: WorkerConfig) -> AttemptDir:
    return RunDir(config.run_dir).attempt(config.attempt_id)


def has_stopped(files: AttemptDir, run_index: int) -> bool:
    """Whether workers that ended well did so because they were asked to."""
    return files.stopping_path(run_index).exists()
