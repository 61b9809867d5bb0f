"""Timeline events: making them, their messages, and what is read back from them. Pure.

An event has a message for people and `data` for programs. `describe` words the records of drivers;
`latest_resize_request` and `traces_of` read requests and results back from a timeline. The newest
resize or drain event holds the whole request: the number of workers and all hosts to leave.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from service.domain.membership import CURRENT
from service.domain.models import Attempt, EndReason, Job, Membership, TimelineEvent
from trainer.protocol import events
from trainer.protocol.requests import ResizeRequest


class ServiceEvent(StrEnum):
    """Kinds of the timeline events that the service makes; drivers report `events.Event`."""

    meaning: str

    def __new__(cls, kind: str, meaning: str) -> ServiceEvent:
        member = str.__new__(cls, kind)
        member._value_, member.meaning = kind, meaning
        return member

    JOB_SUBMITTED = "job_submitted", "A job was stored; it waits in the queue."
    ATTEMPT_CREATED = "attempt_created", "A job left the queue with a new attempt."
    ATTEMPT_SUBMITTED = "attempt_submitted", "The cluster took the attempt."
    RETRY_SCHEDULED = "retry_scheduled", "An attempt ended, and another one follows."
    JOB_PAUSED = "job_paused", "The workers have left as asked; the job rests."
    JOB_PREEMPTED = "job_preempted", "The job made way for another one and is queued again."
    JOB_ENDED = "job_ended", "The job has succeeded, failed or been cancelled."
    CANCEL_REQUESTED = "cancel_requested", "A user cancels the job."
    PAUSE_REQUESTED = "pause_requested", "A user pauses the job."
    RESUME_REQUESTED = "resume_requested", "A user resumes the job."
    RESTART_REQUESTED = "restart_requested", "A user restarts the job from a checkpoint."
    RESIZE_REQUESTED = "resize_requested", "A user wants another number of workers."
    DRAIN_REQUESTED = "drain_requested", "A user wants the workers off a host, or back on it."
    TRACE_REQUESTED = "trace_requested", "A user wants a trace of the next steps."
    PREEMPTION_REQUESTED = "preemption_requested", "The job is to make way for another one."
    PREEMPTING = "preempting", "Another job makes way for this one."


EVENT_KINDS = frozenset(ServiceEvent) | {
    model.model_fields["kind"].default
    for model in get_args(get_args(events.Event)[0])
    # They become progress and points of curves, not lines of the timeline.
    if model not in (events.Metrics, events.Progress)
}
"""All kinds that a timeline may have."""


def timeline_event(
    job: Job,
    attempt: Attempt | None,
    now: float,
    kind: ServiceEvent,
    message: str,
    data: Mapping[str, object] | None = None,
    actor: str = "service",
) -> TimelineEvent:
    """A timeline event; the store gives it its id. `data` is for programs, `message` for people."""
    attempt_id = attempt.id if attempt else None
    facts = {"attempt": attempt.index, **(data or {})} if attempt else {**(data or {})}
    return TimelineEvent(0, job.id, attempt_id, now, kind.value, message, actor, facts)


def end_details(job: Job, ended: Attempt | None) -> dict[str, object]:
    """Data of an end: how often the job failed, and the evidence of its reason."""
    evidence = {"evidence": dict(ended.evidence)} if ended and ended.evidence else {}
    max_failures = job.spec.retry.max_failures
    return {"num_failures": job.num_failures, "max_failures": max_failures, **evidence}


# Requests of users for another size of a running job, or for hosts that it should leave.
RESIZE, DRAIN = ServiceEvent.RESIZE_REQUESTED.value, ServiceEvent.DRAIN_REQUESTED.value
RESIZE_KINDS = (RESIZE, DRAIN)


def latest_resize_request(lines: Iterable[TimelineEvent]) -> ResizeRequest:
    """The request of the newest of some timeline events."""
    data = [line.data for line in lines if line.kind in RESIZE_KINDS]
    newest = data[-1] if data else {}
    known = {name: newest[name] for name in newest.keys() & ResizeRequest.model_fields}
    return ResizeRequest.model_validate(known)


# Of reasons that the driver gives; the coordinator sends a message instead.
_LOSSES = {reason.value: reason.rule.loss for reason in EndReason}
# Any other cause of a resize is a loss.
_RESIZES = {
    "request": "as asked",
    "resize": "as asked",
    "room": "as the cluster has room",
    "no_room": "as there was no room for more",
    "drain": "to leave a host",
    "straggler": "to leave a host that is too slow",
}
_LEAVES = {
    "resize": "fewer workers are wanted",
    "drain": "its host is drained",
    "straggler": "it was too slow and is replaced",
    "poisoned": "its loss became NaN or infinite, so its rows since the last sync do not count",
}
_ALARMING = (
    events.GroupLost,
    events.HangFound,
    events.HostExcluded,
    events.StragglerFound,
    events.RowsSkipped,
    events.RowsQuarantined,
)


def level_of(event: events.Event) -> str | None:
    """`warning` or `error` for events that should stand out; None for others."""
    if isinstance(event, events.Divergence):
        return "error"
    is_alarming = isinstance(event, _ALARMING)
    is_fault = isinstance(event, events.GroupLeft) and event.cause in ("straggler", "poisoned")
    return "warning" if is_alarming or is_fault else None


def describe(event: events.Event, membership: Membership | None = None) -> str:
    """The message of a record; `membership` is that before it."""
    match event:
        case events.Note():
            return event.message
        case events.AttemptStarted():
            return f"driver is up, starting {event.world_size} worker(s)"
        case events.WorkersStarted():
            # From a checkpoint, or of a group that was lost from the memory of another.
            at = f", at step {event.resumed_step}" if event.resumed_step else ""
            return (
                f"{event.world_size} worker(s) ready: {event.num_replicas} sharding group(s) of "
                f"{event.shard_group_size}, {event.placement}, {event.backend}{at}"
            )
        case events.CheckpointCommitted():
            took = f"{_size(event.size_bytes)} in {event.duration_s:.1f} s"
            best = ", best so far" if event.is_best else ""
            return f"checkpoint at step {event.step} ({took}{best})"
        case events.CheckpointDeleted():
            return f"checkpoint of step {event.step} removed by retention"
        case events.Divergence():
            return _divergence(event)
        case events.SyncIntervalChanged():
            now, before = event.every_steps, event.every_steps_before
            every = "step" if now == 1 else f"{now} steps"
            return f"sync every {every} from step {event.step} on, not {before}: {event.reason}"
        case events.LayoutChosen():
            size, placement = event.shard_group_size, event.placement.replace("_", "-")
            groups = f"{counted(event.num_replicas, 'sharding group')} of {size}, {placement}"
            on = f"{counted(event.world_size, 'worker')} on {counted(event.num_hosts, 'host')}"
            return f"layout: {on} as {groups}; {event.reason}"
        case events.MembershipChanged():
            return _membership_changed(event)
        case events.GroupLost():
            return _group_lost(event, membership)
        case events.GroupJoined():
            return _group_joined(event, membership)
        case events.GroupLeft():
            return f"{_group(event)} left in good order: {_LEAVES[event.cause]}"
        case events.Recovered():
            redo = counted(event.syncs_lost, "sync interval") if event.syncs_lost else "nothing"
            tries = f", at try {event.num_tries}" if event.num_tries > 1 else ""
            late = f"the commit came {event.pause_s:.2f} s late"
            return f"recovered, {late}: generation {event.generation}, {redo} to redo{tries}"
        case events.CapacityRequested():
            return _capacity_requested(event)
        case events.Resized(cause="start"):
            most = counted(event.world_size_before, "worker")
            return f"starts with {event.world_size} of {most}: there is no room for more"
        case events.Resized():
            change = "grew" if event.world_size > event.world_size_before else "shrank"
            change += f" from {event.world_size_before} to {event.world_size} workers"
            how = "by a restart from a checkpoint" if event.restarted else "without a restart"
            return f"{change} {how}, {_RESIZES.get(event.cause, 'after a loss')}"
        case events.StragglerFound():
            follows = "it moves to another" if event.action == "replace" else "it stays"
            slow = f"{event.slowdown:.1f} times as slow as the others"
            if event.median_s:
                own, others = (f"{1e3 * each:.3g} ms" for each in (event.own_s, event.median_s))
                slow += f" ({own} of its own a step, the median rank {others})"
            return f"{_rank(event)} is {slow}; {follows}"
        case events.HangFound():
            idle = f"nothing done for {event.idle_s:.0f} s in phase {event.phase}"
            return f"{_rank(event)} hangs: {idle}"
        case events.HostExcluded():
            pause_s = max(0.0, event.until - event.time)
            pause = f"{pause_s / 60:.0f} min" if pause_s >= 120 else f"{pause_s:.0f} s"
            why = event.reason or f"failed {counted(event.num_failures, 'time')}"
            return f"host {event.host} {why}: no worker is placed on it for {pause}"
        case events.RowsQuarantined():
            return f"{counted(event.count, 'row')} of {event.file} left out: {event.reason}"
        case events.RowsSkipped():
            # Epochs are counted from 1 wherever people read them.
            rows = f"rows {event.start:,} to {event.stop:,} of epoch {event.epoch + 1}"
            if event.num_rows not in (None, event.stop - event.start):
                rows = f"{counted(event.num_rows, 'row')} among {rows}"
            return f"{rows} are left out: {event.reason}"
        case events.TraceWritten():
            steps = f"{event.num_steps} step(s) up to step {event.step} on rank {event.rank}"
            return f"trace of {steps} written ({_size(event.size_bytes)})"
        case events.WorkersLost():
            what = "stopped" if event.reason == EndReason.DIVERGED else "lost"
            follows = "restarting them" if event.will_restart else "not restarting"
            return f"workers {what} ({event.reason}: {event.message}); {follows}"
        case events.AttemptEnded():
            return f"attempt ended ({event.reason}): {event.message}"
        case _:
            return event.kind


def _group_lost(event: events.GroupLost, membership: Membership | None) -> str:
    cause = _LOSSES.get(event.reason) or event.message or event.reason.replace("_", " ")
    others = [
        member
        for member in (membership.members if membership else ())
        if member.standing == CURRENT and member.group != event.group
    ]
    if event.is_spare:
        return f"spare {_group(event)} was lost: {cause}"
    follows = f"{counted(len(others), 'group trains', 'groups train')} on"
    if not others:
        follows = "no other group trains"
    elif event.rows_returned:
        follows += f" and will train its {event.rows_returned:,} rows"
    return f"{_group(event)} was lost: {cause}; {follows}"


def _group_joined(event: events.GroupJoined, membership: Membership | None) -> str:
    gone = {each.group for each in membership.gone} if membership else set()
    again = " again" if event.group in gone else ""
    if event.how == "start":
        return f"{_group(event)} joined{again} from the start"
    donor = "a live group" if event.donor is None else f"group {event.donor}"
    copied = f"copied {_size(event.copied_bytes)} from {donor}"
    return f"{_group(event)} joined{again}: {copied} in {event.duration_s:.1f} s"


def _membership_changed(event: events.MembershipChanged) -> str:
    verbs = {
        "current": ("trains", "train"),
        "listening": ("copies from a peer", "copy from a peer"),
        "spare": ("is a spare", "are spares"),
        "initial": ("starts", "start"),
    }
    parts = []
    for standing, (one, many) in verbs.items():
        if named := sorted(each.group for each in event.groups if each.standing == standing):
            numbers = ", ".join(map(str, named))
            parts.append(f"groups {numbers} {many}" if named[1:] else f"group {numbers} {one}")
    copies = ""
    if event.copies_alive:
        hosts = counted(event.host_copies_alive, "host")
        copies = f"; each shard has {counted(event.copies_alive, 'copy', 'copies')} on {hosts}"
    return f"generation {event.generation}: {', '.join(parts) or 'no group'}{copies}"


def _capacity_requested(event: events.CapacityRequested) -> str:
    num_missing = event.num_wanted - event.num_workers
    each = ", ".join(f"{amount:g} {name}" for name, amount in event.resources_per_worker.items())
    asked = f"the autoscaler was asked for room for {counted(num_missing, 'worker', 'workers')}"
    if each:
        asked += f" ({each} each)"
    if event.num_workers < event.num_needed:
        fitting = f"there is room for {event.num_workers} of at least {event.num_needed} workers"
        return f"waits for room: {fitting}; {asked}"
    return f"{asked}, to grow from {event.num_workers} to {event.num_wanted}"


def _divergence(event: events.Divergence) -> str:
    follows = {
        "fail": "the workers stop, to resume from a checkpoint while the budget lasts",
        "rebroadcast": "the copy that most ranks of the replica group hold replaces it",
    }[event.action]
    ranks = ", ".join(str(rank) for rank in event.ranks)
    # Tables are named by an identifier, parameters by their path in the model.
    if "." in event.table:
        what, part = f"dense parameter '{event.table}'", "that"
    else:
        what, part = f"table '{event.table}'", f"shard {event.shard}"
    return (
        f"copies of {what} diverged by step {event.step}: {part} of rank(s) {ranks} differs from "
        f"its replicas; {follows}"
    )


def _group(event: events.GroupLost | events.GroupJoined | events.GroupLeft) -> str:
    return f"group {event.group} ({', '.join(dict.fromkeys(event.hosts)) or 'no host'})"


def _rank(event: events.StragglerFound | events.HangFound) -> str:
    return f"rank {event.rank} of group {event.group} ({event.host})"


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things, as in `1 host`, `2 hosts`; `many` is a plural that is not `one` + s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def _size(num_bytes: int) -> str:
    is_small = num_bytes < 100_000
    return f"{num_bytes / 1e3:.1f} kB" if is_small else f"{num_bytes / 1e6:,.1f} MB"


# Profiler traces: kinds of their events.
REQUESTED = ServiceEvent.TRACE_REQUESTED.value
WRITTEN = "trace_written"
# Other names are refused before they become part of a path.
_NAME_PATTERN = re.compile(r"(spec|t-[0-9a-f]{8})-rank(0|[1-9]\d{0,5})\.json\.gz")


class Trace(BaseModel, frozen=True):
    """A trace in Chrome's format, gzipped: `num_steps` steps of one rank, `step` the last.

    `name` is that of its file, which is unique within the attempt.
    """

    name: str
    attempt_id: str
    rank: int
    step: int
    num_steps: int
    size_bytes: int
    time: float


def traces_of(lines: Sequence[TimelineEvent]) -> list[Trace]:
    """Traces written according to a timeline; of a file written again the newest line."""
    found: dict[tuple[str, str], Trace] = {}
    for line in lines:
        if line.kind == WRITTEN:
            data: dict[str, Any] = line.data
            own = {"name": Path(data["path"]).name, "attempt_id": line.attempt_id or ""}
            trace = Trace.model_validate({**data, **own, "time": line.time})
            if _NAME_PATTERN.fullmatch(trace.name):
                found[trace.attempt_id, trace.name] = trace
    return sorted(found.values(), key=lambda trace: trace.time)
