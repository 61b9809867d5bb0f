"""Traces on demand: what is asked of the workers, what is listed, and what can be downloaded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.db.jobs import JobStore
from service.domain.models import Job
from service.errors import StaleVersion
from service.jobs import profiling
from tests.harness.builders import batch, checkpoint, trace_written, workers_started
from tests.harness.service import Api, problem_in, replace_attempt


@pytest.fixture
def job_id(api: Api) -> str:
    """A job whose four workers are at work."""
    started = api.start()
    assert api.post_events(f"{started}-a0", batch(workers_started())).status_code == 200
    return started


def ask(api: Api, job_id: str, **body: Any) -> Any:
    return api.http.post(f"/v1/jobs/{job_id}/traces", json=body)


def report_trace(api: Api, job_id: str, *records: Any, index: int = 0) -> None:
    """Records of the workers of attempt `index`, behind what they sent before."""
    attempt_id = f"{job_id}-a{index}"
    first_seq = api.store.stream_positions(attempt_id).get("rank-0", 0)
    assert api.post_events(attempt_id, batch(*records, first_seq=first_seq)).status_code == 200


def write_trace(api: Api, job_id: str, content: bytes, index: int = 0) -> None:
    """The trace of rank 0 that the spec asked for."""
    folder = api.files(job_id, index).traces_dir
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec-rank0.json.gz").write_bytes(content)


# ---- asking


def test_a_request_reaches_the_workers_as_a_whole_file_and_is_told(api: Api, job_id: str) -> None:
    response = ask(api, job_id, num_steps=5, ranks=[2, 0, 2])
    asked = response.json()
    assert response.status_code == 202
    assert asked["names"] == [f"{asked['id']}-rank0.json.gz", f"{asked['id']}-rank2.json.gz"]
    path = api.files(job_id).trace_request_path
    assert json.loads(path.read_text()) == {"id": asked["id"], "num_steps": 5, "ranks": [0, 2]}
    assert [found.name for found in path.parent.glob("trace-request*")] == [path.name]
    line = api.http.get(f"/v1/jobs/{job_id}/events?kind=trace_requested").json()["items"][0]
    wanted = "trace of 5 step(s) on rank(s) 0, 2 requested"
    assert (line["actor"], line["message"]) == ("local", wanted)
    pytest.importorskip("torch", reason="the workers' side of a trace needs torch.profiler")
    from trainer.training.profiling import TraceRequest

    found = TraceRequest.model_validate_json(path.read_text())
    assert (found.id, found.num_steps, found.ranks) == (asked["id"], 5, (0, 2))


def test_a_second_request_waits_until_every_trace_of_the_first_is_written(
    api: Api, job_id: str
) -> None:
    first = ask(api, job_id, ranks=[0, 1]).json()["id"]
    problem_in(ask(api, job_id), 409, "trace_pending")
    report_trace(api, job_id, trace_written(first, 0))
    problem = problem_in(ask(api, job_id), 409, "trace_pending")
    assert f"{first}-rank1.json.gz" in problem["detail"]
    report_trace(api, job_id, trace_written(first, 1))
    again = ask(api, job_id)
    assert again.status_code == 202
    assert (again.json()["num_steps"], again.json()["ranks"]) == (3, [0]), "the usual ones"


def test_what_an_earlier_attempt_owes_or_nobody_writes_in_the_end_does_not_count(
    api: Api, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(api, job_id)
    replace_attempt(api.store, job_id)
    assert ask(api, job_id).status_code == 202
    monkeypatch.setattr(profiling, "PATIENCE_S", -1.0)
    assert ask(api, job_id).status_code == 202


def test_only_a_running_job_can_be_traced(api: Api) -> None:
    waiting = api.submit()
    problem = problem_in(ask(api, waiting), 409, "job_not_running")
    assert "QUEUED" in problem["detail"]
    api.end(waiting)
    problem_in(ask(api, waiting), 409, "job_not_running")
    problem_in(ask(api, "nothing"), 404, "job_not_found")


def test_a_faulty_request_is_named_by_its_field(api: Api, job_id: str) -> None:
    bodies: list[tuple[dict[str, Any], list[str]]] = [
        ({"num_steps": 0}, ["num_steps"]),
        ({"num_steps": 101}, ["num_steps"]),
        ({"ranks": []}, ["ranks"]),
        ({"ranks": [-1]}, ["ranks[0]"]),
        ({"steps": 3}, ["steps"]),
        # Those beyond the world size.
        ({"ranks": [0, 4, 9]}, ["ranks[1]", "ranks[2]"]),
    ]
    for body, paths in bodies:
        problem = problem_in(ask(api, job_id, **body), 422, "invalid_request")
        assert [field["path"] for field in problem["fields"]] == paths
    assert "0 to 3" in problem["detail"]
    assert not api.files(job_id).trace_request_path.exists()


def test_of_two_requests_at_once_one_passes(
    api: Api, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    update_job, rivals = JobStore.update_job, [None]

    def race(store: JobStore, job: Job, **changes: Any) -> Job:
        if rivals:
            rivals.pop()
            assert ask(api, job_id).status_code == 202
        return update_job(store, job, **changes)

    monkeypatch.setattr(JobStore, "update_job", race)
    problem_in(ask(api, job_id), 409, "trace_pending")
    (line,) = api.store.list_timeline(job_id, kinds=["trace_requested"])
    path = api.files(job_id).trace_request_path
    assert json.loads(path.read_text())["id"] == line.data["id"]
    assert [found.name for found in path.parent.glob("trace-request*")] == [path.name]


def test_a_job_that_others_keep_writing_is_given_up(
    api: Api, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: JobStore, job: Job, **_: object) -> Job:
        raise StaleVersion(job.id, job.version)

    monkeypatch.setattr(JobStore, "update_job", refuse)
    problem_in(ask(api, job_id), 409, "stale_version")
    assert list(api.files(job_id).root.glob("trace-request*")) == []


def test_storage_that_cannot_be_written_is_named(api: Api, job_id: str) -> None:
    root = api.files(job_id).root
    for path in root.iterdir():
        path.unlink()
    root.rmdir()
    root.write_text("in the way")
    problem = problem_in(ask(api, job_id), 503, "storage_unavailable")
    assert "SHARDLOOM_RUNS_DIR" in problem["detail"]
    assert api.store.list_timeline(job_id, kinds=["trace_requested"]) == []


def test_a_request_that_cannot_be_placed_is_refused_and_leaves_no_draft(
    api: Api, job_id: str
) -> None:
    path = api.files(job_id).trace_request_path
    path.mkdir()
    problem_in(ask(api, job_id), 503, "storage_unavailable")
    assert [found.name for found in path.parent.glob("trace-request*")] == [path.name]


# ---- listing and downloading


def test_traces_are_listed_in_order_and_written_again_once(api: Api, job_id: str) -> None:
    assert api.http.get(f"/v1/jobs/{job_id}/traces").json() == {"items": [], "next": None}
    again = trace_written("spec", time=9e9, step=99)
    stray = trace_written(path="/etc/passwd")
    early = trace_written("t-00000001", 3, time=0.0)
    records = [trace_written("spec"), early, again, stray, checkpoint(5)]
    report_trace(api, job_id, *records)
    found = api.http.get(f"/v1/jobs/{job_id}/traces").json()["items"]
    assert [(t["name"], t["rank"], t["step"]) for t in found] == [
        ("t-00000001-rank3.json.gz", 3, 12),
        ("spec-rank0.json.gz", 0, 99),
    ]
    assert {t["attempt_id"] for t in found} == {f"{job_id}-a0"}


def test_a_trace_is_downloaded_as_gzip(api: Api, job_id: str) -> None:
    write_trace(api, job_id, b"\x1f\x8b content")
    response = api.http.get(f"/v1/jobs/{job_id}/traces/spec-rank0.json.gz")
    assert (response.status_code, response.content) == (200, b"\x1f\x8b content")
    assert response.headers["content-type"] == "application/gzip"
    assert "content-encoding" not in response.headers
    assert "tiny-spec-rank0.json.gz" in response.headers["content-disposition"]


def test_the_newest_attempt_that_has_a_trace_is_meant_unless_one_is_named(
    api: Api, job_id: str
) -> None:
    replace_attempt(api.store, job_id)
    url = f"/v1/jobs/{job_id}/traces/spec-rank0.json.gz"
    write_trace(api, job_id, b"first")
    assert api.http.get(url).content == b"first"
    write_trace(api, job_id, b"second", index=1)
    assert api.http.get(url).content == b"second"
    assert api.http.get(url, params={"attempt": f"{job_id}-a0"}).content == b"first"
    problem_in(api.http.get(url, params={"attempt": "other-a0"}), 404, "trace_not_found")


def test_what_is_gone_or_no_name_of_a_trace_is_not_found(api: Api, job_id: str) -> None:
    assert api.files(job_id).spec_path.exists()
    for name in (
        "spec-rank0.json.gz",
        "..%2Fspec.json",
        "spec-rank0.json.gz%0A",
        "t-XYZ-rank0.json.gz",
    ):
        response = api.http.get(f"/v1/jobs/{job_id}/traces/{name}")
        assert response.status_code == 404
        assert response.headers["content-type"] == "application/problem+json"
    response = api.http.get(f"/v1/jobs/{job_id}/traces/spec-rank0.json.gz%00")
    assert problem_in(response, 422, "invalid_request")["fields"][0]["code"] == "nul"
    (api.files(job_id).traces_dir / "spec-rank0.json.gz").mkdir(parents=True)
    response = api.http.get(f"/v1/jobs/{job_id}/traces/spec-rank0.json.gz")
    problem_in(response, 404, "trace_not_found")
