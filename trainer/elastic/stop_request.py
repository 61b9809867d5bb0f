"""Asking the workers of the domain `job` to save and stop, so that they start again elsewhere.

    driver ──► stop-request.json {"run_index", "cause"}     read by rank 0 at every report
    rank 0 ──► stopping-RUN_INDEX                           when all ranks know of it

Both are files of the attempt. Workers that end well have completed the training, or left that mark.
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
    import torch.distributed as dist

    if not is_report_step:
        return False
    files = RunDir(config.run_dir).attempt(config.attempt_id)
    is_first = dist.get_rank() == 0
    answer = [is_wanted(files, config.run_index) if is_first else None]
    dist.broadcast_object_list(answer, src=0)
    if answer[0] and is_first:
        files.stopping_path(config.run_index).touch()
    return bool(answer[0])


def has_stopped(files: AttemptDir, run_index: int) -> bool:
    """Whether workers that ended well did so because they were asked to."""
    return files.stopping_path(run_index).exists()
