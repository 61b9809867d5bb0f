"""Membership of an attempt: which groups train, and how many workers a job has. Pure.

`apply_event` folds the records of a driver into a `Membership`; the other functions read it, or
the spec where the attempt has not reported yet. T is the number of workers, L the size of a
sharding group, M the number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from service.domain.metrics import MEMORY_PARTS, STEP_PHASES
from service.domain.models import (
    ChosenLayout,
    ExcludedHost,
    GoneGroup,
    Job,
    JobStatus,
    Member,
    Membership,
    Prediction,
    Recovery,
)
from service.domain.sharding import failure_domain_of
from trainer.protocol import events
from trainer.spec.job import JobSpec

CURRENT, SPARE = "current", "spare"
# The timeline has all of it.
_MAX_REASON_CHARS = 300
# Causes after which no group of that number comes back.
FOR_GOOD = frozenset({"resize", "drain"})


def apply_event(
    membership: Membership | None, attempt_id: str, event: events.Event
) -> Membership | None:
    """The membership after a record of `attempt_id`; that of an earlier attempt is dropped.

    Other kinds of records leave it as it is. Streams arrive one after another, so a record that is
    older than the known membership does not change it.
    """
    known = membership
    if known is None or known.attempt_id != attempt_id:
        known = Membership(attempt_id)
    match event:
        case events.LayoutChosen():
            layout = ChosenLayout(**event.model_dump(exclude={"kind", "time"}))
            return replace(known, layout=layout, world_size=layout.world_size)
        case events.WorkersStarted() if event.prediction:
            return replace(known, prediction=_of_fullest_rank(event.prediction))
        case events.MembershipChanged():
            return _on_members(known, event)
        case events.WorkersLost() if known.members:
            return replace(known, members=(), copies_alive=0, host_copies_alive=0)
        case events.GroupLost() if event.is_spare:
            return _with_out(known, event)
        case events.GroupLost():
            lost = _with_gone(known, event, event.reason, event.message)
            return replace(lost, num_losses=known.num_losses + 1)
        case events.GroupLeft() if event.cause in FOR_GOOD:
            return _with_out(known, event)
        case events.GroupLeft():
            return _with_gone(known, event, event.cause, "")
        case events.GroupJoined():
            return replace(known, gone=_without(known.gone, event.group))
        case events.Recovered():
            if event.time >= known.changed_at:
                # Its members were told before they formed it, and are not told again.
                known = replace(known, generation=event.generation, commit=event.commit)
            return replace(
                known,
                last_recovery=Recovery(**event.model_dump(exclude={"kind", "commit"})),
                num_recoveries=known.num_recoveries + 1,
                recovery_pause_s=known.recovery_pause_s + event.pause_s,
            )
        case events.Resized():
            return replace(known, world_size=event.world_size)
        case events.HostExcluded():
            host = ExcludedHost(event.host, event.num_failures, event.until)
            others = tuple(each for each in known.excluded_hosts if each.host != event.host)
            return replace(known, excluded_hosts=(*others, host))
        case events.Divergence():
            return replace(known, num_divergences=known.num_divergences + 1)
        case _:
            return membership


def _of_fullest_rank(told: events.Prediction) -> Prediction:
    parts = {name: told.memory_bytes.get(name, []) for name in MEMORY_PARTS}
    ranks = [dict(zip(parts, held, strict=True)) for held in zip(*parts.values(), strict=False)]
    return Prediction(
        cluster=told.cluster,
        samples_per_s=told.samples_per_s,
        lookup_imbalance=told.lookup_imbalance,
        step_s={name: told.step_s[name] for name in STEP_PHASES if name in told.step_s},
        memory_bytes=max(ranks, key=lambda rank: sum(rank.values()), default={}),
        sync_every_steps=told.sync_every_steps,
    )


def _on_members(membership: Membership, event: events.MembershipChanged) -> Membership:
    if event.time < membership.changed_at:
        return membership
    members = tuple(
        Member(each.group, each.incarnation, tuple(each.hosts), each.standing, each.donor)
        for each in event.groups
    )
    return replace(
        membership,
        changed_at=event.time,
        generation=event.generation,
        commit=event.commit,
        copies_alive=event.copies_alive,
        host_copies_alive=event.host_copies_alive,
        members=members,
    )


def _with_gone(
    membership: Membership, event: events.GroupLost | events.GroupLeft, reason: str, message: str
) -> Membership:
    """The membership without one incarnation of a group, which may come back."""
    texts = reason[:_MAX_REASON_CHARS], message[:_MAX_REASON_CHARS]
    gone = GoneGroup(event.group, event.incarnation, tuple(event.hosts), event.time, *texts)
    rest = _with_out(membership, event)
    return replace(rest, gone=(*_without(rest.gone, event.group), gone))


def _with_out(membership: Membership, event: events.GroupLost | events.GroupLeft) -> Membership:
    gone = (event.group, event.incarnation)
    members = tuple(m for m in membership.members if (m.group, m.incarnation) != gone)
    return replace(membership, members=members)


def _without(gone: Iterable[GoneGroup], group: int) -> tuple[GoneGroup, ...]:
    return tuple(each for each in gone if each.group != group)


def current_membership(job: Job) -> Membership | None:
    """What the newest attempt of a job has reported of its layout and groups, if anything."""
    membership = job.membership
    is_current = membership is not None and membership.attempt_id == job.current_attempt_id
    return membership if is_current else None


def membership_of(job: Job) -> Membership | None:
    """The membership of a job's newest attempt; None before its groups are known."""
    membership = current_membership(job)
    return membership if membership and membership.changed_at else None


def layout_of_attempt(job: Job) -> ChosenLayout | None:
    """The layout that a job's newest attempt chose; None before it has."""
    membership = current_membership(job)
    return membership.layout if membership else None


def failure_domain(job: Job) -> str:
    """What a lost host takes down, as the newest attempt chose it, else as the spec implies."""
    chosen = layout_of_attempt(job)
    if chosen is not None:
        return chosen.failure_domain
    return failure_domain_of(job.spec) or "job"


def num_current(membership: Membership) -> int:
    return sum(member.standing == CURRENT for member in membership.members)


def group_size(membership: Membership) -> int:
    """L, from the layout or the groups; 0 before either is known."""
    if membership.layout is not None:
        return membership.layout.shard_group_size
    hosts = [member.hosts for member in membership.members]
    return max(map(len, [*hosts, *(gone.hosts for gone in membership.gone)]), default=0)


def num_places(membership: Membership) -> int:
    """How much is kept of an attempt's groups: groups, their hosts, and hosts that are left out."""
    groups: list[Member | GoneGroup] = [*membership.members, *membership.gone]
    return sum(1 + len(group.hosts) for group in groups) + len(membership.excluded_hosts)


def num_wanted(membership: Membership) -> int:
    """How many groups should train; spares are beside them.

    For a moment more do, as while the replacement of a drained group is there already.
    """
    size = group_size(membership)
    return max(membership.world_size // size if size else 0, _num_members(membership))


def _num_members(membership: Membership) -> int:
    return sum(member.standing != SPARE for member in membership.members)


def missing(membership: Membership) -> tuple[GoneGroup, ...]:
    """Groups that are gone and awaited: the newest ones, up to `num_wanted` groups in all."""
    num_awaited = max(0, num_wanted(membership) - _num_members(membership))
    present = {member.group for member in membership.members}
    not_back = tuple(each for each in membership.gone if each.group not in present)
    return not_back[max(0, len(not_back) - num_awaited) :]


@dataclass(frozen=True)
class Sizes:
    """Bounds of T, then L, M at most workers, and the placement; None while they are `auto`.

    `spare_workers` are those of spare groups, beside T.
    """

    min_workers: int
    world_size: int
    shard_group_size: int | None
    placement: str | None
    spare_workers: int = 0

    @property
    def num_replicas(self) -> int | None:
        """M at most workers; None while L is `auto`."""
        return self.world_size // self.shard_group_size if self.shard_group_size else None


def sizes_of_spec(spec: JobSpec) -> Sizes:
    parallelism = spec.parallelism
    size, placement = parallelism.shard_group_size, parallelism.placement
    fewest = parallelism.num_hosts_needed * (1 if size == "auto" else size)
    return Sizes(
        min_workers=max(parallelism.min_workers, fewest),
        world_size=parallelism.world_size,
        shard_group_size=None if size == "auto" else size,
        placement=None if placement == "auto" else placement,
        spare_workers=parallelism.spare_workers,
    )


def sizes_of_job(job: Job) -> Sizes:
    """The sizes that a job's newest attempt chose, else those that its spec gives.

    The next attempt of a queued job chooses anew.
    """
    given, chosen = sizes_of_spec(job.spec), layout_of_attempt(job)
    if chosen is None or job.status is JobStatus.QUEUED:
        return given
    size, parallelism = chosen.shard_group_size, job.spec.parallelism
    num_groups = max(parallelism.num_hosts_needed, -(-parallelism.min_workers // size))
    return Sizes(
        # Bounds that were written without knowing L become multiples of it.
        min_workers=num_groups * size,
        world_size=given.world_size // size * size,
        shard_group_size=size,
        placement=chosen.placement,
        spare_workers=parallelism.spares * size if chosen.num_replicas > 1 else 0,
    )


def span_text(least: int, most: int) -> str:
    """Bounds in words: `4`, or `2-6` where they differ."""
    return str(most) if least == most else f"{least}-{most}"


def workers_held(job: Job) -> int:
    """How many workers a job has now, at most, with its spares; 0 where it does not run."""
    if job.status.is_terminal or job.status.is_at_rest:
        return 0
    membership, sizes = current_membership(job), sizes_of_job(job)
    # A job may say what it likes, but others wait for what it holds.
    most = job.spec.parallelism.world_size
    reported = min(membership.world_size, most) if membership else 0
    given = job.queue_note.workers
    if job.status is JobStatus.STARTING and given:
        # The layout is told as large as the job may grow.
        reported = min(reported or given, given)
    return sizes.spare_workers + (reported or given or sizes.world_size)
