"""What the dashboard reads: store snapshots and rendered fragments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.dashboard import fragments
from service.dashboard.snapshots import LIST_MAX_AGE_S, ListFeed, load_job
from service.domain import Job, JobStatus, TimelineEvent
from service.job_errors import JobNotFound
from service.store.sql import SqlJobStore
from tests.unit.service.builders import (
    NOW,
    attempt_of,
    batch,
    metrics,
    queued_job,
    workers_started,
)


@pytest.fixture
def job(store: SqlJobStore) -> Job:
    """A stored job with a live attempt and one record."""
    stored = store.create_job(queued_job(), idempotency_key=None, request_hash="")
    attempt = attempt_of(stored)
    starting = replace(stored, status=JobStatus.STARTING, current_attempt_id=attempt.id)
    store.update_job(starting, attempt=attempt)
    store.append_events(attempt.id, batch(workers_started(), metrics(10, train_loss=0.9)), NOW)
    return store.get_job(stored.id)


def test_a_snapshot_holds_what_the_page_shows(store: SqlJobStore, job: Job) -> None:
    snapshot = load_job(store, job.id, None)
    assert [event.kind for event in snapshot.timeline] == ["job_submitted", "workers_started"]
    assert snapshot.points is not None
    assert [point.value for point in snapshot.points["train/loss"]] == [0.9]


def test_a_later_snapshot_adds_only_what_is_new(store: SqlJobStore, job: Job) -> None:
    first = load_job(store, job.id, None)
    unchanged = load_job(store, job.id, first)
    assert (unchanged.points, unchanged.timeline) == (None, first.timeline)
    store.append_events(f"{job.id}-a0", batch(metrics(20, train_loss=0.8), first_seq=2), NOW)
    changed = load_job(store, job.id, unchanged)
    assert changed.points is not None
    assert [point.step for point in changed.points["train/loss"]] == [10, 20]


def test_an_unknown_job_is_reported_as_such(store: SqlJobStore) -> None:
    with pytest.raises(JobNotFound):
        load_job(store, "job-nope", None)


def test_the_list_counts_what_it_holds(store: SqlJobStore, job: Job) -> None:
    snapshot = ListFeed(store).latest()
    assert snapshot.counts == {JobStatus.RUNNING: 1}
    assert not snapshot.has_more


def test_readers_of_the_list_share_one_read_until_it_is_old(store: SqlJobStore) -> None:
    now_s = 0.0
    feed = ListFeed(store, clock=lambda: now_s)
    assert not feed.latest().jobs
    store.create_job(queued_job(), idempotency_key=None, request_hash="")
    assert not feed.latest().jobs
    now_s = LIST_MAX_AGE_S
    assert len(feed.latest().jobs) == 1


def test_text_of_others_cannot_become_markup(job: Job) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    failed = replace(job, status=JobStatus.FAILED, message=hostile)
    line = TimelineEvent(1, job.id, None, NOW, "note", hostile, "driver", {})
    html = fragments.heading(failed, NOW) + fragments.timeline(failed, [line])
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") == 2


def test_fragments_of_a_new_job_say_what_will_come() -> None:
    job = queued_job()
    assert "once the workers have started" in fragments.groups(job, [])
    assert "not started" in fragments.progress(job)
    assert "No checkpoint" in fragments.checkpoints([], NOW)
    assert "not been submitted" in fragments.attempts(job, [], NOW)


def test_the_group_diagram_names_rank_and_host(store: SqlJobStore, job: Job) -> None:
    html = fragments.groups(job, load_job(store, job.id, None).timeline)
    assert html.count('class="rank') == 4
    assert 'title="rank 3 on a"' in html
