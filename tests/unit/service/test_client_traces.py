"""The SDK's traces: asked for once, waited for, saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.schemas import TraceOut, TraceRequested
from service.client_errors import Conflict, InvalidRequest, NotFound, ServerFault, TraceLost
from tests.unit.service.api_samples import (
    job_body,
    problem_body,
    requested_trace_body,
    trace_body,
)
from tests.unit.service.test_client import Script, ok

REQUESTED = TraceRequested(**requested_trace_body())


def test_a_trace_is_asked_for_once_even_where_the_service_is_in_trouble() -> None:
    body = problem_body(503, "storage_unavailable", "no space left")
    script = Script(httpx.Response(503, json=body))
    with pytest.raises(ServerFault):
        script.client().request_trace("ratings", num_steps=2, ranks=[1])
    (request,) = script.requests
    assert (request.method, request.url.path) == ("POST", "/v1/jobs/ratings/traces")
    assert json.loads(request.content) == {"num_steps": 2, "ranks": [1]}


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [(409, "trace_pending", Conflict), (422, "invalid_request", InvalidRequest)],
)
def test_a_refused_request_is_typed(status: int, code: str, error: type[Exception]) -> None:
    script = Script(httpx.Response(status, json=problem_body(status, code, "no")))
    with pytest.raises(error):
        script.client().request_trace("ratings")


def test_waiting_ends_when_every_rank_is_written() -> None:
    one, both = [trace_body(0)], [trace_body(1), trace_body(0)]
    script = Script(
        *(ok(body) for body in (job_body(), {"items": one}, job_body(), {"items": both}))
    )
    found = script.client().wait_for_traces("ratings", REQUESTED)
    assert [trace.rank for trace in found] == [0, 1]
    assert script.naps_s == [0.5]


def test_a_trace_that_is_written_as_the_job_ends_still_counts() -> None:
    both = {"items": [trace_body(0), trace_body(1)]}
    script = Script(ok(job_body(status="SUCCEEDED")), ok(both))
    assert len(script.client().wait_for_traces("ratings", REQUESTED)) == 2


@pytest.mark.parametrize(
    "change", [{"status": "FAILED"}, {"current_attempt_id": "job-0000000000ab-2"}]
)
def test_waiting_gives_up_when_the_workers_asked_are_gone(change: dict[str, Any]) -> None:
    script = Script(ok(job_body(**change)), ok({"items": [trace_body(0)]}))
    with pytest.raises(TraceLost, match="t-0000c0de did not come"):
        script.client().wait_for_traces("ratings", REQUESTED)


def test_waiting_has_an_end() -> None:
    answers = [ok(job_body()), ok({"items": []})] * 3
    with pytest.raises(TraceLost, match="within 1 s"):
        Script(*answers).client().wait_for_traces("ratings", REQUESTED, timeout_s=1.0)


def test_a_download_lands_in_the_folder_under_its_name(tmp_path: Path) -> None:
    script = Script(httpx.Response(200, content=b"\x1f\x8b"))
    trace = TraceOut(**trace_body(0))
    path = script.client().download_trace("ratings", trace, tmp_path / "new" / "folder")
    assert (path.name, path.read_bytes()) == (trace.name, b"\x1f\x8b")
    assert script.requests[0].url.params["attempt"] == trace.attempt_id


def test_a_trace_that_is_gone_leaves_no_file(tmp_path: Path) -> None:
    script = Script(httpx.Response(404, json=problem_body(404, "trace_not_found", "gone")))
    with pytest.raises(NotFound):
        script.client().download_trace("ratings", TraceOut(**trace_body(0)), tmp_path)
    assert list(tmp_path.iterdir()) == []
