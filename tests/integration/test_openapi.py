"""The whole REST API against its own OpenAPI document, by requests that schemathesis makes up.

No request may end in a 5xx, and every answer must be as the document says. `make fuzz` makes up
10 000 requests, valid and not: SHARDLOOM_FUZZ_CASES says how many there are in all.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.main import build_app
from service.settings import Settings
from tests.unit.service.builders import spec_document

NUM_CASES = int(os.environ.get("SHARDLOOM_FUZZ_CASES", "400"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
JOBS = ("lives", "ended")


@schemathesis.serializer("application/zip")
def zipped(ctx: Any, value: Any) -> bytes:
    """Any bytes in the place of an archive."""
    return bytes(value) if isinstance(value, bytes) else str(value).encode(errors="replace")


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> list[APIOperation[Any, Any, Any]]:
    """What can be asked of a service that knows two jobs."""
    app = build_app(_settings(tmp_path_factory.mktemp("fuzz")))
    http = TestClient(app, base_url="http://127.0.0.1:8700")
    for name in JOBS:
        answer = http.post("/v1/jobs", json={"spec": spec_document(name=name)})
        assert answer.status_code == 201, answer.text
    assert http.post("/v1/jobs/ended:cancel").status_code == 202
    # This also starts the app, whose reconciler then works on what the requests leave behind.
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    return [found.ok() for found in schema.get_all_operations()]


def _settings(home: Path) -> Settings:
    return Settings(
        home=home,
        backend="fake",
        dashboard=False,
        allowed_hosts=["testserver"],
        rate_limit_per_s=1e9,
        rate_limit_burst=10**9,
        attempt_rate_limit_per_s=1e9,
        attempt_rate_limit_burst=10**9,
    )


@pytest.mark.timeout(3600)
def test_every_answer_is_as_the_document_says(
    operations: list[APIOperation[Any, Any, Any]],
) -> None:
    assert len(operations) > 40
    num_each = max(1, NUM_CASES // (2 * len(operations)))
    failures = []
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            try:
                # What has no parameters cannot be asked wrongly.
                with suppress(Unsatisfiable):
                    _ask(operation, mode, num_each)
            except BaseExceptionGroup as error:
                failures += [f"{operation.label}: {each}" for each in error.exceptions]
    assert not failures, "\n\n".join(failures)


def _ask(operation: APIOperation[Any, Any, Any], mode: GenerationMode, num_cases: int) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_cases,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Case) -> None:
        made_up = case.path_parameters.get("job")
        if isinstance(made_up, str) and len(made_up) % 2:
            # A name that is made up is hardly ever that of a job.
            case.path_parameters["job"] = JOBS[len(made_up) // 2 % len(JOBS)]
        case.call_and_validate(checks=CHECKS)

    ask()
