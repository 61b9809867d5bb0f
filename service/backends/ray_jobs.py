"""Runs attempts as Ray jobs over Ray's Jobs REST API (plain HTTP: Ray itself is not imported).

Ray answers a repeated `submission_id` with an error that says so, which makes submitting
idempotent. Whatever is not a clear answer of a Ray cluster (no connection, a time-out, a 5xx, a
401, somebody else's 404) counts as unreachable: nothing is concluded from it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from service.backends.base import Backend, Submission
from service.domain.models import EndReason, Observation, ObservedState
from service.errors import BackendUnreachable, SubmissionRefused
from trainer.failures import without_statistics
from trainer.layout.hosts import HostFacts, hosts_by_address

_STATUSES = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED")
# By Ray's `error_type`, what its message says where the driver went with its host
# (ray/dashboard/modules/job/job_manager.py); what ends a driver alone has other words.
_LOST_HOST_SIGNS = {
    "JOB_SUPERVISOR_ACTOR_DIED": "its node has died",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE": "failed to get job supervisor",
}
_MAX_ERROR_CHARS = 500
# Of the 20 000 that Ray tells; all of them are in driver.log on run storage.
_MAX_LOG_CHARS = 2000
# Ray tells of 100 unless asked for more, and of no more than this.
_MAX_NODES = 10_000
_ASK_NODES_EVERY_S = 10.0
# Of all jobs that it ran and that nobody deleted: each has 20 000 characters of log if it failed.
_MAX_ANSWER_BYTES = 1 << 28


class RayJobsBackend(Backend):
    """A Ray cluster behind its Jobs API at `address`, as in `http://127.0.0.1:8265`."""

    name = "ray_jobs"

    def __init__(
        self,
        address: str,
        *,
        auth_token: str | None = None,
        timeout_s: float = 5.0,
        submit_timeout_s: float = 20.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.address = address.rstrip("/")
        self._timeout_s, self._submit_timeout_s = timeout_s, submit_timeout_s
        self._dead_nodes: frozenset[str] = frozenset()
        self._ask_nodes_at = 0.0
        self._http = httpx.Client(
            base_url=self.address,
            headers={"Authorization": f"Bearer {auth_token}"} if auth_token else {},
            timeout=timeout_s,
            transport=transport,
            # A proxy from the environment has no business between us and the cluster.
            trust_env=False,
        )

    def close(self) -> None:
        self._http.close()

    def submit(self, submission: Submission) -> None:
        body = {
            "submission_id": submission.attempt_id,
            "entrypoint": submission.entrypoint,
            "runtime_env": {"env_vars": submission.env},
            "metadata": submission.metadata,
        }
        response = self._send("POST", "/api/jobs/", json=body, timeout=self._submit_timeout_s)
        if "submission_id" in _json_object(response) or "already exists" in response.text:
            return
        # Ray itself blames a request by no other status.
        if response.status_code != httpx.codes.BAD_REQUEST:
            raise BackendUnreachable(self._strange(response))
        raise SubmissionRefused(f"Ray at {self.address} refused the job: {_cause(response)}")

    def observe(self, attempt_id: str) -> Observation:
        try:
            response = self._send("GET", f"/api/jobs/{attempt_id}")
        except BackendUnreachable as error:
            return Observation(ObservedState.UNREACHABLE, str(error))
        if _is_unknown(attempt_id, response):
            return Observation(ObservedState.NOT_FOUND, _cause(response))
        found = self._observation_of(_json(response))
        return found or Observation(ObservedState.UNREACHABLE, self._strange(response))

    def observe_all(self, attempt_ids: Sequence[str]) -> Mapping[str, Observation]:
        try:
            response = self._send("GET", "/api/jobs/")
        except BackendUnreachable:
            return self._unless_away(attempt_ids)
        wanted, infos = set(attempt_ids), _json(response)
        told = {
            str(info["submission_id"]): self._observation_of(info)
            for info in (infos if isinstance(infos, list) else [])
            if isinstance(info, dict) and str(info.get("submission_id")) in wanted
        }
        return {name: found for name, found in told.items() if found is not None}

    def _unless_away(self, attempt_ids: Sequence[str]) -> Mapping[str, Observation]:
        """Nothing where Ray answers at all: to list many jobs takes it longer than we wait."""
        try:
            self.check()
        except BackendUnreachable as error:
            away = Observation(ObservedState.UNREACHABLE, str(error))
            return dict.fromkeys(attempt_ids, away)
        return {}

    def stop(self, attempt_id: str) -> None:
        response = self._send("POST", f"/api/jobs/{attempt_id}/stop")
        if not response.is_success and not _is_unknown(attempt_id, response):
            raise BackendUnreachable(self._strange(response))

    def forget(self, attempt_id: str) -> None:
        """Delete a submission that ended from what Ray lists; raises for one that has not.

        Not within a second of its end: Ray, which looks for it then, would list it as failed.
        """
        response = self._send("DELETE", f"/api/jobs/{attempt_id}")
        if not response.is_success and not _is_unknown(attempt_id, response):
            raise BackendUnreachable(self._strange(response))

    def check(self) -> str:
        """Return the version of Ray; raises `BackendUnreachable`."""
        response = self._send("GET", "/api/version")
        version = _json_object(response).get("ray_version")
        if version is None:
            raise BackendUnreachable(self._strange(response))
        return f"Ray {version}"

    def hosts(self) -> tuple[HostFacts, ...]:
        """Live hosts of the cluster; raises `BackendUnreachable`."""
        response = self._send("GET", "/api/v0/nodes", params={"limit": _MAX_NODES})
        body = _json_object(response)
        try:
            nodes = body["data"]["result"]["result"]
            alive = [node for node in nodes if node["state"] == "ALIVE"]
            dead = [node for node in nodes if node["state"] == "DEAD"]
            self._dead_nodes = frozenset(str(node.get("node_id")) for node in dead)
            return hosts_by_address(
                (str(node["node_ip"]), node["resources_total"]) for node in alive
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise BackendUnreachable(self._strange(response)) from None

    def _observation_of(self, info: Any) -> Observation | None:
        """What Ray tells of a job; None where it is no answer of the Jobs API."""
        status = info.get("status") if isinstance(info, dict) else None
        if status not in _STATUSES:
            return None
        verdict, log = verdict_and_log(info.get("message"))
        sign = _LOST_HOST_SIGNS.get(str(info.get("error_type")))
        if status == "RUNNING" and self._is_dead(info.get("driver_node_id")):
            verdict = "its node is dead"
        elif sign is None or sign not in verdict:
            return Observation(ObservedState[status], verdict + log)
        message = f"the driver's host was lost: {verdict}"
        return Observation(ObservedState.FAILED, message, EndReason.HOST_LOST)

    def _is_dead(self, node_id: Any) -> bool:
        """Whether a node is known to be dead; asks for those that are once in a while.

        A head that found the state of the one before it calls that one's jobs RUNNING until the
        next job is submitted: only then Ray looks after them.
        """
        if node_id is not None and time.monotonic() >= self._ask_nodes_at:
            self._ask_nodes_at = time.monotonic() + _ASK_NODES_EVERY_S
            with suppress(BackendUnreachable):
                self.hosts()
        return str(node_id) in self._dead_nodes

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """An answer as a whole, of bounded size and time: jobs may run beside who gives it."""
        # A time-out is about the next bytes, which may come one by one.
        deadline = time.monotonic() + 2 * options.get("timeout", self._timeout_s)
        content = bytearray()
        try:
            with self._http.stream(method, path, **options) as response:
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > _MAX_ANSWER_BYTES or time.monotonic() > deadline:
                        raise httpx.ReadError("its answer has no end")
            return httpx.Response(response.status_code, content=bytes(content))
        except httpx.RequestError as error:
            cause = str(error) or type(error).__name__
            raise BackendUnreachable(
                f"no answer from Ray at {self.address} ({cause}); is the cluster up? "
                "SHARDLOOM_RAY_ADDRESS says where to look"
            ) from error

    def _strange(self, response: httpx.Response) -> str:
        if response.status_code in (401, 403):
            return (
                f"Ray at {self.address} wants another token (HTTP {response.status_code}); "
                "set SHARDLOOM_RAY_AUTH_TOKEN"
            )
        return (
            f"unexpected answer from {self.address} (HTTP {response.status_code}: "
            f"{_cause(response)}); is it the Ray dashboard?"
        )


def verdict_and_log(message: Any) -> tuple[str, str]:
    """What Ray says of a job, and the end of the driver's log that it adds if the driver failed."""
    verdict, _, rest = str(message or "").partition(", last available logs")
    log = rest.partition("\n")[2].rstrip()[-_MAX_LOG_CHARS:]
    return without_statistics(verdict)[:_MAX_LOG_CHARS], f"\n{log}" if log else ""


def _is_unknown(attempt_id: str, response: httpx.Response) -> bool:
    """Whether it is Ray that does not know it: pages of others do not exist, either."""
    return response.status_code == 404 and f"Job {attempt_id} does not exist" in response.text


def _json(response: httpx.Response) -> Any:
    """The body of a good answer; None for what is none."""
    try:
        return response.json() if response.is_success else None
    except (ValueError, RecursionError):
        return None


def _json_object(response: httpx.Response) -> dict[str, Any]:
    """The body of a good answer, or an empty object."""
    body = _json(response)
    return body if isinstance(body, dict) else {}


def _cause(response: httpx.Response) -> str:
    # Ray answers with a traceback, whose last line says what was wrong; to that of its agent, which
    # submits and deletes, it adds a line with a full stop.
    lines = response.text.strip().removesuffix("\n.").splitlines()
    return lines[-1][:_MAX_ERROR_CHARS] if lines else response.reason_phrase
