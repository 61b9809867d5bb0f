"""Calls of the SDK about the course of a job, the queue and the quotas of projects."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from service.api.lifecycle_schemas import CloneJob, DeletedJob, RestartJob
from service.api.queue_schemas import ProjectOut, QueueOut, Quotas
from service.api.schemas import JobDetail, Page
from service.client_http import Connection, if_version


class LifecycleCalls(Connection):
    """Pause, resume, clone, restart, delete; the queue; projects.

    With a `version` (of a job that was read) a change raises `Conflict` if the job is at another
    one by now. What is safe to repeat is retried: pauses and resumes are not, as somebody may have
    asked for the opposite in between.
    """

    def pause(self, job: str, *, version: int | None = None) -> JobDetail:
        """Ask a job to save, release its workers and keep its place; `Conflict` if it has ended."""
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
        body = RestartJob.model_construct(step=step, path=path).model_dump()
        return self._verb(job, "restart", body, version=version)

    def clone(
        self,
        job: str,
        *,
        name: str | None = None,
        set: Mapping[str, Any] | None = None,
        patch: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> JobDetail:
        """Submit the spec of a job again, with changes; raises `InvalidRequest` for bad ones.

        `set` has values by dotted path, `patch` is a JSON merge patch. Secrets of the job do not
        come along. Sent again if unanswered, always with the same Idempotency-Key.
        """
        headers = {"Idempotency-Key": idempotency_key or str(uuid.uuid4())}
        document = CloneJob.model_construct(name=name, set=dict(set or {}), patch=patch)
        body = {**document.model_dump(exclude={"secrets"}), "secrets": dict(secrets or {})}
        response = self._with_retries(
            lambda: self._http.post(f"{_path(job)}:clone", json=body, headers=headers)
        )
        return self._parse(response, JobDetail)

    def delete(self, job: str, *, artifacts: bool = True, version: int | None = None) -> DeletedJob:
        """Delete a job that has ended, with its files unless `artifacts` is False; what is left.

        Raises `Conflict` while it lives.
        """
        params = {"artifacts": "true" if artifacts else "false"}
        headers = if_version(version)
        response = self._once(lambda: self._http.delete(_path(job), params=params, headers=headers))
        return self._parse(response, DeletedJob)

    def _verb(
        self,
        job: str,
        verb: str,
        body: dict[str, Any] | None = None,
        *,
        version: int | None = None,
    ) -> JobDetail:
        headers = if_version(version)
        response = self._once(
            lambda: self._http.post(f"{_path(job)}:{verb}", json=body, headers=headers)
        )
        return self._parse(response, JobDetail)

    # ---- the queue and projects

    def queue(self) -> QueueOut:
        """Who waits for what, in the order of their turn, and who holds the workers."""
        return self._get("/v1/queue", QueueOut)

    def projects(self) -> list[ProjectOut]:
        """Projects that have quotas or live jobs, by name."""
        return self._get("/v1/projects", Page[ProjectOut]).items

    def project(self, name: str) -> ProjectOut:
        """Quotas and use of a project; raises `NotFound`."""
        return self._get(_project_path(name), ProjectOut)

    def set_quotas(
        self, name: str, *, max_workers: int | None = None, max_running_jobs: int | None = None
    ) -> ProjectOut:
        """Set both quotas of a project; None is no limit."""
        quotas = Quotas.model_construct(max_workers=max_workers, max_running_jobs=max_running_jobs)
        body = quotas.model_dump()
        response = self._with_retries(lambda: self._http.put(_project_path(name), json=body))
        return self._parse(response, ProjectOut)

    def remove_quotas(self, name: str) -> None:
        """Take the quotas of a project away; raises `NotFound` if it has none."""
        self._once(lambda: self._http.delete(_project_path(name)))


def _path(job: str) -> str:
    return f"/v1/jobs/{quote(job, safe='')}"


def _project_path(name: str) -> str:
    return f"/v1/projects/{quote(name, safe='')}"
