"""Which jobs a list holds: by status, project, labels, name and time, over REST and in the CLI."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.service.api_house import Api, problem_in
from tests.unit.service.fake_service import FakeService, shardloom


def ids(api: Api, **params: object) -> list[str]:
    """Ids on the first page."""
    response = api.http.get("/v1/jobs", params=params)  # type: ignore[arg-type]
    assert response.status_code == 200, response.text
    return [job["id"] for job in response.json()["items"]]


@pytest.fixture
def three(api: Api) -> list[str]:
    """Jobs of two projects, oldest first."""
    return [
        api.submit(name="a", project="ads", labels={"team": "red", "tier": "1"}),
        api.submit(name="b", project="ads", labels={"team": "blue"}),
        api.submit(name="c", project="feed", labels={"team": "red"}),
    ]


def test_jobs_are_listed_by_project_and_labels(api: Api, three: list[str]) -> None:
    first, second, third = three
    assert ids(api, project="ads") == [second, first]
    assert ids(api, label="team=red") == [third, first]
    assert ids(api, label=["team=red", "tier=1"]) == [first]
    assert ids(api, project="feed", label="team=blue") == []


def test_jobs_are_listed_by_the_time_of_their_creation(api: Api, three: list[str]) -> None:
    created = [api.http.get(f"/v1/jobs/{job}").json()["created_at"] for job in three]
    assert ids(api, created_after=created[1]) == [three[2], three[1]]
    assert ids(api, created_before=created[1]) == [three[0]]
    assert ids(api, created_after="2031-01-01T00:00:00Z") == []
    assert ids(api, created_before="2031-01-01T00:00:00+02:00") == three[::-1]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"label": [f"k{number}=x" for number in range(21)]}, "label"),
        ({"status": ["QUEUED"] * 21}, "status"),
        ({"label": "team"}, "label[0]"),
        ({"label": "=red"}, "label[0]"),
        ({"created_after": "yesterday"}, "created_after"),
    ],
)
def test_a_filter_that_cannot_be_read_is_refused_by_name(
    api: Api, params: dict[str, Any], field: str
) -> None:
    problem = problem_in(api.http.get("/v1/jobs", params=params), 422, "invalid_request")
    assert [fault["path"] for fault in problem["fields"]] == [field]


def test_ps_passes_every_filter_on(service: FakeService) -> None:
    command = ["ps", "--project", "ads", "--label", "team=red", "--label", "tier=1"]
    result = shardloom(*command, "--since", "2026-11-20", "--until", "2026-11-21T12:00:00")
    assert result.exit_code == 0, result.output
    asked = service.requests[-1].url.params
    assert (asked["project"], asked.get_list("label")) == ("ads", ["team=red", "tier=1"])
    passed_s = float(asked["created_before"]) - float(asked["created_after"])
    assert passed_s == 36 * 3600


def test_ps_refuses_a_label_without_a_value(service: FakeService) -> None:
    result = shardloom("ps", "--label", "team")
    assert result.exit_code == 2
    assert "KEY=VALUE" in result.output
