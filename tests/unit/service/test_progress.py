"""Progress wherever a job is shown: list, detail, stream and command line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from service.api.views import progress_of
from service.client_sse import parse_events
from service.domain import JobStatus, Progress
from tests.unit.service.api_house import Api
from tests.unit.service.api_samples import job_body
from tests.unit.service.builders import NOW, batch
from tests.unit.service.fake_service import FakeService, shardloom
from trainer.events import Progress as ProgressRecord


def _report(api: Api, job_id: str, step: int) -> None:
    record = ProgressRecord(
        time=NOW, step=step, total_steps=200, epoch=0, rows=step * 64, rows_per_s=640.0, eta_s=15.0
    )
    batch_of = batch(*[record] * step)
    assert api.post_events(f"{job_id}-a0", batch_of).status_code == 200


def _run(api: Api, job_id: str) -> None:
    job = api.store.get_job(job_id)
    api.store.update_job(replace(job, status=JobStatus.RUNNING, started_at=NOW))


def test_list_and_detail_tell_percent_rows_and_time_left(api: Api) -> None:
    job_id = api.start()
    _run(api, job_id)
    _report(api, job_id, 50)
    wanted = {"percent": 25.0, "rows": 3200, "rows_per_s": 640.0, "eta_s": 15.0, "step": 50}
    [listed] = api.http.get("/v1/jobs").json()["items"]
    for found in (listed, api.http.get(f"/v1/jobs/{job_id}").json()):
        assert wanted.items() <= found["progress"].items()


def test_a_job_that_does_not_run_has_no_time_left() -> None:
    progress = Progress(step=1, total_steps=2, eta_s=9.0)
    assert progress_of(progress, JobStatus.RUNNING).eta_s == 9.0
    for status in (JobStatus.QUEUED, JobStatus.PAUSED, JobStatus.FAILED):
        assert progress_of(progress, status).eta_s is None


def _stream(api: Api, job_id: str, **params: Any) -> list[Any]:
    response = api.http.get(
        f"/v1/jobs/{job_id}/events", params=params, headers={"Accept": "text/event-stream"}
    )
    return list(parse_events([response.text]))


def test_a_stream_tells_progress_if_asked(api: Api) -> None:
    job_id = api.start()
    _report(api, job_id, 50)
    api.http.post(f"/v1/jobs/{job_id}:cancel")
    for _ in range(3):
        api.look()
    assert {event.name for event in _stream(api, job_id)} == {"timeline", "end"}
    events = _stream(api, job_id, progress=True)
    [told] = [event for event in events if event.name == "progress"]
    assert json.loads(told.data)["percent"] == 25.0
    assert told.id == [event for event in events if event.name == "timeline"][-1].id


def test_the_command_line_lists_it(service: FakeService) -> None:
    body = job_body(status="RUNNING")
    body["progress"] |= {"rows": 1_200_000, "eta_s": 200.0, "percent": 45.0, "total_steps": 100}
    service.looks = [body]
    assert "45 %  1.2M rows  3m 20s left" in shardloom("ps").stdout
