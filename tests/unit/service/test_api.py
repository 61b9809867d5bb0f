"""The REST API over a real store and the scripted backend."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from service.backends.base import HostFacts
from service.backends.fake import FakeBackend
from service.client_sse import parse_events
from service.domain import EndReason, Job, JobStatus, Observation, ObservedState
from service.lifecycle import decide
from service.logs import LogPosition
from service.main import create_app
from service.settings import Settings
from service.store.engine import newest_revision
from service.store.sql import SqlJobStore
from tests.unit.service.api_house import LOOPBACK_URL, Api, problem_in
from tests.unit.service.builders import (
    NOW,
    attempt_ended,
    attempt_of,
    batch,
    checkpoint,
    metrics,
    spec_document,
    workers_started,
)

SSE = {"Accept": "text/event-stream"}


def _events(response: Any) -> list[tuple[str, str, Any]]:
    found = parse_events(response.iter_text())
    return [(event.name, event.id, json.loads(event.data)) for event in found]


# ---- submit


def test_a_submitted_job_is_queued_and_located(api: Api) -> None:
    response = api.http.post("/v1/jobs", json={"spec": spec_document(labels={"team": "x"})})
    job = response.json()
    assert response.status_code == 201
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (job["status"], job["name"], job["labels"]) == ("QUEUED", "tiny", {"team": "x"})
    assert (job["world_size"], job["shard_group_size"], job["num_replicas"]) == (4, 2, 2)
    assert job["num_attempts"] == 0
    assert Path(job["run_dir"]).is_absolute()
    assert api.http.get(response.headers["location"]).json() == job


def test_the_same_key_and_spec_make_one_job(api: Api) -> None:
    headers = {"Idempotency-Key": "once"}
    body = {"spec": spec_document()}
    first = api.http.post("/v1/jobs", json=body, headers=headers).json()
    again = api.http.post("/v1/jobs", json=body, headers=headers).json()
    assert first["id"] == again["id"]
    assert len(api.http.get("/v1/jobs").json()["items"]) == 1


def test_a_repeated_submit_is_answered_though_its_data_went_away(api: Api, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    body = {"spec": spec_document(data={"path": str(tmp_path), "label": {"column": "rating"}})}
    headers = {"Idempotency-Key": "k"}
    first = api.http.post("/v1/jobs", json=body, headers=headers)
    manifest.unlink()
    again = api.http.post("/v1/jobs", json=body, headers=headers)
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
    problem_in(api.http.post("/v1/jobs", json=body), 422, "invalid_spec")


def test_the_same_key_with_another_spec_conflicts(api: Api) -> None:
    headers = {"Idempotency-Key": "once"}
    api.http.post("/v1/jobs", json={"spec": spec_document()}, headers=headers)
    other = {"spec": spec_document(name="other")}
    response = api.http.post("/v1/jobs", json=other, headers=headers)
    assert "'once'" in problem_in(response, 409, "idempotency_conflict")["detail"]


def test_a_dry_run_plans_and_creates_nothing(api: Api) -> None:
    response = api.http.post("/v1/jobs?dry_run=true", json={"spec": spec_document()})
    plan = response.json()
    assert response.status_code == 200
    assert plan["sharding_groups"] == [[0, 2], [1, 3]]
    assert plan["replica_groups"] == [[0, 1], [2, 3]]
    assert plan["moment_scale"] == 2.0
    assert api.http.get("/v1/jobs").json()["items"] == []


def test_a_plan_is_made_for_the_cluster_that_there_is(api: Api) -> None:
    automatic = {"workers": {"min": 2, "max": 8}, "shard_group_size": 2, "survive": {"hosts": 1}}
    body = {"spec": spec_document(parallelism=automatic)}
    api.backend.set_hosts(HostFacts("a", 2, 0, 2**30), HostFacts("b", 2, 0, 2**30))
    plan = api.http.post("/v1/jobs?dry_run=true", json=body).json()
    assert plan["cluster"] == "2 host(s) with room for 2 + 2 worker(s)"
    assert plan["layout"]["world_size"] == 4
    api.backend.set_down(True)
    plan = api.http.post("/v1/jobs?dry_run=true", json=body).json()
    assert plan["cluster"] == "hosts not known"


def test_a_job_whose_layout_is_open_is_listed_and_shown(api: Api) -> None:
    job_id = api.submit(
        parallelism={
            "workers": {"min": 2, "max": 6},
            "shard_group_size": "auto",
            "placement": "auto",
        }
    )
    for job in (
        api.http.get(f"/v1/jobs/{job_id}").json(),
        api.http.get("/v1/jobs").json()["items"][0],
    ):
        assert (job["min_workers"], job["world_size"]) == (2, 6)
        assert (job["shard_group_size"], job["num_replicas"]) == (None, None)


def test_a_folder_to_start_from_that_is_not_there_is_refused(api: Api) -> None:
    warm_start = {"warm_start": {"path": "/nowhere/checkpoints"}}
    response = api.http.post("/v1/jobs", json={"spec": spec_document(checkpoint=warm_start)})
    fields = problem_in(response, 422, "invalid_spec")["fields"]
    assert [field["path"] for field in fields] == ["checkpoint.warm_start.path"]


def test_a_plan_scales_no_moments_where_there_are_none(api: Api) -> None:
    spec = spec_document(optimizer={"sparse": {"name": "sgd"}})
    response = api.http.post("/v1/jobs?dry_run=true", json={"spec": spec})
    assert response.json()["moment_scale"] == 1.0


# ---- read, list, cancel


def test_jobs_are_paged_newest_first(api: Api) -> None:
    made = [api.submit(name=f"job{number}") for number in range(3)]
    first = api.http.get("/v1/jobs?limit=2").json()
    second = api.http.get("/v1/jobs", params={"limit": 2, "after": first["next"]}).json()
    found = [job["id"] for job in first["items"] + second["items"]]
    assert sorted(found) == sorted(made)
    assert found == sorted(found, reverse=True)
    assert second["next"] is None


def test_jobs_are_filtered(api: Api) -> None:
    kept, ended = api.submit(name="kept"), api.submit(name="ended")
    api.end(ended)
    found = api.http.get("/v1/jobs?status=CANCELLED&status=FAILED").json()["items"]
    assert [job["id"] for job in found] == [ended]
    found = api.http.get("/v1/jobs?name=kept").json()["items"]
    assert [job["id"] for job in found] == [kept]


def test_a_job_is_found_by_name_and_by_prefix(api: Api) -> None:
    job_id = api.submit()
    assert api.http.get("/v1/jobs/tiny").json()["id"] == job_id
    assert api.http.get(f"/v1/jobs/{job_id[:-1]}").json()["id"] == job_id
    other = api.submit(name="newer")
    assert api.http.get(f"/v1/jobs/{other}").json()["id"] == other
    problem_in(api.http.get("/v1/jobs/job-"), 404, "job_not_found")
    problem_in(api.http.get("/v1/jobs/nothing"), 404, "job_not_found")


def test_cancel_of_a_queued_job_ends_it_and_a_second_one_conflicts(api: Api) -> None:
    job_id = api.submit()
    response = api.http.post(f"/v1/jobs/{job_id}:cancel")
    assert (response.status_code, response.json()["status"]) == (202, "CANCELLED")
    problem = problem_in(api.http.post(f"/v1/jobs/{job_id}:cancel"), 409, "job_ended")
    assert "CANCELLED" in problem["detail"]


def test_cancel_of_a_submitted_job_stops_it(api: Api) -> None:
    job_id = api.start()
    assert api.http.post(f"/v1/jobs/{job_id}:cancel").json()["status"] == "STOPPING"
    assert api.http.post(f"/v1/jobs/{job_id}:cancel").status_code == 202
    api.look()
    api.look()
    job = api.http.get(f"/v1/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("CANCELLED", "cancelled")
    (attempt,) = api.http.get(f"/v1/jobs/{job_id}/attempts").json()["items"]
    assert attempt["end_reason"] == "cancelled"


# ---- records


def test_records_are_acknowledged_once_and_gaps_answered(api: Api) -> None:
    job_id = api.start()
    attempt_id = f"{job_id}-a0"
    first = batch(workers_started(), metrics(1, train_loss=1.0))
    assert api.post_events(attempt_id, first).json() == {"stream": "rank-0", "next_seq": 2}
    assert api.post_events(attempt_id, first).json() == {"stream": "rank-0", "next_seq": 2}
    gap = api.post_events(attempt_id, batch(metrics(2, train_loss=1.0), first_seq=5))
    assert problem_in(gap, 409, "sequence_gap")["next_seq"] == 2
    assert api.http.get(f"/v1/jobs/{job_id}").json()["status"] == "RUNNING"
    problem_in(api.post_events("job-x-a0", first), 404, "attempt_not_found")


def test_a_record_of_an_unknown_kind_is_refused_with_its_path(api: Api) -> None:
    body = {"stream": "rank-0", "first_seq": 0, "events": [{"kind": "dance", "time": 1}]}
    response = api.http.post(f"/v1/attempts/{api.start()}-a0/events", json=body)
    assert problem_in(response, 422, "invalid_request")["fields"][0]["path"] == "events[0]"


def test_metrics_come_as_series_and_nan_as_null(api: Api) -> None:
    job_id = api.start()
    losses = [3.0, math.nan, math.inf]
    records = [metrics(step, train_loss=loss, speed_x=1.0) for step, loss in enumerate(losses)]
    assert api.post_events(f"{job_id}-a0", batch(*records)).status_code == 200
    found = api.http.get(f"/v1/jobs/{job_id}/metrics?name=train/loss").json()
    assert found["names"] == ["speed/x", "train/loss"]
    (series,) = found["series"]
    assert [point["value"] for point in series["points"]] == [3.0, None, None]
    assert len(api.http.get(f"/v1/jobs/{job_id}/metrics").json()["series"]) == 2
    latest = api.http.get(f"/v1/jobs/{job_id}").json()["latest_metrics"]
    assert latest == {"speed/x": 1.0, "train/loss": None}
    ranged = api.http.get(f"/v1/jobs/{job_id}/metrics?name=speed/x&from_step=1&max_points=1").json()
    assert [point["step"] for point in ranged["series"][0]["points"]] == [2]


def test_checkpoints_are_listed(api: Api) -> None:
    job_id = api.start()
    api.post_events(f"{job_id}-a0", batch(checkpoint(10), checkpoint(20, is_best=True)))
    found = api.http.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"]
    assert [(c["step"], c["is_best"]) for c in found] == [(10, False), (20, True)]


def test_the_timeline_is_paged(api: Api) -> None:
    job_id = api.start()
    page = api.http.get(f"/v1/jobs/{job_id}/events?limit=2").json()
    rest = api.http.get(f"/v1/jobs/{job_id}/events?after={page['next']}").json()
    kinds = [line["kind"] for line in page["items"] + rest["items"]]
    assert kinds == ["job_submitted", "attempt_created", "attempt_submitted"]
    assert rest["next"] is None


def test_a_reported_nan_does_not_break_the_timeline(api: Api) -> None:
    job_id = api.start()
    ended = attempt_ended().model_copy(update={"final_metrics": {"train/loss": math.nan}})
    api.post_events(f"{job_id}-a0", batch(ended))
    response = api.http.get(f"/v1/jobs/{job_id}/events")
    assert response.status_code == 200
    json.loads(response.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


# ---- streams


def test_a_followed_timeline_ends_with_the_job(api: Api) -> None:
    job_id = api.submit()
    api.end(job_id)
    with api.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=SSE) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = _events(response)
    kinds = [body["kind"] for name, _, body in events if name == "timeline"]
    assert kinds == ["job_submitted", "cancel_requested", "job_ended"]
    assert events[-1][0] == "end"
    assert events[-1][2] == {"status": "CANCELLED"}


def test_a_followed_timeline_resumes_behind_the_last_event(api: Api) -> None:
    job_id = api.submit()
    api.end(job_id)
    first_id = str(api.store.list_timeline(job_id)[0].id)
    headers = {**SSE, "Last-Event-ID": first_id}
    with api.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as response:
        events = _events(response)
    assert [body["kind"] for _, _, body in events[:-1]] == ["cancel_requested", "job_ended"]
    refused = api.http.get(f"/v1/jobs/{job_id}/events", headers={**SSE, "Last-Event-ID": "x"})
    assert problem_in(refused, 422, "invalid_request")["fields"][0]["path"] == "Last-Event-ID"


def test_followed_logs_go_on_into_the_next_attempt_and_end_with_the_job(api: Api) -> None:
    job_id = api.start()
    _replace_attempt(api, job_id)
    api.log(f"{job_id}-a0", "driver", "one\nlast words")
    api.log(f"{job_id}-a1", "driver", "two\n")
    job = api.store.get_job(job_id)
    done = _end_newest(api, job)
    assert done is JobStatus.SUCCEEDED
    path = f"/v1/jobs/{job_id}/logs?follow=true"
    cursor = api.http.get(f"/v1/jobs/{job_id}/logs?attempt={job_id}-a0").json()["cursor"]
    with api.http.stream("GET", path, headers={"Last-Event-ID": _start(job_id)}) as response:
        events = _events(response)
    assert [body["text"] for name, _, body in events if name == "log"] == [
        "one",
        "last words",
        "two",
    ]
    assert events[-1][0] == "end"
    with api.http.stream("GET", path, headers={"Last-Event-ID": cursor}) as response:
        assert [body.get("text") for _, _, body in _events(response)] == ["two", None]


def test_logs_are_read_in_pieces_by_cursor(api: Api) -> None:
    job_id = api.start()
    attempt_id = f"{job_id}-a0"
    api.log(attempt_id, "driver", "up\n")
    api.log(attempt_id, "rank-0", "a\nb\n")
    first = api.http.get(f"/v1/jobs/{job_id}/logs").json()
    assert first["sources"] == ["driver", "rank-0"]
    assert [(line["source"], line["text"]) for line in first["lines"]] == [
        ("driver", "up"),
        ("rank-0", "a"),
        ("rank-0", "b"),
    ]
    api.log(attempt_id, "rank-0", "c\n")
    second = api.http.get(f"/v1/jobs/{job_id}/logs", params={"after": first["cursor"]}).json()
    assert [line["text"] for line in second["lines"]] == ["c"]
    tail = api.http.get(f"/v1/jobs/{job_id}/logs?source=rank-0&tail=2").json()
    assert [line["text"] for line in tail["lines"]] == ["b", "c"]


@pytest.mark.parametrize("source", ["../../../etc/passwd", "..", "secrets"])
def test_log_names_cannot_leave_their_folder(api: Api, source: str) -> None:
    job_id = api.start()
    response = api.http.get(f"/v1/jobs/{job_id}/logs", params={"source": source})
    problem_in(response, 404, "log_not_found")


def test_attempts_of_other_jobs_are_not_shown(api: Api) -> None:
    mine, other = api.start(), api.start(name="other")
    response = api.http.get(f"/v1/jobs/{mine}/logs?attempt={other}-a0")
    problem_in(response, 404, "attempt_not_found")
    problem_in(api.http.get(f"/v1/jobs/{mine}/logs?after=junk"), 422, "invalid_request")


def test_a_job_that_never_ran_has_no_logs(api: Api) -> None:
    found = api.http.get(f"/v1/jobs/{api.submit()}/logs").json()
    assert (found["attempt_id"], found["lines"], found["sources"]) == (None, [], [])


def test_a_stream_of_a_live_job_stops_when_the_server_does(api: Api) -> None:
    job_id = api.start()
    app = api.http.app
    assert isinstance(app, FastAPI)
    app.state.context.closing.set()
    with api.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=SSE) as response:
        assert _events(response) == []


# ---- the service itself


def test_a_service_whose_reconciler_died_is_not_ready(api: Api) -> None:
    state = api.http.app.state
    state.context = replace(state.context, has_died=lambda: True)
    problem = problem_in(api.http.get("/readyz"), 503, "reconciler_died")
    assert "Restart the service" in problem["detail"]
    assert api.http.get("/healthz").status_code == 200


def test_health_readiness_and_cluster(api: Api) -> None:
    assert api.http.get("/healthz").json() == {"status": "ok"}
    assert api.http.get("/v1/cluster").json()["reachable"] is True
    api.backend.set_down(True)
    assert api.http.get("/v1/cluster").json()["reachable"] is False
    ready = api.http.get("/readyz")
    assert (ready.status_code, ready.json()["store"]["migration"]) == (200, newest_revision())


def test_prometheus_counts_records(api: Api) -> None:
    job_id = api.start()
    api.post_events(f"{job_id}-a0", batch(metrics(1, train_loss=1.0)))
    assert "shardloom_events_received_total 1.0" in api.http.get("/metrics").text


def test_the_api_describes_itself(api: Api) -> None:
    described = api.http.get("/openapi.json").json()
    operations = [o for path in described["paths"].values() for o in path.values()]
    assert all(operation["summary"] for operation in operations)
    assert "/v1/jobs/{job}:cancel" in described["paths"]


def test_the_app_runs_its_reconciler_and_closes_it(
    store: SqlJobStore, app_settings: Settings
) -> None:
    backend = FakeBackend(app_settings.home / "fake")
    settings = app_settings.model_copy(update={"reconcile_interval_s": 0.01})
    with TestClient(create_app(settings, store, backend), base_url=LOOPBACK_URL) as http:
        job_id = http.post("/v1/jobs", json={"spec": spec_document()}).json()["id"]
        with http.stream("GET", f"/v1/jobs/{job_id}/events", headers=SSE) as response:
            for event in parse_events(response.iter_text()):
                body = json.loads(event.data)
                if event.name == "timeline" and body["kind"] == "attempt_submitted":
                    http.post(f"/v1/jobs/{job_id}:cancel")
        assert http.get(f"/v1/jobs/{job_id}").json()["status"] == "CANCELLED"
    assert backend.attempt_ids() == [f"{job_id}-a0"]


def _start(job_id: str) -> str:
    return LogPosition(f"{job_id}-a0").encode()


def _replace_attempt(api: Api, job_id: str) -> None:
    """Lose the first attempt and put a second one in its place."""
    job = api.store.get_job(job_id)
    first = api.store.get_attempt(f"{job_id}-a0")
    lost = replace(first, ended_at=NOW, end_reason=EndReason.DRIVER_LOST)
    job = api.store.update_job(job, attempt=lost)
    second = attempt_of(job, index=1, submitted_at=NOW)
    api.store.update_job(replace(job, current_attempt_id=second.id), attempt=second)


def _end_newest(api: Api, job: Job) -> JobStatus:
    attempt = api.store.get_attempt(f"{job.id}-a{job.num_attempts - 1}")
    decision = decide(job, attempt, Observation(ObservedState.SUCCEEDED), NOW)
    api.store.update_job(decision.job, attempt=decision.attempt, timeline=decision.timeline)
    return decision.job.status
