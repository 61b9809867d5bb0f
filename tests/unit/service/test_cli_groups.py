"""Groups, lost time and requests for another size in the terminal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.commands import jobs
from tests.unit.service.api_samples import event_body, job_body, membership_body, problem_body
from tests.unit.service.fake_service import FakeService, shardloom


def attempt_body(**changes: Any) -> dict[str, Any]:
    """An attempt that ended because a device ran out of memory."""
    return {
        "id": "job-0000000000ab-a0",
        "index": 0,
        "created_at": 1000.0,
        "submitted_at": 1001.0,
        "started_at": 1002.0,
        "ended_at": 1100.0,
        "end_reason": "device_oom",
        "message": "rank 1: out of memory",
        "num_worker_failures": 1,
        "evidence": {"rank": "1", "exception": "OutOfMemoryError"},
        **changes,
    }


@pytest.fixture
def degraded(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> FakeService:
    """A service whose job lost one of three groups twelve seconds ago."""
    monkeypatch.setattr(jobs.time, "time", lambda: 2000.0)
    metrics = {
        "goodput/share": 0.971,
        "goodput/lost_s/start": 14.0,
        "goodput/lost_s/recovery": 3.2,
        "goodput/lost_s/hang": 0.0,
        "risk/steps_undurable": 48.0,
    }
    service.looks = [
        job_body(
            membership=membership_body(),
            num_current_groups=2,
            num_wanted_groups=3,
            latest_metrics=metrics,
        )
    ]
    return service


def shown(subject: str, *arguments: str) -> str:
    """What `show` says of one subject."""
    (line,) = [
        line
        for line in shardloom("show", "ratings", *arguments).stdout.splitlines()
        if line.startswith(f"{subject} ")
    ]
    return line.removeprefix(subject).strip()


@pytest.mark.parametrize(
    ("subject", "text"),
    [
        ("domain", "replica_group: a lost host takes down its groups; the others train on"),
        (
            "chosen",
            "three copies on three hosts survive the loss of two (105.0 MB more memory a worker, "
            "12 ms a full sync)",
        ),
        ("groups", "2 of 3 train, generation 4, commit 128"),
        ("copies", "2 copies of each shard on 2 hosts; survive needs 3"),
        (
            "recovered",
            "11 s ago, after a pause of 0.31 s, nothing to redo; 1 group lost so far",
        ),
        ("left out", "127.0.0.9 (for 10m 00s)"),
        ("at risk", "48 steps (49.2k rows) since the newest checkpoint"),
        ("goodput", "97.1%; lost: start 2.4%, recovery 0.5%"),
    ],
)
def test_show_tells_of_groups_and_lost_time(degraded: FakeService, subject: str, text: str) -> None:
    assert shown(subject) == text


def test_show_lists_every_group_the_lost_one_included(degraded: FakeService) -> None:
    lines = shardloom("show", "ratings").stdout.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("Group"))
    assert [line.split() for line in lines[start + 1 : start + 4]] == [
        ["0", "trains", "0", "127.0.0.2"],
        ["1", "gone", "12", "s", "ago", "(host", "lost)", "0", "127.0.0.3"],
        ["2", "trains", "0", "127.0.0.4"],
    ]


def test_show_says_what_survive_still_allows(degraded: FakeService) -> None:
    whole = membership_body(copies_alive=3, host_copies_alive=3)
    degraded.looks = [job_body(membership=whole)]
    assert shown("copies") == "3 copies of each shard on 3 hosts; the loss of 2 more is survived"


def test_show_tells_what_is_wanted_of_the_workers(degraded: FakeService) -> None:
    data = {"id": "r-1", "workers": 4, "drain_hosts": ["127.0.0.3"]}
    degraded.events = [event_body(1, kind="drain_requested", data=data)]
    assert shown("wanted") == "4 workers, without 127.0.0.3"


def test_a_job_that_told_no_groups_is_shown_without_them(service: FakeService) -> None:
    output = shardloom("show", "ratings").stdout
    for word in ("generation", "copies", "goodput", "at risk"):
        assert word not in output


def test_an_ended_job_shows_its_recoveries_and_no_groups(degraded: FakeService) -> None:
    degraded.looks = [job_body(status="SUCCEEDED", membership=membership_body())]
    output = shardloom("show", "ratings").stdout
    assert "after a pause of 0.31 s" in output
    assert "of 3 train" not in output
    assert "Standing" not in output


def test_show_ends_with_the_evidence_and_what_to_change(service: FakeService) -> None:
    service.looks = [job_body(status="FAILED", reason="retries_exhausted")]
    service.attempts = [attempt_body()]
    output = shardloom("show", "ratings").stdout
    lines = [line.split() for line in output.splitlines()]
    assert ["rank", "1"] in lines
    assert ["exception", "OutOfMemoryError"] in lines
    assert "Lower data.batch_size" in output


def test_ps_marks_a_job_with_fewer_groups_than_it_should_have(degraded: FakeService) -> None:
    assert "RUNNING 2 of 3 groups" in shardloom("ps").stdout
    degraded.looks = [job_body(num_current_groups=3, num_wanted_groups=3)]
    assert "groups" not in shardloom("ps").stdout


def test_resize_asks_for_a_number_of_workers(service: FakeService) -> None:
    result = shardloom("resize", "ratings", "4")
    assert (result.exit_code, result.stdout) == (0, "asked for 4 workers without 127.0.0.3\n")
    (request,) = service.requests
    assert request.url.path == "/v1/jobs/ratings/resize"
    assert json.loads(request.content) == {"workers": 4}


@pytest.mark.parametrize(("options", "undo"), [((), False), (("--undo",), True)])
def test_drain_asks_to_leave_a_host_or_takes_it_back(
    service: FakeService, options: tuple[str, ...], undo: bool
) -> None:
    assert shardloom("drain", "ratings", "127.0.0.3", *options).exit_code == 0
    (request,) = service.requests
    assert request.url.path == "/v1/jobs/ratings/drain"
    assert json.loads(request.content) == {"host": "127.0.0.3", "undo": undo}


def test_a_wish_can_be_printed_for_programs(service: FakeService) -> None:
    answer = json.loads(shardloom("resize", "ratings", "4", "--json").stdout)
    assert answer == {"id": "r-0000c0de", "workers": 4, "drain_hosts": ["127.0.0.3"]}


def test_a_size_that_does_not_fit_is_a_refusal_with_the_reason(service: FakeService) -> None:
    fields = [{"path": "workers", "code": "size", "message": "possible: 4, 6, 8"}]
    service.refusal = problem_body(422, "invalid_request", "5 do not fit", fields=fields)
    result = shardloom("resize", "ratings", "5")
    assert result.exit_code == 2
    assert "possible: 4, 6, 8" in result.stderr


def test_a_number_of_workers_is_checked_before_anything_is_sent(service: FakeService) -> None:
    assert shardloom("resize", "ratings", "0").exit_code == 2
    assert service.requests == []
