"""The OpenAPI document: as FastAPI derives it, with problem documents and credentials."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastapi import FastAPI

from service.api.middleware import MAX_KEY_CHARS, takes_key_here
from service.auth.permissions import Scope, rule_of
from service.schemas.common import Problem

_REFERENCE = "#/components/schemas/{model}"
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


_CONTENT = {
    "application/problem+json": {
        "schema": {"$ref": _REFERENCE.format(model="Problem")},
        "example": _EXAMPLE,
    }
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "description": "The request cannot be met; `code` and `fields` say why.",
        "content": _CONTENT,
    },
    "5XX": {"description": "Our fault.", "content": _CONTENT},
}
"""Of every route."""


def install(app: FastAPI) -> None:
    """Let `app` answer /openapi.json with the document."""
    derived = app.openapi
    app.openapi = cache(lambda: _complete(derived()))  # type: ignore[method-assign]


def _complete(document: dict[str, Any]) -> dict[str, Any]:
    components = document["components"]
    problem = Problem.model_json_schema(ref_template=_REFERENCE)
    components["schemas"] |= problem.pop("$defs", {}) | {"Problem": problem}
    components["securitySchemes"] = {
        "key": {
            "type": "http",
            "scheme": "bearer",
            "description": "An API key, an OIDC token, or for drivers the token of their attempt.",
        }
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if takes_key_here(method.upper(), path):
                operation.setdefault("parameters", []).append(_KEY_HEADER)
            rule = rule_of(method.upper(), path)
            # The second one says that SHARDLOOM_AUTH=none asks for none.
            operation["security"] = [] if rule.scope is Scope.PUBLIC else [{"key": []}, {}]
    return document
