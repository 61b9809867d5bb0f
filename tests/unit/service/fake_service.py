"""An in-memory service behind httpx's mock transport, for tests of the CLI."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import httpx
from click.testing import Result
from typer.testing import CliRunner

from service.cli import build_app
from service.client import RetryPolicy, ShardloomClient
from tests.unit.service.api_samples import (
    event_body,
    job_body,
    problem_body,
    requested_trace_body,
)
from trainer import code_archive

Look = Callable[[], dict[str, Any]]


class FakeService:
    """One job named `ratings`; each read of it shows the next of `looks`, the last for ever."""

    def __init__(self) -> None:
        self.looks: list[dict[str, Any]] = [job_body()]
        self.events = [event_body(1), event_body(2, kind="checkpoint_committed")]
        self.checkpoints: list[dict[str, Any]] = []
        self.attempts: list[dict[str, Any]] = []
        self.traces: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {"names": [], "series": []}
        self.refusal: dict[str, Any] | None = None
        self.cluster: dict[str, Any] = {}
        self.is_down = False
        self.log_pieces = [["step 50 [loss 0.41]"]]
        self.submitted: list[dict[str, Any]] = []
        self.uploads: list[bytes] = []
        self.requests: list[httpx.Request] = []

    def client(self, url: str | None = None, _retry: RetryPolicy | None = None) -> ShardloomClient:
        """A client of this service, without pauses."""
        return ShardloomClient(
            url or "http://fake:1",
            transport=httpx.MockTransport(self.answer),
            retry=RetryPolicy(num_retries=0),
            sleep=lambda _: None,
        )

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        self.requests.append(request)
        if self.is_down:
            raise httpx.ConnectError("Connection refused")
        if self.refusal is not None:
            return httpx.Response(self.refusal["status"], json=self.refusal)
        if request.url.path == "/v1/cluster":
            return httpx.Response(200, json=self.cluster)
        if request.url.path == "/v1/code":
            self.uploads.append(request.content)
            kept = asdict(code_archive.check(request.content))
            return httpx.Response(201, json=kept)
        path = request.url.path.removeprefix("/v1/jobs")
        if path in ("", "/"):
            return self._jobs(request)
        job, _, part = path.removeprefix("/").partition("/")
        if job.partition(":")[0] not in ("ratings", "job-0000000000ab"):
            problem = problem_body(404, "job_not_found", f"no job has the id or name '{job}'")
            return httpx.Response(404, json=problem)
        if part.startswith("traces/"):
            return httpx.Response(200, content=b"\x1f\x8b")
        return httpx.Response(200, json=self._part(part, request))

    def _jobs(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.submitted.append(json.loads(request.content)["spec"])
            return httpx.Response(201, json=self.looks[0])
        return httpx.Response(200, json={"items": [self.looks[0]], "next": None})

    def _part(self, part: str, request: httpx.Request) -> Any:
        if part == "events":
            after = int(request.url.params["after"])
            return {"items": [event for event in self.events if event["id"] > after]}
        if part == "logs":
            number = int(request.url.params.get("after", 0))
            texts = self.log_pieces[number] if number < len(self.log_pieces) else []
            lines = [{"source": "rank-0", "text": text} for text in texts]
            cursor = str(min(number + 1, len(self.log_pieces)))
            return {"attempt_id": "a", "sources": ["rank-0"], "lines": lines, "cursor": cursor}
        if part == "traces" and request.method == "POST":
            return requested_trace_body()
        if part in ("resize", "drain"):
            return {"id": "r-0000c0de", "workers": 4, "drain_hosts": ["127.0.0.3"]}
        parts = {
            "traces": {"items": self.traces},
            "metrics": self.metrics,
            "attempts": {"items": self.attempts},
            "checkpoints": {"items": self.checkpoints},
        }
        if part in parts:
            return parts[part]
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


def shardloom(*arguments: str, stdin: str | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(build_app(), list(arguments), input=stdin)
