"""Who trains in an attempt, folded from its records; how many workers a job has."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.views import summary_of
from service.domain.membership import (
    apply_event,
    failure_domain,
    layout_of_attempt,
    membership_of,
    missing,
    num_current,
    num_wanted,
)
from service.domain.metrics import MEMORY_PARTS, STEP_PHASES, compared
from service.domain.models import Job, JobStatus, Membership
from service.schemas.wording import layout_text, shape_text
from tests.harness.builders import (
    NOW,
    folded_membership,
    group_joined,
    group_lost,
    group_member,
    layout_chosen,
    live_job,
    membership_changed,
    predicted_workers,
    queued_job,
    recovered,
)
from trainer.layout.cost import StepTime
from trainer.protocol import events
from trainer.protocol.events import Event


def running(membership: Membership | None) -> Job:
    """A running job with this membership of its only attempt."""
    job, attempt = live_job()
    held = membership and replace(membership, attempt_id=attempt.id)
    return replace(job, membership=held)


def left(group: int, cause: str) -> events.GroupLeft:
    return events.GroupLeft(time=NOW, group=group, incarnation=0, cause=cause, hosts=[])


def resized(world_size: int) -> events.Resized:
    return events.Resized(
        time=NOW, world_size_before=6, world_size=world_size, cause="request", restarted=False
    )


START = (layout_chosen(), membership_changed())


def test_a_lost_group_is_missing_until_another_life_of_it_is_there() -> None:
    lost = folded_membership(*START, group_lost(1))
    assert [gone.group for gone in missing(lost)] == [1]
    assert (num_current(lost), num_wanted(lost), lost.num_losses) == (2, 3, 1)
    copying = membership_changed(
        group_member(0), group_member(1, "listening", incarnation=1), group_member(2), generation=3
    )
    listening = apply_event(lost, lost.attempt_id, copying)
    assert listening
    assert missing(listening) == ()
    assert num_current(listening) == 2
    back = apply_event(listening, lost.attempt_id, group_joined(1))
    assert back.gone == ()


def test_the_order_of_a_loss_and_the_new_membership_does_not_matter() -> None:
    rest = membership_changed(group_member(0), group_member(2), generation=2)
    assert folded_membership(*START, group_lost(1), rest) == folded_membership(
        *START, rest, group_lost(1)
    )


def test_an_older_membership_that_arrives_late_changes_nothing() -> None:
    newest = folded_membership(membership_changed(generation=5, time=NOW + 9))
    late = membership_changed(group_member(0), generation=4, time=NOW)
    assert apply_event(newest, newest.attempt_id, late) == newest


_MOVED = membership_changed(*map(group_member, (0, 1, 3)), generation=3, time=NOW + 1)
_NEW_LIFE = membership_changed(group_member(0), group_member(1, incarnation=1))
_SPARED = membership_changed(*map(group_member, range(3)), group_member(3, "spare"), generation=2)
_EARLIER = membership_changed(time=NOW - 1)
_FOUR = membership_changed(*map(group_member, range(4)), generation=2)
_SMALL = layout_chosen(world_size=4, num_replicas=2)


@pytest.mark.parametrize(
    ("records", "current", "wanted", "awaited"),
    [
        ((*START, left(2, "straggler")), 2, 3, [2]),
        ((*START, left(2, "resize"), resized(4)), 2, 2, []),
        ((*START, group_lost(1), resized(4)), 2, 2, []),
        # It moved under another number.
        ((*START, _MOVED, left(2, "drain")), 3, 3, []),
        ((*START, group_lost(2), _MOVED), 3, 3, []),
        # A late word of a former life does not remove the new one.
        ((_NEW_LIFE, group_lost(1, incarnation=0)), 2, 2, []),
        # A membership of before a resize does not undo it.
        ((layout_chosen(), resized(4), _EARLIER, left(2, "resize")), 2, 2, []),
        # There are more groups than the layout was chosen for, or no layout was told.
        ((_SMALL, membership_changed()), 3, 3, []),
        ((membership_changed(),), 3, 3, []),
        # The replacement of a drained group came before that left.
        ((*START, _FOUR, left(2, "drain"), _MOVED), 3, 3, []),
        # Spares are beside the groups that should train, and not missed.
        ((*START, _SPARED), 3, 3, []),
        ((*START, _SPARED, group_lost(3, is_spare=True)), 3, 3, []),
        ((*START, _SPARED, group_lost(1)), 2, 3, [1]),
    ],
)
def test_groups_are_awaited_up_to_what_there_should_be(
    records: tuple[Event, ...], current: int, wanted: int, awaited: list[int]
) -> None:
    found = folded_membership(*records)
    assert (num_current(found), num_wanted(found)) == (current, wanted)
    assert [gone.group for gone in missing(found)] == awaited


def test_the_newest_recovery_is_kept_and_all_are_counted() -> None:
    membership = folded_membership(recovered(pause_s=0.9), recovered(pause_s=0.31))
    assert (membership.last_recovery.pause_s, membership.num_recoveries) == (0.31, 2)


def test_a_recovery_tells_the_generation_unless_a_newer_membership_did() -> None:
    members = membership_changed(generation=3)
    found = folded_membership(members, recovered(time=NOW + 1))
    assert (found.generation, found.commit) == (4, 12)
    assert folded_membership(members, recovered(time=NOW - 1)).generation == 3


def test_a_host_is_excluded_once_however_often_it_is_told() -> None:
    told = [
        events.HostExcluded(time=NOW, host="h3", num_failures=n, until=NOW + 600 * n)
        for n in (3, 6)
    ]
    (host,) = folded_membership(*told).excluded_hosts
    assert (host.num_failures, host.until) == (6, NOW + 3600)


def test_of_what_was_predicted_the_fullest_rank_is_kept_whatever_a_job_tells() -> None:
    workers = predicted_workers()
    told = workers.prediction
    assert told is not None
    for memory, kept in (
        (told.memory_bytes, dict.fromkeys(MEMORY_PARTS, 1_000_000)),
        ({"tables": [1]}, {}),
        (
            {**told.memory_bytes, "tables": [7], "other": [9]},
            {**dict.fromkeys(MEMORY_PARTS, 500_000), "tables": 7},
        ),
    ):
        odd = told.model_copy(update={"memory_bytes": memory, "step_s": {"nonsense": 1.0}})
        membership = apply_event(None, "a", workers.model_copy(update={"prediction": odd}))
        assert membership is not None and membership.prediction is not None
        found = membership.prediction
        assert (found.memory_bytes, found.step_s) == (kept, {})
        assert all(each.ratio is None for each in compared(found, {}))


def test_every_phase_that_the_planner_predicts_is_compared() -> None:
    assert {f"{phase}_s" for phase in STEP_PHASES} == {field.name for field in fields(StepTime)}


def test_another_attempt_starts_with_nothing() -> None:
    first = folded_membership(*START, group_lost(1))
    second = apply_event(first, "job-1-a1", layout_chosen())
    assert (second.members, second.num_losses, second.attempt_id) == ((), 0, "job-1-a1")


def test_what_an_earlier_attempt_had_is_not_shown_of_the_new_one() -> None:
    job = running(folded_membership(*START))
    assert membership_of(job)
    assert layout_of_attempt(job)
    again = replace(job, current_attempt_id=f"{job.id}-a1")
    assert membership_of(again) is None
    assert layout_of_attempt(again) is None


def test_a_job_without_groups_of_its_own_has_no_membership() -> None:
    assert membership_of(running(None)) is None
    assert membership_of(running(folded_membership(layout_chosen(failure_domain="job")))) is None


def test_the_failure_domain_is_what_the_attempt_chose_else_what_the_spec_implies() -> None:
    assert failure_domain(running(None)) == "job"
    chosen = running(folded_membership(layout_chosen(failure_domain="replica_group")))
    assert failure_domain(chosen) == "replica_group"
    spread = {"workers": 4, "shard_group_size": 2, "placement": "inter_host"}
    assert failure_domain(queued_job(parallelism=spread)) == "replica_group"
    undecided = {"workers": 4, "shard_group_size": "auto", "placement": "auto"}
    assert failure_domain(queued_job(parallelism=undecided)) == "job"


_records = st.lists(
    st.one_of(
        st.just(layout_chosen()),
        st.builds(
            lambda groups, time: membership_changed(*map(group_member, groups), time=NOW + time),
            st.sets(st.integers(0, 3), min_size=1),
            st.integers(0, 9),
        ),
        st.builds(group_lost, st.integers(0, 3)),
        st.builds(group_joined, st.integers(0, 3)),
        st.builds(left, st.integers(0, 3), st.sampled_from(["resize", "drain"])),
        st.builds(resized, st.integers(1, 4).map(lambda groups: 2 * groups)),
    ),
    min_size=1,
    max_size=20,
)


@given(_records)
def test_whatever_is_told_no_group_is_both_there_and_missing(records: list[Event]) -> None:
    membership = folded_membership(*records)
    present = {member.group for member in membership.members}
    awaited = [gone.group for gone in missing(membership)]
    assert not present & set(awaited)
    assert len(awaited) == len(set(awaited))


# ---- sizes

AUTO = {"shard_group_size": "auto", "placement": "auto"}


def job_of(workers: Any, **parallelism: Any) -> Job:
    """A job in an attempt that has not chosen yet."""
    sizes = {"workers": workers, "shard_group_size": 2, **parallelism}
    return replace(queued_job(parallelism=sizes), current_attempt_id="job-a1")


def with_choice(job: Job, shard_group_size: int) -> Job:
    """The job once an attempt has chosen groups of that size."""
    sizes = {"world_size": 4, "shard_group_size": shard_group_size}
    chosen = layout_chosen(**sizes, num_replicas=4 // shard_group_size)
    return replace(job, membership=folded_membership(chosen, attempt_id="job-a1"))


def test_lists_and_pages_show_what_is_decided() -> None:
    for job, listed, shown in (
        (job_of(4), "4 = 2 x 2", "4 workers (2 replicas x 2 shards)"),
        (job_of({"min": 2, "max": 6}, **AUTO), "2-6 (auto)", "2-6 workers (auto)"),
        (
            job_of(4, placement="inter_host", spares=1),
            "4 = 2 x 2 + 2",
            "4 workers (2 replicas x 2 shards) and 2 in spares",
        ),
        (job_of(1, shard_group_size=1), "1 = 1 x 1", "1 worker (1 replicas x 1 shards)"),
        (
            replace(with_choice(job_of({"min": 3, "max": 7}, **AUTO), 2), status=JobStatus.PAUSED),
            "4-6 = 2-3 x 2",
            "4-6 workers (2-3 replicas x 2 shards)",
        ),
    ):
        assert layout_text(summary_of(job)).replace(chr(215), "x") == listed
        assert shape_text(summary_of(job)) == shown
