"""The Python SDK: a typed, synchronous client of the REST API.

    with ShardloomClient("http://127.0.0.1:8700") as client:
        job = client.submit(yaml.safe_load(open("job.yaml")))
        job = client.wait(job.id)

Which calls are sent again, and how jobs are named: docs/reference/sdk.md. Errors: see
`service.client.errors`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from pydantic import ValidationError

from service.client.errors import ShardloomError, TraceLost
from service.client.resources import AccessCalls, ExportCalls, LogCalls, SweepCalls, WebhookCalls
from service.client.transport import (
    PATIENCE_S,
    REQUEST_TIMEOUT_S,
    Params,
    items_of_pages,
    job_path,
    path_of,
    refusal,
)
from service.domain.job_filter import JobFilter
from service.domain.models import Checkpoint, TimelineEvent
from service.domain.timeline import Trace
from service.schemas.admin import ClusterOut, ProjectOut
from service.schemas.common import Page
from service.schemas.jobs import (
    AttemptOut,
    DeletedJob,
    JobDetail,
    JobPlan,
    JobSummary,
    MetricsOut,
    QueueOut,
    ResizeRequestOut,
    TraceRequested,
)
from service.schemas.plans import PlansOut
from trainer.protocol.code_archive import CodeSummary, pack
from trainer.spec import load_spec
from trainer.spec.base import problems_of
from trainer.spec.job import JobSpec
from trainer.spec.parse import set_values

# A path is that of a YAML file.
Spec = JobSpec | Mapping[str, Any] | os.PathLike[str] | str
Code = os.PathLike[str] | str | bytes

TRACE_TIMEOUT_S = 600.0
PLAN_LIMIT_S = 60.0
# More than the 300 s that the service gives a deletion.
_DELETION_S = 330.0
# Proxies take URLs of 8 KiB.
_NAMES_AT_A_TIME = 50


class ShardloomClient(AccessCalls, ExportCalls, LogCalls, SweepCalls, WebhookCalls):
    """A connection to one service; close it, or use it as a context manager.

    With a `version` (of a job that was read) a change raises `Conflict` if the job is at another
    one by now.
    """

    # ---- jobs

    def submit(
        self,
        spec: Spec,
        *,
        code: Code | None = None,
        idempotency_key: str | None = None,
        secrets: Mapping[str, str] | None = None,
        force: bool = False,
    ) -> JobDetail:
        """Create a job from a spec; raises `InvalidRequest` with the faulty fields.

        `code` is the folder with the code of `model.module`, which travels with the job.
        `secrets` are environment variables for its processes, kept encrypted, never shown. With
        the same `idempotency_key` the same spec makes one job, however often it is sent. `force`
        takes one whose tables do not fit the memory of the cluster's workers.
        """
        body = {"spec": self.with_code(spec, code), "secrets": dict(secrets or {})}
        return self._create("/v1/jobs", JobDetail, body, idempotency_key, force=force)

    def with_code(self, spec: Spec, code: Code | None) -> dict[str, Any]:
        """The spec with the id of its code, which the service has then: a folder, or its archive.

        Raises `CodeError` for a folder that cannot be packed.
        """
        document = _document(spec)
        if code is None:
            return document
        archive = code if isinstance(code, bytes) else pack(Path(code))
        named: dict[str, Any] = set_values(document, {"model.code": self.upload_code(archive).id})
        return named

    def upload_code(self, archive: bytes) -> CodeSummary:
        """Keep a code archive (`trainer.protocol.code_archive.pack`), whose id a spec may name.

        Raises `InvalidRequest` for one that cannot be unpacked safely.
        """
        headers = {"Content-Type": "application/zip"}
        options = {"content": archive, "headers": headers, "is_change": False}
        return self._request("POST", "/v1/code", CodeSummary, repeatable=True, **options)

    def plan(self, spec: Spec) -> JobPlan:
        """Check a spec without creating a job, and say which groups it would form."""
        body = {"spec": _document(spec)}
        options = {"json": body, "params": {"dry_run": "true"}, "is_change": False}
        return self._request("POST", "/v1/jobs", JobPlan, **options)

    def plans(
        self,
        spec: Spec,
        *,
        cluster: str | None = None,
        time_limit_s: float = PLAN_LIMIT_S,
    ) -> PlansOut:
        """Layouts of a job side by side on a cluster: the service's own, or a profile such as
        `8xH100-80GB x 128, hbm_bytes=60e9`."""
        body = {"spec": _document(spec), "cluster": cluster, "time_limit_s": time_limit_s}
        patience = httpx.Timeout(REQUEST_TIMEOUT_S, read=time_limit_s + REQUEST_TIMEOUT_S)
        options = {"json": body, "timeout": patience, "is_change": False}
        return self._request("POST", "/v1/plans", PlansOut, **options)

    def list_jobs(self, *, limit: int = 50, **filters: Any) -> Page[JobSummary]:
        """One page of jobs, newest first, by `filters` as in `JobFilter`.

        `next` of a page is the `after` of the following one. Raises `InvalidRequest`.
        """
        try:
            params = JobFilter(**filters).params
        except ValidationError as error:
            raise refusal(
                "the filters of a list of jobs", problems_of(error.errors(), JobFilter)
            ) from None
        return self._get("/v1/jobs", Page[JobSummary], {"limit": limit, **params})

    def iter_jobs(self, **filters: Any) -> Iterator[JobSummary]:
        """Every job, newest first, by `filters` as in `JobFilter`; fetched page by page."""
        first = filters.pop("after", None)
        return items_of_pages(lambda after: self.list_jobs(after=after or first, **filters))

    def get_job(self, job: str) -> JobDetail:
        """Read a job; raises `NotFound`."""
        return self._get(job_path(job), JobDetail)

    def wait(
        self,
        job: str,
        *,
        timeout_s: float | None = None,
        poll_s: float = 1.0,
        patience_s: float = PATIENCE_S,
    ) -> JobDetail:
        """Block until the job has ended and return it; raises `TimeoutError` after `timeout_s`.

        A service that does not answer is asked again for `patience_s` (never beyond `timeout_s`).
        It is the job that has the name when this is called, whatever gets the name meanwhile.
        """
        for found in self._polled(job_path(job), JobDetail, timeout_s, poll_s, patience_s):
            if found.status.is_terminal:
                return found
        raise TimeoutError(f"job {found.id} is {found.status} after {timeout_s} s")

    # ---- lifecycle

    def cancel(self, job: str, *, version: int | None = None) -> JobDetail:
        """Ask a job to stop; raises `Conflict` if it has ended."""
        return self._verb(job, "cancel", version=version)

    def pause(self, job: str, *, version: int | None = None) -> JobDetail:
        """Ask a job to save, release its workers and keep its place; `Conflict` if it has ended.

        As `resume`, it is sent once: another user may have asked for the opposite in between.
        """
        return self._verb(job, "pause", version=version)

    def resume(self, job: str, *, version: int | None = None) -> JobDetail:
        """Let a paused job wait for its workers again; raises `Conflict` if it is not paused."""
        return self._verb(job, "resume", version=version)

    def restart(
        self,
        job: str,
        *,
        step: int | None = None,
        path: str | None = None,
        version: int | None = None,
    ) -> JobDetail:
        """Let a job go on from one of its checkpoints, by default the newest.

        Raises `Conflict` while it has workers, `NotFound` for a checkpoint that it does not have.
        """
        return self._verb(job, "restart", {"step": step, "path": path}, version=version)

    def clone(
        self,
        job: str,
        *,
        name: str | None = None,
        set: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        force: bool = False,
    ) -> JobDetail:
        """Submit the spec of a job again, with changes; raises `InvalidRequest` for bad ones.

        `set` has values by dotted path. Secrets of the job do not come along. `idempotency_key` and
        `force` are as in `submit`.
        """
        body = {
            "name": name,
            "set": dict(set or {}),
            "secrets": dict(secrets or {}),
        }
        path = f"{job_path(job)}:clone"
        return self._create(path, JobDetail, body, idempotency_key, force=force)

    def delete(self, job: str, *, artifacts: bool = True, version: int | None = None) -> DeletedJob:
        """Delete a job that has ended, with its files unless `artifacts` is False; what is left.

        Raises `Conflict` while it lives.
        """
        patience = httpx.Timeout(REQUEST_TIMEOUT_S, read=_DELETION_S)
        options = {"headers": _if_match(version), "timeout": patience, "is_change": True}
        params = {"artifacts": artifacts}
        return self._request("DELETE", job_path(job), DeletedJob, params=params, **options)

    def resize(self, job: str, num_workers: int) -> ResizeRequestOut:
        """Ask a running job for another number of workers.

        Raises `InvalidRequest` for a size that it cannot train with, `Conflict` if it does not run.
        """
        return self._resize(job, "resize", {"workers": num_workers})

    def drain(self, job: str, host: str, *, undo: bool = False) -> ResizeRequestOut:
        """Ask a running job to leave a host, or with `undo` to use it again.

        Raises `InvalidRequest` for a host without its workers, `Conflict` if it does not run.
        """
        return self._resize(job, "drain", {"host": host, "undo": undo})

    def _resize(self, job: str, part: str, body: dict[str, Any]) -> ResizeRequestOut:
        # Asking twice for the same changes nothing.
        return self._request(
            "POST", job_path(job, part), ResizeRequestOut, repeatable=True, json=body
        )

    def _verb(
        self, job: str, verb: str, body: dict[str, Any] | None = None, *, version: int | None = None
    ) -> JobDetail:
        path = f"{job_path(job)}:{verb}"
        return self._request("POST", path, JobDetail, json=body, headers=_if_match(version))

    # ---- what a job left behind

    def attempts(self, job: str) -> list[AttemptOut]:
        """Attempts of a job, oldest first."""
        return self._get(job_path(job, "attempts"), Page[AttemptOut]).items

    def checkpoints(self, job: str) -> list[Checkpoint]:
        """Committed checkpoints that still exist, in step order."""
        return self._get(job_path(job, "checkpoints"), Page[Checkpoint]).items

    def metrics(
        self,
        job: str,
        *,
        names: Sequence[str] = (),
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int | None = None,
    ) -> MetricsOut:
        """Series of the metrics asked for, by default all, of at most `max_points` points (500).

        One that the job does not have, or not yet, is empty: `names` of the answer are all it has.
        """

        def ask(some: Sequence[str]) -> MetricsOut:
            steps: Params = {"from_step": from_step, "to_step": to_step, "max_points": max_points}
            return self._get(job_path(job, "metrics"), MetricsOut, {"name": list(some), **steps})

        answer = ask(names)
        # Without names the service answers the first ones only.
        rest = [] if names else answer.names[len(answer.series) :]
        for start in range(0, len(rest), _NAMES_AT_A_TIME):
            answer.series.extend(ask(rest[start : start + _NAMES_AT_A_TIME]).series)
        return answer

    def events(
        self, job: str, *, after: int = 0, limit: int = 200, kinds: Sequence[str] = ()
    ) -> list[TimelineEvent]:
        """Timeline lines with an id above `after`, in order, at most `limit`; `kinds` filters."""
        params: Params = {"after": after, "limit": limit, "kind": list(kinds)}
        return self._get(job_path(job, "events"), Page[TimelineEvent], params).items

    def iter_events(
        self, job: str, *, after: int = 0, kinds: Sequence[str] = ()
    ) -> Iterator[TimelineEvent]:
        """Every timeline line so far with an id above `after`, fetched page by page."""
        while page := self.events(job, after=after, kinds=kinds):
            yield from page
            after = page[-1].id

    def follow_events(
        self, job: str, *, after: int = 0, patience_s: float = PATIENCE_S
    ) -> Iterator[TimelineEvent]:
        """Timeline lines as they happen, until the job has ended; survives broken connections.

        A service that does not answer is asked again for `patience_s`.
        """
        path = job_path(self._id_of(job, patience_s), "events")
        yield from self._stream(path, TimelineEvent, {"after": after}, patience_s)

    # ---- traces

    def request_trace(
        self, job: str, *, num_steps: int = 3, ranks: Sequence[int] = (0,)
    ) -> TraceRequested:
        """Ask a running job to record its next steps.

        Raises `Conflict` if the job does not run or an earlier trace is still being recorded.
        """
        body = {"num_steps": num_steps, "ranks": list(ranks)}
        return self._request("POST", job_path(job, "traces"), TraceRequested, json=body)

    def traces(self, job: str) -> list[Trace]:
        """Traces that the job's workers wrote, in the order of writing."""
        return self._get(job_path(job, "traces"), Page[Trace]).items

    def wait_for_traces(
        self,
        job: str,
        requested: TraceRequested,
        *,
        timeout_s: float = TRACE_TIMEOUT_S,
        poll_s: float = 0.5,
    ) -> list[Trace]:
        """Block until everything that a request asked for is written; raises `TraceLost`."""
        deadline = self._clock() + timeout_s
        for found in self._polled(job_path(job), JobDetail, timeout_s, poll_s):
            # After the job, so that what was written before it ended is found.
            path = job_path(found.id, "traces")
            page = self._get(path, Page[Trace], patience_s=PATIENCE_S, deadline=deadline)
            written = {t.name: t for t in page.items if t.attempt_id == requested.attempt_id}
            if written.keys() >= set(requested.names):
                return [written[name] for name in requested.names]
            if found.status.is_terminal or found.current_attempt_id != requested.attempt_id:
                raise TraceLost(requested.id, f"the workers it was asked of ended ({found.status})")
        raise TraceLost(requested.id, f"it was not written within {timeout_s:g} s")

    def download_trace(self, job: str, trace: Trace, folder: Path) -> Path:
        """Save a trace in a folder, which is made if missing; returns the file's path.

        Raises `NotFound` if it is gone, and OSError if it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path, params = job_path(job, "traces", trace.name), {"attempt": trace.attempt_id}
        return self._download(path, params, folder / Path(trace.name).name)

    # ---- the queue and projects

    def queue(self) -> QueueOut:
        """Who waits for what, in the order of their turn, and who holds the workers."""
        return self._get("/v1/queue", QueueOut)

    def projects(self) -> list[ProjectOut]:
        """Projects that have quotas or live jobs, by name."""
        return self._get("/v1/projects", Page[ProjectOut]).items

    def project(self, name: str) -> ProjectOut:
        """Quotas and use of a project; raises `NotFound`."""
        return self._get(path_of("projects", name), ProjectOut)

    def set_quotas(
        self, name: str, *, max_workers: int | None = None, max_running_jobs: int | None = None
    ) -> ProjectOut:
        """Set both quotas of a project; None is no limit."""
        body = {"max_workers": max_workers, "max_running_jobs": max_running_jobs}
        return self._request(
            "PUT", path_of("projects", name), ProjectOut, repeatable=True, json=body
        )

    def remove_quotas(self, name: str) -> None:
        """Take the quotas of a project away; raises `NotFound` if it has none."""
        self._send("DELETE", path_of("projects", name))

    # ---- the service itself

    def cluster(self) -> ClusterOut:
        """What the service knows of the cluster behind it."""
        return self._get("/v1/cluster", ClusterOut)

    def is_alive(self) -> bool:
        """Whether a service answers right now; one attempt, never raises."""
        return self.why_not_alive() is None

    def why_not_alive(self) -> ShardloomError | None:
        """What a request right now comes to where no service answers; one attempt."""
        try:
            self._send("GET", "/healthz", timeout=2.0)
        except ShardloomError as error:
            return error
        return None


def _document(spec: Spec) -> dict[str, Any]:
    """The spec as it is sent; raises `SpecError` for a file that holds no valid one."""
    if isinstance(spec, os.PathLike | str):
        found = load_spec(Path(spec).read_text()).model_dump(mode="json")
        return dict(absolute_data_path(found))
    return spec.model_dump(mode="json") if isinstance(spec, JobSpec) else dict(spec)


def absolute_data_path(document: Any) -> Any:
    """The document, or values by dotted path, with a relative `data.path` made absolute.

    The service and its workers run in folders of their own.
    """
    if not isinstance(document, dict):
        return document
    data, changes = document.get("data"), {}
    if "data.path" in document:
        changes["data.path"] = _absolute(document["data.path"])
    if isinstance(data, dict) and "path" in data:
        changes["data"] = {**data, "path": _absolute(data["path"])}
    return document | changes


def _absolute(path: Any) -> Any:
    """URLs, and what is no path, stay as they are."""
    if not isinstance(path, str) or not path or "://" in path:
        return path
    # Unlike that of pathlib it leaves a user that is not known.
    return os.path.normpath(Path.cwd() / os.path.expanduser(path))  # noqa: PTH111


def _if_match(version: int | None) -> dict[str, str]:
    return {} if version is None else {"If-Match": f'"{version}"'}
