"""Specs with anything in any place: taken or refused with the faulty fields, never a 5xx."""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.main import build_app
from service.settings import Settings
from tests.conftest import EXAMPLE_SPEC
from tests.unit.service.builders import TINY_DATA

NUM_CASES = int(os.environ.get("SHARDLOOM_FUZZ_CASES", "400"))

Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> TestClient:
    """A service whose faults come back as answers."""
    home = tmp_path_factory.mktemp("specs")
    app = build_app(Settings(home=home, backend="fake", dashboard=False, rate_limit_per_s=1e9))
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


@given(
    places=st.lists(st.sampled_from(list(places(VALID))), min_size=1, max_size=3), data=st.data()
)
@settings(
    max_examples=NUM_CASES,
    deadline=None,
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
