"""What the dashboard makes of jobs, timelines, checkpoints and attempts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.dashboard import views
from service.dashboard.job_page import spec_yaml
from service.dashboard.log_view import suggested_source
from service.dashboard.snapshots import ListFilter
from service.domain import (
    Checkpoint,
    EndReason,
    Job,
    JobStatus,
    Progress,
    QueueNote,
    TimelineEvent,
)
from tests.unit.service.builders import NOW, attempt_of, queued_job
from trainer.parallel.layout import Layout
from trainer.spec import load_spec


def running_job(**fields: Any) -> Job:
    """A job at half its steps."""
    progress = Progress(step=50, total_steps=100, rows=51_200, rows_per_s=16_540, eta_s=200)
    job = replace(queued_job(), status=JobStatus.RUNNING, started_at=NOW + 10, progress=progress)
    return replace(job, **fields)


def event(kind: str, *, id: int = 1, time: float = NOW, **data: object) -> TimelineEvent:
    """A timeline line with a message of its own kind."""
    return TimelineEvent(id, "job-1", "job-1-a0", time, kind, f"about {kind}", "driver", data)


def workers_event(sharding: list[list[int]], replicas: list[list[int]], hosts: list[str]) -> Any:
    """The record of a worker group, as the store keeps it."""
    return event(
        "workers_started",
        run_index=0,
        world_size=len(hosts),
        shard_group_size=len(sharding[0]),
        num_replicas=len(sharding),
        placement="intra_host",
        backend="gloo",
        sharding_groups=sharding,
        replica_groups=replicas,
        hosts=hosts,
        table_shards={"users": "row_wise"},
        total_steps=100,
        resumed_step=0,
    )


def test_a_running_job_shows_progress_eta_and_layout() -> None:
    row = views.job_row(running_job(latest_metrics={"train/loss": 0.61}), NOW + 70)
    assert row["percent"] == 50.0
    assert row["aside"] == "3m 20s left"
    assert row["workers"] == "4 = 2 × 2"  # noqa: RUF001
    assert (row["loss"], row["rows_per_s"], row["duration"]) == ("0.6100", "16.5k", "1m 00s")


def test_a_row_is_strict_json_even_when_the_loss_is_not_a_number() -> None:
    row = views.job_row(running_job(latest_metrics={"train/loss": math.nan}), NOW)
    assert json.loads(json.dumps(row, allow_nan=False))["loss"] == "NaN"


def test_a_failed_job_shows_its_reason_instead_of_an_eta() -> None:
    failed = running_job(status=JobStatus.FAILED, reason=EndReason.DATA_ERROR, ended_at=NOW + 20)
    row = views.job_row(failed, NOW + 1000)
    assert (row["tone"], row["aside"], row["duration"]) == ("bad", "data error", "10s")


def test_a_job_that_waits_shows_its_place_in_the_queue() -> None:
    note = QueueNote(position=3, reason="waiting for 4 of 8 workers")
    waiting = replace(queued_job(), queue_note=note.document)
    assert views.job_row(waiting, NOW)["aside"] == "#3 in the queue"


def test_almost_done_is_not_shown_as_done() -> None:
    job = running_job(progress=Progress(step=9_999, total_steps=10_000))
    assert views.progress_view(job).percent_text == "99%"


def test_statuses_are_counted_in_the_order_of_a_life() -> None:
    jobs = [running_job(), replace(queued_job(), status=JobStatus.FAILED), queued_job()]
    assert list(views.count_statuses(jobs)) == [
        JobStatus.QUEUED,
        JobStatus.RUNNING,
        JobStatus.FAILED,
    ]


@pytest.mark.parametrize(
    ("wanted", "admitted"),
    [
        (ListFilter(), True),
        (ListFilter(name="TIN"), True),
        (ListFilter(name="other"), False),
        (ListFilter(status=JobStatus.RUNNING), True),
        (ListFilter(status=JobStatus.FAILED), False),
    ],
)
def test_the_list_filters_by_name_and_status(wanted: ListFilter, admitted: bool) -> None:
    assert wanted.admits(running_job()) is admitted


def test_key_figures_follow_the_metric_of_the_task_and_flag_nan() -> None:
    metrics = {"train/loss": math.nan, "validation/rmse": 0.87, "balance/lookup": 1.2}
    figures = {f.name: f for f in views.key_figures(running_job(latest_metrics=metrics))}
    assert figures["train/loss"].tone == "bad"
    assert figures["validation/rmse"].label == "Validation RMSE"
    assert figures["balance/lookup"].value == "1.20×"  # noqa: RUF001


def test_the_grid_has_a_row_per_sharding_group_and_a_column_per_shard() -> None:
    grid = views.group_grid(
        [workers_event([[0, 2], [1, 3]], [[0, 1], [2, 3]], ["a", "a", "b", "b"])]
    )
    assert grid is not None
    assert [[cell.rank for cell in row] for row in grid.rows] == [[0, 2], [1, 3]]
    assert [[cell.host for cell in row] for row in grid.rows] == [["a", "b"], ["a", "b"]]


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(["intra_host", "inter_host"]))
def test_columns_of_the_grid_are_the_replica_groups(
    num_replicas: int, shard_group_size: int, placement: Any
) -> None:
    world_size = num_replicas * shard_group_size
    layout = Layout(world_size, shard_group_size, placement)
    sharding = [list(group) for group in layout.sharding_groups]
    replicas = [list(group) for group in layout.replica_groups]
    grid = views.group_grid([workers_event(sharding, replicas, ["a"] * world_size)])
    assert grid is not None
    columns = list(zip(*grid.rows, strict=True))
    assert [sorted(cell.rank for cell in column) for column in columns] == replicas


def test_the_grid_shows_the_newest_workers() -> None:
    first = workers_event([[0, 1]], [[0], [1]], ["a", "a"])
    second = workers_event([[0], [1]], [[0, 1]], ["a", "b"])
    grid = views.group_grid([first, second, event("note")])
    assert grid is not None
    assert (len(grid.rows), grid.hosts) == (2, ("a", "b"))


def test_there_is_no_grid_before_workers_started() -> None:
    assert views.group_grid([event("job_submitted")]) is None


@pytest.mark.parametrize(
    ("line", "tone"),
    [
        (event("note", level="error"), "bad"),
        (event("note", level="info"), "neutral"),
        (event("workers_lost"), "warn"),
        (event("attempt_ended", reason="completed"), "good"),
        (event("attempt_ended", reason="data_error"), "bad"),
        (event("job_ended"), "bad"),
    ],
)
def test_an_event_is_coloured_by_what_it_means(line: TimelineEvent, tone: str) -> None:
    assert views.event_tone(running_job(status=JobStatus.FAILED), line) == tone


def test_the_timeline_is_newest_first_limited_and_counts_from_submission() -> None:
    events = [event("note", id=n, time=NOW + n) for n in range(100)]
    lines = views.timeline_lines(running_job(), events, 3)
    assert [line.clock for line in lines] == ["+01:39", "+01:38", "+01:37"]


def test_checkpoints_are_newest_first_and_mark_the_best() -> None:
    checkpoints = [
        Checkpoint("job-1", step, f"step-{step}", 84_300_000, NOW, step == 500, {"train/loss": 1})
        for step in (500, 1000)
    ]
    lines = views.checkpoint_lines(checkpoints, NOW + 90)
    assert [(line.step, line.is_best) for line in lines] == [("1,000", False), ("500", True)]
    assert (lines[0].size, lines[0].age) == ("84.3 MB", "1m 30s ago")


def test_attempts_are_counted_from_one_and_a_live_one_is_still_running() -> None:
    job = running_job()
    ended = attempt_of(job, started_at=NOW, ended_at=NOW + 5, end_reason=EndReason.DRIVER_LOST)
    newest, oldest = views.attempt_lines(
        job, [ended, attempt_of(job, index=1, started_at=NOW + 60)], NOW + 75
    )
    assert (newest.number, newest.outcome, newest.duration) == (2, "live", "15s")
    assert (oldest.number, oldest.outcome, oldest.tone) == (1, "driver lost", "bad")


def test_the_spec_can_be_submitted_again_as_it_is_shown() -> None:
    job = queued_job()
    assert load_spec(spec_yaml(job)) == job.spec


def test_the_log_of_rank_0_is_shown_first_where_there_is_one() -> None:
    assert suggested_source(["driver"]) == "driver"
    assert suggested_source(["driver", "rank-0", "rank-1"]) == "rank-0"
    assert suggested_source(["driver", "group-1-rank-0", "group-2-rank-0"]) == "group-1-rank-0"
    assert suggested_source([]) is None
