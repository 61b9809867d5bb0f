"""How a driver's records read in a timeline, and what is stored beside the sentence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from service.domain.ingest import IngestResult, apply_events
from service.domain.membership import num_places
from service.domain.models import EndReason, JobStatus
from service.domain.timeline import describe
from tests.harness.builders import (
    NOW,
    attempt_ended,
    attempt_of,
    checkpoint,
    divergence,
    group_lost,
    layout_chosen,
    live_job,
    membership_changed,
    metrics,
    queued_job,
    row_wise_plan,
    trace_written,
    workers_lost,
    workers_started,
)
from trainer.protocol.events import (
    MAX_RECORD_BYTES,
    Event,
    EventBatch,
    Metrics,
    damaged_record,
    read_record,
)


def applied(*records: Event) -> IngestResult:
    """Records of the only attempt of a job."""
    job, attempt = live_job()
    return apply_events(job, attempt, records, NOW)


@pytest.mark.parametrize(
    ("action", "follows"), [("fail", "resume from a checkpoint"), ("rebroadcast", "replaces it")]
)
def test_a_divergence_names_table_shard_ranks_and_what_follows(action: str, follows: str) -> None:
    text = describe(divergence(ranks=[3, 5], action=action))
    for part in ("'users'", "step 48", "shard 1", "3, 5", follows):
        assert part in text


def test_a_dense_parameter_that_diverged_is_not_called_a_table() -> None:
    text = describe(divergence(table="network.over_arch.0.weight", shard=0, ranks=[3]))
    assert text.startswith(
        "copies of dense parameter 'network.over_arch.0.weight' diverged by step 48: that of "
        "rank(s) 3 differs from its replicas"
    )
    assert "shard" not in text


def test_workers_that_diverged_were_stopped_and_not_lost() -> None:
    lost = workers_lost()
    assert describe(lost).startswith("workers lost")
    assert describe(lost.model_copy(update={"reason": "diverged"})).startswith("workers stopped")


def test_a_divergence_is_an_error_line_and_a_lost_group_a_warning() -> None:
    lines = applied(divergence(), trace_written(), workers_started(), group_lost()).timeline
    assert [line.data.get("level") for line in lines] == ["error", None, None, "warning"]


HOSTILE = [
    '{"kind": "note", "time": 1e300, "message": ""}',
    '{"kind": "recovered", "generation": 1, "commit": 1, "cause": "", "pause_s": NaN, '
    '"syncs_lost": 0, "num_tries": 1, "time": 1}',
    layout_chosen().model_copy(update={"shard_group_size": 0}).model_dump_json(),
    layout_chosen().model_copy(update={"shard_group_size": 2**60}).model_dump_json(),
    workers_started().model_copy(update={"shard_group_size": 2**60}).model_dump_json(),
    workers_started(tables=[row_wise_plan()])
    .model_copy(update={"shard_group_size": 1})
    .model_dump_json(),
    workers_started().model_copy(update={"replica_groups": [[7]]}).model_dump_json(),
    group_lost().model_copy(update={"hosts": ["h" * 1000]}).model_dump_json(),
    metrics(1).model_copy(update={"values": {"x" * MAX_RECORD_BYTES: 1.0}}).model_dump_json(),
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_record_that_is_too_much_for_its_readers_counts_as_damaged(line: str) -> None:
    assert read_record(line.encode(), NOW) == damaged_record(NOW)


def test_a_record_of_a_newer_trainer_is_taken_without_what_it_adds() -> None:
    known = workers_started(tables=[row_wise_plan()])
    document = known.model_dump(mode="json") | {"colour": None}
    document["tables"][0] |= {"colour": ["red"] * 10}
    assert read_record(json.dumps(document).encode(), NOW) == known
    batch = {"stream": "driver", "first_seq": 0, "events": [document], "colour": "red"}
    taken = EventBatch.model_validate_json(json.dumps(batch))
    assert taken == EventBatch(stream="driver", first_seq=0, events=[known])


def test_a_record_that_only_a_newer_version_knows_holds_nothing_up() -> None:
    known = metrics(1).model_dump(mode="json", exclude_none=True)
    events = [{"kind": "of_tomorrow", "time": NOW}, known]
    batch = {"stream": "driver", "first_seq": 0, "events": events}
    unknown, taken = EventBatch.model_validate_json(json.dumps(batch)).events
    assert (unknown.message, taken) == (damaged_record(NOW).message, metrics(1))


def test_what_is_kept_of_a_job_at_every_pass_stays_small_whatever_it_tells() -> None:
    job, attempt = live_job()
    lost = group_lost().model_copy(update={"message": "m" * 10**6, "hosts": ["h"] * 20_000})
    flood = [lost.model_copy(update={"group": number}) for number in range(40)]
    held = apply_events(job, attempt, [membership_changed(), *flood], NOW).job.membership
    assert num_places(held) < 40_000
    assert len(held.gone[0].message) < 1000
    evidence = {f"e{number}": "x" * 10_000 for number in range(100)}
    ended = attempt_ended("host_lost").model_copy(update={"evidence": evidence})
    assert applied(ended).attempt.reported_end.evidence == {}


def test_where_all_workers_are_lost_no_group_is_there_any_more() -> None:
    job, attempt = live_job()
    held = apply_events(job, attempt, [membership_changed(), workers_lost()], NOW).job.membership
    assert (held.members, held.copies_alive, held.host_copies_alive) == ((), 0, 0)


@pytest.mark.parametrize(
    ("reason", "num_failures"),
    [("workers_lost", 1), ("hang", 1), ("host_lost", 0), ("preempted", 0), ("from_later", 1)],
)
def test_lost_hosts_are_no_failures_of_the_job(reason: str, num_failures: int) -> None:
    lost = workers_lost().model_copy(update={"reason": reason})
    assert applied(lost).attempt.num_worker_failures == num_failures


def test_an_unknown_end_reason_counts_as_a_training_error() -> None:
    report = applied(attempt_ended("cosmic_rays")).attempt.reported_end
    assert report.reason is EndReason.TRAINING_ERROR
    assert "cosmic_rays" in report.message


@pytest.mark.parametrize("status", [JobStatus.STARTING, JobStatus.STOPPING])
def test_started_workers_make_a_job_run_that_starts_and_no_other(status: JobStatus) -> None:
    job, attempt = live_job(status)
    told = apply_events(job, attempt, [workers_started(total_steps=70)], NOW + 5).job
    assert (told.started_at, told.progress.total_steps) == (NOW, 70)
    assert told.status is (JobStatus.RUNNING if status is JobStatus.STARTING else status)


def test_new_workers_drop_what_was_told_of_positions_that_they_may_not_have() -> None:
    names = ("phase/lookup_s", "phase/lookup_s/7", "memory/peak_rss_bytes/7", "train/recall/7")
    told = Metrics(time=NOW, step=5, values=dict.fromkeys(names, 1.0))
    assert [*applied(told, workers_started()).job.latest_metrics] == [
        "phase/lookup_s",
        "train/recall/7",
    ]


@pytest.mark.parametrize(
    ("told_at", "kept_at"), [(0.0, NOW), (NOW + 3, NOW + 3), (NOW + 9e9, NOW + 5)]
)
def test_no_clock_of_a_driver_dates_records_before_their_job_or_after_they_came(
    told_at: float, kept_at: float
) -> None:
    records = (
        metrics(5, time=told_at, loss=1.0),
        workers_lost().model_copy(update={"time": told_at}),
    )
    kept = apply_events(*live_job(), records, NOW + 5)
    assert kept.points == {("loss", 5): (1.0, kept_at)}
    assert [line.time for line in kept.timeline] == [kept_at]


def test_only_the_current_attempt_says_who_trains() -> None:
    job = queued_job()
    old, new = attempt_of(job), attempt_of(job, index=1)
    current = replace(job, current_attempt_id=new.id)
    records = [layout_chosen(), membership_changed()]
    assert apply_events(current, old, records, NOW).job.membership is None
    held = apply_events(current, new, records, NOW).job.membership
    assert held.attempt_id == new.id


def test_a_lost_group_is_told_with_those_that_train_on() -> None:
    assert applied(membership_changed(), group_lost()).timeline[-1].message == (
        "group 1 (127.0.0.3) was lost: its host stopped answering; 2 groups train on and will "
        "train its 4,096 rows"
    )


@pytest.mark.parametrize("event", [workers_started(), checkpoint(900), metrics(5, train_loss=1.0)])
def test_a_record_of_an_attempt_proves_that_it_went_back_as_it_should(event: Event) -> None:
    job = replace(queued_job(), resume_from="/runs/x/checkpoints/step-00000100-a0-r0")
    attempt = attempt_of(job, index=1)
    current = replace(job, current_attempt_id=attempt.id)
    assert apply_events(current, attempt, [event], NOW).job.resume_from is None
    late = attempt_of(job, index=0)
    assert apply_events(current, late, [event], NOW).job.resume_from == job.resume_from
