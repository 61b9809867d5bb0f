"""Jobs paused, cloned, restarted, queued and changed as they were read: REST, SDK and CLI."""

from __future__ import annotations

import json

import httpx
import pytest

from service.client.client import ShardloomClient
from service.client.errors import Conflict, InvalidRequest, NotFound
from service.domain.models import JobStatus
from service.jobs.run_storage import run_dir_of
from service.sweeps.search import spec_of_trial
from tests.harness.builders import batch, checkpoint, progress, spec_document
from tests.harness.service import Api, end, problem_body, problem_in, running, shardloom
from trainer.layout.hosts import HostFacts


def test_a_job_pauses_and_goes_on_with_another_attempt(api: Api, client: ShardloomClient) -> None:
    job_id = running(api)
    queued_at = api.store.get_job(job_id).queued_at
    paused = client.pause(job_id)
    assert (paused.status, paused.pause_requested) == (JobStatus.RUNNING, True)
    assert client.pause(job_id).version == paused.version
    api.poll()
    files = api.files(job_id)
    assert "id" in json.loads(files.pause_request_path.read_text())
    end(api, job_id, "paused")
    rested = client.get_job(job_id)
    assert (rested.status, rested.pause_requested, rested.num_failures) == ("PAUSED", False, 0)
    api.poll()
    assert len(client.attempts(job_id)) == 1
    resumed = client.resume(job_id)
    assert resumed.status is JobStatus.QUEUED
    api.poll()
    assert [attempt.index for attempt in client.attempts(job_id)] == [0, 1]
    assert api.store.get_job(job_id).queued_at == queued_at
    actors = {e.kind: e.actor for e in client.iter_events(job_id)}
    assert "job_paused" in actors
    assert actors["pause_requested"] == actors["resume_requested"] == "local"


def test_what_makes_no_sense_is_a_conflict(api: Api, client: ShardloomClient) -> None:
    job_id = running(api)
    with pytest.raises(Conflict, match="not paused"):
        client.resume(job_id)
    with pytest.raises(Conflict, match="has not ended"):
        client.delete(job_id)
    with pytest.raises(Conflict, match="pause or cancel it"):
        client.restart(job_id)
    end(api, job_id)
    with pytest.raises(Conflict, match="already ended"):
        client.pause(job_id)
    with pytest.raises(NotFound, match=r"has no checkpoint yet \(clone the job"):
        client.restart(job_id)


# ---- clone


def test_a_clone_is_a_job_of_its_own_with_changes(api: Api, client: ShardloomClient) -> None:
    trial = {"sweep": "sweep-1", "trial": "3"}
    job_id = api.submit(labels={"team": "ads", "run": "1", **trial})
    made = client.clone(
        job_id,
        name="larger",
        set={
            "training.epochs": 3,
            "parallelism.workers": 8,
            "labels": {"team": "ads", "kind": "clone"},
            "priority": 7,
        },
    )
    assert (made.id != job_id, made.name, made.spec.training.epochs) == (True, "larger", 3)
    assert (made.spec.parallelism.world_size, made.priority) == (8, 7)
    assert made.labels == {"team": "ads", "kind": "clone"}
    assert client.get_job(job_id).spec.training.epochs == 1
    assert api.store.list_timeline(made.id)[0].data["cloned_from"] == job_id


def test_a_job_without_validation_stays_so_in_its_clones_and_in_a_sweep(api: Api) -> None:
    data = {**spec_document()["data"], "split": {"validation": None}}
    job_id = api.submit(data=data)
    clone = api.http.post(f"/v1/jobs/{job_id}:clone", json={"set": {"training.epochs": 2}})
    assert clone.json()["spec"]["data"]["split"] == {"train": "train", "validation": None}
    epochs = {"path": "training.epochs", "values": [1, 2]}
    body = {"spec": spec_document(data=data), "parameters": [epochs], "metric": "train/loss"}
    sweep = api.http.post("/v1/sweeps", json=body).json()
    kept = api.http.app.state.context.sweeps.get(sweep["id"])
    assert spec_of_trial(kept, 0, {"training.epochs": 2}).data.split.validation is None


def test_changes_that_no_spec_can_take_are_refused(api: Api) -> None:
    path = f"/v1/jobs/{api.submit()}:clone"
    nested = json.loads('{"a":' * 900 + "1" + "}" * 900)
    for body in (
        {"set": {"\ud800[0]": "x"}},
        {"set": {"labels.a": nested}},
    ):
        headers = {"content-type": "application/json"}
        answer = api.http.post(path, content=json.dumps(body), headers=headers)
        assert problem_in(answer, 422, "invalid_spec")["fields"]


def test_a_clone_is_checked_like_any_spec_and_made_once(api: Api, client: ShardloomClient) -> None:
    job_id = api.submit()
    with pytest.raises(InvalidRequest, match="parallelism"):
        client.clone(job_id, set={"parallelism.workers": 3})
    first = client.clone(job_id, name="again", idempotency_key="k")
    assert client.clone(job_id, name="again", idempotency_key="k").id == first.id


# ---- restart


def test_a_job_goes_on_from_the_checkpoint_that_was_chosen(
    api: Api, client: ShardloomClient
) -> None:
    job_id = running(api)
    saved = [
        checkpoint(step).model_copy(
            update={"path": f"{api.settings.runs_dir}/{job_id}/checkpoints/step-{step:08d}-a0-r0"}
        )
        for step in (100, 200, 300)
    ]
    api.post_events(f"{job_id}-a0", batch(*saved, stream="workers-0"))
    end(api, job_id, "training_error")
    with pytest.raises(NotFound, match="100, 200, 300"):
        client.restart(job_id, step=150)
    restarted = client.restart(job_id, step=200)
    assert (restarted.status, restarted.reason) == (JobStatus.QUEUED, None)
    api.poll()
    rewind = run_dir_of(api.settings, job_id).rewind_path
    expected = {"checkpoint": "step-00000200-a0-r0", "attempt_index": 1}
    assert json.loads(rewind.read_text()) == expected
    assert api.store.get_job(job_id).resume_from is None
    end(api, job_id, "host_lost")
    assert client.get_job(job_id).status is JobStatus.QUEUED
    assert json.loads(rewind.read_text()) == expected


def test_a_job_that_trained_all_its_steps_goes_on_from_earlier_ones_only(
    api: Api, client: ShardloomClient
) -> None:
    job_id = running(api)
    sent = batch(checkpoint(60), checkpoint(100), progress(100), stream="workers-0")
    api.post_events(f"{job_id}-a0", sent)
    end(api, job_id)
    for step in (None, 100):
        with pytest.raises(Conflict, match="all 100 steps are trained"):
            client.restart(job_id, step=step)
    assert client.restart(job_id, step=60).status is JobStatus.QUEUED


# ---- the queue and projects


def test_the_queue_shows_who_waits_for_what(api: Api, client: ShardloomClient) -> None:
    api.backend.set_hosts(HostFacts("h0", 6, 0, 1 << 33))
    busy = running(api, name="busy")
    waiting = api.submit(name="waiting", priority=3, preemptible=False)
    api.http.put("/v1/projects/default", json={"max_running_jobs": 1})
    api.poll()
    found = client.queue()
    assert [job.id for job in found.running] == [busy]
    assert found.running[0].num_workers == 4
    (place,) = found.waiting
    assert (place.id, place.position) == (waiting, 1)
    assert place.reason == "project default: 1 of 1 jobs running"
    shown = client.get_job(waiting)
    assert shown.queue.reason == place.reason
    assert place.reason in shardloom("queue").stdout
    assert "#1: project default" in shardloom("show", waiting).stdout
    assert "QUEUED #1" in shardloom("ps").stdout
    document = json.loads(shardloom("queue", "--json").stdout)
    assert document["waiting"][0]["id"] == waiting


def test_projects_have_quotas_and_show_what_is_in_use(api: Api, client: ShardloomClient) -> None:
    running(api, project="ads")
    assert client.project("ads").max_workers is None
    changed = client.set_quotas("ads", max_workers=8)
    assert (changed.num_workers, changed.num_running_jobs) == (4, 1)
    assert [each.name for each in client.projects()] == ["ads"]
    assert "4 of 8" in shardloom("projects", "list").stdout
    assert "4 of 9" in shardloom("projects", "set", "ads", "--max-workers", "9").stdout
    shardloom("projects", "set", "ads", "--max-running-jobs", "7")
    assert client.project("ads").max_workers == 9, "what is not given stays"
    assert shardloom("projects", "remove", "ads").exit_code == 0
    unknown = shardloom("projects", "show", "nobody").stderr
    assert "`shardloom projects set`" in unknown
    assert "/v1/" not in unknown
    with pytest.raises(NotFound, match="has no quotas"):
        client.remove_quotas("ads")
    with pytest.raises(NotFound):
        client.project("nobody")
    for body in ({"max_workers": -1}, {"max_workers": "many"}, {"max_gpus": 3}):
        assert api.http.put("/v1/projects/ads", json=body).status_code == 422
    assert "1 to 63 of a-z" in shardloom("projects", "set", "Ads_Team").stderr


def test_commands_change_the_course_of_a_job(api: Api, client: ShardloomClient) -> None:
    job_id = api.submit()
    assert "is paused" in shardloom("pause", job_id).stdout
    assert json.loads(shardloom("resume", job_id, "--json").stdout)["status"] == "QUEUED"
    clone_id = shardloom("clone", job_id, "--set", "training.epochs=2").stdout.strip()
    assert client.get_job(clone_id).spec.training.epochs == 2
    client.cancel(clone_id)
    assert shardloom("delete", clone_id, "--yes").exit_code == 0
    assert shardloom("restart", job_id, "--step", "5").exit_code == 2
    assert shardloom("clone", job_id, "--set", "nonsense").exit_code == 2


# ---- ETag and If-Match


def etag(api: Api, job: str) -> str:
    """The tag of a job now."""
    return str(api.http.get(f"/v1/jobs/{job}").headers["ETag"])


def test_a_change_is_made_of_the_version_that_was_read_and_of_no_other(api: Api) -> None:
    job = api.submit()
    read = etag(api, job)
    answer = api.http.post(f"/v1/jobs/{job}:pause", headers={"If-Match": read})
    paused = etag(api, job)
    assert (answer.status_code, answer.headers["ETag"]) == (202, paused)
    assert paused != read
    for verb in ("cancel", "pause", "resume", "restart"):
        answer = api.http.post(f"/v1/jobs/{job}:{verb}", headers={"If-Match": read})
        problem_in(answer, 412, "version_changed")
        assert etag(api, job) == paused
    api.end(job)
    answer = api.http.delete(f"/v1/jobs/{job}", headers={"If-Match": read})
    problem_in(answer, 412, "version_changed")
    assert api.store.get_job(job).status is JobStatus.CANCELLED
    assert api.http.delete(f"/v1/jobs/{job}", headers={"If-Match": etag(api, job)}).is_success


def test_a_tag_that_was_never_given_out_matches_nothing_and_a_star_anything(api: Api) -> None:
    path = f"/v1/jobs/{api.submit()}:cancel"
    for tag in ("7", 'W/"1"', 'W/"1", W/"2"', '"seven"', '"' + "9" * 40 + '"', ""):
        answer = api.http.post(path, headers={"If-Match": tag})
        problem_in(answer, 412, "version_unknown")
    assert api.http.post(path, headers={"If-Match": "*"}).status_code == 202


def test_a_change_is_made_of_any_version_in_a_list_compared_strongly(api: Api) -> None:
    job = api.submit()
    read = etag(api, job)
    for tags in ('"98", "99"', f'"98",W/{read} , "99"'):
        answer = api.http.post(f"/v1/jobs/{job}:pause", headers={"If-Match": tags})
        assert "asks for 98 or 99" in problem_in(answer, 412, "version_changed")["detail"]
    tags = f'"x,y" ,"98",, {read}'
    assert api.http.post(f"/v1/jobs/{job}:pause", headers={"If-Match": tags}).status_code == 202
    assert etag(api, job) != read


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
