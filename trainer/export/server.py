"""The scorer: one export over HTTP, without Shardloom's service.

python -m trainer.export.server DIR [--host 127.0.0.1] [--port 8800] [--threads 1]

POST /v1/predict   {"rows": [{column: value, ...}, ...]} -> a prediction for each row and task
GET  /v1/model     what is served, and what a row holds
GET  /healthz      200 as long as it can score
GET  /metrics      for Prometheus

Errors are RFC 9457 problems with a machine `code`; a row that cannot be scored refuses the whole
request and is named in `fields`.

Serves the export in DIR until SIGINT or SIGTERM; exits with 1 where it cannot start.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import uvicorn
from anyio import CapacityLimiter, to_thread
from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from trainer.export.artifact import BadRow, ExportError
from trainer.export.predict import Predictor
from trainer.spec.base import FieldProblem, request_problems

logger = logging.getLogger(__name__)
MAX_ROWS = 4096
MAX_BODY_BYTES = 16 * 2**20
PROBLEM_TYPE = "application/problem+json"
DEFAULT_PORT = 8800
# Requests scored at a time, each of which takes memory; others wait.
_MAX_AT_ONCE = 4
_SHUTDOWN_S = 10


class PredictRequest(BaseModel, extra="forbid"):
    """Rows to score, each a value by column as `/v1/model` names them.

    `raw` says which columns hold values of the raw data, and which vocabulary makes them ids.
    """

    rows: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_ROWS)]
    raw: Annotated[dict[str, str], Field(examples=[{"movie_id": "movie_id"}])] = {}


class Served(BaseModel):
    """The model that answered."""

    job: str
    checkpoint: str
    step: int
    quantize: str


class PredictAnswer(BaseModel):
    """One prediction by task for each row, in order; in the label's own unit."""

    predictions: list[dict[str, float]]
    model: Served


class Problem(BaseModel):
    """An RFC 9457 problem."""

    type: str = "about:blank"
    title: str
    status: int
    code: str
    detail: str
    fields: list[FieldProblem] = []


class ScorerMetrics:
    def __init__(self, served: Served) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "scorer_requests", "Requests to predict by status", ["status"], registry=self.registry
        )
        self.rows = Counter("scorer_rows", "Rows scored", registry=self.registry)
        self.seconds = Histogram(
            "scorer_predict_seconds",
            "Time to answer a request to predict",
            registry=self.registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
        )
        labels = ["model", "checkpoint", "quantize"]
        info = Gauge("scorer_model", "The export that is served", labels, registry=self.registry)
        info.labels(served.job, served.checkpoint, served.quantize).set(served.step)


def create_scorer(folder: Path) -> FastAPI:
    """The app that serves the export in `folder`; raises `ArtifactError`."""
    predictor = Predictor(folder)
    manifest = predictor.manifest
    served = Served.model_validate(manifest.model_dump(include=set(Served.model_fields)))
    metrics = ScorerMetrics(served)
    app = FastAPI(
        title=f"Scorer of {manifest.job}",
        summary="Predictions of a model exported by Shardloom.",
        version=f"{manifest.step}",
    )
    _add_error_handlers(app)
    _add_measuring(app, metrics)
    _add_routes(app, predictor, served, metrics)
    return app


def _add_routes(app: FastAPI, predictor: Predictor, served: Served, metrics: ScorerMetrics) -> None:
    example = {"rows": [predictor.features["example"]]}
    slots = CapacityLimiter(_MAX_AT_ONCE)
    body = Body(openapi_examples={"a row": {"summary": "One row", "value": example}})
    answers: dict[int | str, dict[str, Any]] = {
        code: {"model": Problem, "content": {PROBLEM_TYPE: {}}} for code in (413, 422)
    }

    def score(request: PredictRequest) -> PredictAnswer:
        found = predictor.predict(request.rows, request.raw)
        for task, values in found.items():
            if not (is_finite := np.isfinite(values)).all():  # which JSON could not say
                row = int(is_finite.argmin())
                raise BadRow(row, task, f"the prediction is {values[row]}; values are too large")
        metrics.rows.inc(len(request.rows))
        columns = [values.tolist() for values in found.values()]
        rows = [dict(zip(found, row, strict=True)) for row in zip(*columns, strict=True)]
        return PredictAnswer(predictions=rows, model=served)

    # Those that wait take none of the threads that all other routes share.
    @app.post("/v1/predict", summary="Score rows", responses=answers)
    async def predict(request: PredictRequest = body) -> PredictAnswer:
        return await to_thread.run_sync(score, request, limiter=slots)

    @app.get("/v1/model", summary="What is served, and what a row holds")
    def model() -> dict[str, Any]:
        return {"model": served.model_dump(), **predictor.features}

    @app.get("/healthz", summary="Whether it can score")
    def healthz() -> dict[str, str]:
        predictor.predict([predictor.features["example"]])
        return {"status": "ok"}

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_measuring(app: FastAPI, metrics: ScorerMetrics) -> None:
    @app.middleware("http")
    async def measure(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        if request.url.path != "/v1/predict":
            return await call_next(request)
        started = time.perf_counter()
        length = request.headers.get("content-length", "")
        # Without a length the body is chunked, and nobody knows how much comes.
        if request.method == "POST" and not length.isdecimal():
            response: Response = _refuse(411, "length_required", "send a Content-Length")
        elif request.method == "POST" and int(length) > MAX_BODY_BYTES:
            detail = f"the body has {length} bytes, {MAX_BODY_BYTES} are allowed; send fewer rows"
            response = _refuse(413, "body_too_large", detail)
        else:
            try:
                response = await call_next(request)
            except Exception:  # whatever PyTorch raises is counted and answered
                logger.exception("the rows of a request could not be scored")
                detail = "the rows could not be scored; the scorer's log says why"
                response = _refuse(500, "internal_error", detail)
        metrics.requests.labels(str(response.status_code)).inc()
        metrics.seconds.observe(time.perf_counter() - started)
        return response


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(BadRow)
    async def bad_row(request: Request, error: BadRow) -> Response:
        fault = FieldProblem(f"rows[{error.row}].{error.column}", "bad_value", error.problem)
        return _refuse(422, "bad_row", str(error), [fault])

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        faults = request_problems(error.errors())
        detail = "; ".join(f"{fault.path}: {fault.message}" for fault in faults)
        return _refuse(422, "invalid_request", detail, faults)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _refuse(error.status_code, "http_error", str(error.detail))


def _refuse(
    status: int, code: str, detail: str, fields: list[FieldProblem] | None = None
) -> Response:
    title = HTTPStatus(status).phrase
    problem = Problem(title=title, status=status, code=code, detail=detail, fields=fields or [])
    # A name in the request may hold half a character, which UTF-8 has no bytes for.
    text = json.dumps(problem.model_dump(), ensure_ascii=True)
    return Response(text, status_code=status, media_type=PROBLEM_TYPE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.export.server", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the export")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--threads", type=int, default=1, help="threads of one prediction")
    options = parser.parse_args(arguments)
    for name in ("torch", "torch._export"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    try:
        app = create_scorer(options.folder)
    except ExportError as error:
        print(f"cannot serve: {error}", file=sys.stderr, flush=True)
        return 1
    gc.freeze()  # or full collections, of all that torch imports, would hold requests up
    uvicorn.run(
        app,
        host=options.host,
        port=options.port,
        log_level="info",
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
