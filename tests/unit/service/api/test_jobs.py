"""Jobs over REST: submitted, planned, listed, read, followed and cancelled."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from service.api import deps
from service.api.routers import system
from service.api.views import progress_of
from service.backends.base import ClusterWatch
from service.backends.fake import Script
from service.client.client import ShardloomClient
from service.db.engine import newest_revision
from service.domain.job_filter import JobFilter
from service.domain.lifecycle import decide
from service.domain.models import JobStatus, Observation, ObservedState, Progress
from service.storage import in_time
from tests.harness.builders import (
    NOW,
    attempt_ended,
    batch,
    checkpoint,
    metrics,
    progress,
    spec_document,
    workers_lost,
    workers_started,
)
from tests.harness.service import (
    Api,
    FakeService,
    problem_in,
    shardloom,
)
from tests.harness.wait import scaled
from trainer.layout.hosts import HostFacts

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


def test_a_repeated_submit_is_answered_though_nothing_is_as_it_was(
    api: Api, tmp_path: Path
) -> None:
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{}")
    api.backend.set_hosts(HostFacts("a", 4, 0, 4 << 30))
    large = [{"name": "users", "num_embeddings": 2 * 10**8, "embedding_dim": 8}]
    data = {"path": str(tmp_path), "label": {"column": "rating"}}
    body = {"spec": spec_document(data=data, embedding_tables=large)}
    headers = {"Idempotency-Key": "k"}
    first = api.http.post("/v1/jobs?force=true", json=body, headers=headers)
    manifest.unlink()
    again = api.http.post("/v1/jobs", json=body, headers=headers)
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])
    assert len(api.http.get("/v1/jobs").json()["items"]) == 1
    problem_in(api.http.post("/v1/jobs", json=body), 422, "invalid_spec")
    other = {"spec": {**body["spec"], "name": "other"}}
    response = api.http.post("/v1/jobs", json=other, headers=headers)
    assert "'k'" in problem_in(response, 409, "idempotency_conflict")["detail"]


def test_a_dry_run_plans_and_creates_nothing(api: Api) -> None:
    response = api.http.post("/v1/jobs?dry_run=true", json={"spec": spec_document()})
    plan = response.json()
    assert response.status_code == 200
    assert plan["sharding_groups"] == [[0, 2], [1, 3]]
    assert plan["replica_groups"] == [[0, 1], [2, 3]]
    assert plan["moment_scale"] == 2.0
    sgd = {"spec": spec_document(optimizer={"sparse": {"name": "sgd"}})}
    plan = api.http.post("/v1/jobs?dry_run=true", json=sgd).json()
    assert plan["moment_scale"] == 1.0, "there are no moments"
    assert api.http.get("/v1/jobs").json()["items"] == []


def test_a_plan_is_made_for_the_cluster_that_there_is(api: Api) -> None:
    state = api.http.app.state  # type: ignore[attr-defined]
    state.context = replace(state.context, cluster=ClusterWatch(api.backend, every_s=0))
    automatic = {"workers": {"min": 2, "max": 8}, "shard_group_size": 2, "survive": {"hosts": 1}}
    body = {"spec": spec_document(parallelism=automatic)}
    api.backend.set_hosts(HostFacts("a", 2, 0, 2**30), HostFacts("b", 2, 0, 2**30))
    plan = api.http.post("/v1/jobs?dry_run=true", json=body).json()
    assert plan["cluster"] == "2 host(s) with room for 2 + 2 worker(s)"
    assert plan["layout"]["world_size"] == 4
    api.backend.set_down(True)
    plan = api.http.post("/v1/jobs?dry_run=true", json=body).json()
    assert plan["cluster"] == "hosts not known"


@pytest.mark.parametrize("has_answered", [False, True], ids=["from the start", "since"])
def test_nobody_waits_for_a_cluster_that_hangs(
    api: Api, monkeypatch: pytest.MonkeyPatch, has_answered: bool
) -> None:
    state = api.http.app.state  # type: ignore[attr-defined]
    state.context = replace(state.context, cluster=ClusterWatch(api.backend, every_s=0))
    if has_answered:
        api.backend.set_hosts(HostFacts("a", 2, 0, 2**30))
        assert len(api.http.get("/v1/cluster").json()["hosts"]) == 1
    answers, waited = threading.Event(), []

    def hang() -> None:
        if not answers.wait(scaled(20.0)):
            waited.append("somebody waited for it")

    for module in (deps, system):
        monkeypatch.setattr(module, "CLUSTER_S", 0.1)
    for name in ("check", "hosts"):
        monkeypatch.setattr(api.backend, name, hang)
    try:
        found = api.http.get("/v1/cluster").json()
        assert (found["reachable"], found["hosts"]) == (False, [])
        plan = api.http.post("/v1/jobs?dry_run=true", json={"spec": spec_document()})
        assert plan.json()["cluster"] == "hosts not known"
        planned = api.http.post("/v1/plans", json={"spec": spec_document()})
        problem_in(planned, 422, "no_plan")
        assert waited == []
    finally:
        answers.set()


# ---- read, list, cancel


def test_jobs_are_paged_newest_first(api: Api) -> None:
    made = [api.submit(name=f"job{number}") for number in range(3)]
    first = api.http.get("/v1/jobs?limit=2").json()
    second = api.http.get("/v1/jobs", params={"limit": 2, "after": first["next"]}).json()
    found = [job["id"] for job in first["items"] + second["items"]]
    assert sorted(found) == sorted(made)
    assert found == sorted(found, reverse=True)
    assert second["next"] is None


def test_a_job_is_found_by_name_and_by_prefix(api: Api) -> None:
    job_id = api.submit()
    assert api.http.get("/v1/jobs/tiny").json()["id"] == job_id
    assert api.http.get(f"/v1/jobs/{job_id[:-1]}").json()["id"] == job_id
    other = api.submit(name="newer")
    assert api.http.get(f"/v1/jobs/{other}").json()["id"] == other
    problem_in(api.http.get("/v1/jobs/job-"), 404, "job_not_found")
    problem_in(api.http.get("/v1/jobs/nothing"), 404, "job_not_found")


def test_cancel_ends_a_queued_job_and_stops_a_submitted_one(api: Api) -> None:
    job_id = api.submit()
    response = api.http.post(f"/v1/jobs/{job_id}:cancel")
    assert (response.status_code, response.json()["status"]) == (202, "CANCELLED")
    problem = problem_in(api.http.post(f"/v1/jobs/{job_id}:cancel"), 409, "job_ended")
    assert "CANCELLED" in problem["detail"]
    job_id = api.start()
    assert api.http.post(f"/v1/jobs/{job_id}:cancel").json()["status"] == "STOPPING"
    assert api.http.post(f"/v1/jobs/{job_id}:cancel").status_code == 202
    api.poll(2)
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


def test_the_timeline_is_paged(api: Api) -> None:
    job_id = api.start()
    page = api.http.get(f"/v1/jobs/{job_id}/events?limit=2").json()
    rest = api.http.get(f"/v1/jobs/{job_id}/events?limit=1&after={page['next']}").json()
    kinds = [line["kind"] for line in page["items"] + rest["items"]]
    assert kinds == ["job_submitted", "attempt_created", "attempt_submitted"]
    assert rest["next"] is None


def test_lines_and_checkpoints_have_these_fields_and_no_nan(
    api: Api, client: ShardloomClient
) -> None:
    job_id = api.start()
    told_at = api.store.get_job(job_id).created_at
    saved = checkpoint(10).model_copy(
        update={"metrics": {"validation/rmse": math.nan}, "time": told_at}
    )
    api.post_events(f"{job_id}-a0", batch(saved))
    (found,) = api.http.get(f"/v1/jobs/{job_id}/checkpoints").json()["items"]
    assert found == {
        "job_id": job_id,
        "step": 10,
        "path": saved.path,
        "size_bytes": 1000,
        "created_at": told_at,
        "is_best": False,
        "metrics": {"validation/rmse": None},
    }
    assert math.isnan(client.checkpoints(job_id)[0].metrics["validation/rmse"])
    line = api.http.get(f"/v1/jobs/{job_id}/events").json()["items"][-1]
    assert line["data"].pop("metrics") == {"validation/rmse": None}
    assert line == {
        "id": line["id"],
        "job_id": job_id,
        "attempt_id": f"{job_id}-a0",
        "time": told_at,
        "kind": "checkpoint_committed",
        "message": line["message"],
        "actor": "driver",
        "data": line["data"],
    }
    job, attempt = api.store.get_job(job_id), api.store.get_attempt(f"{job_id}-a0")
    done = decide(job, attempt, Observation(ObservedState.SUCCEEDED), NOW)
    api.store.update_job(done.job, attempt=done.attempt, timeline=done.timeline)
    lines = api.http.get(f"/v1/jobs/{job_id}/events").json()["items"]
    assert [json.loads(each.data) for each in api.follow(f"{job_id}/events")[:-1]] == lines


# ---- streams


def test_a_followed_timeline_ends_with_the_job_and_resumes_behind_any_event(api: Api) -> None:
    job_id = api.submit()
    api.end(job_id)
    *lines, end = api.follow(f"{job_id}/events")
    kinds = [json.loads(line.data)["kind"] for line in lines]
    assert kinds == ["job_submitted", "cancel_requested", "job_ended"]
    assert (end.event, json.loads(end.data)) == ("end", {"status": "CANCELLED"})
    rest = api.follow(f"{job_id}/events", lines[0].id)[:-1]
    assert [line.json() for line in rest] == [line.json() for line in lines[1:]]


def test_log_names_cannot_leave_their_folder(api: Api) -> None:
    job_id = api.start()
    spoilt = ("../../../etc/passwd", "..", "../spec", "rank-1/../../x", "driver\n")
    for source in (*spoilt, "secrets", "group-1", "group-x-rank-1", "rank-"):
        response = api.http.get(f"/v1/jobs/{job_id}/logs", params={"source": source})
        problem_in(response, 404, "log_not_found")


def test_logs_are_those_of_the_jobs_own_attempts(api: Api) -> None:
    found = api.http.get(f"/v1/jobs/{api.submit()}/logs").json()
    assert (found["attempt_id"], found["lines"], found["sources"]) == (None, [], [])
    mine, other = api.start(), api.start(name="other")
    response = api.http.get(f"/v1/jobs/{mine}/logs?attempt={other}-a0")
    problem_in(response, 404, "attempt_not_found")


# ---- the service itself


def test_a_service_whose_reconciler_died_is_not_ready(api: Api) -> None:
    state = api.http.app.state
    state.context = replace(state.context, reconciler=Mock(has_died=True))
    problem = problem_in(api.http.get("/readyz"), 503, "reconciler_died")
    assert "Restart the service" in problem["detail"]
    assert api.http.get("/healthz").status_code == 200


def test_a_service_without_a_free_thread_is_healthy(api: Api) -> None:
    assert api.status_without_a_free_thread("GET", "/healthz") == 200


def test_routes_of_files_say_that_run_storage_is_broken(api: Api) -> None:
    job_id = api.start()
    api.settings.runs_dir.rename(api.settings.home / "aside")
    api.settings.runs_dir.touch()
    problem_in(api.http.get(f"/v1/jobs/{job_id}/logs"), 503, "storage_unavailable")


def test_readiness_says_what_cannot_be_reached_and_why(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = api.http.app.state
    state.context = replace(state.context, cluster=ClusterWatch(api.backend, every_s=0))
    body = api.http.get("/readyz").json()
    assert (body["cluster"]["reachable"], body["store"]["migration"]) == (True, newest_revision())
    assert body["storage"] == {"runs": "writable", "hanging": {}}
    mount, release = Path("/mnt/nfs/data"), threading.Event()
    with pytest.raises(TimeoutError):
        in_time(mount, release.wait, 0.05)
    assert api.http.get("/readyz").json()["storage"]["hanging"] == {"/mnt/nfs": 1}
    release.set()
    with monkeypatch.context() as patched:
        patched.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
        assert "Read-only" in api.http.get("/readyz").json()["storage"]["runs"]
    api.backend.set_down(True)
    shutil.rmtree(api.settings.runs_dir)
    api.settings.runs_dir.write_text("no folder")
    ready = api.http.get("/readyz")
    assert ready.status_code == 200, "jobs can be looked at, and started later"
    assert (ready.json()["cluster"]["reachable"], ready.json()["status"]) == (False, "ready")
    assert ready.json()["cluster"]["message"]
    assert str(api.settings.runs_dir) in ready.json()["storage"]["runs"]


# ---- ends of attempts


def test_an_attempt_tells_the_evidence_of_its_end_and_what_to_change(api: Api) -> None:
    job_id = api.start()
    evidence = {"rank": "1", "exception": "OutOfMemoryError"}
    ended = attempt_ended("device_oom").model_copy(update={"evidence": evidence})
    lost = workers_lost().model_copy(update={"reason": "device_oom", "evidence": evidence})
    told = batch(*[lost] * 4, ended, stream="driver")
    assert api.post_events(f"{job_id}-a0", told).status_code == 200
    api.backend.play(f"{job_id}-a0", Script(("failed",)))
    api.poll()
    (attempt,) = api.http.get(f"/v1/jobs/{job_id}/attempts").json()["items"]
    assert (attempt["end_reason"], attempt["evidence"]) == ("device_oom", evidence)
    assert "data.batch_size" in attempt["advice"]
    job = api.http.get(f"/v1/jobs/{job_id}").json()
    assert (job["status"], job["reason"]) == ("FAILED", "retries_exhausted")
    assert job["advice"] == attempt["advice"]
    (line,) = api.http.get(f"/v1/jobs/{job_id}/events?kind=attempt_ended").json()["items"]
    assert line["data"]["evidence"] == evidence
    counted = 'shardloom_ended_jobs_total{reason="device_oom",status="FAILED"} 1.0'
    assert counted in api.http.get("/metrics").text


# ---- filters of lists, over REST and in the CLI


@pytest.mark.every_database
def test_jobs_are_listed_by_project_labels_status_name_and_time(api: Api) -> None:
    first = api.submit(name="a", project="ads", labels={"team": "red", "tier": "1"})
    second = api.submit(name="b", project="ads", labels={"team": "blue"})
    third = api.submit(name="c", project="feed", labels={"team": "red"})
    api.end(first)
    created_at = api.http.get(f"/v1/jobs/{second}").json()["created_at"]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"project": "ads"}, [second, first]),
        ({"label": "team=red"}, [third, first]),
        ({"label": ["team=red", "tier=1"]}, [first]),
        ({"label": ["team=red", "tier=2"]}, []),
        ({"label": ["team=red", "team=blue"]}, []),
        ({"label": "team=red", "status": ["CANCELLED", "FAILED"]}, [first]),
        ({"project": "feed", "label": "team=blue"}, []),
        ({"status": ["CANCELLED", "FAILED"]}, [first]),
        ({"name": "b"}, [second]),
        ({"created_after": created_at}, [third, second]),
        ({"created_before": created_at}, [first]),
        ({"created_after": created_at, "created_before": created_at + 1e-6}, [second]),
        ({"created_before": "2031-01-01T00:00:00+02:00"}, [third, second, first]),
        ({"created_before": "2060-01-01"}, [third, second, first]),
    ]
    for params, wanted in cases:
        page = api.http.get("/v1/jobs", params=params).json()
        assert [job["id"] for job in page["items"]] == wanted, params


def test_ps_passes_every_filter_on(service: FakeService) -> None:
    labels = ["team=red", "tier=1", "team=blue"]
    command = ["ps", "--project", "ads", *(f"--label={label}" for label in labels)]
    command += ["--status=queued", "--name=n", "--search=x", "--metric", "ne<0.5"]
    result = shardloom(*command, "--since", "2026-11-20", "--until", "2026-11-21T12:00:00")
    assert result.exit_code == 0, result.output
    asked = service.requests[-1].url.params
    fields = JobFilter.model_fields.items()
    assert {field.alias or name for name, field in fields} <= {*asked, "after"}
    assert (asked["project"], asked.get_list("label")) == ("ads", labels)
    passed_s = float(asked["created_before"]) - float(asked["created_after"])
    assert passed_s == 36 * 3600
    refused = shardloom("ps", "--label", "team")
    assert (refused.exit_code, "KEY=VALUE" in refused.output) == (2, True)


# ---- progress


def test_list_and_detail_tell_percent_rows_and_time_left(api: Api) -> None:
    job_id = api.start()
    told = batch(workers_started(), progress(50, total_steps=200))
    assert api.post_events(f"{job_id}-a0", told).status_code == 200
    wanted = {"percent": 25.0, "rows": 3200, "rows_per_s": 640.0, "eta_s": 15.0, "step": 50}
    [listed] = api.http.get("/v1/jobs").json()["items"]
    for found in (listed, api.http.get(f"/v1/jobs/{job_id}").json()):
        assert wanted.items() <= found["progress"].items()


def test_half_of_the_rows_are_half_of_the_job_though_steps_had_other_sizes_before_a_resize() -> (
    None
):
    resized = Progress(step=10, total_steps=50, rows=5120, rows_per_s=64.0, eta_s=80.0)
    assert progress_of(resized, JobStatus.RUNNING).percent == 50.0
    for rows_per_s, eta_s in ((-64.0, 80.0), (0.0, 80.0), (math.inf, 0.0), (math.nan, 1.0)):
        told = replace(resized, rows_per_s=rows_per_s, eta_s=eta_s)
        assert progress_of(told, JobStatus.RUNNING).percent == 20.0, "by steps"


def test_a_job_that_does_not_run_has_no_time_left() -> None:
    found = Progress(step=1, total_steps=2, eta_s=9.0)
    assert progress_of(found, JobStatus.RUNNING).eta_s == 9.0
    for status in (JobStatus.QUEUED, JobStatus.PAUSED, JobStatus.FAILED):
        assert progress_of(found, status).eta_s is None
