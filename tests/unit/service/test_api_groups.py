"""Groups, lost hosts and how attempts ended, as the REST API tells them."""

from __future__ import annotations

import pytest

from service.backends.fake import Script
from tests.unit.service.api_house import Api
from tests.unit.service.builders import (
    HOSTS,
    attempt_ended,
    batch,
    group_lost,
    layout_chosen,
    membership_changed,
    recovered,
    workers_lost,
    workers_started,
)

SPREAD = {
    "workers": 6,
    "shard_group_size": 2,
    "placement": "inter_host",
    "survive": {"hosts": 1},
}


@pytest.fixture
def job_id(api: Api) -> str:
    """A running job that lost one of three groups."""
    started = api.start(parallelism=SPREAD)
    told = batch(
        layout_chosen(), workers_started(), membership_changed(), group_lost(1), recovered()
    )
    assert api.post_events(f"{started}-a0", told).status_code == 200
    return started


def test_a_job_tells_its_groups_copies_and_last_recovery(api: Api, job_id: str) -> None:
    membership = api.http.get(f"/v1/jobs/{job_id}").json()["membership"]
    assert (membership["num_current"], membership["num_wanted"]) == (2, 3)
    assert [member["group"] for member in membership["members"]] == [0, 2]
    assert membership["members"][0]["hosts"] == [HOSTS[0]] * 2
    (gone,) = membership["missing"]
    assert (gone["group"], gone["reason"]) == (1, "host_lost")
    assert membership["last_recovery"]["pause_s"] == 0.31
    assert membership["layout"]["failure_domain"] == "replica_group"
    assert membership["host_copies_needed"] == 2


def test_a_list_tells_how_many_groups_train_of_those_that_should(api: Api, job_id: str) -> None:
    (job,) = api.http.get("/v1/jobs").json()["items"]
    assert (job["num_current_groups"], job["num_wanted_groups"]) == (2, 3)


def test_a_job_that_told_no_groups_has_none(api: Api) -> None:
    job = api.http.get(f"/v1/jobs/{api.start()}").json()
    assert job["membership"] is None
    assert (job["num_current_groups"], job["num_wanted_groups"], job["advice"]) == (None, None, "")


def test_a_new_attempt_does_not_show_the_groups_of_the_last(api: Api, job_id: str) -> None:
    api.backend.play(f"{job_id}-a0", Script(("failed",)))
    api.look()
    job = api.store.get_job(job_id)
    assert job.num_failures == 1
    shown = api.http.get(f"/v1/jobs/{job_id}").json()
    assert shown["num_current_groups"] is None


def test_an_attempt_tells_the_evidence_of_its_end_and_what_to_change(api: Api, job_id: str) -> None:
    evidence = {"rank": "1", "exception": "OutOfMemoryError"}
    ended = attempt_ended("device_oom").model_copy(update={"evidence": evidence})
    lost = workers_lost().model_copy(update={"reason": "device_oom", "evidence": evidence})
    told = batch(*[lost] * 4, ended, stream="driver")
    assert api.post_events(f"{job_id}-a0", told).status_code == 200
    api.backend.play(f"{job_id}-a0", Script(("failed",)))
    api.look()
    (attempt,) = api.http.get(f"/v1/jobs/{job_id}/attempts").json()["items"]
    assert (attempt["end_reason"], attempt["evidence"]) == ("device_oom", evidence)
    assert "data.batch_size" in attempt["advice"]
    job = api.http.get(f"/v1/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("FAILED", "retries_exhausted")
    assert "reason of the last attempt" in job["advice"]
    (line,) = api.http.get(f"/v1/jobs/{job_id}/events?kind=attempt_ended").json()["items"]
    assert line["data"]["evidence"] == evidence


def test_lost_hosts_do_not_spend_the_budget(api: Api, job_id: str) -> None:
    lost = workers_lost().model_copy(update={"reason": "host_lost"})
    told = batch(*[lost] * 9, attempt_ended("host_lost"), stream="driver")
    assert api.post_events(f"{job_id}-a0", told).status_code == 200
    api.backend.play(f"{job_id}-a0", Script(("failed",)))
    api.look()
    job = api.http.get(f"/v1/jobs/{job_id}").json()
    assert (job["status"], job["num_failures"]) == ("QUEUED", 0)
