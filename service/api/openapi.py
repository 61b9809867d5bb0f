"""The OpenAPI document: as FastAPI derives it, with problem documents and credentials."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from service.api.middleware import MAX_KEY_CHARS, takes_key_here
from service.auth.permissions import Scope, rule_of
from service.schemas.common import Problem

_PROBLEM = "application/problem+json"
_REFERENCE = "#/components/schemas/{model}"
_FASTAPI_MODELS = ("HTTPValidationError", "ValidationError")
_KEY_HEADER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "A request that is repeated with its key within a day gets the first answer.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
}
_EXAMPLE = {
    "type": "about:blank",
    "title": "Not found",
    "status": 404,
    "detail": "no job has the id or name 'ratings'; GET /v1/jobs lists them",
    "code": "job_not_found",
    "instance": "/v1/jobs/ratings",
    "fields": [],
}


def install(app: FastAPI) -> None:
    """Let `app` answer /openapi.json with the document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document_of(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document_of(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for model in _FASTAPI_MODELS:
        schemas.pop(model, None)
    problem = Problem.model_json_schema(ref_template=_REFERENCE)
    schemas |= problem.pop("$defs", {}) | {"Problem": problem}
    components["securitySchemes"] = {
        "key": {
            "type": "http",
            "scheme": "bearer",
            "description": "An API key, an OIDC token, or for drivers the token of their attempt.",
        }
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _describe_errors(operation)
            if takes_key_here(method.upper(), path):
                operation.setdefault("parameters", []).append(_KEY_HEADER)
            rule = rule_of(method.upper(), path)
            # The second one says that SHARDLOOM_AUTH=none asks for none.
            operation["security"] = [] if rule.scope is Scope.PUBLIC else [{"key": []}, {}]
    return document


def _describe_errors(operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    schema = {"$ref": _REFERENCE.format(model="Problem")}
    body = {_PROBLEM: {"schema": schema, "example": _EXAMPLE}}
    errors = {"4XX": "The request cannot be met; `code` and `fields` say why.", "5XX": "Our fault."}
    for status, description in errors.items():
        responses.setdefault(status, {"description": description, "content": body})
