"""Profiler traces of a job: request them while it runs, list them, find their files.

A request is a file of the attempt that its workers look for at every report, and a line of the
timeline, which tells everybody else of it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from service.db.jobs import JobStore
from service.domain.models import Job, JobStatus, TimelineEvent
from service.domain.timeline import _NAME_PATTERN, REQUESTED, WITHDRAWN, WRITTEN, Trace, traces_of
from service.errors import (
    InvalidRequest,
    JobNotRunning,
    StaleVersion,
    StorageUnavailable,
    TraceNotFound,
    TracePending,
)
from service.jobs.actions import retry_if_stale
from service.jobs.run_storage import write_json
from trainer.protocol.run_dir import RunDir, trace_name
from trainer.protocol.untrusted import NotRegular, open_folder, open_untrusted
from trainer.spec.base import FieldProblem

# A request that brought nothing for so long does not stand in the way of another.
PATIENCE_S = 600.0
# The newest of those about traces: several of the largest requests.
_MAX_LINES = 5000


@dataclass(frozen=True)
class TraceRequest:
    """Steps that somebody wants traced on some ranks of an attempt."""

    id: str
    attempt_id: str
    num_steps: int
    ranks: tuple[int, ...]

    @property
    def document(self) -> dict[str, object]:
        """As in the file for the workers, and in the timeline."""
        return {"id": self.id, "num_steps": self.num_steps, "ranks": list(self.ranks)}


def request_trace(
    store: JobStore, run_dir: RunDir, job_id: str, num_steps: int, ranks: Sequence[int]
) -> TraceRequest:
    """Ask the workers of a running job for a trace of their next steps.

    Raises `JobNotFound`, `InvalidRequest`, and as conflicts `JobNotRunning` and `TracePending`;
    `StaleVersion` only if others kept writing the job meanwhile, and `StorageUnavailable`.
    """

    def attempt() -> TraceRequest:
        job = store.get_job(job_id)
        request = _new_request(job, num_steps, ranks)
        now = time.time()
        _check_nothing_pending(_read_lines(store, job_id), request.attempt_id, now)
        path = run_dir.attempt(request.attempt_id).trace_request_path
        shown = ", ".join(str(rank) for rank in request.ranks)
        message = f"trace of {num_steps} step(s) on rank(s) {shown} requested"
        event = _event(job, request, now, REQUESTED, message, "user")
        is_told = False
        try:
            with open_folder(path.parent, run_dir.runs_dir, make=True):
                # The version of the job lets one of two requests through, and a stopping job none.
                store.update_job(job, timeline=[event])
            is_told = True
            write_json(path, request.document, run_dir.runs_dir)
        except OSError as error:
            if is_told:
                _withdraw(store, job_id, request, str(error))
            raise StorageUnavailable(str(error)) from error
        return request

    return retry_if_stale(attempt)()


def _withdraw(store: JobStore, job_id: str, request: TraceRequest, cause: str) -> None:
    """Tell that a request never reached the workers, so that the next one need not wait for it.

    Where others keep writing the job it is left to `PATIENCE_S`.
    """
    message = f"the trace {request.id} is withdrawn: its request cannot be written ({cause})"

    def attempt() -> None:
        job = store.get_job(job_id)
        event = _event(job, request, time.time(), WITHDRAWN, message, "service")
        store.update_job(job, timeline=[event])

    with contextlib.suppress(StaleVersion):
        retry_if_stale(attempt)()


def _new_request(job: Job, num_steps: int, ranks: Sequence[int]) -> TraceRequest:
    world_size = job.spec.parallelism.world_size
    unknown = [index for index, rank in enumerate(ranks) if rank >= world_size]
    if unknown:
        message = f"no such rank: workers are numbered 0 to {world_size - 1}"
        raise InvalidRequest([FieldProblem(f"ranks[{each}]", "rank", message) for each in unknown])
    if job.status is not JobStatus.RUNNING or job.current_attempt_id is None:
        raise JobNotRunning(job.id, "to trace", job.status)
    chosen = tuple(sorted(set(ranks)))
    return TraceRequest(f"t-{secrets.token_hex(4)}", job.current_attempt_id, num_steps, chosen)


def _event(
    job: Job, request: TraceRequest, now: float, kind: str, message: str, actor: str
) -> TimelineEvent:
    attempt_id, data = request.attempt_id, request.document
    return TimelineEvent(0, job.id, attempt_id, now, kind, message, actor, data)


def _check_nothing_pending(lines: Sequence[TimelineEvent], attempt_id: str, now: float) -> None:
    """Raise `TracePending` if the attempt's newest request still waits for some of its traces."""
    own = [line for line in lines if line.attempt_id == attempt_id]
    request = next((line for line in reversed(own) if line.kind == REQUESTED), None)
    if request is None or now - request.time > PATIENCE_S:
        return
    data: dict[str, Any] = request.data
    if any(line.kind == WITHDRAWN and line.data["id"] == data["id"] for line in own):
        return
    names = {trace_name(data["id"], rank) for rank in data["ranks"]}
    if missing := names - {trace.name for trace in traces_of(own)}:
        raise TracePending(data["id"], sorted(missing))


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
    kinds = (REQUESTED, WRITTEN, WITHDRAWN)
    return store.list_timeline(job_id, kinds=kinds, limit=_MAX_LINES, newest=True)
