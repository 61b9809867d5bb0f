"""An attempt as its driver knows it: context, secrets, and restarts of the workers.

Secrets are fetched once, with the attempt's own token, and handed to the workers within what Ray
pickles, in an object that never shows its values. They are in no file, no log and no runtime
environment.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from secrets import token_urlsafe
from typing import Any, Literal

import httpx

from trainer import failures
from trainer.coordination.authentication import new_token
from trainer.coordination.detection import HostRecord
from trainer.driver.autoscale import CapacityManager
from trainer.failures import Budget, EndReason, Failure
from trainer.layout.cost import Cluster
from trainer.protocol import events, mirror
from trainer.protocol.mirror import PATIENCE_S, MirrorConfig, connect
from trainer.protocol.outbox import EventWriter
from trainer.protocol.requests import ResizeRequest
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.untrusted import read_untrusted
from trainer.protocol.versions import versions_here
from trainer.protocol.worker_config import GroupConfig, SecretEnv, WorkerConfig
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec

logger = logging.getLogger(__name__)
_RETRY_S = 2.0
_PASSING = {httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS}
POST_TIMEOUT_S = 10.0
MIRROR_S = 3 * mirror.INTERVAL_S
# After a run this long the next failure counts as the first in a row.
_LONG_RUN_S = 120.0


class AttemptFailed(Exception):
    """The attempt cannot start its workers; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def claim(
    http: httpx.Client,
    url: str,
    body: Mapping[str, str],
    what: str,
    patience_s: float = PATIENCE_S,
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Any:
    """Claim `what` at a URL of the service, which gives it to one claim; raises `AttemptFailed`.

    The claim in `body` is the same in every try: an answer may be lost.
    """
    give_up_at = clock() + patience_s
    while True:
        try:
            response = http.post(url, json=body)
        except httpx.HTTPError as error:
            cause = str(error) or type(error).__name__
        else:
            if response.is_success:
                with suppress(ValueError, LookupError, TypeError):  # else it is no service of ours
                    return response.json()[what]
            cause = f"HTTP {response.status_code}"
            if response.is_client_error and response.status_code not in _PASSING:
                raise _not_given(f"the service refuses the job's {what} ({cause}, see its log)")
        if clock() >= give_up_at:
            raise _not_given(f"the service does not give the job's {what} ({cause})")
        logger.warning("waiting for the job's %s: %s", what, cause)
        wait(_RETRY_S)


def _not_given(message: str) -> AttemptFailed:
    return AttemptFailed(Failure(EndReason.STORAGE_ERROR, message))


@dataclass(frozen=True)
class DriverContext:
    """What the control plane tells a driver, by environment variables and the file of its token.

    A failure in `end_on` ends the attempt without restarts, as the next attempt will differ. No
    worker is placed on a host in `avoided_hosts` before its time (Unix seconds), if there is room
    elsewhere. `token` authenticates the attempt to the service, `ca_file` verifies the service, and
    `claim` is this process's alone. An autoscaling cluster has room for `cluster_max_workers` at
    most; None for a fixed cluster. With `is_mirrored` run storage is the service's alone.
    """

    job_id: str
    attempt_id: str
    run_dir: Path
    service_url: str | None
    max_worker_failures: int
    end_on: frozenset[str] = frozenset()
    avoided_hosts: tuple[tuple[str, float], ...] = ()
    token: str = field(default="", repr=False)
    ca_file: str | None = None
    cluster_max_workers: int | None = None
    secrets: SecretEnv = field(default_factory=SecretEnv)
    is_mirrored: bool = False
    claim: str = field(default_factory=partial(token_urlsafe, 32), repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> DriverContext:
        """Read the SHARDLOOM_* variables; a missing one is a KeyError that names it.

        The token is in a file that is removed once read, in a variable, or at the service; raises
        OSError or `AttemptFailed`.
        """
        job_id, attempt_id = env["SHARDLOOM_JOB_ID"], env["SHARDLOOM_ATTEMPT_ID"]
        files = RunDir(Path(env["SHARDLOOM_RUN_DIR"])).attempt(attempt_id)
        context = cls(
            job_id=job_id,
            attempt_id=attempt_id,
            run_dir=Path(env["SHARDLOOM_RUN_DIR"]),
            service_url=env.get("SHARDLOOM_SERVICE_URL"),
            max_worker_failures=int(env.get("SHARDLOOM_MAX_WORKER_FAILURES", "0")),
            end_on=frozenset(env.get("SHARDLOOM_END_ON", "").split()),
            avoided_hosts=tuple(
                (host, float(until))
                for each in env.get("SHARDLOOM_AVOIDED_HOSTS", "").split()
                for host, _, until in [each.rpartition("=")]
            ),
            token=env.get("SHARDLOOM_ATTEMPT_TOKEN") or _take_token(files),
            ca_file=env.get("SHARDLOOM_CA_FILE"),
            cluster_max_workers=int(env.get("SHARDLOOM_CLUSTER_MAX_WORKERS", "0")) or None,
            is_mirrored=env.get("SHARDLOOM_RUNS_SHARED") == "false",
        )
        code = env.get("SHARDLOOM_ATTEMPT_CODE")
        if not code or not context.service_url:
            return context
        # Ray shows the environment of a job to all who may use the cluster: a code serves once.
        body = {"attempt_id": attempt_id, "code": code, "claim": context.claim}
        with context.connect(POST_TIMEOUT_S) as http:
            token = claim(http, f"{context.service_url}/v1/attempts:claim", body, "token")
        return replace(context, token=token)

    def connect(self, timeout_s: float) -> httpx.Client:
        """An HTTP client of the service with the attempt's token."""
        return connect(self.token, self.ca_file, timeout_s)

    @property
    def mirror(self) -> MirrorConfig | None:
        """How each host's copy of the run folder is kept, where they share none."""
        if not self.is_mirrored or not self.service_url:
            return None
        return MirrorConfig(
            str(self.run_dir), self.attempt_id, self.service_url, self.token, self.ca_file
        )

    @property
    def files(self) -> AttemptDir:
        return RunDir(self.run_dir).attempt(self.attempt_id)

    def read_spec(self) -> JobSpec:
        """The spec as the service took it, maybe of an earlier version.

        Raises `SpecError`, and `AttemptFailed` for fields of a newer version.
        """
        return _stored_spec(self.files.spec_path)

    def read_resolved_spec(self) -> JobSpec:
        """The spec as `open_attempt` resolved it."""
        return _stored_spec(self.files.resolved_spec_path)

    @property
    def is_pause_wanted(self) -> bool:
        """Whether the attempt shall save and end; False while storage fails."""
        return is_there(self.files.pause_request_path)


def _stored_spec(path: Path) -> JobSpec:
    # What newer versions refuse must not end a job, nor its length with every default in it.
    try:
        return JobSpec.checked(json.loads(path.read_bytes()), {"stored": True})
    except SpecError as error:
        # The service knows all that it wrote: what else is wrong here is of its version, too.
        unknown = [each.path for each in error.problems if each.code == "extra_forbidden"]
        if not unknown:
            raise
        message = (
            f"the service wrote {', '.join(unknown)}, which the trainer here does not know: "
            "install the service's version on all hosts"
        )
        raise AttemptFailed(Failure(EndReason.VERSION_MISMATCH, message)) from None


def is_there(path: Path) -> bool:
    """Whether there is such a file; False while storage fails."""
    try:
        return path.exists()
    except OSError:
        return False


def _take_token(files: AttemptDir) -> str:
    """Read and remove the attempt's token, "" if there is none; raises OSError."""
    try:
        token = read_untrusted(files.token_path, files.runs_dir).decode()
    except FileNotFoundError:
        return ""
    except PermissionError as error:
        raise PermissionError(
            f"cannot read {files.token_path} ({error.strerror}), which only the service's own user "
            "can: run Ray as that user"
        ) from error
    with suppress(OSError):
        files.token_path.unlink()
    return token


@dataclass(frozen=True)
class Attempt:
    """An attempt whose spec has its tables and its layout resolved.

    `capacity` manages the capacity requests where the cluster is autoscaled. `token` is known to
    its coordinator and its workers only (`trainer.coordination.authentication`). `cluster` is what
    the planner is told of the hosts, None where too little is known of them. `data` is Ray's
    reference to the `FoundData` that all workers read, as these may be many megabytes.
    """

    context: DriverContext
    spec: JobSpec
    writer: EventWriter
    use_gpu: bool = False
    capacity: CapacityManager | None = None
    token: bytes = field(default_factory=new_token, repr=False)
    cluster: Cluster | None = None
    data: Any = None

    def config(self, run_index: int, group: GroupConfig | None = None) -> WorkerConfig:
        c = self.context
        return WorkerConfig(
            self.spec,
            c.run_dir,
            c.attempt_id,
            run_index,
            group,
            secrets=c.secrets,
            versions=versions_here(),
            token=self.token,
            cluster=vars(self.cluster) if self.cluster else None,
            mirror=c.mirror,
            data=self.data,
        )

    def report_size(
        self, before: int | None, now: int, cause: str, request: ResizeRequest, *, restarted: bool
    ) -> None:
        """Report another number of workers than `before`, or, at first, than the layout has."""
        if before is None:
            # The layout is told as large as the job may grow.
            before, restarted = self.spec.parallelism.world_size, False
            cause = "request" if now == request.workers else "start"
        if now == before:
            return
        resized = events.Resized(
            time=time.time(),
            world_size_before=before,
            world_size=now,
            cause=cause,
            restarted=restarted,
        )
        self.writer.write(resized)

    def report_straggler(
        self, found: events.StragglerFound, record: HostRecord, now: float, *, is_replaced: bool
    ) -> None:
        """Tell of it, and leave its host out where its workers move."""
        action: Literal["none", "replace"] = "replace" if is_replaced else "none"
        self.writer.write(found.model_copy(update={"action": action}))
        if is_replaced:
            slow = f"is {found.slowdown:.1f} times as slow as the others (rank {found.rank})"
            self.writer.write(record.exclude(found.host, slow, now))

    def host_record(self) -> HostRecord:
        """A record of hosts by the job's policy, with those that the service wants avoided."""
        recovery = self.spec.recovery
        return HostRecord(
            recovery.exclude_host_after, recovery.exclude_host_s, self.context.avoided_hosts
        )


def warn(writer: EventWriter, message: str) -> None:
    """Add a warning to the job's timeline and to the driver's log."""
    logger.warning("%s", message)
    writer.write(events.Note(time=time.time(), level="warning", message=message))


@dataclass(frozen=True)
class Restart:
    """The workers ended well and start again at once, with another size or elsewhere."""


PAUSED = Failure(EndReason.PAUSED, "saved and stopped on request")
PAUSED_EARLY = Failure(EndReason.PAUSED, "stopped on request while no workers trained")
Outcome = Failure | Restart | None
"""How a run of the workers ended; None when training is complete."""


def run_with_restarts(
    attempt: Attempt,
    live: Callable[[int], Outcome],
    wait: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Failure | None:
    """Run the workers again and again, while it helps and the retry budget allows.

    `live` runs the workers with the given run index, from the newest checkpoint. Returns None when
    training is complete.
    """
    num_paid = num_in_a_row = 0
    for run_index in itertools.count():
        began = clock()
        outcome = live(run_index)
        if isinstance(outcome, Restart):
            continue
        if outcome is None:
            return None
        num_paid += outcome.reason.rule.budget is Budget.USER
        num_in_a_row = 1 if clock() - began > _LONG_RUN_S else num_in_a_row + 1
        budget = attempt.context.max_worker_failures
        will_restart = failures.should_restart(outcome, num_paid, budget)
        will_restart &= outcome.reason not in attempt.context.end_on
        if outcome.reason.rule.restarts_workers:
            attempt.writer.write(
                events.WorkersLost(
                    time=time.time(),
                    run_index=run_index,
                    reason=outcome.reason,
                    message=outcome.message,
                    will_restart=will_restart,
                    evidence=outcome.facts,
                )
            )
        if not will_restart:
            return outcome
        delay_s = failures.restart_delay_s(num_in_a_row)
        # For the last files of the workers' hosts to arrive at the others.
        wait(max(delay_s, MIRROR_S) if attempt.context.is_mirrored else delay_s)
    raise AssertionError("counting does not end")
