"""Timelines speak to programs as well: actor, reason and facts of what happens to a job."""

from __future__ import annotations

from typing import Any

from tests.unit.service.api_house import Api
from tests.unit.service.builders import attempt_ended, batch, checkpoint
from tests.unit.service.house import House


def _line(api: Api, job_id: str, kind: str) -> dict[str, Any]:
    lines = api.http.get(f"/v1/jobs/{job_id}/events", params={"kind": kind}).json()["items"]
    found: dict[str, Any] = lines[-1]
    return found


def test_a_submission_says_who_and_what(api: Api) -> None:
    told = _line(api, api.submit(labels={"team": "ads"}, priority=7), "job_submitted")
    assert told["actor"] == "local"
    assert told["data"] == {
        "name": "tiny",
        "project": "default",
        "priority": 7,
        "labels": {"team": "ads"},
        "min_workers": 4,
        "max_workers": 4,
    }


def test_an_attempt_says_its_number_and_how_long_it_was_awaited(api: Api) -> None:
    told = _line(api, api.start(), "attempt_created")
    assert told["data"]["attempt"] == 0
    assert told["data"]["queued_s"] >= 0


def test_a_wish_says_who_had_it_and_when_in_the_jobs_life(api: Api) -> None:
    job_id = api.submit()
    api.end(job_id)
    asked = _line(api, job_id, "cancel_requested")
    assert (asked["actor"], asked["data"]) == ("local", {"was": "QUEUED"})
    ended = _line(api, job_id, "job_ended")
    assert ended["data"]["status"] == "CANCELLED"
    assert ended["data"]["reason"] == "cancelled"


def test_a_retry_says_reason_delay_and_what_it_costs(house: House) -> None:
    job = house.submit("running", "failed", max_failures=2)
    house.look(4)
    [told] = house.store.list_timeline(job.id, kinds=("retry_scheduled",))[:1]
    assert told.data["reason"] == "driver_lost"
    assert (told.data["num_failures"], told.data["max_failures"]) == (1, 2)
    assert told.data["delay_s"] > 0
    assert told.data["is_counted"] is True


def test_what_drivers_report_keeps_its_fields(api: Api) -> None:
    job_id = api.start()
    api.post_events(f"{job_id}-a0", batch(checkpoint(5), attempt_ended()))
    assert _line(api, job_id, "checkpoint_committed")["data"]["step"] == 5
    ended = _line(api, job_id, "attempt_ended")
    assert (ended["actor"], ended["data"]["reason"]) == ("driver", "completed")
