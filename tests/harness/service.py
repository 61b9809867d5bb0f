"""The control plane in a test's hands: without HTTP, behind its API, and with credentials.

Real store, scripted backend; the reconciler runs only when a test says so. For tests of the
client and of the commands there are also bodies as the service sends them, and a service that
answers with them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from anyio.to_thread import current_default_thread_limiter
from fastapi.testclient import TestClient
from httpx_sse import EventSource, ServerSentEvent
from starlette.types import Message, Receive
from typer import testing

from service.api.views import detail_of
from service.app import create_app
from service.auth.security import Security
from service.backends.fake import FakeBackend, Record, Script
from service.cli.main import build_app
from service.client.client import ShardloomClient
from service.client.transport import RetryPolicy
from service.db.jobs import JobStore
from service.domain.auth import ApiKey, Role, hash_of, new_key_text
from service.domain.models import EndReason, Job, JobStatus, Progress, QueueState
from service.jobs.run_storage import run_dir_of
from service.observability.metrics import ServiceMetrics
from service.reconciler.loop import Reconciler, _rests
from service.settings import Settings
from tests.harness.builders import (
    NOW,
    TINY_DATA,
    attempt_ended,
    attempt_of,
    batch,
    checkpoint,
    queued_job,
    spec_document,
    workers_started,
)
from tests.harness.databases import store_job
from tests.harness.wait import scaled
from trainer.export.artifact import write_manifest
from trainer.export.requests import ExportFolder, list_exports
from trainer.protocol import code_archive
from trainer.protocol.events import Event, EventBatch
from trainer.protocol.run_dir import AttemptDir

# Without `auth=required` the service answers for no other host.
LOOPBACK_URL = "http://127.0.0.1:8700"
HOST = "https://shardloom.example"


def run_once(reconciler: Reconciler) -> None:
    """Schedule, and reconcile every live job once in this thread."""
    queue, store = reconciler._queue, reconciler._store
    queue.admit()
    if queue._written is not None:
        queue._written.result()
    for job in store.list_live_jobs():
        if not _rests(job):
            reconciler.reconcile(job.id)
    for job_id, index in store.attempts_to_collect(reconciler._clock()):
        reconciler._settle(job_id, index)


@dataclass
class House:
    """A control plane without HTTP; `now` is its clock."""

    store: JobStore
    backend: FakeBackend
    settings: Settings
    now: float = NOW
    # Of the reconciler that polled last.
    placed: Callable[[Job], Job] = lambda job: job

    def reconciler(
        self, backend_class: Callable[[Path], FakeBackend] | None = None, **changes: Any
    ) -> Reconciler:
        """A reconciler as a service just started with these changes of settings would have it."""
        backend = backend_class(Path(self.backend.address)) if backend_class else self.backend
        settings = self.settings.model_copy(update=changes)
        return Reconciler(self.store, backend, settings, ServiceMetrics(), lambda: self.now)

    def poll(self, num_times: int = 1, *, every_s: float = 1.0) -> None:
        """Let a fresh reconciler reconcile every job."""
        reconciler = self.reconciler()
        for _ in range(num_times):
            run_once(reconciler)
            self.now += every_s
        reconciler.close()
        self.placed = reconciler.placed

    def place_of(self, job: Job) -> QueueState:
        """Where a job stands in the queue, or what it was started with."""
        return self.placed(self.store.get_job(job.id)).queue_note

    def submit(self, *observations: str, max_failures: int = 3) -> Job:
        """A queued job whose attempts follow a script."""
        job = queued_job(max_failures=max_failures)
        store_job(self.store, job)
        if observations:
            self.backend.play(job.id, Script(observations))
        return job

    def status(self, job: Job) -> JobStatus:
        return self.store.get_job(job.id).status

    def record(self, job: Job, index: int = 0) -> Record:
        """What the cluster knows of an attempt."""
        found = self.backend.record(f"{job.id}-a{index}")
        assert found is not None
        return found

    def files(self, job: Job, index: int = 0) -> AttemptDir:
        """Files of an attempt on run storage."""
        return run_dir_of(self.settings, job.id).attempt(f"{job.id}-a{index}")

    def leave(self, job: Job, *events: Event, stream: str = "driver") -> Path:
        """Records in the outbox of the first attempt, as its driver would leave them."""
        path = self.files(job).stream_path(stream)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(event.model_dump_json() + "\n" for event in events))
        return path


@dataclass
class _Served:
    """An app behind a client, whose reconciler runs only when a test says so."""

    http: TestClient
    store: JobStore
    backend: FakeBackend
    settings: Settings

    def poll(self, num_times: int = 1) -> None:
        """Let a fresh reconciler reconcile every job, now."""
        # The app's own reconciler does not run: positions in the queue come from this one.
        context = self.http.app.state.context  # type: ignore[attr-defined]
        reconciler = Reconciler(self.store, self.backend, self.settings, context.telemetry)
        for _ in range(num_times):
            run_once(reconciler)
        reconciler.close()
        object.__setattr__(context, "reconciler", reconciler)

    def post_raw(self, path: str, receive: Receive, **headers: str) -> list[int]:
        """Statuses of the answer to a POST that a server reads off the wire by `receive`."""
        statuses: list[int] = []

        async def send(message: Message) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        sent = {"host": self.http.base_url.host, "content-type": "application/json", **headers}
        raw = [(name.lower().encode(), value.encode()) for name, value in sent.items()]
        scope = {"type": "http", "method": "POST", "scheme": "http", "path": path, "headers": raw}
        asyncio.run(self.http.app({**scope, "query_string": b""}, receive, send))
        return statuses


class Api(_Served):
    """An app that asks nobody who they are."""

    def submit(self, **changes: Any) -> str:
        """Id of a new job."""
        response = self.http.post("/v1/jobs", json={"spec": spec_document(**changes)})
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    def start(self, **changes: Any) -> str:
        """Id of a new job whose first attempt was submitted."""
        job_id = self.submit(**changes)
        self.poll()
        return job_id

    def end(self, job_id: str) -> None:
        """Let a job that was never submitted end."""
        assert self.http.post(f"/v1/jobs/{job_id}:cancel").status_code == 202

    def post_events(self, attempt_id: str, records: EventBatch) -> Any:
        return self.http.post(
            f"/v1/attempts/{attempt_id}/events",
            content=records.model_dump_json(),
            headers={"Content-Type": "application/json"},
        )

    def status_without_a_free_thread(self, method: str, path: str, **request: Any) -> int:
        """Status of the answer while all threads of the API are at work."""

        async def ask() -> int:
            threads = current_default_thread_limiter()
            for _ in range(int(threads.total_tokens)):
                threads.acquire_on_behalf_of_nowait(object())
            transport = httpx.ASGITransport(self.http.app)
            async with httpx.AsyncClient(transport=transport, base_url=LOOPBACK_URL) as http:
                answer = http.request(method, path, **request)
                return (await asyncio.wait_for(answer, scaled(20))).status_code

        return asyncio.run(ask())

    def follow(self, path: str, last_id: str = "", **params: Any) -> list[ServerSentEvent]:
        """Events of a stream of a job until its end, behind `last_id`."""
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": last_id} if last_id else {})
        response = self.http.get(f"/v1/jobs/{path}", params=params, headers=headers)
        return [event for event in EventSource(response).iter_sse() if event.data]

    def files(self, job_id: str, index: int = 0) -> AttemptDir:
        """Files of an attempt on run storage."""
        return run_dir_of(self.settings, job_id).attempt(f"{job_id}-a{index}")

    def log(self, attempt_id: str, source: str, text: str) -> None:
        """Append to a log file as a process of the attempt would."""
        job_id = attempt_id.rpartition("-a")[0]
        path = run_dir_of(self.settings, job_id).attempt(attempt_id).log_path(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(text)


def problem_in(response: Any, status: int, code: str) -> dict[str, Any]:
    """The problem document of a response, which must have this status and code."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert (problem["status"], problem["code"]) == (status, code)
    assert problem["title"]
    assert problem["detail"]
    return problem


def replace_attempt(store: JobStore, job_id: str, **fields: Any) -> None:
    """Lose the first attempt of a job and put a second one in its place, with these fields."""
    lost = {"ended_at": time.time(), "end_reason": EndReason.DRIVER_LOST}
    first = replace(store.get_attempt(f"{job_id}-a0"), **lost)
    job = store.update_job(store.get_job(job_id), attempt=first)
    second = attempt_of(job, index=1, **{"submitted_at": NOW, **fields})
    store.update_job(replace(job, current_attempt_id=second.id), attempt=second)


def running(api: Api, **changes: Any) -> str:
    """Id of a job whose workers train."""
    job_id = api.submit(**changes)
    api.backend.play(job_id, Script(("running",)))
    api.poll()
    api.post_events(f"{job_id}-a0", batch(workers_started()))
    return job_id


def end(api: Api, job_id: str, reason: str = "completed") -> None:
    """The driver of the newest attempt ends."""
    attempt_id = api.store.get_job(job_id).current_attempt_id
    assert attempt_id is not None
    api.post_events(attempt_id, batch(attempt_ended(reason), stream="driver"))
    api.backend.play(attempt_id, Script(("failed",)))
    api.poll()


@dataclass
class Guarded(_Served):
    """An app with `auth=required`; `keys` are texts of keys by their names."""

    keys: dict[str, str] = field(default_factory=dict)

    @property
    def security(self) -> Security:
        found: Security = self.http.app.state.context.security
        return found

    def add_key(self, name: str, roles: dict[str, Role]) -> str:
        """Id of a new key."""
        key_id, text = new_key_text()
        key = ApiKey(key_id, name, roles, time.time(), "test")
        self.security.keys.add_key(key, hash_of(text))
        self.keys[name] = text
        return key_id

    def send(
        self, method: str, path: str, key: str | None = None, **options: Any
    ) -> httpx.Response:
        """Send a request with the key of this name."""
        headers = dict(options.pop("headers", {}))
        if key is not None:
            headers["Authorization"] = f"Bearer {self.keys[key]}"
        return self.http.request(method, path, headers=headers, follow_redirects=False, **options)

    def submit(self, key: str, **changes: Any) -> str:
        """Id of a new job."""
        answer = self.send("POST", "/v1/jobs", key, json={"spec": spec_document(**changes)})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


# Opens apps below a test's folder, or a given one, and closes them at its end: `open_guarded`.
GuardedApps = Callable[..., Guarded]


def guarded(home: Path, **changes: Any) -> Guarded:
    """An app with a key for each role in `default`, and `root` for everything."""
    settings = Settings(
        **{
            "home": home,
            "backend": "fake",
            "dashboard": False,
            "auth": "required",
            "storage_roots": [TINY_DATA],
            "stream_poll_s": 0.01,
            **changes,
        }
    )
    store = JobStore.open(settings.database_url)
    backend = FakeBackend(home / "fake")
    app = create_app(settings, store, backend)
    http = TestClient(app, base_url=HOST, raise_server_exceptions=False)
    house = Guarded(http, store, backend, settings)
    for role in Role:
        house.add_key(role.label, {"default": role})
    house.add_key("root", {"*": Role.ADMIN})
    return house


# ---- exports


def with_checkpoint(api: Api) -> str:
    """Id of a job with a checkpoint of step 10."""
    job_id = api.start()
    api.post_events(f"{job_id}-a0", batch(checkpoint(10)))
    return job_id


def only_export(api: Api, job_id: str) -> ExportFolder:
    """The one export of a job."""
    (folder,) = list_exports(run_dir_of(api.settings, job_id))
    return folder


def write_export(folder: ExportFolder) -> None:
    """Let an export be done."""
    (folder.artifact / "vocabularies").mkdir(parents=True)
    (folder.artifact / "model.pt2").write_bytes(b"\x01" * 70_000)
    (folder.artifact / "vocabularies" / "user.parquet").write_bytes(b"v")
    (folder.artifact / "report.json").write_text('{"num_rows": 3}')
    facts = {"job": "ratings", "checkpoint": "step-10", "step": 10, "quantize": "int8"}
    write_manifest(folder.artifact, **facts, versions={})


# ---- bodies as the service sends them


JOB_ID = "job-0000000000ab"
ATTEMPT_ID = f"{JOB_ID}-a0"


def job_body(**changes: Any) -> dict[str, Any]:
    """A `JobDetail` in the middle of its training."""
    running = replace(
        queued_job(name="ratings"),
        id=JOB_ID,
        status=JobStatus.RUNNING,
        created_at=1000.0,
        started_at=1002.0,
        current_attempt_id=ATTEMPT_ID,
        version=3,
        progress=Progress(step=50, total_steps=200, rows=51200, rows_per_s=2130.0, eta_s=72.0),
        latest_metrics={"train/loss": 0.41, "validation/rmse": 0.934},
    )
    return {
        **detail_of(running, Settings(runs_dir=Path("/runs"))).model_dump(mode="json"),
        **changes,
    }


def event_body(event_id: int, **changes: Any) -> dict[str, Any]:
    """One line of a timeline."""
    return {
        "id": event_id,
        "job_id": JOB_ID,
        "attempt_id": None,
        "time": 1000.0 + event_id,
        "kind": "note",
        "message": f"line {event_id}",
        "actor": "service",
        "data": {},
        **changes,
    }


def requested_trace_body() -> dict[str, Any]:
    """The answer to a request for a trace of ranks 0 and 1."""
    return {
        "id": "t-0000c0de",
        "attempt_id": ATTEMPT_ID,
        "num_steps": 3,
        "ranks": [0, 1],
        "names": ["t-0000c0de-rank0.json.gz", "t-0000c0de-rank1.json.gz"],
    }


def trace_body(rank: int) -> dict[str, Any]:
    """A trace that answers that request."""
    return {
        "name": f"t-0000c0de-rank{rank}.json.gz",
        "attempt_id": ATTEMPT_ID,
        "rank": rank,
        "step": 1203,
        "num_steps": 3,
        "size_bytes": 1_200_000,
        "time": 1000.0,
    }


def problem_body(status: int, code: str, detail: str, **changes: Any) -> dict[str, Any]:
    """An RFC 9457 problem."""
    return {"title": "Problem", "status": status, "detail": detail, "code": code, **changes}


class FakeService:
    """One job named `ratings`; each read of it shows the next of `states`, the last for ever."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = [job_body()]
        self.events = [event_body(1), event_body(2, kind="checkpoint_committed")]
        self.traces: list[dict[str, Any]] = []
        self.refusal: dict[str, Any] | None = None
        self.is_down = False
        self.submitted: list[dict[str, Any]] = []
        self.uploads: list[bytes] = []
        self.requests: list[httpx.Request] = []

    def client(self, url: str | None = None, **_options: Any) -> ShardloomClient:
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
            return httpx.Response(201, json=self.states[0])
        return httpx.Response(200, json={"items": [self.states[0]], "next": None})

    def _part(self, part: str, request: httpx.Request) -> Any:
        if part == "events":
            after = int(request.url.params["after"])
            return {"items": [event for event in self.events if event["id"] > after]}
        if part == "logs":
            lines = [{"source": "rank-0", "text": "step 50 [loss 0.41]"}]
            is_more = "after" not in request.url.params
            page = {"attempt_id": "a", "sources": ["rank-0"], "cursor": "1"}
            return {**page, "lines": lines if is_more else []}
        if part == "traces" and request.method == "POST":
            return requested_trace_body()
        if part in ("traces", "attempts", "checkpoints"):
            return {"items": self.traces if part == "traces" else []}
        if part == "metrics":
            return {"names": [], "series": []}
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


# Typer makes all commands anew at each call, which takes 0.08 s.
testing._get_command = cache(testing._get_command)
_app = cache(build_app)


def shardloom(*arguments: str, stdin: str | None = None) -> testing.Result:
    """Run a command in this process."""
    return testing.CliRunner().invoke(_app(), list(arguments), input=stdin)
