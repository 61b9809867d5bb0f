"""Errors of the control plane: one hierarchy, of which the API makes problems (RFC 9457).

Each class has its HTTP `status` and a stable `code`: its name in snake case, unless it names one.
Its text is the `detail` of the problem. `SpecError` of the trainer is no part of it; the API
answers it with 422 `invalid_spec`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from trainer.layout.plans import Change
from trainer.spec.base import FieldProblem


class ServiceError(Exception):
    """Base of what the control plane raises; its text is `template`, filled with the arguments."""

    status = 500
    code = "internal_error"
    title = "Internal error"
    template = "{}"
    # Faulty fields of the request, further members of the problem, headers of the answer.
    fields: Sequence[FieldProblem] = ()
    extensions: Mapping[str, object] = MappingProxyType({})
    headers: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        words = re.sub(r"(?<!^)(?=[A-Z])", " ", cls.__name__).lower()
        cls.code = vars(cls).get("code", words.replace(" ", "_"))
        if cls.__base__ is ServiceError:
            cls.title = vars(cls).get("title", words.capitalize())

    def __init__(self, *values: object) -> None:
        super().__init__(self.template.format(*values))


class InvalidRequest(ServiceError):
    status = 422

    def __init__(self, faults: Sequence[FieldProblem]) -> None:
        self.fields = tuple(faults)
        super().__init__("; ".join(f"{fault.path}: {fault.message}" for fault in faults))


class NotFound(ServiceError):
    status = 404


class ProjectNotFound(NotFound):
    template = "project '{0}' has no quotas; PUT /v1/projects/{0} sets some"


class WebhookNotFound(NotFound):
    template = "no webhook has the id '{}'; GET /v1/webhooks lists them"


class DeliveryNotFound(NotFound):
    """A webhook has no delivery of this id, or it was forgotten with age."""

    template = "webhook {0} has no delivery {1}; GET /v1/webhooks/{0}/deliveries lists them"


class Conflict(ServiceError):
    """Not possible in the present state."""

    status = 409


class IdempotencyConflict(Conflict):
    template = "Idempotency-Key '{}' was used before with another request; use a new key"


class RequestInProgress(Conflict):
    code = "request_under_way"
    template = "the first request with Idempotency-Key '{}' is still being carried out; ask again"
    headers = MappingProxyType({"Retry-After": "1"})


class PreconditionFailed(ServiceError):
    status = 412


class SubmissionRefused(ServiceError):
    """The backend answered, and the answer was no: the same request would be refused again."""

    status = 502
    title = "Backend error"


class BackendUnreachable(ServiceError):
    """The backend did not answer in time: nothing is known, and nothing must be concluded."""

    status = 503


class StoreUnavailable(ServiceError):
    """The database does not answer or is not at the newest migration."""

    status = 503


class StorageUnavailable(ServiceError):
    status = 503
    title = "Run storage unavailable"
    template = "run storage failed ({}); check SHARDLOOM_RUNS_DIR"


@contextmanager
def reaching_storage(purpose: str = "") -> Iterator[None]:
    """Raise `StorageUnavailable` for an OSError; `purpose` precedes its message."""
    try:
        yield
    except OSError as error:
        raise StorageUnavailable(f"{purpose}{error}") from error


class ReconcilerDied(ServiceError):
    status = 503
    template = (
        "the loop that runs jobs has ended, so no job starts or ends; the service's log says why. "
        "Restart the service: running jobs go on"
    )


# ---- logs, checkpoints, traces, exports, code


class LogNotFound(NotFound):
    template = "no log is named '{}'; the attempt has: {}"


class CheckpointNotFound(NotFound):
    def __init__(self, job_id: str, wanted: str, steps: Sequence[int]) -> None:
        known = ", ".join(str(step) for step in steps) or "none"
        super().__init__(f"{job_id} has no checkpoint {wanted}; steps that it has: {known}")


class TraceNotFound(NotFound):
    template = "no trace is named '{}', or its file is gone; GET /v1/jobs/JOB/traces lists them"


class ExportNotFound(NotFound):
    template = "{} has no export '{}'; GET /v1/jobs/JOB/exports lists them"


class TracePending(Conflict):
    template = "trace {} is still being recorded; wait until {} is written"


class ExportPending(Conflict):
    """An earlier export of the job, `export_id`, is not done yet."""

    template = "export {1} of job {0} is not done yet; wait for it, then ask again"

    def __init__(self, job_id: str, export_id: str) -> None:
        self.export_id = export_id
        super().__init__(job_id, export_id)


class ExportNotReady(Conflict):
    def __init__(self, export_id: str, status: str, message: str) -> None:
        cause = f": {message}" if message else ""
        super().__init__(f"export {export_id} is {status}{cause}")


class ExportRefused(Conflict):
    template = (
        "{} {}; let jobs export where they train (`export: {{on_success: true}}`), or export "
        "on a host of the cluster with `shardloom export --run-dir DIR --to DIR`"
    )


class CodeStoreFull(ServiceError):
    status = 507


# ---- sweeps


class SweepNotFound(NotFound):
    template = "no sweep has the id '{}'; GET /v1/sweeps lists them"


class SweepEnded(Conflict):
    template = "{} has already ended ({})"


class SweepNotEnded(Conflict):
    template = "{} has not ended; cancel it and wait for its end first"


# ---- jobs, their attempts and what they report


class JobNotFound(NotFound):
    template = "no job has the id or name '{}'; GET /v1/jobs lists them"


class AttemptNotFound(NotFound):
    template = "no attempt has the id '{}'"


class JobEnded(Conflict):
    template = "{} has already ended ({})"


class JobNotEnded(Conflict):
    template = "{} has not ended: it is {}; cancel it and wait for its end first"


class JobNotRunning(Conflict):
    template = "{} has no workers {}: it is {}, not RUNNING"


class JobNotPaused(Conflict):
    template = "{} is not paused: it is {}"


class JobActive(Conflict):
    code = "job_at_work"
    template = "{} is {}; pause or cancel it, and wait until it has stopped first"


class LayoutUnknown(Conflict):
    template = (
        "{} has not chosen its shard_group_size yet; ask again once its timeline tells the layout"
    )


class SequenceGap(Conflict):
    """A batch starts after records that never arrived; `next_seq` is the one to go on from."""

    template = (
        "batch of stream '{0}' starts at {1}, but record {2} has not arrived yet; send again "
        "from {2}"
    )

    def __init__(self, stream: str, first_seq: int, next_seq: int) -> None:
        self.extensions = {"next_seq": next_seq}
        super().__init__(stream, first_seq, next_seq)


class RunsAreShared(Conflict):
    template = "hosts have run storage mounted here (SHARDLOOM_RUNS_SHARED): nothing is exchanged"


class NoSuchRunFile(NotFound):
    template = "{} is no file that hosts exchange with the service, or there is none now"


class RunStorageFull(ServiceError):
    status = 507
    template = "run storage has less than {:.0%} left; delete jobs, or give it a larger volume"


class StaleVersion(Conflict):
    template = "{} was changed since version {} was read; read again"


class LockLost(Conflict):
    template = "the lock {} of {} ran out and is another replica's now; what it was for is dropped"


class VersionChanged(PreconditionFailed):
    template = (
        "{0} is at version {2} now, and If-Match asks for {1}: read it again, and repeat the "
        "request if it is still meant"
    )


class VersionUnknown(PreconditionFailed):
    template = (
        'If-Match is {!r}; give the ETag of a job, such as "7". A weak one (W/"7", as proxies make '
        "that compress) matches nothing"
    )


class RecordRefused(ServiceError):
    status = 422
    template = "a record of attempt {} cannot be stored ({})"


class JobUnreadable(ServiceError):
    template = (
        "{} cannot be read ({}); was it stored by another version of the service? Run that "
        "version, or cancel the job with it"
    )


# ---- access


class NotSignedIn(ServiceError):
    status = 401
    template = (
        "{}; send 'Authorization: Bearer KEY' with an API key (`shardloom login`, or "
        "SHARDLOOM_API_KEY)"
    )
    headers = MappingProxyType({"WWW-Authenticate": 'Bearer realm="shardloom"'})

    def __init__(self, cause: str = "this request carries no credentials") -> None:
        super().__init__(cause)


class Forbidden(ServiceError):
    """Valid credentials without the right to do this."""

    status = 403


class ForeignOrigin(Forbidden):
    template = (
        "a page of {:.200} may not change anything here; SHARDLOOM_ALLOWED_ORIGINS names the sites "
        "that may"
    )


class CsrfRefused(Forbidden):
    """A change by a browser's session without the token that our own pages send."""

    code = "csrf_token"
    template = (
        "a session must send the value of its cookie 'shardloom-csrf' in the header X-CSRF-Token "
        "with whatever changes something; reload the page, or use an API key"
    )


class ForeignHost(ServiceError):
    status = 421
    title = "Misdirected request"
    template = (
        "this service does not answer for the host '{:.200}'; SHARDLOOM_ALLOWED_HOSTS names those "
        "it answers for"
    )


class BehindProxy(ServiceError):
    status = 421
    title = "Misdirected request"
    template = (
        "this request came through a proxy (it carries X-Forwarded-For or Forwarded), and this "
        "service is for users of its own machine: behind a proxy it wants SHARDLOOM_AUTH=required"
    )


class BodyTooLarge(ServiceError):
    status = 413
    template = "a request's body has at most {} bytes here"


class BodyTooSlow(ServiceError):
    status = 408
    template = "a request's body comes within {:g} s here"
    headers = MappingProxyType({"Connection": "close"})


class TooManyRequests(ServiceError):
    status = 429
    template = "too many requests; try again in {} s"

    def __init__(self, retry_after_s: int) -> None:
        self.headers = {"Retry-After": str(retry_after_s)}
        super().__init__(retry_after_s)


class TooManyOpen(ServiceError):
    status = 429
    title = "Too many requests"
    template = (
        "{} requests or streams of this caller are open, as many as may be; close some, or raise "
        "SHARDLOOM_MAX_OPEN_REQUESTS"
    )
    headers = MappingProxyType({"Retry-After": "1"})


class IdentityProviderAway(ServiceError):
    status = 503
    template = "cannot read the keys at {} ({}); SHARDLOOM_OIDC_JWKS_URL"


class SecretKeyUnusable(ServiceError):
    template = "{} (SHARDLOOM_SECRET_KEY)"


class KeyNotFound(NotFound):
    template = "no API key has the id '{}'; `shardloom keys list` shows them"


# ---- plans


class DoesNotFit(ServiceError):
    """The tables of a spec do not fit the memory of the cluster's workers."""

    status = 422

    def __init__(self, why: str, changes: Sequence[Change]) -> None:
        advice = "; or ".join(change.text for change in changes)
        would = f". What would do: {advice}" if advice else ""
        super().__init__(f"{why}{would}. Forced (--force, ?force=true) it is tried all the same")
        self.extensions = {"changes": [{"set": each.set, "text": each.text} for each in changes]}


class NoPlan(ServiceError):
    """The cluster cannot be planned for: too little is known of it, or it has no room."""

    status = 422


class PlanTimedOut(ServiceError):
    status = 504
    template = (
        "the plan was not done within {:g} s; give it more (--time-limit, time_limit_s), or ask "
        "again when the service is less busy"
    )


class PlannerFailed(ServiceError):
    """The process with TorchRec's planner failed."""

    template = (
        "the process that plans failed: {} (-9 is too little memory, and trainer_python must be a "
        "Python with the trainer's packages)"
    )
