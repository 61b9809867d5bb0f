"""What the control plane raises, and how each error reads as an RFC 9457 problem.

    ServiceError                      status  code
    ├── InvalidRequest                422     invalid_request   (`fields` say where)
    ├── who may call, and how much: `service.security.errors`
    ├── jobs and what they report: `service.job_errors`
    ├── what they read and leave: `service.artifact_errors`
    ├── NotFound                      404
    │   ├── ProjectNotFound                   project_not_found
    │   ├── NotAHead                          not_a_head
    │   ├── WebhookNotFound                   webhook_not_found
    │   └── DeliveryNotFound                  delivery_not_found
    ├── Conflict                      409
    │   ├── IdempotencyConflict               idempotency_conflict
    │   └── RequestUnderWay                   request_under_way (`Retry-After`)
    ├── PreconditionFailed            412
    ├── BackendError                  502
    │   ├── SubmissionRefused                 submission_refused
    │   └── BackendUnreachable        503     backend_unreachable
    ├── StoreUnavailable              503     store_unavailable
    ├── StorageUnavailable            503     storage_unavailable
    ├── ReconcilerDied                503     reconciler_died
    └── PortInUse                     (start) port_in_use

`trainer.spec.SpecError` maps to 422 `invalid_spec`.
"""

from __future__ import annotations

from collections.abc import Sequence

from service.api.schemas import FieldFault, Problem
from trainer.spec import SpecError


class ServiceError(Exception):
    """Base of what the control plane raises; its text is the `detail` of the problem."""

    status = 500
    code = "internal_error"
    title = "Internal error"

    @property
    def fields(self) -> Sequence[FieldFault]:
        """Faulty fields of the request, where the error is about fields."""
        return ()

    @property
    def extensions(self) -> dict[str, object]:
        """Further members of the problem."""
        return {}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the answer carries beside the problem."""
        return {}


class InvalidRequest(ServiceError):
    """A request whose fields cannot be accepted."""

    status = 422
    code = "invalid_request"
    title = "Invalid request"

    def __init__(self, faults: Sequence[FieldFault]) -> None:
        self._faults = tuple(faults)
        super().__init__("; ".join(f"{fault.path}: {fault.message}" for fault in faults))

    @property
    def fields(self) -> Sequence[FieldFault]:
        """Every fault found."""
        return self._faults


class NotFound(ServiceError):
    """Something that the request names does not exist."""

    status = 404
    code = "not_found"
    title = "Not found"


class ProjectNotFound(NotFound):
    """A project has no quotas."""

    code = "project_not_found"

    def __init__(self, name: str) -> None:
        super().__init__(f"project '{name}' has no quotas; PUT /v1/projects/{name} sets some")


class WebhookNotFound(NotFound):
    """No webhook has this id."""

    code = "webhook_not_found"

    def __init__(self, webhook_id: str) -> None:
        super().__init__(f"no webhook has the id '{webhook_id}'; GET /v1/webhooks lists them")


class DeliveryNotFound(NotFound):
    """A webhook has no delivery of this id, or it was forgotten with age."""

    code = "delivery_not_found"

    def __init__(self, webhook_id: str, delivery_id: int) -> None:
        super().__init__(
            f"webhook {webhook_id} has no delivery {delivery_id}; "
            f"GET /v1/webhooks/{webhook_id}/deliveries lists them"
        )


class NotAHead(NotFound):
    """The Ray of this service is not one that machines can join."""

    code = "not_a_head"
    title = "Not a head"

    def __init__(self) -> None:
        super().__init__(
            "machines cannot join the cluster of this service: it was not started by "
            "`shardloom up --head`"
        )


class Conflict(ServiceError):
    """Not possible in the present state."""

    status = 409
    code = "conflict"
    title = "Conflict"


class IdempotencyConflict(Conflict):
    """An idempotency key came back with another request."""

    code = "idempotency_conflict"

    def __init__(self, key: str) -> None:
        super().__init__(
            f"Idempotency-Key '{key}' was used before with another request; use a new key"
        )


class RequestUnderWay(Conflict):
    """A request was repeated while the first one is still being carried out."""

    code = "request_under_way"

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the first request with Idempotency-Key '{key}' is still being carried out; ask again"
        )

    @property
    def headers(self) -> dict[str, str]:
        """When to ask again."""
        return {"Retry-After": "1"}


class PreconditionFailed(ServiceError):
    """What a request made its condition (If-Match) does not hold."""

    status = 412
    title = "Precondition failed"


class BackendError(ServiceError):
    """The backend did not do what it was asked."""

    status = 502
    code = "backend_error"
    title = "Backend error"


class SubmissionRefused(BackendError):
    """The backend answered, and the answer was no: the same request would be refused again."""

    code = "submission_refused"


class BackendUnreachable(BackendError):
    """The backend did not answer in time: nothing is known, and nothing must be concluded."""

    status = 503
    code = "backend_unreachable"
    title = "Backend unreachable"


class StoreUnavailable(ServiceError):
    """The database does not answer or is not at the newest migration."""

    status = 503
    code = "store_unavailable"
    title = "Store unavailable"


class StorageUnavailable(ServiceError):
    """Run storage cannot be written."""

    status = 503
    code = "storage_unavailable"
    title = "Run storage unavailable"

    def __init__(self, cause: str) -> None:
        super().__init__(f"cannot write to run storage ({cause}); check SHARDLOOM_RUNS_DIR")


class ReconcilerDied(ServiceError):
    """Requests are answered, but no job goes on."""

    status = 503
    code = "reconciler_died"
    title = "Reconciler died"

    def __init__(self) -> None:
        super().__init__(
            "the loop that runs jobs has ended, so no job starts or ends; the service's log says "
            "why. Restart the service: running jobs go on"
        )


class PortInUse(ServiceError):
    """The service cannot listen where it was told to."""

    code = "port_in_use"
    title = "Port in use"

    def __init__(self, host: str, port: int, cause: str) -> None:
        super().__init__(
            f"cannot listen on {host}:{port} ({cause}); is another service running? "
            "Stop it or set SHARDLOOM_PORT to a free port"
        )


def problem_of(error: ServiceError) -> dict[str, object]:
    """The problem document of an error, extension members included."""
    problem = Problem(
        title=error.title,
        status=error.status,
        detail=str(error),
        code=error.code,
        fields=list(error.fields),
    )
    return {**problem.model_dump(), **error.extensions}


def problem_of_spec(error: SpecError) -> dict[str, object]:
    """The problem document of a faulty spec: one field per fault, by its path in the spec."""
    faults = [FieldFault(path=p.path, code=p.code, message=p.message) for p in error.problems]
    return Problem(
        title="Invalid spec", status=422, detail=str(error), code="invalid_spec", fields=faults
    ).model_dump()
