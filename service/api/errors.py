"""Every error of the API as `application/problem+json` (RFC 9457).

Status and code of a `ServiceError` are attributes of its class (`service.errors`); a `SpecError`
becomes 422 `invalid_spec` with one field per fault, and anything unexpected 500 `internal_error`.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service.errors import InvalidRequest, ServiceError
from service.observability.logging_setup import request_id
from service.schemas.common import Problem
from trainer.spec.base import FieldProblem, SpecError

logger = logging.getLogger(__name__)


def _problem_of(error: ServiceError) -> dict[str, object]:
    problem = Problem(
        title=error.title,
        status=error.status,
        detail=str(error),
        code=error.code,
        fields=list(error.fields),
    )
    return {**problem.model_dump(), **error.extensions}


class ProblemResponse(JSONResponse):
    """A problem document."""

    media_type = "application/problem+json"


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of `app` with a problem."""
    app.exception_handler(ServiceError)(answer_error)
    app.exception_handler(SpecError)(_on_spec_error)
    app.exception_handler(RequestValidationError)(_on_invalid_request)
    app.exception_handler(HTTPException)(_on_http_error)
    app.exception_handler(Exception)(_on_unexpected)


def _respond(request: Request, problem: dict[str, Any], **options: Any) -> ProblemResponse:
    body = {**problem, "instance": request.url.path}
    if known := request_id.get():
        body["request_id"] = known
    return ProblemResponse(body, status_code=int(problem["status"]), **options)


def answer_error(request: Request, error: ServiceError) -> ProblemResponse:
    """The problem response to a request that failed with `error`."""
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.warning("%s %s: %s", request.method, request.url.path, error)
    return _respond(request, _problem_of(error), headers=error.headers)


def _on_spec_error(request: Request, error: SpecError) -> ProblemResponse:
    problem = Problem(
        title="Invalid spec",
        status=422,
        detail=str(error),
        code="invalid_spec",
        fields=list(error.problems),
    )
    return _respond(request, problem.model_dump())


def _on_invalid_request(request: Request, error: RequestValidationError) -> ProblemResponse:
    faults = [
        FieldProblem(path=_path(fault), code=fault["type"], message=fault["msg"])
        for fault in error.errors()
    ]
    return _respond(request, _problem_of(InvalidRequest(faults)))


def _path(fault: dict[str, Any]) -> str:
    # The first part says where the field was (body, query, path, header), not what it is called.
    where, *parts = fault["loc"]
    if fault["type"] == "json_invalid":
        return str(where)
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or str(where)


def _on_http_error(request: Request, error: HTTPException) -> ProblemResponse:
    status = HTTPStatus(error.status_code)
    problem = Problem(
        title=status.phrase,
        status=status,
        detail=f"{request.method} {request.url.path}: {error.detail}",
        code=status.name.lower(),
    )
    return _respond(request, problem.model_dump(), headers=error.headers)


def _on_unexpected(request: Request, error: Exception) -> ProblemResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    problem = Problem(
        title=ServiceError.title,
        status=ServiceError.status,
        detail="the service failed on this request; its log says more",
        code=ServiceError.code,
    )
    return _respond(request, problem.model_dump())
