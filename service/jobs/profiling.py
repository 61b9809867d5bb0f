"""Profiler traces of a job: request them while it runs, list them, find their files.

A request is a file of the attempt that its workers look for at every report, and a line of the
timeline, which tells everybody else of it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import IO, Any, Unpack

from service.db.jobs import JobStore
from service.domain.lifecycle import Decision
from service.domain.models import Job, JobStatus, TimelineEvent
from service.domain.timeline import _NAME_PATTERN, REQUESTED, WRITTEN, Trace, traces_of
from service.errors import (
    InvalidRequest,
    JobNotRunning,
    TraceNotFound,
    TracePending,
    reaching_storage,
)
from service.jobs.actions import ChangedBy, change_job
from service.jobs.run_storage import run_dir_of, write_json
from service.settings import Settings
from trainer.protocol.run_dir import RunDir, trace_name
from trainer.protocol.untrusted import NotRegular, open_folder, open_untrusted
from trainer.spec.base import FieldProblem

# A request that brought nothing for so long does not stand in the way of another.
PATIENCE_S = 600.0
# The newest of those about traces: several of the largest requests.
_MAX_LINES = 5000


def request_trace(
    store: JobStore,
    settings: Settings,
    job_id: str,
    num_steps: int,
    ranks: Sequence[int],
    **by: Unpack[ChangedBy],
) -> tuple[str, dict[str, Any]]:
    """Ask the workers of a running job for a trace of their next steps.

    Gives the attempt's id, and the request as it is told: `id`, `num_steps` and `ranks`.
    Raises `JobNotFound`, `InvalidRequest`, and as conflicts `JobNotRunning` and `TracePending`;
    `StaleVersion` only if others kept writing the job meanwhile, and `StorageUnavailable`.
    """
    trace_id, chosen = f"t-{secrets.token_hex(4)}", sorted(set(ranks))
    document: dict[str, Any] = {"id": trace_id, "num_steps": num_steps, "ranks": chosen}
    run_dir = run_dir_of(settings, job_id)

    def ask(job: Job, actor: str) -> Decision:
        attempt_id, now = _traced_attempt(job, ranks), time.time()
        _check_nothing_pending(_read_lines(store, job_id), attempt_id, now)
        folder = run_dir.attempt(attempt_id).root
        with reaching_storage(), open_folder(folder, run_dir.runs_dir, make=True):
            pass  # Or there would be a line of what nobody is told.
        message = f"trace of {num_steps} step(s) on rank(s) {', '.join(map(str, chosen))} requested"
        event = TimelineEvent(0, job.id, attempt_id, now, REQUESTED, message, actor, document)
        # The version of the job lets one of two requests through, and a stopping job none.
        return Decision(job, None, timeline=(event,))

    asked = change_job(store, job_id, ask, **by)
    assert asked.current_attempt_id is not None
    with reaching_storage():
        path = run_dir.attempt(asked.current_attempt_id).trace_request_path
        write_json(path, document, run_dir.runs_dir)
    return asked.current_attempt_id, document


def _traced_attempt(job: Job, ranks: Sequence[int]) -> str:
    """The attempt whose ranks are traced; raises `InvalidRequest`, and `JobNotRunning`."""
    world_size = job.spec.parallelism.world_size
    unknown = [index for index, rank in enumerate(ranks) if rank >= world_size]
    if unknown:
        message = f"no such rank: workers are numbered 0 to {world_size - 1}"
        raise InvalidRequest([FieldProblem(f"ranks[{each}]", "rank", message) for each in unknown])
    if job.status is not JobStatus.RUNNING or job.current_attempt_id is None:
        raise JobNotRunning(job.id, "to trace", job.status)
    return job.current_attempt_id


def _check_nothing_pending(lines: Sequence[TimelineEvent], attempt_id: str, now: float) -> None:
    """Raise `TracePending` if the attempt's newest request still waits for some of its traces."""
    own = [line for line in lines if line.attempt_id == attempt_id]
    request = next((line for line in reversed(own) if line.kind == REQUESTED), None)
    if request is None or now - request.time > PATIENCE_S:
        return
    data: dict[str, Any] = request.data
    names = {trace_name(data["id"], rank) for rank in data["ranks"]}
    if missing := names - {trace.name for trace in traces_of(own)}:
        raise TracePending(data["id"], ", ".join(sorted(missing)))


def list_traces(store: JobStore, job_id: str) -> list[Trace]:
    """The newest traces that workers of a job wrote, in the order of writing."""
    return traces_of(_read_lines(store, job_id))


def find_trace(
    store: JobStore, run_dir: RunDir, job_id: str, name: str, attempt_id: str | None
) -> IO[bytes]:
    """The opened file of a trace, in the attempt named or in the newest that has it.

    Only what a trace can be called, in an attempt of this job, is looked for. Raises
    `TraceNotFound`.
    """
    if _NAME_PATTERN.fullmatch(name):
        for attempt in reversed(store.list_attempts(job_id)):
            if attempt_id in (None, attempt.id):
                path = run_dir.attempt(attempt.id).traces_dir / name
                # A job may lay a link among its files; what it leads to is not the job's to show.
                with contextlib.suppress(FileNotFoundError, NotRegular):
                    return open_untrusted(path, run_dir.runs_dir)
    raise TraceNotFound(name)


def _read_lines(store: JobStore, job_id: str) -> list[TimelineEvent]:
    kinds = (REQUESTED, WRITTEN)
    return store.list_timeline(job_id, kinds=kinds, limit=_MAX_LINES, newest=True)
