"""The whole REST API against its own OpenAPI document, by requests that schemathesis makes up.

No request may end in a 5xx, and every answer must be as the document says. Specs with anything in
any place are taken, or refused with the faulty fields. `make fuzz` makes up 10 000 of each:
SHARDLOOM_FUZZ_CASES says how many there are in all.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import yaml
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.app import build_app
from service.settings import Settings
from tests.conftest import EXAMPLE_SPEC
from tests.harness.builders import TINY_DATA, spec_document
from tests.harness.properties import examples

NUM_CASES = int(os.environ.get("SHARDLOOM_FUZZ_CASES", examples(400, fast=120)))
NUM_SPECS = int(os.environ.get("SHARDLOOM_FUZZ_CASES", examples(400, fast=100)))
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
        auth="none",
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
        wrongly = [GenerationMode.NEGATIVE] if _can_be_wrong(operation) else []
        for mode in (GenerationMode.POSITIVE, *wrongly):
            try:
                _ask(operation, mode, num_each)
            except BaseExceptionGroup as error:
                failures += [f"{operation.label}: {each}" for each in error.exceptions]
    assert not failures, "\n\n".join(failures)


def _can_be_wrong(operation: APIOperation[Any, Any, Any]) -> bool:
    """Whether a request may break the document: any text does as a part of a path."""
    return bool([*operation.body]) or any(
        each.location != "path" or each.definition["schema"].keys() & {"pattern", "maxLength"}
        for each in operation.iter_parameters()
    )


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


# ---- specs with anything in any place

Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """A service whose faults come back as answers."""
    home = tmp_path_factory.mktemp("specs")
    app = build_app(Settings(home=home, backend="fake", auth="none", dashboard=False))
    return TestClient(app, base_url="http://127.0.0.1:8700", raise_server_exceptions=False)


def places(document: Any, before: Place = ()) -> Iterator[Place]:
    """Where a document holds something."""
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield (*before, key)
        yield from places(value, (*before, key))


VALID: dict[str, Any] = yaml.safe_load(EXAMPLE_SPEC.read_text())
VALID["data"]["path"] = str(TINY_DATA)
PLACES = list(places(VALID))
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["auto", "\x00", "../..", "/", "a" * 5000, "\ud800".encode(errors="replace")]),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
).map(lambda value: value.decode() if isinstance(value, bytes) else value)


@given(places=st.lists(st.sampled_from(PLACES), min_size=1, max_size=3), data=st.data())
@settings(
    max_examples=NUM_SPECS,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_spec_is_taken_or_refused_by_its_fields(
    http: TestClient, places: list[Place], data: st.DataObject
) -> None:
    document = deepcopy(VALID)
    for place in places:
        _put(document, place, data.draw(ODD))
    dry_run = data.draw(st.booleans())
    response = http.post(
        "/v1/jobs", json={"spec": document}, params={"dry_run": str(dry_run).lower()}
    )
    assert response.status_code in (200, 201, 422), response.text
    if response.status_code == 422:
        problem = response.json()
        assert problem["fields"], problem
        assert all(fault["path"] and fault["message"] for fault in problem["fields"])


def _put(document: Any, place: Place, value: Any) -> None:
    *parents, last = place
    for key in parents:
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):
            return  # another change took it away
    if isinstance(document, dict) or (isinstance(document, list) and last in range(len(document))):
        document[last] = value
