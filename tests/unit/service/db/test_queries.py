"""Finding, counting, leasing and deleting jobs; how long metric points are kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import event, func, insert, select, update

from service.db.auth import KeyStore
from service.db.jobs import JobStore
from service.db.metrics import prune
from service.db.tables import job_secrets, jobs, metadata, metric_points
from service.db.webhooks import WebhookStore
from service.domain.auth import AuditFilter
from service.domain.job_filter import JobFilter
from service.domain.models import Attempt, Job, JobStatus, Progress, QueueState
from service.errors import AttemptNotFound, JobNotFound
from tests.harness.builders import (
    NOW,
    attempt_of,
    audit_record,
    batch,
    checkpoint,
    metrics,
    queued_job,
)
from tests.harness.databases import store_attempt, store_job
from tests.harness.properties import examples

pytestmark = pytest.mark.every_database

DAY_S = 86_400.0


def _stored(store: JobStore, number: int = 0, **changes: Any) -> Job:
    return store_job(store, queued_job(now=NOW + number, **changes))


def _with_attempt(store: JobStore, **changes: Any) -> tuple[Job, Attempt]:
    return store_attempt(store, queued_job(**changes), JobStatus.RUNNING)


def _with_status(store: JobStore, job: Job, status: JobStatus) -> Job:
    return store.update_job(replace(job, status=status))


def test_the_columns_of_queue_and_progress_read_back(store: JobStore) -> None:
    job = replace(queued_job(), priority=7, pause_requested=True, queued_at=NOW)
    job = replace(job, resume_from="checkpoints/step-1", queue_note=QueueState(num_free=2))
    job = replace(job, progress=Progress(step=3, advanced_at=NOW, checkpoint_at=NOW + 1))
    stored = store_job(store, job)
    assert store.get_job(job.id) == stored == job
    attempt = attempt_of(job)
    store.update_job(job, attempt=attempt)
    assert store.get_attempt(attempt.id) == attempt


def test_a_queue_note_of_a_later_version_is_read(store: JobStore) -> None:
    job = store_job(store, replace(queued_job(), queue_note=QueueState(num_free=2)))
    note = {"num_free": 2, "of_a_later_version": [1]}
    with store.engine.begin() as connection:
        connection.execute(update(jobs).values(queue_note=note))
    assert store.get_job(job.id) == job


# ---- lists


def test_pages_behind_the_largest_id_are_empty(store: JobStore) -> None:
    job = _stored(store)
    keys, largest = KeyStore(store.engine), 2**63 - 1
    keys.append_audit([audit_record()])
    assert store.list_timeline(job.id, after=largest) == []
    assert len(keys.list_audit(AuditFilter(), before=largest)) == 1


def test_jobs_are_found_by_project_of_those_that_may_be_seen(store: JobStore) -> None:
    jobs = {}
    for number, project in enumerate(("a", "b", "c")):
        job = replace(queued_job(now=NOW + number), project=project)
        jobs[project] = store_job(store, job)
    assert store.list_jobs(JobFilter(project="b"))[0] == [jobs["b"]]
    assert store.list_jobs(projects=["a", "c"])[0] == [jobs["c"], jobs["a"]]
    assert store.list_jobs(JobFilter(project="b"), projects=["a"])[0] == []
    assert store.list_jobs(projects=[]) == ([], None)


def test_jobs_are_found_by_a_part_of_their_name_or_id_and_by_their_newest_metric(
    store: JobStore,
) -> None:
    good, bad, silent = (store_attempt(store, queued_job(name=f"night-{n}"))[0] for n in range(3))
    for job, values in ((good, (0.9, 0.7)), (bad, (0.6, 0.8)), (silent, (0.5, math.nan))):
        told = [metrics(10 * step, validation_ne=value) for step, value in enumerate(values, 1)]
        store.append_events(f"{job.id}-a0", batch(*told), NOW)

    def found(**wanted: Any) -> set[str]:
        return {job.id for job in store.list_jobs(JobFilter(**wanted))[0]}

    assert found(search="IGHT-1") == {bad.id}
    assert found(search=good.id[3:]) == {good.id}
    assert found(search="night_") == set()
    assert found(metrics=["validation/ne < 0.75"]) == {good.id}
    assert found(metrics=["validation/ne>=.8"], search="night") == {bad.id}
    assert store.metric_sample(good.id, "validation/ne", 9) == [(10, 0.9), (20, 0.7)]
    assert store.metric_sample(good.id, "validation/other", 9) == []


def test_somebody_may_see_very_many_projects(store: JobStore) -> None:
    job = _stored(store)
    projects = ["default", *(f"p{number}" for number in range(300))]
    assert store.list_jobs(JobFilter(statuses=list(JobStatus)), projects=projects)[0] == [job]
    assert store.list_jobs(projects=projects[1:])[0] == []


def test_pages_of_several_statuses_leave_no_job_out(store: JobStore) -> None:
    kinds = (JobStatus.FAILED, JobStatus.SUCCEEDED, JobStatus.QUEUED)
    made = [_with_status(store, _stored(store, number), kinds[number % 3]) for number in range(9)]
    wanted = [job for job in reversed(made) if job.status is not JobStatus.QUEUED]
    found: list[Job] = []
    cursor = None
    while len(found) < len(wanted):
        page, cursor = store.list_jobs(JobFilter(after=cursor, statuses=kinds[:2]), limit=2)
        found += page
    assert (found, cursor) == (wanted, None)


# ---- leases


def _busy(store: JobStore, number: int = 0) -> Job:
    return _with_status(store, _stored(store, number), JobStatus.RUNNING)


def _claim(store: JobStore, owner: str, now: float, limit: int = 10) -> list[str]:
    return store.claim_live_jobs(owner, lease_s=15.0, now=now, limit=limit)


def test_a_live_job_is_looked_at_by_one_replica_until_its_lease_ends(store: JobStore) -> None:
    job = _busy(store)
    assert _claim(store, "a", NOW) == [job.id]
    assert _claim(store, "b", NOW + 14) == []
    assert _claim(store, "b", NOW + 16) == [job.id]
    assert _claim(store, "a", NOW + 16) == []


def test_replicas_that_start_together_share_the_jobs(store: JobStore) -> None:
    made = {_busy(store, number).id for number in range(5)}
    first, second = _claim(store, "a", NOW, limit=3), _claim(store, "b", NOW, limit=3)
    assert (len(first), len(second)) == (3, 2)
    assert {*first, *second} == made


def test_a_replica_that_closes_gives_its_jobs_back_at_once(store: JobStore) -> None:
    job = _busy(store)
    _claim(store, "a", NOW)
    store.release_leases("a")
    assert _claim(store, "b", NOW) == [job.id]
    _with_status(store, job, JobStatus.FAILED)  # a lease makes no decision stale
    assert _claim(store, "b", NOW + 1) == []


def test_a_job_that_rests_is_nobodys_until_something_is_asked_of_it(store: JobStore) -> None:
    queued, paused = _stored(store), _with_status(store, _stored(store, 1), JobStatus.PAUSED)
    assert _claim(store, "a", NOW) == []
    store.update_job(replace(queued, cancel_requested=True))
    store.update_job(replace(paused, pause_requested=True))
    assert _claim(store, "a", NOW) == [queued.id, paused.id]


def test_a_job_that_one_replica_cannot_read_is_left_to_those_that_can(store: JobStore) -> None:
    job, other = _busy(store), JobStore(store.engine)
    with store.engine.connect().execution_options(is_write=True) as connection, connection.begin():
        connection.execute(update(jobs).values(spec="{}"))
    assert store.list_live_jobs() == []
    assert _claim(store, "a", NOW) == []
    assert _claim(other, "b", NOW) == [job.id]


def test_leases_that_need_no_renewal_are_seen_without_a_write(store: JobStore) -> None:
    job = _busy(store)
    _claim(store, "a", NOW)
    with patch.object(store, "write", side_effect=AssertionError("the database is locked")):
        assert _claim(store, "a", NOW + 7) == [job.id]
        assert _claim(store, "b", NOW + 7) == []
    assert _claim(store, "a", NOW + 8) == [job.id]
    assert _claim(store, "b", NOW + 16) == [], "it was renewed"


# ---- deletion


def test_a_deleted_job_leaves_no_row_behind(store: JobStore) -> None:
    job, attempt = _with_attempt(store, labels={"team": "ads"})
    store.append_events(attempt.id, batch(metrics(1, train_loss=1.0), checkpoint(1)), NOW)
    secret = {"job_id": job.id, "name": "TOKEN", "sealed": "x", "created_at": NOW}
    with store.engine.connect().execution_options(is_write=True) as connection, connection.begin():
        connection.execute(insert(job_secrets), secret)
    other, _ = _with_attempt(store, labels={"team": "ads"})
    _with_status(store, store.get_job(job.id), JobStatus.FAILED)
    before = _row_counts(store)
    store.delete_job(job.id)
    with pytest.raises(JobNotFound):
        store.get_job(job.id)
    with pytest.raises(AttemptNotFound):
        store.append_events(attempt.id, batch(metrics(2, train_loss=1.0)), NOW)
    assert store.list_jobs()[0] == [store.get_job(other.id)]
    after = _row_counts(store)
    emptied = {name for name in before if before[name] > after[name] == 0}
    assert emptied >= {"streams", "metric_names", "metric_points", "checkpoints", "job_secrets"}
    assert (after["jobs"], after["job_labels"], after["attempts"]) == (1, 1, 1)


def test_the_points_of_a_deleted_job_go_one_metric_a_transaction(store: JobStore) -> None:
    job, attempt = _with_attempt(store)
    store.append_events(attempt.id, batch(metrics(1, train_loss=1.0, train_auc=0.5)), NOW)
    _with_status(store, store.get_job(job.id), JobStatus.FAILED)
    num_left = select(func.count()).select_from(metric_points)
    seen: list[int] = []
    event.listen(store.engine, "commit", lambda each: seen.append(each.scalar(num_left)))
    store.delete_job(job.id)
    assert seen == [2, 1, 0, 0]


def _row_counts(store: JobStore) -> dict[str, int]:
    with store.engine.connect() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
        }


# ---- metric points: read and pruned


def _with_losses(store: JobStore, losses: list[float], *, every_s: float = 1.0) -> Job:
    job, attempt = _with_attempt(store)
    records = [
        metrics(step, time=NOW + step * every_s, train_loss=loss)
        for step, loss in enumerate(losses)
    ]
    store.append_events(attempt.id, batch(*records), records[-1].time)
    return job


def test_nan_and_infinite_values_survive_and_a_bucket_with_a_nan_shows_it(store: JobStore) -> None:
    job = _with_losses(store, [1.0, math.nan, math.inf])
    values = [point.value for point in store.metric_points(job.id, "train/loss")]
    assert math.isnan(values[1])
    assert values[2] == math.inf
    assert store.get_job(job.id).latest_metrics == {"train/loss": math.inf}
    (point,) = store.metric_points(job.id, "train/loss", max_points=1)
    assert math.isnan(point.value)
    assert (point.min, point.max) == (1.0, math.inf)


@pytest.mark.parametrize(
    ("losses", "mean"),
    [([1e200, 3e200], 2e200), ([1.7e308, 1.7e308], math.inf), ([5e-324, 0.0, 0.0], 0.0)],
)
def test_huge_and_tiny_values_have_a_mean_on_every_database(
    store: JobStore, losses: list[float], mean: float
) -> None:
    job = _with_losses(store, losses)
    (point,) = store.metric_points(job.id, "train/loss", max_points=1)
    assert point.value == mean


def test_a_repeated_step_shows_its_newest_value_and_counts_once(store: JobStore) -> None:
    job, attempt = _with_attempt(store)
    for first, loss in ((0, 1.0), (10, 7.0)):
        records = [metrics(step, train_loss=loss) for step in range(10)]
        store.append_events(attempt.id, batch(*records, first_seq=first), NOW)
    assert [p.value for p in store.metric_points(job.id, "train/loss")] == [7.0] * 10
    assert _prune(store, max_points=15) == 0
    assert _steps(store, job) == list(range(10))


@settings(max_examples=examples(20))
@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), max_points=st.integers(1, 20)
)
def test_downsampling_keeps_extremes_last_step_and_mean(
    store: JobStore, values: list[float], max_points: int
) -> None:
    job = _with_losses(store, values)
    points = store.metric_points(job.id, "train/loss", max_points=max_points)
    assert len(points) <= max_points or len(points) == len(values) <= max_points
    assert min(p.min for p in points) == min(values)
    assert max(p.max for p in points) == max(values)
    assert points[-1].step == len(values) - 1
    assert [p.step for p in points] == sorted(p.step for p in points)
    if max_points > 1:
        assert points[-1].value == points[-1].min == values[-1], "the newest is not averaged"
    else:
        assert points[0].value == pytest.approx(sum(values) / len(values), rel=1e-6, abs=1e-6)


def test_points_are_read_by_range_of_steps(store: JobStore) -> None:
    job = _with_losses(store, [1.0] * 10)
    points = store.metric_points(job.id, "train/loss", from_step=3, to_step=5)
    assert [point.step for point in points] == [3, 4, 5]
    assert store.metric_names(job.id) == ["train/loss"]
    assert store.metric_points(job.id, "no/such") == []


def _prune(store: JobStore, max_points: int) -> int:
    return prune(store.engine, days=0, max_points=max_points, now=NOW)


def _steps(store: JobStore, job: Job) -> list[int]:
    points = store.metric_points(job.id, "train/loss", max_points=100_000)
    return [point.step for point in points]


def test_points_beyond_the_limit_thin_out_below_the_newest_half(store: JobStore) -> None:
    job = _with_losses(store, [1.0] * 21)
    assert _prune(store, max_points=21) == 0
    assert _prune(store, max_points=20) == 5
    assert _steps(store, job) == [0, 2, 4, 6, 8, *range(10, 21)]
    assert _prune(store, max_points=20) == 0


def test_a_metric_that_goes_on_stays_below_the_limit_for_ever(store: JobStore) -> None:
    job, attempt = _with_attempt(store)
    for first in range(0, 1000, 50):
        records = [metrics(step, train_loss=1.0) for step in range(first, first + 50)]
        store.append_events(attempt.id, batch(*records, first_seq=first), NOW)
        _prune(store, max_points=100)
    steps = _steps(store, job)
    assert len(steps) <= 100
    assert (steps[0], steps[-50:]) == (0, list(range(950, 1000)))


def test_points_older_than_the_retention_are_deleted(store: JobStore) -> None:
    job = _with_losses(store, [1.0] * 10, every_s=DAY_S)
    retention = {"days": 3.5, "max_points": 100}
    assert prune(store.engine, **retention, now=NOW + 9 * DAY_S) == 6
    assert _steps(store, job) == [6, 7, 8, 9]
    assert prune(store.engine, **retention, now=NOW + 9 * DAY_S) == 0
    assert prune(store.engine, **retention, now=NOW + 100 * DAY_S) == 4
    assert store.metric_names(job.id) == ["train/loss"]


def test_a_nan_outlives_its_neighbour(store: JobStore) -> None:
    losses = [1.0, math.nan, *([1.0] * 20)]
    job = _with_losses(store, losses)
    _prune(store, max_points=20)
    assert _steps(store, job)[:2] == [1, 2]


# ---- plans


def test_no_list_reads_all_jobs(tmp_path: Path) -> None:
    lists: list[dict[str, Any]] = [
        {"statuses": [JobStatus.FAILED]},
        {"statuses": [JobStatus.FAILED, JobStatus.QUEUED]},
        {"name": "tiny"},
        {"projects": ["p", "q"]},
        {"project": "p", "statuses": [JobStatus.FAILED, JobStatus.QUEUED]},
        {"labels": [("a", "b"), ("c", "d")], "statuses": [JobStatus.FAILED]},
        {"created_after": NOW, "created_before": NOW + 9},
        {"created_before": NOW, "name": "tiny", "after": "job-x"},
    ]
    for wanted in lists:
        call = partial(
            JobStore.list_jobs, projects=wanted.pop("projects", None), wanted=JobFilter(**wanted)
        )
        plan = _plan(tmp_path, call)
        scans = [step for step in plan if "SCAN jobs" in step or "SCAN job_" in step]
        assert (bool(plan), scans) == (True, []), wanted


def test_a_search_goes_through_all_names_once(tmp_path: Path) -> None:
    wanted = JobFilter(search="night", statuses=[JobStatus.FAILED, JobStatus.QUEUED])
    plan = _plan(tmp_path, lambda store: store.list_jobs(wanted, projects=["p", "q"]))
    assert len([step for step in plan if "SCAN jobs" in step]) == 1


def test_looks_at_live_jobs_go_by_index(tmp_path: Path) -> None:
    looks: list[tuple[Callable[[JobStore], Any], str]] = [
        (lambda store: store.list_live_jobs(), "ix_jobs_live"),
        (lambda store: store.has_queued_jobs(), "ix_jobs_status_id"),
        (lambda store: store.claim_live_jobs("a", lease_s=1, now=1, limit=9), "ix_jobs_live"),
        (
            lambda store: WebhookStore(store.engine).claim(NOW, claim_s=1.0),
            "ix_webhook_deliveries_due (webhook_id=? AND state=? AND next_try_at<?)",
        ),
    ]
    for call, index in looks:
        plan = _plan(tmp_path, call)
        assert all(index in step for step in plan if "SCAN jobs" in step)
        assert any(index in step for step in plan), index


def _plan(folder: Path, call: Callable[[JobStore], Any]) -> list[str]:
    """The plan that SQLite makes of the selects and updates of a call."""
    store = JobStore.open(f"sqlite:///{folder / 'shardloom.db'}")
    seen: list[tuple[str, Any]] = []

    def note(_c: Any, _cur: Any, statement: str, values: Any, _ctx: Any, _many: bool) -> None:
        seen.append((statement, values))

    event.listen(store.engine, "before_cursor_execute", note)
    call(store)
    event.remove(store.engine, "before_cursor_execute", note)
    steps: list[str] = []
    with store.engine.connect() as connection:
        for statement, values in seen:
            if statement.startswith(("SELECT", "UPDATE")):
                plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
                steps += [row[3] for row in plan]
    store.close()
    return steps
