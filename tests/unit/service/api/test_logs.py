"""Logs over HTTP: filters, search, time range, follow with resume, download."""

from __future__ import annotations

import io
import itertools
import json
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.api import sse
from service.api.sse import _MAX_OFFSETS, LATE_LINES_S, LogFollower, StreamBatch
from service.domain.lifecycle import decide
from service.domain.models import JobStatus, Observation, ObservedState
from service.jobs.logs import LogFilter, LogPosition
from tests.harness.builders import NOW
from tests.harness.clock import FakeClock
from tests.harness.properties import examples
from tests.harness.service import Api, problem_in, replace_attempt

RANK_0 = """\
2026-11-21T10:00:00.000Z INFO trainer: step 1
2026-11-21T10:00:05.000Z WARNING trainer: slow peer
2026-11-21T10:00:10.000Z ERROR trainer: lost rank 3
Traceback (most recent call last):
  ConnectionError: gone
2026-11-21T10:00:15.000Z INFO trainer: step 2
"""
RANK_3 = "2026-11-21T10:00:09.000Z INFO trainer: step 1\nFatal Python error: Aborted\n"
TEN = 1_795_255_200.0


@pytest.fixture
def job(api: Api) -> str:
    """A job with logs of a driver and two ranks."""
    job_id = api.start()
    api.log(f"{job_id}-a0", "rank-0", RANK_0)
    api.log(f"{job_id}-a0", "rank-3", RANK_3)
    api.log(f"{job_id}-a0", "driver", "2026-11-21T09:59:00.000Z INFO trainer.driver: up\n")
    return job_id


def _texts(api: Api, job: str, **params: Any) -> list[str]:
    response = api.http.get(f"/v1/jobs/{job}/logs", params=params)
    assert response.status_code == 200, response.text
    return [line["text"].rpartition(": ")[2] for line in response.json()["lines"]]


def test_lines_tell_rank_level_and_time(api: Api, job: str) -> None:
    assert _texts(api, job)[:2] == ["up", "step 1"], "those of the driver come first"
    body = api.http.get(f"/v1/jobs/{job}/logs", params={"source": "rank-0"}).json()
    assert body["sources"] == ["driver", "rank-0", "rank-3"]
    assert body["lines"][1] == {
        "source": "rank-0",
        "text": "2026-11-21T10:00:05.000Z WARNING trainer: slow peer",
        "rank": 0,
        "group": None,
        "level": "warning",
        "time": TEN + 5,
    }
    assert [line["level"] for line in body["lines"][2:5]] == ["error"] * 3
    assert body["more"] is False, "or a job that goes on writing would keep one who reads for ever"


def test_lines_are_chosen_by_source_tail_rank_level_text_and_time(api: Api, job: str) -> None:
    traceback = "Traceback (most recent call last):"
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"rank": 3}, ["step 1", "Aborted"]),
        ({"rank": 7}, []),
        ({"source": "rank-3", "tail": 1}, ["Aborted"]),
        # A level takes in the traceback and the last words.
        ({"level": "warning"}, ["slow peer", "lost rank 3", traceback, "gone", "Aborted"]),
        ({"q": "LOST RANK"}, ["lost rank 3"]),
        ({"q": "error*lost"}, ["lost rank 3"]),
        ({"q": "nowhere"}, []),
        ({"since": TEN + 4, "until": TEN + 9}, ["slow peer"]),
        # A line without a time has that of the line above it.
        ({"since": TEN + 9, "rank": 3}, ["step 1", "Aborted"]),
    ]
    for params, wanted in cases:
        assert _texts(api, job, **params) == wanted
    assert len(_texts(api, job, rank=[0, 3])) == 8


def test_filters_hold_for_each_piece_of_a_long_log(api: Api) -> None:
    job_id = api.start()
    noise = "2026-11-21T10:00:00.000Z INFO trainer: " + "x" * 1000 + "\n"
    api.log(f"{job_id}-a0", "rank-0", noise * 3000 + RANK_0)
    found, after, more = list[str](), None, True
    while more:
        params = {"level": "error", **({"after": after} if after else {})}
        body = api.http.get(f"/v1/jobs/{job_id}/logs", params=params).json()
        found += [line["text"] for line in body["lines"]]
        after, more = body["cursor"], body["more"]
    assert len(found) == 3


# ---- following


def _succeed(api: Api, job_id: str) -> None:
    """Let the first attempt of a job succeed at NOW, some time ago."""
    job, attempt = api.store.get_job(job_id), api.store.get_attempt(f"{job_id}-a0")
    done = decide(job, attempt, Observation(ObservedState.SUCCEEDED), NOW)
    api.store.update_job(done.job, attempt=done.attempt)


@settings(max_examples=examples(15))
@given(cut=st.integers(0, 7), level=st.sampled_from([None, "warning"]))
def test_a_stream_resumes_behind_any_event_without_a_line_lost_or_doubled(
    api: Api, cut: int, level: str | None
) -> None:
    job = api.start()
    for source, text in (("rank-0", RANK_0), ("rank-3", RANK_3)):
        api.log(f"{job}-a0", source, text)
    _succeed(api, job)
    params = {"level": level} if level else {}
    *whole, end = api.follow(f"{job}/logs", **params)
    assert end.event == "end"
    seen = whole[:cut]
    *rest, _ = api.follow(f"{job}/logs", seen[-1].id if seen else "", **params)
    texts = [json.loads(event.data)["text"] for event in seen + rest]
    assert texts == [json.loads(event.data)["text"] for event in whole]
    assert len(whole) == (5 if level else 8)


def test_a_stream_outlives_calls_that_storage_answers_too_late_without_a_line_lost_or_doubled(
    api: Api, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = itertools.count()

    def late(path: Path, call: Callable[[], StreamBatch], owner: str) -> StreamBatch:
        found = call()
        if next(polls) % 2:
            return found
        raise TimeoutError(f"what {owner} wrote takes long to read")

    _succeed(api, job)
    whole = [(event.id, event.data) for event in api.follow(f"{job}/logs")]
    monkeypatch.setattr(sse, "in_time", late)
    assert [(event.id, event.data) for event in api.follow(f"{job}/logs")] == whole
    assert next(polls) >= 4


def test_lines_of_workers_that_outlive_their_attempt_come_before_those_of_the_next(
    api: Api,
) -> None:
    job_id = api.start()
    replace_attempt(api.store, job_id)
    first = f"{job_id}-a0"
    api.log(first, "rank-0", "one\n")
    api.log(f"{job_id}-a1", "rank-0", "three\n")
    clock, job = FakeClock(time.time()), api.store.get_job(job_id)
    follower = LogFollower(api.store, api.settings, job, None, None, LogFilter(), clock)
    follower.start_at(LogPosition(first))

    def _poll() -> list[str]:
        frames = [item.decode() for item in follower.poll().items]
        return [json.loads(frame.splitlines()[1][len("data: ") :])["text"] for frame in frames]

    assert _poll() == ["one"]
    assert _poll() == []
    api.log(first, "rank-0", "two\n")
    assert (_poll(), follower.has_more) == (["two"], False)
    api.log(first, "rank-0", "last words")
    clock.now += LATE_LINES_S
    assert (_poll(), follower.has_more) == (["last words"], True)
    assert (_poll(), follower.has_more) == ([], True)
    assert (_poll(), follower.has_more) == (["three"], False)


@pytest.mark.parametrize("is_one_wanted", [True, False])
def test_a_stream_of_a_job_that_has_ended_waits_for_lines_of_workers_that_outlive_it(
    api: Api, is_one_wanted: bool
) -> None:
    job_id = api.start()
    _succeed(api, job_id)
    attempt, clock = f"{job_id}-a0", FakeClock(NOW)
    job, wanted = api.store.get_job(job_id), attempt if is_one_wanted else None
    follower = LogFollower(api.store, api.settings, job, wanted, None, LogFilter(), clock)
    assert follower.poll() == StreamBatch([])
    clock.now += LATE_LINES_S - 1
    api.log(attempt, "rank-0", "late\n")
    assert len(follower.poll().items) == 1
    assert follower.poll().ended is None
    clock.now += 1
    assert follower.poll().ended is JobStatus.SUCCEEDED


# ---- download


def test_all_logs_come_in_one_archive(api: Api, job: str) -> None:
    response = api.http.get(f"/v1/jobs/{job}/logs:download")
    assert response.headers["content-type"] == "application/zip"
    assert f"{job}-logs.zip" in response.headers["content-disposition"]
    with zipfile.ZipFile(io.BytesIO(response.content)) as archive:
        assert archive.testzip() is None
        names = [f"{job}-a0/{source}.log" for source in ("driver", "rank-0", "rank-3")]
        assert archive.namelist() == names
        assert archive.read(names[1]).decode() == RANK_0
    response = api.http.get(f"/v1/jobs/{job}/logs:download", params={"attempt": f"{job}-a0"})
    assert zipfile.ZipFile(io.BytesIO(response.content)).namelist() == names


def test_only_logs_of_the_jobs_attempts_can_be_downloaded(api: Api, job: str) -> None:
    other = api.start()
    response = api.http.get(f"/v1/jobs/{job}/logs:download", params={"attempt": f"{other}-a0"})
    problem_in(response, 422, "invalid_request")
    response = api.http.get(f"/v1/jobs/{api.submit()}/logs:download")
    assert zipfile.ZipFile(io.BytesIO(response.content)).namelist() == []


def test_a_stream_of_many_logs_has_a_cursor_at_the_end_of_each_batch(api: Api, job: str) -> None:
    for rank in range(10, 10 + 2 * _MAX_OFFSETS):
        api.log(f"{job}-a0", f"rank-{rank}", "a line\n")
    _succeed(api, job)
    *lines, _ = api.follow(f"{job}/logs")
    ids = [line.id for line in lines]
    assert len({*ids}) < len(lines) - 30, "one without a cursor has that of the line before"
    for at in (0, len(lines) - 20, len(lines) - 1):
        *rest, _ = api.follow(f"{job}/logs", ids[at])
        assert [line.data for line in rest] == [
            line.data for line in lines[ids.index(ids[at]) + 1 :]
        ]
