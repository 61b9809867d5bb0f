"""Changes that are meant for a job as its reader saw it: ETag and If-Match."""

from __future__ import annotations

import httpx
import pytest

from service.client import ShardloomClient
from service.client_errors import Conflict
from service.domain import JobStatus
from tests.unit.service.api_house import Api, problem_in
from tests.unit.service.api_samples import problem_body


def etag(api: Api, job: str) -> str:
    """The tag of a job now."""
    return str(api.http.get(f"/v1/jobs/{job}").headers["ETag"])


def test_a_change_of_the_version_that_was_read_is_made_and_answers_with_the_new_tag(
    api: Api,
) -> None:
    job = api.submit()
    read = etag(api, job)
    answer = api.http.post(f"/v1/jobs/{job}:pause", headers={"If-Match": read})
    assert answer.status_code == 202
    assert answer.headers["ETag"] == etag(api, job) != read


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume", "restart"])
def test_a_change_that_was_meant_for_another_version_changes_nothing(api: Api, verb: str) -> None:
    job = api.submit()
    read = etag(api, job)
    assert api.http.post(f"/v1/jobs/{job}:pause").status_code == 202
    paused = etag(api, job)
    answer = api.http.post(f"/v1/jobs/{job}:{verb}", headers={"If-Match": read})
    problem_in(answer, 412, "version_changed")
    assert etag(api, job) == paused


def test_a_deletion_may_ask_for_a_version_too(api: Api) -> None:
    job = api.submit()
    read = etag(api, job)
    api.end(job)
    answer = api.http.delete(f"/v1/jobs/{job}", headers={"If-Match": read})
    problem_in(answer, 412, "version_changed")
    assert api.store.get_job(job).status is JobStatus.CANCELLED
    assert api.http.delete(f"/v1/jobs/{job}", headers={"If-Match": etag(api, job)}).is_success


@pytest.mark.parametrize("tag", ["7", 'W/"7"', '"seven"', '"7", "8"', '"' + "9" * 40 + '"'])
def test_a_tag_that_was_never_given_out_matches_nothing(api: Api, tag: str) -> None:
    job = api.submit()
    answer = api.http.post(f"/v1/jobs/{job}:cancel", headers={"If-Match": tag})
    problem_in(answer, 412, "version_unknown")
    assert not api.store.get_job(job).cancel_requested


def test_a_star_matches_any_version(api: Api) -> None:
    job = api.submit()
    assert api.http.post(f"/v1/jobs/{job}:cancel", headers={"If-Match": "*"}).status_code == 202


def test_the_sdk_sends_the_version_and_tells_of_a_conflict() -> None:
    sent: list[str] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["If-Match"])
        return httpx.Response(412, json=problem_body(412, "version_changed", "changed"))

    with ShardloomClient(transport=httpx.MockTransport(refuse)) as client:
        for change in (client.cancel, client.pause, client.resume, client.restart, client.delete):
            with pytest.raises(Conflict) as caught:
                change("ratings", version=7)
            assert caught.value.code == "version_changed"
    assert sent == ['"7"'] * 5
