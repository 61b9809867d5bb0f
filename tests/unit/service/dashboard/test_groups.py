"""What the page of a job makes of groups that change, of a sharding plan and of traces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.dashboard import fragments, views
from service.dashboard.groups import (
    MemberGrid,
    TimelineRow,
    grid_then,
    lanes_of,
    member_grid,
    moments_of,
)
from service.domain.ingest import apply_events
from service.domain.models import (
    Checkpoint,
    EndReason,
    Job,
    JobStatus,
    Progress,
    ReportedEnd,
    TimelineEvent,
)
from tests.harness.builders import (
    ELASTIC,
    HOSTS,
    NOW,
    attempt_of,
    divergence,
    group_joined,
    group_lost,
    group_member,
    layout_chosen,
    membership_changed,
    predicted_workers,
    queued_job,
    recovered,
    row_wise_plan,
    table_wise_plan,
    trace_written,
    workers_lost,
    workers_started,
)
from trainer.protocol import events
from trainer.protocol.events import Event, Metrics, TablePlan

SPREAD = ELASTIC | {"workers": {"min": 2, "max": 6}}
Scene = tuple[Job, Sequence[TimelineEvent]]


def scene(*records: Event, parallelism: dict[str, Any] = SPREAD) -> Scene:
    """A running job that told these records, and its timeline."""
    job = queued_job(parallelism=parallelism)
    attempt = attempt_of(job)
    progress = Progress(step=130, total_steps=1000)
    job = replace(job, status=JobStatus.RUNNING, current_attempt_id=attempt.id, progress=progress)
    told_at = max((each.time for each in records), default=NOW)
    intake = apply_events(job, attempt, records, told_at)
    return intake.job, intake.timeline


def degraded() -> Scene:
    """Three groups of which one was lost after a minute, 20 seconds ago."""
    return scene(
        layout_chosen(),
        membership_changed(),
        group_lost(1, time=NOW + 60),
        membership_changed(group_member(0), group_member(2), generation=2, time=NOW + 60),
        recovered(time=NOW + 60.4, generation=2),
    )


def lanes(told: Scene, at_s: float = 80.0) -> Sequence[TimelineRow]:
    return lanes_of(*told, NOW + at_s).rows


def section(told: Scene, *checkpoints: Checkpoint, at_s: float = 80.0) -> str:
    """What is told beside the lanes, as HTML."""
    return fragments.membership(*told, checkpoints, NOW + at_s)


def facts(html: str) -> dict[str, tuple[str, str]]:
    """Text and tone of each fact."""
    found = re.findall(r'<dt title=".*">(.*)</dt>\n.*<dd class="tone-(.*)">(.*)</dd>', html)
    return {name: (unescape(text), tone) for name, tone, text in found}


def grid_of(told: Scene) -> MemberGrid:
    grid = member_grid(told[0], told[1])
    assert grid
    return grid


def saved(step: int) -> Checkpoint:
    return Checkpoint("job-1", step, f"step-{step}", 1, NOW, True, {})


def test_a_lane_shows_when_its_group_trained_and_when_it_was_gone() -> None:
    found = lanes(degraded())
    assert [(lane.group, lane.standing, lane.hosts) for lane in found] == [
        (0, "trains", HOSTS[0]),
        (1, "gone", HOSTS[1]),
        (2, "trains", HOSTS[2]),
    ]
    spans = [(span.tone, span.left, span.width) for span in found[1].spans]
    assert spans == [("good", 0.0, 75.0), ("bad", 75.0, 25.0)]
    assert found[1].spans[1].title == "group 1 gone, 20s"
    job, timeline = degraded()
    ended = replace(job, status=JobStatus.SUCCEEDED, ended_at=NOW + 70)
    assert lanes_of(ended, timeline, NOW + 5000).until == "+01:10"


def test_a_group_that_copies_is_not_yet_shown_as_training() -> None:
    back = group_member(1, "listening", incarnation=1)
    told = scene(
        membership_changed(group_member(0), group_member(1)),
        group_lost(1, time=NOW + 10),
        membership_changed(group_member(0), back, generation=3, time=NOW + 20),
        membership_changed(group_member(0), group_member(1, incarnation=1), time=NOW + 30),
        group_joined(1, time=NOW + 30),
    )
    lane = lanes(told, at_s=40)[1]
    assert [span.tone for span in lane.spans] == ["good", "bad", "active", "good"]
    assert [span.width for span in lane.spans] == [25.0] * 4


@given(st.lists(st.tuples(st.sets(st.integers(0, 3)), st.integers(0, 50)), min_size=1, max_size=8))
def test_spans_of_a_lane_never_overlap_and_stay_within_it(told: list[tuple[set[int], int]]) -> None:
    records = [
        membership_changed(*map(group_member, groups), time=NOW + at)
        for groups, at in told
        if groups
    ]
    for lane in lanes(scene(*records)):
        edge = 0.0
        for span in lane.spans:
            assert span.left >= edge - 1e-6
            edge = span.left + span.width
        assert edge <= 100 + 1e-6


def test_what_needs_attention_is_coloured() -> None:
    told = facts(section(degraded()))
    assert told["Training"] == ("2 of 3 groups, generation 2", "warn")
    assert told["Copies alive"] == ("2 of each shard, on 2 hosts; 1 more may be lost", "good")
    recovery = "commit 310 ms late, nothing to redo, 19s ago; 1 group lost so far"
    assert told["Last recovery"] == (recovery, "good")
    alone = membership_changed(group_member(0), generation=3)
    fewer = facts(section(scene(layout_chosen(), alone)))["Copies alive"]
    assert fewer == ("1 of each shard, on 1 host; survive needs 2", "warn")


def test_a_job_that_waits_for_groups_says_so() -> None:
    alone = membership_changed(group_member(0), generation=3)
    told = scene(layout_chosen(), alone, parallelism=ELASTIC | {"workers": 6, "min_groups": 2})
    text = "waits for 1 more: 1 of 3 groups, generation 3, min_groups 2"
    assert facts(section(told))["Training"] == (text, "warn")


def test_work_at_risk_is_counted_from_the_newest_checkpoint_unless_the_job_says_so() -> None:
    told = degraded()
    text = "30 steps since the newest checkpoint"
    assert facts(section(told, saved(100)))["At risk"][0] == text
    job = replace(told[0], latest_metrics={"risk/steps_undurable": 12.0})
    assert facts(section((job, told[1]), saved(100)))["At risk"][0].startswith("12 steps")
    for absurd in (1e308, -1e308):
        job = replace(told[0], latest_metrics={"risk/steps_undurable": absurd})
        assert "steps" in facts(section((job, told[1])))["At risk"][0]
    assert facts(section(told))["At risk"][0].startswith("130 steps")
    waiting = replace(job, status=JobStatus.QUEUED)
    assert "At risk" not in facts(section((waiting, told[1]))), "it saved before it was paused"


def test_goodput_is_broken_down_by_what_took_the_rest() -> None:
    values = {"goodput/share": 0.96, "goodput/lost_s/start": 6.0, "goodput/lost_s/redo": 2.0}
    told = scene(Metrics(time=NOW, step=1, values=values))
    html = section(told)
    assert "<strong>96.0%</strong> goodput since the attempt or its coordinator started" in html
    assert 'gained" style="width: 96.000%" title="goodput: 96.0%"' in html
    assert 'loss-0" style="width: 3.000%" title="start: 3.0%"' in html
    assert 'loss-1" style="width: 1.000%" title="lost work: 1.0%"' in html
    assert lanes(told) == ()
    assert fragments.lanes(*told, NOW) == ""


def test_what_is_wanted_is_shown_until_the_job_ends() -> None:
    job, timeline = degraded()
    data: dict[str, object] = {"id": "r-1", "workers": 4, "drain_hosts": [HOSTS[2]]}
    line = replace(timeline[0], kind="drain_requested", data=data)
    wanted = facts(section((job, [*timeline, line])))["Wanted"]
    assert wanted == (f"4 workers, without {HOSTS[2]}", "active")
    ended = replace(job, status=JobStatus.SUCCEEDED, ended_at=NOW)
    names = {*facts(section((ended, [*timeline, line])))}
    assert names == {"Last recovery", "Failure domain", "Chosen"}


def test_a_host_that_is_left_out_is_named_until_its_time_has_come() -> None:
    out = events.HostExcluded(time=NOW, host="h9", num_failures=3, until=NOW + 600)
    told = scene(layout_chosen(), out)
    assert facts(section(told, at_s=0))["Left out"] == ("h9 for 10m 00s", "warn")
    assert "Left out" not in facts(section(told, at_s=601))


def test_the_grid_has_a_row_for_every_group_the_lost_one_included() -> None:
    grid = grid_of(degraded())
    assert [(row.group, row.standing, row.tone) for row in grid.rows] == [
        (0, "trains", "good"),
        (1, "gone", "bad"),
        (2, "trains", "good"),
    ]
    assert [row.hosts for row in grid.rows] == [(HOSTS[0],) * 2, ("", ""), (HOSTS[2],) * 2]
    html = fragments.groups(*degraded())
    assert html.count('class="rank missing"') == 2
    # A host keeps its colour while its group is gone.
    assert f'host-2 good" title="rank 1 of group 2 on {HOSTS[2]}"' in html
    assert grid.hosts == HOSTS


def test_a_spare_has_a_row_and_leaves_none_when_it_is_lost() -> None:
    members = [*map(group_member, range(3)), group_member(3, "spare")]
    spared = SPREAD | {"placement": "inter_host", "spares": 1}
    told = scene(layout_chosen(), membership_changed(*members), parallelism=spared)
    assert [row.standing for row in grid_of(told).rows] == ["trains"] * 3 + ["spare"]
    training, _ = facts(section(told))["Training"]
    assert training.startswith("3 of 3 groups and 1 of 1 spare, generation 1")
    lost = group_lost(3, is_spare=True, time=NOW + 9)
    told = scene(membership_changed(*members), lost, parallelism=spared)
    assert told[1][-1].message.startswith("spare group 3 (")
    assert [row.standing for row in grid_of(told).rows] == ["trains"] * 3
    last = lanes(told)[-1]
    assert last.group == 3 and [span.title for span in last.spans][-1].startswith("group 3 spare")


def test_copies_alive_are_counted_under_each_shard() -> None:
    copies = grid_of(degraded()).copies
    assert [(each.text, each.tone) for each in copies] == [("2 of 3", "good")] * 2
    assert copies[0].hint == "2 copies of shard 0 on 2 hosts; survive needs 2"


def test_an_ended_job_shows_the_groups_that_its_workers_formed() -> None:
    job, timeline = scene(layout_chosen(), membership_changed(), workers_started())
    assert "group 0" in fragments.groups(job, timeline)
    ended = replace(job, status=JobStatus.FAILED, ended_at=NOW)
    assert "replica 0" in fragments.groups(ended, timeline)


def test_a_degraded_job_is_marked_in_list_and_heading() -> None:
    job, _ = degraded()
    assert views.job_row(job, NOW)["groups"] == "2 of 3 groups"
    assert "2 of 3 groups" in fragments.heading(job, NOW)
    whole, _ = scene(layout_chosen(), membership_changed())
    assert views.job_row(whole, NOW)["groups"] == ""
    assert section((queued_job(), ())) == ""


def test_the_evidence_of_an_end_is_shown_with_its_attempt_and_what_to_change() -> None:
    job, timeline = scene(workers_lost().model_copy(update={"evidence": {"exit": "-9"}}))
    assert "exit: -9" in fragments.render("timeline.html", job=job, timeline=timeline)
    report = ReportedEnd(EndReason.DEVICE_OOM, "killed", NOW, {"signal": "9", "host": HOSTS[1]})
    attempt = replace(attempt_of(job), end_reason=EndReason.DEVICE_OOM, reported_end=report)
    html = fragments.render("attempts.html", job=job, attempts=[attempt], now=NOW)
    assert f"<dt>signal</dt><dd>9</dd><dt>host</dt><dd>{HOSTS[1]}</dd>" in html
    failed = replace(
        job, status=JobStatus.FAILED, reason=EndReason.RETRIES_EXHAUSTED, message="gave up"
    )
    assert "Lower data.batch_size" in fragments.heading(failed, NOW, [attempt])


def test_text_of_records_cannot_become_markup() -> None:
    hostile = "<img src=x onerror=alert(1)>"
    plan = TablePlan.model_validate({**row_wise_plan().model_dump(), "name": hostile})
    told = scene(
        layout_chosen(reason=hostile),
        membership_changed(group_member(0).model_copy(update={"hosts": [hostile] * 2})),
        group_lost(2, reason=hostile),
        workers_started(tables=[plan]),
        divergence(table=hostile),
    )
    failed = replace(told[0], status=JobStatus.FAILED, message=hostile)
    html = (
        section(told)
        + fragments.lanes(*told, NOW)
        + fragments.groups(*told)
        + fragments.sharding(*told)
    )
    html += fragments.heading(failed, NOW) + fragments.render(
        "timeline.html", job=told[0], timeline=told[1]
    )
    assert "<img" not in html
    assert "&lt;img" in html


def test_the_grid_goes_back_through_losses_copies_and_attempts() -> None:
    back = group_member(1, "listening", incarnation=1).model_copy(update={"donor": 2})
    job, timeline = scene(
        layout_chosen(),
        workers_started(),
        membership_changed(),
        group_lost(1, time=NOW + 60),
        membership_changed(group_member(0), back, group_member(2), time=NOW + 70),
        group_joined(1, time=NOW + 90, donor=2),
    )
    earlier = apply_events(job, attempt_of(job, index=1), [workers_started(), workers_lost()], NOW)
    moments = moments_of([*timeline, *earlier.timeline])
    assert [moment.kind for moment in moments][-3:] == [
        *("group_lost", "membership_changed", "group_joined")
    ]

    def rows_at(kind: str) -> list[str]:
        grid, _ = grid_then(job, timeline, next(m for m in moments[::-1] if m.kind == kind))
        assert grid
        return [row.standing for row in grid.rows]

    assert rows_at("group_lost") == ["trains", "gone", "trains"]
    assert rows_at("membership_changed") == ["trains", "copies from 2", "trains, serves 1"]
    assert "from group 2 in" in timeline[-1].message
    lost = next(moment for moment in moments if moment.kind == "workers_lost")
    assert fragments.groups(job, earlier.timeline, lost).count(", lost") == 4


# ---- sharding and traces


@pytest.fixture
def job() -> Job:
    """A job of 2 replicas x 2 shards."""
    return queued_job()


def timeline_of(job: Job, *records: Event) -> list[TimelineEvent]:
    """The lines that these records leave."""
    return apply_events(job, attempt_of(job), records, records[-1].time).timeline


def test_each_table_shows_its_plan_in_words_and_as_a_picture(job: Job) -> None:
    plans = [row_wise_plan(num_embeddings=3000), table_wise_plan("movies", 1)]
    html = fragments.sharding(job, timeline_of(job, workers_started(tables=plans)))
    users, movies = html.split("<tr>")[2:]
    for text in ("users", "row-wise", "fp32", "3,000 × 8", "108 kB"):  # noqa: RUF001
        assert f">{text}</td>" in users
    assert 'viewBox="0 0 8 3000"' in users
    assert re.findall(r'rect class="host-(\d)" (.*?)>', users) == [
        ("0", 'x="0" y="0" width="8" height="1500"'),
        ("1", 'x="0" y="1500" width="8" height="1500"'),
    ]
    assert '<span class="shard host-1"><b>1</b>all</span>' in movies


def test_the_bars_show_who_holds_more_than_others(job: Job) -> None:
    plans = [row_wise_plan(), table_wise_plan("movies", 1, size_bytes=1800)]
    html = fragments.sharding(job, timeline_of(job, workers_started(tables=plans)))
    assert re.findall(r"</b> (ranks.*)</dt>", html) == ["ranks 0, 1", "ranks 2, 3"]
    first, second = re.findall(r'<dd class="load host-\d">(.*)</dd>', html)
    assert re.findall(r'width: (.*?)%" title="(.*?)"', first) == [("50.000", "users: 1.8 kB")]
    assert re.findall(r'width: (.*?)%" title="(.*?)"', second) == [
        ("50.000", "users: 1.8 kB"),
        ("50.000", "movies: 1.8 kB"),
    ]
    assert "1.33× imbalance" in html  # noqa: RUF001


def test_of_very_many_tables_those_that_fill_one_position_are_listed_and_others_found_by_name(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fragments, "MAX_TABLES", 2)
    monkeypatch.setattr(fragments, "_MAX_PIECES", 1)
    plans = [
        table_wise_plan("small", 0, size_bytes=100),
        row_wise_plan("wide"),  # 3600 bytes, half of them on each position
        table_wise_plan("large", 1, size_bytes=1900),
        table_wise_plan("Smallest", 0, size_bytes=10),
    ]
    job = replace(job, latest_metrics={f"table/{plan.name}/lookups": 9.0 for plan in plans})
    lines = timeline_of(job, workers_started(tables=plans))

    html, found = fragments.sharding(job, lines), fragments.sharding(job, lines, "SMALL")
    listed = re.compile(r'<td class="name">(.*)</td>').findall
    assert listed(html) == ["large", "wide"]
    assert "2 of 4 tables: those that take most of one position" in html
    assert 'title="2 other tables: 110 B"' in html
    assert listed(found) == ["small", "Smallest"], "as in the plan, where all fit"
    assert "No table has this in its name" in fragments.sharding(job, lines, "no such")


def test_tables_show_lookups_and_syncs_and_positions_their_memory(job: Job) -> None:
    metrics = {"table/users/lookups": 1024.0, "table/users/hottest": 0.25}
    metrics |= {f"memory/peak_rss_bytes/{position}": 720_000.0 for position in (0, 1)}
    plans = [row_wise_plan(num_embeddings=10_000), table_wise_plan("movies", 1, size_bytes=1800)]
    lines = timeline_of(job, workers_started(tables=plans))
    html = fragments.sharding(replace(job, latest_metrics=metrics), lines)
    assert "not synced" in html
    synced = {**metrics, "table/users/synced": 0.05}
    html = fragments.sharding(replace(job, latest_metrics=synced), lines)
    assert re.findall(r"</i>(\d.*?%)</span>", html) == ["25.0%", "5.0%"]
    # 1024 lookups of 10 000 rows: 8 numbers each in fp32, and one of optimizer state.
    assert 'title="predicted 10.2%"' in html
    assert '"number">18 kB</td>' in html
    assert '"number">36.9 kB</td>' in html
    assert "Memory per position" in html
    assert re.findall(r'load-size">(.*?)<', html) == ["180 kB of 720 kB", "182 kB of 720 kB"]
    partly = replace(job, latest_metrics={"memory/peak_rss_bytes/0": 1.0})
    html = fragments.sharding(partly, lines)
    assert "Tables per position" in html
    assert "Lookups and syncs" not in html


def test_predicted_memory_is_shown_by_position_and_part(job: Job) -> None:
    html = fragments.sharding(job, timeline_of(job, predicted_workers()))
    assert html.count('title="Activations: 1 MB"') == 1, "of the fuller position"
    assert re.findall(r'load-size">(.*?)<', html)[-2:] == ["3.5 MB", "7 MB"]
    assert "Reserve" not in html
    uneven = predicted_workers().prediction.model_copy(update={"memory_bytes": {"tables": [1]}})
    told = timeline_of(job, workers_started(), predicted_workers(prediction=uneven))
    assert "Activations" not in fragments.sharding(job, told), "whatever a job tells"


def test_a_data_parallel_table_is_whole_everywhere(job: Job) -> None:
    plan = row_wise_plan().model_copy(update={"sharding_type": "data_parallel", "shards": []})
    timeline = timeline_of(job, workers_started(tables=[plan]))
    assert "whole on every rank" in fragments.sharding(job, timeline)


def test_the_section_shows_the_policy_before_there_is_a_plan_and_without_one(job: Job) -> None:
    without = timeline_of(job, workers_started())
    for timeline, text in (([], "once the workers have told their plan"), (without, "too many")):
        html = fragments.sharding(job, timeline)
        assert text in html
        assert "the rows touched since the last sync" in html
        assert "Tables per position" not in html


def test_traces_are_newest_first_with_a_link_to_the_attempt_that_wrote_them(job: Job) -> None:
    assert "No trace has been written yet" in fragments.render("traces.html", timeline=[])
    records = [trace_written("spec"), trace_written("t-00000001", 1, time=NOW + 60, step=1200)]
    lines = timeline_of(job, *records)
    html = fragments.render("traces.html", job=job, timeline=lines, now=NOW + 90)
    link = f"/v1/jobs/{job.id}/traces/t-00000001-rank1.json.gz?attempt={job.id}-a0"
    assert f'href="{link}"' in html
    assert html.index("t-00000001") < html.index("spec-rank0")
    for part in ("1,200", "1.2 MB", "30s ago"):
        assert part in html


def test_divergences_are_an_alarm_with_the_newest_first(job: Job) -> None:
    timeline = timeline_of(job, *(divergence(step=step) for step in (10, 20, 30, 40)))
    html = fragments.sharding(job, timeline)
    assert "4 so far" in html
    assert re.findall(r"diverged by (step \d+)", html) == ["step 40", "step 30", "step 20"]
    assert views.event_tone(job, timeline[0]) == "bad"
    assert "alert" not in fragments.sharding(job, [])
