"""Every error of the API as `application/problem+json` (RFC 9457).

Status and code of a `ServiceError` are attributes of its class (`service.errors`); a `SpecError`
becomes 422 `invalid_spec` with one field per fault, and anything unexpected 500 `internal_error`.
"""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from service.errors import InvalidRequest, ServiceError
from service.observability.logging_setup import request_id
from service.schemas.common import Problem
from trainer.spec.base import SpecError, request_problems

logger = logging.getLogger(__name__)


class ProblemResponse(JSONResponse):
    media_type = "application/problem+json"


def add_error_handlers(app: FastAPI) -> None:
    app.exception_handler(ServiceError)(answer_error)
    app.exception_handler(SpecError)(_on_spec_error)
    app.exception_handler(RequestValidationError)(_on_invalid_request)
    app.exception_handler(HTTPException)(_on_http_error)


def answer_error(request: Request, error: ServiceError) -> ProblemResponse:
    """The problem response to a request that failed with `error`."""
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.warning("%s %s: %s", request.method, request.url.path, error)
    return _respond(request, error)


def _respond(request: Request, error: ServiceError) -> ProblemResponse:
    problem = Problem(
        title=error.title,
        status=error.status,
        detail=str(error),
        code=error.code,
        instance=request.url.path,
        fields=list(error.fields),
    )
    body = {**problem.model_dump(), **error.extensions}
    if known := request_id.get():
        body["request_id"] = known
    return ProblemResponse(body, error.status, error.headers)


def _on_spec_error(request: Request, error: SpecError) -> ProblemResponse:
    problem = InvalidRequest(error.problems)
    problem.title, problem.code = "Invalid spec", "invalid_spec"
    return _respond(request, problem)


def _on_invalid_request(request: Request, error: RequestValidationError) -> ProblemResponse:
    return answer_error(request, InvalidRequest(request_problems(error.errors())))


def _on_http_error(request: Request, error: HTTPException) -> ProblemResponse:
    if isinstance(error.__cause__, ServiceError):  # FastAPI's of ours, from where it reads a body
        return answer_error(request, error.__cause__)
    status = HTTPStatus(error.status_code)
    problem = ServiceError(f"{request.method} {request.url.path}: {error.detail}")
    problem.title, problem.code, problem.status = status.phrase, status.name.lower(), status
    problem.headers = error.headers or {}
    return _respond(request, problem)


async def answer_unexpected(request: Request, error: Exception) -> ProblemResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    problem = ServiceError("the service failed on this request; its log says more")
    return _respond(request, problem)
