"""What the dashboard makes of jobs, timelines, checkpoints and attempts, and serves of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from starlette.datastructures import QueryParams

from service.app import create_app
from service.backends.fake import FakeBackend
from service.dashboard import fragments, snapshots, views
from service.dashboard.job import spec_yaml
from service.dashboard.job_feed import JobFeed
from service.dashboard.jobs import JobQuery, ListFeed, spark_path
from service.dashboard.panels import shown_line, suggested_source
from service.dashboard.snapshots import MAX_CHART_POINTS, load_job, read_points
from service.db.jobs import JobStore
from service.domain.job_filter import ALL_JOBS, JobFilter
from service.domain.models import (
    Checkpoint,
    EndReason,
    Job,
    JobStatus,
    Progress,
    QueueState,
    TimelineEvent,
)
from service.domain.sharding import newest_workers
from service.errors import JobNotFound, StoreUnavailable
from service.settings import Settings
from tests.harness.builders import (
    NOW,
    attempt_of,
    batch,
    group_member,
    membership_changed,
    metrics,
    progress,
    queued_job,
    workers_started,
)
from tests.harness.databases import store_attempt, store_job
from tests.harness.service import LOOPBACK_URL
from trainer.layout.layout import Layout
from trainer.protocol.events import Note
from trainer.spec import load_spec


def running_job(**fields: Any) -> Job:
    """A job at half its steps."""
    progress = Progress(step=50, total_steps=100, rows=3_308_000, rows_per_s=16_540, eta_s=200)
    job = replace(queued_job(), status=JobStatus.RUNNING, started_at=NOW + 10, progress=progress)
    return replace(job, **fields)


def event(kind: str, *, id: int = 1, time: float = NOW, **data: object) -> TimelineEvent:
    """A timeline line with a message of its own kind."""
    return TimelineEvent(id, "job-1", "job-1-a0", time, kind, f"about {kind}", "driver", data)


def workers_event(sharding: list[list[int]], replicas: list[list[int]], hosts: list[str]) -> Any:
    """The record of a worker group, as the store keeps it."""
    groups = {"sharding_groups": sharding, "replica_groups": replicas, "hosts": hosts}
    told = workers_started().model_copy(update=groups)
    return event("workers_started", **told.model_dump(exclude={"kind", "time"}))


def rows_of(html: str) -> list[list[str]]:
    """The texts of the cells of a table, row by row."""
    body = html.partition("<tbody>")[2]
    rows = re.findall("<tr>(.*?)</tr>", body, re.DOTALL)
    return [
        [re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*)</td>", row)] for row in rows
    ]


def test_a_running_job_shows_progress_eta_and_layout() -> None:
    told = {"train/loss": 0.61, "speed/rows_per_s": 16_540}
    row = views.job_row(running_job(latest_metrics=told), NOW + 70)
    assert row["percent"] == 50.0
    assert row["aside"] == "3m 20s left"
    assert row["workers"] == "4 = 2 × 2"  # noqa: RUF001
    assert (row["loss"], row["rows_per_s"], row["duration"]) == ("0.6100", "16.5k", "1m 00s")
    almost = running_job(progress=Progress(step=9_999, total_steps=10_000))
    assert views.job_row(almost, NOW)["percent_text"] == "99%"
    # A row is strict JSON, whatever the loss.
    row = views.job_row(running_job(latest_metrics={"train/loss": math.nan}), NOW)
    assert json.loads(json.dumps(row, allow_nan=False))["loss"] == "NaN"


def test_a_job_that_does_not_run_shows_why_instead_of_an_eta() -> None:
    failed = running_job(status=JobStatus.FAILED, reason=EndReason.DATA_ERROR, ended_at=NOW + 20)
    row = views.job_row(failed, NOW + 1000)
    assert (row["tone"], row["aside"], row["duration"]) == ("bad", "data error", "10s")
    note = QueueState(position=3, reason="waiting for 4 of 8 workers")
    waiting = replace(queued_job(), queue_note=note)
    assert views.job_row(waiting, NOW)["aside"] == "#3 in the queue"
    assert views.job_row(running_job(pause_requested=True), NOW)["aside"] == "pausing"


def test_the_page_of_a_queued_job_says_where_it_waits_and_why_and_is_drawn_anew_when_that_changes(
    store: JobStore,
) -> None:
    stored, place = store_job(store), QueueState(2, "waiting for 4 of 8 workers", NOW)
    feed = JobFeed(store, stored.id, lambda job: replace(job, queue_note=place))
    first = feed.latest()
    assert "#2 in the queue: waiting for 4 of 8 workers" in first.html["progress"]
    assert "not started" not in first.html["progress"]
    place = replace(place, expected_start_at=NOW + 1)
    assert feed.latest(max_age_s=0.0).snapshot is first.snapshot
    place = replace(place, position=None, reason="waits before the next attempt")
    html = feed.latest(max_age_s=0.0).html["progress"]
    assert "<span>waits before the next attempt</span>" in html


def test_only_a_job_at_work_runs() -> None:
    for status, told in (
        (JobStatus.RUNNING, "running for 1m 00s"),
        (JobStatus.PAUSED, "started 1m 00s ago"),
        (JobStatus.FAILED, "ran for 1m 00s"),
    ):
        assert told in fragments.heading(running_job(status=status), NOW + 70)


def test_the_address_of_the_list_holds_its_filters() -> None:
    query = JobQuery(
        search="night",
        statuses=(JobStatus.RUNNING, JobStatus.FAILED),
        labels=("team=ads",),
        metric="validation/rmse<0.9",
        columns=("spark", "age"),
        after="job-7",
    )
    assert JobQuery.of(QueryParams(urlsplit(query.address).query)) == query
    assert JobQuery.of(QueryParams("status=burning&x=y")) == JobQuery()
    assert JobQuery().address == "/dashboard/"
    assert query.wanted == JobFilter(
        after="job-7",
        statuses=query.statuses,
        search="night",
        labels=[("team", "ads")],
        metrics=["validation/rmse<0.9"],
    )
    with pytest.raises(ValidationError):
        _ = JobQuery(metric="validation/rmse").wanted
    # What is half typed, or in an address of before, leaves the list as it is.
    odd = JobQuery.of(QueryParams("label==x&label===x&label=team&search=" + "x" * 300))
    assert odd.wanted == JobFilter(search="x" * 200)


def test_a_small_curve_has_a_gap_where_a_value_is_not_finite() -> None:
    assert spark_path([(0, 1.0), (10, math.nan), (20, 0.0)]) == "M2.0 2.0M86.0 22.0"
    assert spark_path([(0, 1.0), (10, 1.0)]).count("L") == 1
    assert spark_path([(5, 1.0)]) == ""


def test_key_figures_follow_the_metric_of_the_task_and_flag_nan() -> None:
    metrics = {"train/loss": math.nan, "validation/rmse": 0.87, "balance/lookup": 1.2}
    html = fragments.render("figures.html", job=running_job(latest_metrics=metrics))
    shown = re.findall(r'<dt>(.*)</dt>\s*<dd class="tone-(.*)">(.*)</dd>', html)
    assert {("Train loss", "bad", "NaN"), ("Validation RMSE", "neutral", "0.8700")} < set(shown)
    assert ("Lookup imbalance", "neutral", "1.20×") in shown  # noqa: RUF001


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(["intra_host", "inter_host"]))
def test_columns_of_the_grid_are_the_replica_groups(
    num_replicas: int, shard_group_size: int, placement: Any
) -> None:
    world_size = num_replicas * shard_group_size
    layout = Layout(world_size, shard_group_size, placement)
    sharding = [list(group) for group in layout.sharding_groups]
    replicas = [list(group) for group in layout.replica_groups]
    workers = newest_workers([workers_event(sharding, replicas, ["a"] * world_size)])
    assert workers is not None
    columns = zip(*views.rank_rows(workers), strict=True)
    assert [sorted(column) for column in columns] == replicas


def test_the_grid_shows_the_newest_workers() -> None:
    first = workers_event([[0, 1]], [[0], [1]], ["a", "a"])
    second = workers_event([[0], [1]], [[0, 1]], ["a", "b"])
    html = fragments.groups(queued_job(), [first, second, event("note")])
    assert re.findall('class="(rank host-.)" title="(.*?)"', html) == [
        ("rank host-0", "rank 0 on a"),
        ("rank host-1", "rank 1 on b"),
    ]


def test_an_event_is_coloured_by_what_it_means() -> None:
    failed = running_job(status=JobStatus.FAILED)
    for line, tone in (
        (event("note", level="error"), "bad"),
        (event("note", level="info"), "neutral"),
        (event("workers_lost"), "warn"),
        (event("attempt_ended", reason="completed"), "good"),
        (event("attempt_ended", reason="data_error"), "bad"),
        (event("job_ended"), "bad"),
    ):
        assert views.event_tone(failed, line) == tone


def test_the_timeline_is_newest_first_limited_and_counts_from_submission() -> None:
    events = [event("note", id=n, time=NOW + n) for n in range(300)]
    html = fragments.render("timeline.html", job=running_job(), timeline=events)
    clocks = re.findall(r"<time>(.*)</time>", html)
    assert (len(clocks), clocks[:3]) == (200, ["+04:59", "+04:58", "+04:57"])


def test_checkpoints_are_newest_first_and_mark_the_best() -> None:
    checkpoints = [
        Checkpoint("job-1", step, f"step-{step}", 84_300_000, NOW, step == 500, {"train/loss": 1})
        for step in (500, 1000)
    ]
    job = replace(running_job(), created_at=NOW - 90)
    newest, best = rows_of(fragments.render("checkpoints.html", job=job, checkpoints=checkpoints))
    assert newest == ["1,000", "", "train/loss 1.0000", "84.3 MB", "+01:30", "step-1000"]
    assert best[:2] == ["500", "best"]


def test_attempts_are_counted_as_in_the_timeline_and_a_live_one_is_still_running() -> None:
    job = running_job()
    ended = attempt_of(job, started_at=NOW, ended_at=NOW + 5, end_reason=EndReason.DRIVER_LOST)
    live = attempt_of(job, index=1, started_at=NOW + 60)
    attempts = [ended, live, attempt_of(job, index=2)]
    html = fragments.render("attempts.html", job=job, attempts=attempts, now=NOW + 75)
    waiting, newest, oldest = rows_of(html)
    assert waiting[:4] == ["2", "live", "–", "–"]  # noqa: RUF001
    assert newest[:4] == ["1", "live", "+01:00", "15s"]
    assert oldest[:4] == ["0", "driver lost", "+00:00", "5s"]
    assert 'tone-bad">driver lost' in html


def test_the_spec_can_be_submitted_again_as_it_is_shown() -> None:
    job = queued_job()
    assert load_spec(spec_yaml(job)) == job.spec


def test_the_log_of_rank_0_is_shown_first_where_there_is_one() -> None:
    assert suggested_source(["driver"]) == "driver"
    assert suggested_source(["driver", "rank-0", "rank-1"]) == "rank-0"
    assert suggested_source(["driver", "group-1-rank-0", "group-2-rank-0"]) == "group-1-rank-0"
    assert suggested_source([]) is None


def test_a_line_of_a_log_is_shown_as_it_was_drawn_last_and_not_longer_than_a_page_bears() -> None:
    assert shown_line("") == shown_line("\v") == "\N{NO-BREAK SPACE}"
    assert shown_line("epoch 1:  10%\repoch 1: 100%") == "epoch 1: 100%"
    assert shown_line("a\u2028b\x85c") == "a b c"
    assert shown_line("\x1b[1;32mINFO\x1b[0m done") == "INFO done"
    assert len(shown_line("x" * 2**20)) < 5000 and shown_line("x" * 2**20).endswith("x ...")


# ---- snapshots and fragments


@pytest.fixture
def job(store: JobStore) -> Job:
    """A stored job with a live attempt and one record."""
    stored, attempt = store_attempt(store)
    store.append_events(attempt.id, batch(workers_started(), metrics(10, train_loss=0.9)), NOW)
    return store.get_job(stored.id)


def test_a_snapshot_holds_what_the_page_shows_and_a_later_one_adds_what_is_new(
    store: JobStore, job: Job
) -> None:
    first = load_job(store, job.id, None)
    assert [event.kind for event in first.timeline] == ["job_submitted", "workers_started"]
    assert load_job(store, job.id, first) is first
    store.append_events(f"{job.id}-a0", batch(metrics(20, train_loss=0.8), first_seq=2), NOW)
    changed = load_job(store, job.id, first)
    assert (changed.is_rewound(first), changed.is_rewound(None)) == (False, True)
    again = batch(workers_started(), first_seq=3)
    store.append_events(f"{job.id}-a0", again, NOW)
    assert load_job(store, job.id, changed).is_rewound(first)
    with pytest.raises(JobNotFound):
        load_job(store, "job-nope", None)


def test_of_a_long_timeline_submission_workers_and_the_newest_lines_are_read_and_kept(
    store: JobStore, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MAX_LINES", 3)
    before = followed = load_job(store, job.id, None)
    for number in range(5):
        told = batch(Note(time=NOW, message=str(number)), first_seq=2 + number)
        store.append_events(f"{job.id}-a0", told, NOW)
        followed = load_job(store, job.id, followed)
    kinds = [line.kind for line in followed.timeline]
    assert kinds == ["job_submitted", "workers_started", *["note"] * 3]
    assert load_job(store, job.id, None).timeline == followed.timeline
    assert [line.message for line in followed.timeline[-3:]] == ["2", "3", "4"]
    store.append_events(f"{job.id}-a0", batch(workers_started(), first_seq=7), NOW)
    again = load_job(store, job.id, followed)
    assert (again.is_rewound(followed), followed.is_rewound(before)) == (True, False)


def test_groups_that_stay_as_they_are_are_kept_once(store: JobStore, job: Job) -> None:
    first = membership_changed()
    other = membership_changed(group_member(0), group_member(1, incarnation=1), group_member(2))
    store.append_events(f"{job.id}-a0", batch(first, first, first_seq=2), NOW)
    known = load_job(store, job.id, None)
    store.append_events(f"{job.id}-a0", batch(other, first_seq=4), NOW)
    lines = load_job(store, job.id, known).timeline[-3:]
    told = [[id(group) for group in line.data["groups"]] for line in lines]
    assert told[0] == told[1]
    assert [old == new for old, new in zip(told[1], told[2], strict=True)] == [True, False, True]


def test_what_readers_of_a_job_see_is_drawn_once_and_again_only_where_it_is_new(
    store: JobStore, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, parts = NOW, fragments.PARTS
    draws = {name: Mock(wraps=part.draw) for name, part in parts.items()}
    noted = {name: part._replace(draw=draws[name]) for name, part in parts.items()}
    monkeypatch.setattr(fragments, "PARTS", noted)

    def drawn() -> set[str]:
        found = {name for name, draw in draws.items() if draw.called}
        for draw in draws.values():
            draw.reset_mock()
        return found

    feed = JobFeed(store, job.id, clock=lambda: now_s)
    first = feed.latest()
    assert drawn() == {*parts}
    told = batch(metrics(20, train_loss=0.8), progress(20), first_seq=2)
    store.append_events(f"{job.id}-a0", told, NOW)
    assert feed.latest(max_age_s=60.0) is first, "it is not old yet"
    draws["traces"].side_effect = ValueError
    with pytest.raises(ValueError):
        feed.latest(max_age_s=0.0)
    draws["traces"].side_effect = None
    assert "step 20" in feed.latest(max_age_s=0.0).html["progress"], "though another part failed"
    assert drawn() == {*parts} - {"lanes", "grid", "sharding", "checkpoints"}
    again = feed.latest(max_age_s=0.0)
    assert feed.latest(max_age_s=0.0) is again
    assert not drawn()
    now_s += 10
    feed.latest(max_age_s=0.0)
    assert drawn() == {*parts} - {"grid", "sharding", "checkpoints"}, "texts with ages"
    away = Mock(side_effect=StoreUnavailable("away"))
    monkeypatch.setattr(store, "get_job", away)
    for max_age_s in (0.0, 60.0):
        with pytest.raises(StoreUnavailable):
            feed.latest(max_age_s)
    assert away.call_count == 1, "those who waited meanwhile do not ask again"


def test_of_known_points_only_newer_ones_are_read_until_there_are_too_many(
    store: JobStore, job: Job
) -> None:
    names = ["train/loss", "train/never"]
    first = read_points(store, job.id, names, {})
    assert [(name, [p.step for p in series]) for name, series in first.items()] == [
        ("train/loss", [10])
    ]
    store.append_events(f"{job.id}-a0", batch(metrics(20, train_loss=0.8), first_seq=2), NOW)
    known = {"train/loss": [replace(first["train/loss"][0], value=7.0)]}
    assert [p.value for p in read_points(store, job.id, names, known)["train/loss"]] == [7.0, 0.8]
    too_many = {"train/loss": known["train/loss"] * 2 * MAX_CHART_POINTS}
    assert [p.value for p in read_points(store, job.id, names, too_many)["train/loss"]] == [
        0.9,
        0.8,
    ]


def test_readers_of_the_list_share_one_read_until_it_is_old(store: JobStore) -> None:
    feed = ListFeed(store)
    page = feed.page(ALL_JOBS)
    assert not page.latest().jobs
    store_job(store)
    assert not feed.page(ALL_JOBS).latest(max_age_s=60.0).jobs
    found = page.latest(max_age_s=0.0)
    assert (len(found.jobs), found.following) == (1, None)
    assert not feed.page(ALL_JOBS, {"of-others"}).latest().jobs


def test_a_small_curve_stays_until_that_of_a_later_step_is_read(store: JobStore, job: Job) -> None:
    feed = ListFeed(store)
    assert (feed.needs_spark(job), feed.spark(job)) == (True, "")
    told = batch(metrics(20, train_loss=0.8), first_seq=2)
    store.append_events(f"{job.id}-a0", told, NOW)
    feed.read_spark(job)
    curve = feed.spark(job)
    assert (feed.needs_spark(job), curve[:1]) == (False, "M")
    later = replace(job, progress=replace(job.progress, step=20))
    assert (feed.needs_spark(later), feed.spark(later)) == (True, curve)


def test_fragments_of_a_new_job_say_what_will_come() -> None:
    job = queued_job()
    assert "once the workers have started" in fragments.groups(job, [])
    assert "not started" in fragments.render("progress.html", job=job)
    assert "No checkpoint" in fragments.render("checkpoints.html", checkpoints=[], now=NOW)
    assert "not been submitted" in fragments.render("attempts.html", job=job, attempts=[], now=NOW)


# ---- served beside the API


@contextmanager
def client_of(store: JobStore, home: Path) -> Iterator[TestClient]:
    """A client of a started app that serves the dashboard over `store`."""
    settings = Settings(home=home, backend="fake", auth="none")
    app = create_app(settings, store, FakeBackend(home / "fake"))
    with TestClient(app, base_url=LOOPBACK_URL) as client:
        yield client


def test_each_app_of_a_process_shows_its_own_store(store: JobStore, tmp_path: Path) -> None:
    with client_of(store, tmp_path) as client:
        assert "movie-nights" not in client.get("/dashboard/").text
    other = JobStore.open(f"sqlite:///{tmp_path / 'other.db'}")
    store_job(other, queued_job(name="movie-nights"))
    with client_of(other, tmp_path) as client:
        assert "movie-nights" in client.get("/dashboard/").text
    other.close()
