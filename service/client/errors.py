"""What the SDK raises: a `ShardloomError`, and a `ProblemError` where the service said no."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from service.schemas.common import Problem
from trainer.spec.base import FieldProblem


class ShardloomError(Exception):
    """Base of everything the SDK raises."""


class ServiceUnreachable(ShardloomError):
    """No answer at `url`, after the retries.

    A change for which `may_have_arrived` may be done: to repeat it may do it twice.
    """

    may_have_arrived = False

    def __init__(self, url: str, cause: str) -> None:
        self.is_distrusted = "CERTIFICATE_VERIFY_FAILED" in cause
        what = f"no Shardloom service answers at {url}"
        if self.is_distrusted:
            what = f"the certificate of {url} is not trusted"
        super().__init__(f"{what} ({cause})")

    def __str__(self) -> str:
        told = super().__str__()
        if self.may_have_arrived:
            told += "; the request may have arrived: look (`shardloom ps`) before repeating it"
        return told


class CredentialsUnusable(ShardloomError):
    """The file of API keys, or of CA certificates, cannot be used."""


class TraceLost(ShardloomError):
    """A trace that was asked for did not come."""

    def __init__(self, trace_id: str, cause: str) -> None:
        super().__init__(f"trace {trace_id} did not come: {cause}")


class ExportFailed(ShardloomError):
    """An export that was asked for did not come."""

    def __init__(self, export_id: str, cause: str) -> None:
        super().__init__(f"export {export_id} did not come: {cause}")


class UnexpectedAnswer(ShardloomError):
    """An answer that is not what a Shardloom service of this version sends."""

    def __init__(self, url: str, cause: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(
            f"{url} gave an answer that this client does not understand ({cause}); is it a "
            "Shardloom service of the same version?"
        )


class ProblemError(ShardloomError):
    """The service refused: HTTP `status`, machine-readable `code`, `detail`, faulty `fields`."""

    def __init__(self, problem: Problem) -> None:
        self.status = problem.status
        self.code = problem.code
        self.detail = problem.detail
        self.fields: tuple[FieldProblem, ...] = tuple(problem.fields)
        super().__init__(problem.detail or problem.title)


class InvalidRequest(ProblemError):
    """HTTP 400, 422: a faulty spec or parameter; `fields` name the path of each fault."""


class NotSignedIn(ProblemError):
    """HTTP 401: no credentials, or some that do not count."""


class Forbidden(ProblemError):
    """HTTP 403: credentials that do not suffice for this."""


class NotFound(ProblemError):
    """HTTP 404: no such job, attempt, log or trace."""


class Conflict(ProblemError):
    """HTTP 409, 412: not possible in the present state of the job."""


class ServerFault(ProblemError):
    """HTTP 5xx: the service itself is in trouble; its log says more."""


_BY_STATUS: dict[int, type[ProblemError]] = {
    400: InvalidRequest,
    401: NotSignedIn,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    412: Conflict,
    422: InvalidRequest,
}


def error_of_response(response: httpx.Response) -> ShardloomError:
    """The exception for an answer whose status is 400 or above; its body must have been read."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return UnexpectedAnswer(
            str(response.url),
            f"HTTP {response.status_code} {response.reason_phrase}",
            response.status_code,
        )
    fallback = ServerFault if problem.status >= 500 else ProblemError
    return _BY_STATUS.get(problem.status, fallback)(problem)
