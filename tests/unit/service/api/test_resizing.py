"""Another size, and hosts to leave: what is accepted, stored and shown to the driver."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service import errors
from service.domain import timeline
from service.domain.models import JobStatus
from service.jobs import actions
from tests.harness.builders import (
    ELASTIC,
    HOSTS,
    batch,
    group_lost,
    layout_chosen,
    membership_changed,
    workers_started,
)
from tests.harness.service import Api, problem_in, replace_attempt
from trainer.protocol.events import Event, HostExcluded
from trainer.protocol.requests import ResizeRequests
from trainer.protocol.run_dir import AttemptDir
from trainer.spec.base import MAX_WORKERS

FROM_TWO = ELASTIC | {"workers": {"min": 2, "max": 8}}


def running(api: Api, *records: Event, **parallelism: Any) -> str:
    """Id of a running job of three groups of two."""
    job_id = api.start(parallelism={**FROM_TWO, **parallelism})
    told = records or (layout_chosen(), workers_started(), membership_changed())
    assert api.post_events(f"{job_id}-a0", batch(*told)).status_code == 200
    assert api.store.get_job(job_id).status is JobStatus.RUNNING
    return job_id


def request_path(api: Api, job_id: str, attempt: int = 0) -> Path:
    return api.files(job_id, attempt).resize_request_path


def told(api: Api, job_id: str) -> list[tuple[str, str]]:
    """(actor, message) of the requests in the timeline."""
    lines = api.store.list_timeline(job_id, kinds=timeline.RESIZE_KINDS)
    return [(line.actor, line.message) for line in lines]


def resize(api: Api, job_id: str, workers: object) -> Any:
    return api.http.post(f"/v1/jobs/{job_id}/resize", json={"workers": workers})


def drain(api: Api, job_id: str, host: str, **more: object) -> Any:
    return api.http.post(f"/v1/jobs/{job_id}/drain", json={"host": host, **more})


def test_requests_are_merged_for_the_driver_and_told(api: Api) -> None:
    job_id = running(api)
    assert resize(api, job_id, 4).status_code == 202
    assert drain(api, job_id, HOSTS[2]).status_code == 202
    answer = drain(api, job_id, HOSTS[0]).json()
    wanted = json.loads(request_path(api, job_id).read_text())
    assert wanted == answer
    assert (wanted["workers"], wanted["drain_hosts"]) == (4, [HOSTS[0], HOSTS[2]])
    assert told(api, job_id) == [
        ("local", "resize to 4 workers requested"),
        ("local", f"drain of host {HOSTS[2]} requested"),
        ("local", f"drain of host {HOSTS[0]} requested"),
    ]
    names = [path.name for path in request_path(api, job_id).parent.glob("resize*")]
    assert names == ["resize-request.json"]
    understood = ResizeRequests(AttemptDir(request_path(api, job_id).parent)).poll()
    assert (understood.workers, understood.drain_hosts) == (4, frozenset({HOSTS[0], HOSTS[2]}))


def test_a_drained_host_is_used_again_when_that_is_undone(api: Api) -> None:
    job_id = running(api)
    assert drain(api, job_id, "nowhere", undo=True).status_code == 202
    assert not request_path(api, job_id).exists()
    assert told(api, job_id) == []
    drain(api, job_id, HOSTS[1])
    assert drain(api, job_id, HOSTS[1], undo=True).json()["drain_hosts"] == []
    assert json.loads(request_path(api, job_id).read_text())["drain_hosts"] == []


def test_asking_again_for_the_same_changes_nothing_but_mends_the_file(api: Api) -> None:
    job_id = running(api)
    first = resize(api, job_id, 8).json()
    request_path(api, job_id).unlink()
    assert resize(api, job_id, 8).json() == first
    assert json.loads(request_path(api, job_id).read_text()) == first
    drained = drain(api, job_id, HOSTS[0]).json()
    replace_attempt(api.store, job_id)  # Its workers have left the host.
    assert drain(api, job_id, HOSTS[0]).json() == drained
    assert len(told(api, job_id)) == 2


def test_a_request_about_another_version_of_the_job_changes_nothing(api: Api) -> None:
    job_id = running(api)
    for path, body in (("resize", {"workers": 4}), ("drain", {"host": HOSTS[1]})):
        url, headers = f"/v1/jobs/{job_id}/{path}", {"If-Match": '"1"'}
        problem_in(api.http.post(url, json=body, headers=headers), 412, "version_changed")
        headers["If-Match"] = api.http.get(f"/v1/jobs/{job_id}").headers["ETag"]
        assert api.http.post(url, json=body, headers=headers).status_code == 202
    assert len(told(api, job_id)) == 2


def test_a_size_that_does_not_fit_is_refused_with_those_that_do(api: Api) -> None:
    job_id = running(api)
    for workers, parts in (
        (5, ("in groups of 2", "possible: 4, 6, 8")),
        (2, ("survive needs 2 groups",)),
        (10, ("2 to 8 workers",)),
        (0, ("greater than or equal to 1",)),
        ("many", ("valid integer",)),
    ):
        problem = problem_in(resize(api, job_id, workers), 422, "invalid_request")
        (fault,) = problem["fields"]
        assert fault["path"] == "workers"
        assert all(part in fault["message"] for part in parts)
    assert not request_path(api, job_id).exists()


def test_a_size_beyond_what_the_quota_left_the_attempt_is_refused(api: Api) -> None:
    api.http.put("/v1/projects/default", json={"max_workers": 6})
    job_id = running(api)
    detail = problem_in(resize(api, job_id, 8), 422, "invalid_request")["detail"]
    assert "the quota of project default left it 6" in detail
    assert detail.endswith("possible: 4, 6")
    assert resize(api, job_id, 6).status_code == 202


def test_a_refusal_lists_a_few_of_many_sizes(api: Api) -> None:
    job_id = running(api, workers={"min": 2, "max": MAX_WORKERS})
    (fault,) = problem_in(resize(api, job_id, 5), 422, "invalid_request")["fields"]
    assert fault["message"].endswith(f"possible: {', '.join(map(str, range(4, 44, 2)))}, ... 16384")
    assert resize(api, job_id, 16382).status_code == 202


def test_a_job_of_a_fixed_size_says_how_to_submit_it_otherwise(api: Api) -> None:
    job_id = running(api, workers_started(), workers=4, placement="intra_host", survive=None)
    (fault,) = problem_in(resize(api, job_id, 6), 422, "invalid_request")["fields"]
    assert (fault["code"], "{min, max}" in fault["message"]) == ("fixed_size", True)
    assert resize(api, job_id, 4).status_code == 202


def test_a_faulty_drain_is_named_by_its_field(api: Api) -> None:
    job_id = running(api)
    for body, path in (({"host": ""}, "host"), ({}, "host"), ({"host": "x", "now": 1}, "now")):
        response = api.http.post(f"/v1/jobs/{job_id}/drain", json=body)
        (fault,) = problem_in(response, 422, "invalid_request")["fields"]
        assert fault["path"] == path
    # A host without workers is refused with those that have some.
    (fault,) = problem_in(drain(api, job_id, "127.0.0.9"), 422, "invalid_request")["fields"]
    assert all(host in fault["message"] for host in HOSTS)
    # Those of an earlier attempt are not known any more.
    replace_attempt(api.store, job_id)
    (fault,) = problem_in(drain(api, job_id, HOSTS[0]), 422, "invalid_request")["fields"]
    assert "none yet" in fault["message"]


@pytest.mark.parametrize(
    ("records", "host"),
    [
        ((workers_started(),), "a"),
        ((layout_chosen(), workers_started(), membership_changed(), group_lost(1)), HOSTS[1]),
    ],
)
def test_a_host_that_workers_are_or_were_on_can_be_drained(
    api: Api, records: tuple[Event, ...], host: str
) -> None:
    assert drain(api, running(api, *records), host).status_code == 202


def test_only_a_running_job_can_be_placed_anew(api: Api) -> None:
    job_id = api.submit(parallelism=FROM_TWO)
    for response in (resize(api, job_id, 4), drain(api, job_id, HOSTS[0])):
        problem = problem_in(response, 409, "job_not_running")
        assert "QUEUED" in problem["detail"]


def test_a_new_attempt_is_told_what_was_wanted_of_the_last(api: Api) -> None:
    job_id = running(api)
    wanted = resize(api, job_id, 4).json()
    replace_attempt(api.store, job_id, submitted_at=None)
    again = replace(api.store.get_job(job_id), status=JobStatus.STARTING)
    api.store.update_job(again)
    api.poll()
    assert json.loads(request_path(api, job_id, attempt=1).read_text()) == wanted


def test_storage_that_cannot_be_written_is_named_and_asking_again_mends_it(api: Api) -> None:
    job_id = running(api)
    path = request_path(api, job_id)
    path.mkdir()
    (path / "in the way").touch()
    problem_in(resize(api, job_id, 4), 503, "storage_unavailable")
    (path / "in the way").unlink()
    path.rmdir()
    assert resize(api, job_id, 4).status_code == 202
    assert json.loads(path.read_text())["workers"] == 4


def test_of_two_requests_at_once_both_count(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes between the first one's line and its file."""
    job_id = running(api)
    write, has_come = actions.write_json, False

    def interrupted(path: Path, document: dict[str, Any], runs_dir: Path) -> None:
        nonlocal has_come
        if not has_come:
            has_come = True
            actions.request_drain(api.store, api.settings, job_id, HOSTS[0])
        write(path, document, runs_dir)

    monkeypatch.setattr(actions, "write_json", interrupted)
    actions.request_resize(api.store, api.settings, job_id, 4)
    wanted = json.loads(request_path(api, job_id).read_text())
    assert (wanted["workers"], wanted["drain_hosts"]) == (4, [HOSTS[0]])


def test_a_layout_that_is_not_chosen_yet_cannot_be_resized(api: Api) -> None:
    job_id = running(api)
    job = api.store.get_job(job_id)
    auto = job.spec.parallelism.model_copy(update={"shard_group_size": "auto", "survive": None})
    undecided = replace(
        job, spec=job.spec.model_copy(update={"parallelism": auto}), membership=None
    )
    with pytest.raises(errors.LayoutUnknown, match="timeline tells the layout"):
        actions.check_size(undecided, 4)
    chosen = replace(undecided, membership=job.membership)
    assert actions.legal_sizes(chosen) == [2, 4, 6, 8]


def test_hosts_that_are_left_out_no_more_are_not_among_those_that_are(api: Api) -> None:
    now = time.time()
    left_out = [
        HostExcluded(time=now, host=host, num_failures=3, until=now + for_s)
        for host, for_s in ((HOSTS[0], -1), (HOSTS[1], 600))
    ]
    job_id = running(api, layout_chosen(), workers_started(), membership_changed(), *left_out)
    membership = api.http.get(f"/v1/jobs/{job_id}").json()["membership"]
    assert [each["host"] for each in membership["excluded_hosts"]] == [HOSTS[1]]
