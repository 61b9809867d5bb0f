"""The SDK's resize and drain: safe to repeat, typed when refused."""

from __future__ import annotations

import json

import httpx
import pytest

from service.api.schemas import WishOut
from service.client_errors import Conflict, InvalidRequest
from tests.unit.service.api_samples import problem_body
from tests.unit.service.test_client import Script, ok

WISH = {"id": "r-0000c0de", "workers": 4, "drain_hosts": ["127.0.0.3"]}


def test_a_size_and_a_host_are_sent_and_what_is_wanted_comes_back() -> None:
    script = Script(ok(WISH), ok(WISH), ok(WISH))
    client = script.client()
    assert client.resize("ratings", 4) == WishOut(**WISH)
    client.drain("ratings", "127.0.0.3")
    client.drain("ratings", "127.0.0.3", undo=True)
    sent = [(request.url.path, json.loads(request.content)) for request in script.requests]
    assert sent == [
        ("/v1/jobs/ratings/resize", {"workers": 4}),
        ("/v1/jobs/ratings/drain", {"host": "127.0.0.3", "undo": False}),
        ("/v1/jobs/ratings/drain", {"host": "127.0.0.3", "undo": True}),
    ]


def test_a_request_is_repeated_while_the_service_is_in_trouble() -> None:
    trouble = httpx.Response(503, json=problem_body(503, "storage_unavailable", "no space left"))
    script = Script(trouble, ok(WISH))
    assert script.client().resize("ratings", 4).id == "r-0000c0de"
    assert len(script.requests) == 2


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [(409, "job_not_running", Conflict), (422, "invalid_request", InvalidRequest)],
)
def test_a_refusal_is_typed_and_not_repeated(
    status: int, code: str, error: type[Exception]
) -> None:
    fields = [{"path": "workers", "code": "size", "message": "possible: 4, 6"}]
    body = problem_body(status, code, "no", fields=fields)
    script = Script(httpx.Response(status, json=body))
    with pytest.raises(error):
        script.client().resize("ratings", 5)
    assert len(script.requests) == 1
