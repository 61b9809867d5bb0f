"""Refusals of the API server, worded as Kubernetes words them.

Each is an `ApiError` that carries the `Status` object of its answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.integration.kube.resources import Resource
from tests.integration.kube.schema import Cause

MODIFIED = (
    "the object has been modified; please apply your changes to the latest version and try again"
)


class ApiError(Exception):
    """A request that is answered with a `Status` of Failure."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        details: dict[str, Any] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}
        self.retry_after_s = retry_after_s
        self.has_empty_details = False

    def status(self) -> dict[str, Any]:
        """The `Status` object that tells it."""
        status: dict[str, Any] = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            **({"reason": self.reason} if self.reason else {}),
        }
        details = dict(self.details)
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        if details or self.has_empty_details:
            status["details"] = details
        return {**status, "code": self.code}


def _details(resource: Resource, name: str, **more: Any) -> dict[str, Any]:
    group = {"group": resource.group} if resource.group else {}
    return {**({"name": name} if name else {}), **group, "kind": resource.plural, **more}


def not_found(resource: Resource, name: str) -> ApiError:
    """There is no object of that name."""
    message = f'{resource.qualified} "{name}" not found'
    return ApiError(404, "NotFound", message, _details(resource, name))


def already_exists(resource: Resource, name: str) -> ApiError:
    """There is an object of that name."""
    message = f'{resource.qualified} "{name}" already exists'
    return ApiError(409, "AlreadyExists", message, _details(resource, name))


def conflict(resource: Resource, name: str, why: str = MODIFIED) -> ApiError:
    """The object is not the one, or not as old, as the request takes it to be."""
    message = f'Operation cannot be fulfilled on {resource.qualified} "{name}": {why}'
    return ApiError(409, "Conflict", message, _details(resource, name))


def forbidden(
    resource: Resource, name: str, why: str, causes: list[dict[str, str]] | None = None
) -> ApiError:
    """The caller may not, or a quota or a namespace that ends forbids it."""
    quoted = f' "{name}"' if name else ""
    message = f"{resource.qualified}{quoted} is forbidden: {why}"
    more = {"causes": causes} if causes else {}
    return ApiError(403, "Forbidden", message, _details(resource, name, **more))


def unauthorized() -> ApiError:
    """Nobody knows the token."""
    return ApiError(401, "Unauthorized", "Unauthorized")


def invalid(resource: Resource, name: str, causes: Sequence[Cause]) -> ApiError:
    """The object breaks its schema or the rules of its kind."""
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    told = list(dict.fromkeys(str(cause) for cause in causes))
    listed = told[0] if len(told) == 1 else f"[{', '.join(told)}]"
    group = {"group": resource.group} if resource.group else {}
    details = {
        **({"name": name} if name else {}),
        **group,
        "kind": resource.kind,
        "causes": [
            {"reason": cause.reason, "message": cause.message, "field": cause.field}
            for cause in causes
        ],
    }
    return ApiError(422, "Invalid", f'{kind} "{name}" is invalid: {listed}', details)


def invalid_patch(manifest: dict[str, Any], why: str) -> ApiError:
    """A patch whose result has fields that nobody knows."""
    shown = json.dumps(json.dumps(manifest))
    cause = Cause("FieldValueInvalid", f"Invalid value: {shown}: {why}", "patch")
    details = {"causes": [{"reason": cause.reason, "message": cause.message, "field": cause.field}]}
    return ApiError(422, "Invalid", f' "" is invalid: {cause}', details)


def rejected_patch() -> ApiError:
    """A JSON patch that does not apply."""
    message = "the server rejected our request due to an error in our request"
    error = ApiError(422, "Invalid", message)
    error.has_empty_details = True
    return error


def bad_request(message: str) -> ApiError:
    """The request cannot be understood."""
    return ApiError(400, "BadRequest", message)


def expired(message: str) -> ApiError:
    """A resource version or a list token is older than what is kept."""
    return ApiError(410, "Expired", message)


def version_of_the_future(asked: int, current: int) -> ApiError:
    """A resource version that is not there yet."""
    message = f"Timeout: Too large resource version: {asked}, current: {current}"
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    return ApiError(504, "Timeout", message, {"causes": causes}, retry_after_s=1)


def no_such_path() -> ApiError:
    """Nothing is served there; Kubernetes answers in plain text."""
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def method_not_allowed() -> ApiError:
    """The path is served, but not for this verb."""
    message = "the server does not allow this method on the requested resource"
    error = ApiError(405, "MethodNotAllowed", message)
    error.has_empty_details = True
    return error


def unsupported_media_type(accepted: Sequence[str]) -> ApiError:
    """The body is in a format that this resource does not take."""
    message = (
        "the body of the request was in an unknown format - accepted media types include: "
        + ", ".join(accepted)
    )
    return ApiError(415, "UnsupportedMediaType", message)


def too_large(limit_bytes: int) -> ApiError:
    """The body is longer than the server reads."""
    message = f"Request entity too large: limit is {limit_bytes}"
    return ApiError(413, "RequestEntityTooLarge", message)
