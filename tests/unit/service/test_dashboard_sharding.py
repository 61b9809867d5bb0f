"""The sharding section and the traces of a job's page."""

from __future__ import annotations

import pytest

from service.dashboard import fragments, views
from service.dashboard.sharding_view import sharding_view
from service.domain import Job, TimelineEvent
from service.store.intake import fold
from tests.unit.service.builders import (
    NOW,
    attempt_of,
    divergence,
    queued_job,
    row_wise_plan,
    table_wise_plan,
    trace_written,
    workers_started,
)
from trainer.events import Event, TablePlan

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def job() -> Job:
    """A job of 2 replicas x 2 shards."""
    return queued_job()


def timeline_of(job: Job, *records: Event) -> list[TimelineEvent]:
    """The lines that these records leave."""
    return fold(job, attempt_of(job), records, NOW).timeline


def test_each_table_shows_its_plan_in_words_and_as_a_picture(job: Job) -> None:
    plans = [row_wise_plan(num_embeddings=3000), table_wise_plan("movies", 1)]
    view = sharding_view(job, timeline_of(job, workers_started(tables=plans)))
    users, movies = view.tables
    assert (users.name, users.sharding, users.data_type) == ("users", "row-wise", "fp32")
    assert (users.shape, users.size) == ("3,000 × 8", "108 kB")  # noqa: RUF001
    assert [(box.position, box.top, box.height) for box in users.boxes] == [(0, 0, 50), (1, 50, 50)]
    assert [(box.left, box.width) for box in users.boxes] == [(0, 100)] * 2
    assert [box.text for box in movies.boxes] == ["all"]


def test_the_bars_show_who_holds_more_than_others(job: Job) -> None:
    plans = [row_wise_plan(), table_wise_plan("movies", 1, size_bytes=1800)]
    view = sharding_view(job, timeline_of(job, workers_started(tables=plans)))
    assert [bar.ranks for bar in view.bars] == ["ranks 0, 1", "ranks 2, 3"]
    assert [[s.percent for s in bar.segments] for bar in view.bars] == [[50.0], [50.0, 50.0]]
    assert view.bars[1].segments[1].title == "movies: 1.8 kB"
    assert view.imbalance == "1.33×"  # noqa: RUF001


def test_a_data_parallel_table_is_whole_everywhere(job: Job) -> None:
    plan = row_wise_plan().model_copy(update={"sharding_type": "data_parallel", "shards": []})
    timeline = timeline_of(job, workers_started(tables=[plan]))
    assert sharding_view(job, timeline).tables[0].is_whole
    assert "whole on every rank" in fragments.sharding(job, timeline)


def test_the_section_shows_the_policy_before_there_is_a_plan_and_without_one(job: Job) -> None:
    for timeline in ([], timeline_of(job, workers_started())):
        html = fragments.sharding(job, timeline)
        assert "once the workers have told their plan" in html
        assert "the rows touched since the last sync" in html
        assert "Tables per position" not in html


def test_workers_that_told_no_plan_still_show_their_sharding_types(job: Job) -> None:
    assert "row_wise" in fragments.groups(job, timeline_of(job, workers_started()))
    planned = timeline_of(job, workers_started(tables=[row_wise_plan()]))
    assert "row_wise" not in fragments.groups(job, planned)


def test_divergences_are_an_alarm_with_the_newest_first(job: Job) -> None:
    alarms = [divergence(step=step) for step in (10, 20, 30, 40)]
    timeline = timeline_of(job, *alarms)
    view = sharding_view(job, timeline)
    assert view.num_divergences == 4
    assert ["step 40" in view.divergences[0], len(view.divergences)] == [True, 3]
    assert "4 so far" in fragments.sharding(job, timeline)
    assert views.event_tone(job, timeline[0]) == "bad"
    assert "alert" not in fragments.sharding(job, [])


def test_names_of_tables_cannot_become_markup(job: Job) -> None:
    plan = TablePlan.model_validate({**row_wise_plan().model_dump(), "name": HOSTILE})
    timeline = timeline_of(job, workers_started(tables=[plan]), divergence(table=HOSTILE))
    assert "<img" not in fragments.sharding(job, timeline)


def test_traces_are_newest_first_with_a_link_to_the_attempt_that_wrote_them(job: Job) -> None:
    records = [trace_written("spec"), trace_written("t-00000001", 1, time=NOW + 60, step=1200)]
    html = fragments.traces(job, timeline_of(job, *records), NOW + 90)
    link = f"/v1/jobs/{job.id}/traces/t-00000001-rank1.json.gz?attempt={job.id}-a0"
    assert f'href="{link}"' in html
    assert html.index("t-00000001") < html.index("spec-rank0")
    for part in ("1,200", "1.2 MB", "30s ago"):
        assert part in html


def test_a_job_without_traces_says_so(job: Job) -> None:
    assert "No trace has been written yet" in fragments.traces(job, [], NOW)


def test_a_job_stored_before_plans_and_policies_is_shown_whole(job: Job) -> None:
    lines = timeline_of(job, workers_started())
    del lines[0].data["tables"]
    assert "rank" in fragments.groups(job, lines)
    assert "once the workers have told their plan" in fragments.sharding(job, lines)
