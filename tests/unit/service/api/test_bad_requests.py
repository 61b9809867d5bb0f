"""Requests that cannot be answered: each is a problem that names what is wrong."""

from __future__ import annotations

import base64
import errno
import json
from pathlib import Path
from unittest.mock import patch

import pytest

from service import errors
from service.db.jobs import JobStore
from service.domain.models import Job
from service.jobs import submit
from tests.harness.builders import spec_document
from tests.harness.service import Api, problem_in

BEYOND_63_BITS = str(2**63)
# Clients know errors by these; a class of another name would change its code.
CODES = """
attempt_not_found backend_unreachable behind_proxy body_too_large body_too_slow checkpoint_not_found
code_store_full conflict csrf_token delivery_not_found does_not_fit
export_not_found export_not_ready export_pending export_refused forbidden
foreign_host foreign_origin idempotency_conflict identity_provider_away invalid_request
job_at_work job_ended job_not_ended job_not_found job_not_paused job_not_running
job_unreadable key_not_found layout_unknown lock_lost log_not_found no_plan no_such_run_file
not_found not_signed_in plan_timed_out planner_failed precondition_failed
project_not_found reconciler_died record_refused request_under_way run_storage_full
runs_are_shared secret_key_unusable sequence_gap stale_version storage_unavailable
store_unavailable submission_refused sweep_ended sweep_not_ended sweep_not_found
too_many_open too_many_requests trace_not_found trace_pending version_changed
version_unknown webhook_not_found
"""


def _refused(api: Api, query: str = "", **changes: object) -> list[dict[str, str]]:
    """Faults of a spec that is refused."""
    response = api.http.post(f"/v1/jobs{query}", json={"spec": spec_document(**changes)})
    return problem_in(response, 422, "invalid_spec")["fields"]


def _data(path: object) -> dict[str, object]:
    return {"path": str(path), "label": {"column": "rating"}}


def _codes(base: type[errors.ServiceError]) -> set[str]:
    ours = [each for each in base.__subclasses__() if each.__module__ == errors.__name__]
    return {each.code for each in ours}.union(*map(_codes, ours))


def test_codes_of_errors_stay_as_clients_know_them() -> None:
    assert _codes(errors.ServiceError) == set(CODES.split())


def test_every_fault_of_a_spec_is_named_by_its_path(api: Api) -> None:
    tables = spec_document()["embedding_tables"]
    tables[0]["embedding_dim"] = "wide"
    for query in ("", "?dry_run=true"):
        faults = _refused(api, query, surprise=1, embedding_tables=tables)
        assert {fault["path"] for fault in faults} == {
            "surprise",
            "embedding_tables[0].embedding_dim",
        }


def test_data_that_cannot_be_read_is_refused(api: Api, tmp_path: Path) -> None:
    empty, torn, other = (tmp_path / name for name in ("empty", "torn", "other"))
    for folder in (empty, torn, other):
        folder.mkdir()
    (torn / "manifest.json").write_text("{ torn")
    (other / "manifest.json").write_text("[]")
    for path, code in (
        (tmp_path / "nowhere", "missing_path"),
        (empty, "missing_manifest"),
        (torn, "unreadable_manifest"),
        (other, "unreadable_manifest"),
        ("data/tiny", "relative_path"),
        ("http://bucket/ratings", "unknown_scheme"),
        ("hdfs://bucket/ratings", "unknown_scheme"),
        ("/" + "a" * 5000, "unreadable_path"),
    ):
        (fault,) = _refused(api, data=_data(path))
        assert (fault["path"], fault["code"]) == ("data.path", code)
        assert len(fault["message"]) < 400
        assert len(str(path)) > 1000 or str(path) in fault["message"]
    path = other / "manifest.json"
    denied = PermissionError(errno.EACCES, "Permission denied", str(path))
    with patch.object(submit, "read_untrusted", side_effect=denied):
        (fault,) = _refused(api, data=_data(other))
    assert f"cannot look at {path} (Permission denied)" in fault["message"]


def test_a_checkpoint_path_of_which_no_checkpoint_could_be_stored_is_refused(api: Api) -> None:
    (fault,) = _refused(api, checkpoint={"path": f"s3://bucket/{'a' * 900}"})
    assert (fault["path"], fault["code"]) == ("checkpoint.path", "too_long")
    assert "at most 900" in fault["message"]


def test_a_folder_to_start_from_that_is_not_there_or_holds_none_is_refused(
    api: Api, tmp_path: Path
) -> None:
    for path in ("/nowhere/checkpoints", str(tmp_path)):
        (fault,) = _refused(api, checkpoint={"warm_start": {"path": path}})
        assert fault["path"] == "checkpoint.warm_start.path"
    run_dir, saved = tmp_path / "run", tmp_path / "saved/step-1"
    for folder in (run_dir / "checkpoints", saved):
        folder.mkdir(parents=True)
    (saved / "COMMIT.json").touch()
    (run_dir / "job.json").touch()  # of a job that may be still to save
    for folder in (run_dir, run_dir / "checkpoints", saved, saved.parent):
        document = spec_document(checkpoint={"warm_start": {"path": str(folder)}})
        assert api.http.post("/v1/jobs", json={"spec": document}).status_code == 201


@pytest.mark.parametrize(
    ("path", "place"),
    [("/mnt/saved/", "/mnt/saved/run"), ("s3://bucket/a?region=eu", "s3://bucket/a/run?region=eu")],
)
def test_a_job_to_start_from_that_keeps_its_checkpoints_elsewhere_is_refused_with_their_place(
    api: Api, tmp_path: Path, path: str, place: str
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "job.json").write_text(json.dumps({"spec": {"checkpoint": {"path": path}}}))
    (fault,) = _refused(api, checkpoint={"warm_start": {"path": str(run_dir)}})
    assert fault["path"] == "checkpoint.warm_start.path"
    assert f"keeps its checkpoints in {place}; give that folder" in fault["message"]
    (run_dir / "checkpoints").mkdir()  # copied there, or the run folders are that place
    document = spec_document(checkpoint={"warm_start": {"path": str(run_dir)}})
    assert api.http.post("/v1/jobs", json={"spec": document}).status_code == 201


def test_finished_data_is_accepted_and_remote_data_seen_when_the_job_starts(
    api: Api, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text('{"splits": {}}')
    for path in (tmp_path, "s3://bucket/ratings", "gs://bucket/ratings"):
        api.submit(data=_data(path))


@pytest.mark.parametrize(
    ("missing", "field"), [("age", "features[1].column"), ("rating", "data.label.column")]
)
def test_a_column_that_prepared_data_lack_is_refused(
    api: Api, tmp_path: Path, missing: str, field: str
) -> None:
    columns = {"user_id": "int64", "age": "float32", "rating": "float32"}
    told = {"splits": {"train": {"num_rows": 8}}, "columns": columns}
    manifest = tmp_path / "manifest.json"
    manifest.write_text(json.dumps(told))
    api.submit(data=_data(tmp_path))
    del columns[missing]
    manifest.write_text(json.dumps(told))
    api.submit(data=_data(tmp_path) | {"split": {"train": "not-in-the-manifest"}})
    (fault,) = _refused(api, data=_data(tmp_path))
    assert (fault["path"], fault["code"]) == (field, "missing_column")
    assert f"no column '{missing}'; it has {', '.join(columns)}" in fault["message"]


def test_a_vocabulary_that_is_not_there_is_refused_with_what_it_holds(
    api: Api, tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "part.parquet").touch()
    features = spec_document()["features"]
    features[0]["vocabulary"] = {"path": "users.parquet"}
    (fault,) = _refused(api, data=_data(tmp_path), features=features)
    assert (fault["path"], fault["code"]) == ("features[0].vocabulary", "missing_path")
    assert f"{tmp_path}/users.parquet is missing" in fault["message"]
    assert "the columns value, index" in fault["message"]
    (tmp_path / "users.parquet").touch()
    api.submit(data=_data(tmp_path), features=features)


def test_plain_parquet_needs_no_manifest_where_tables_have_sizes(api: Api, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "part.parquet").touch()
    tables = spec_document()["embedding_tables"]
    api.submit(data=_data(tmp_path), embedding_tables=tables)
    unsized = [table | {"num_embeddings": "auto"} for table in tables]
    (fault,) = _refused(api, data=_data(tmp_path), embedding_tables=unsized)
    assert (fault["path"], fault["code"]) == ("embedding_tables", "unknown_size")


# ---- errors of the request itself


def test_a_missing_body_is_a_problem_with_a_field(api: Api) -> None:
    problem = problem_in(api.http.post("/v1/jobs", json={}), 422, "invalid_request")
    assert problem["fields"][0]["path"] == "spec"
    assert problem["instance"] == "/v1/jobs"
    headers = {"Content-Type": "application/json"}
    response = api.http.post("/v1/jobs", content="{", headers=headers)
    assert problem_in(response, 422, "invalid_request")["fields"][0]["path"] == "body"


def test_an_unknown_field_beside_a_spec_is_named_and_submits_nothing(api: Api) -> None:
    for field in ("dry_run", "secret"):
        response = api.http.post("/v1/jobs", json={"spec": spec_document(), field: True})
        assert problem_in(response, 422, "invalid_request")["fields"][0]["path"] == field
    assert api.http.get("/v1/jobs").json()["items"] == []


def test_an_unknown_route_and_method_are_problems(api: Api) -> None:
    problem_in(api.http.get("/v1/nowhere"), 404, "not_found")
    response = api.http.delete("/v1/jobs")
    problem_in(response, 405, "method_not_allowed")
    assert "POST" in response.headers["allow"] or "GET" in response.headers["allow"]


def test_a_bad_query_is_named(api: Api) -> None:
    job = f"jobs/{api.submit()}"
    for query, path in (
        ("jobs?limit=0", "limit"),
        ("jobs?limit=x", "limit"),
        ("jobs?status=LOST", "status[0]"),
        ("jobs?" + "status=QUEUED&" * 21, "status"),
        ("jobs?" + "&".join(f"label=k{number}=x" for number in range(21)), "label"),
        ("jobs?label=team", "label[0]"),
        ("jobs?label==red", "label[0]"),
        ("jobs?metric=validation/ne", "metric[0]"),
        ("jobs?metric=validation/ne<1.2.3", "metric[0]"),
        ("jobs?metric=validation/ne<1e999", "metric[0]"),
        ("jobs?projects=of-others", "projects"),
        ("jobs?serch=x", "serch"),
        ("jobs?created_after=yesterday", "created_after"),
        ("audit?after=x", "after"),
        (f"{job}/events?after={BEYOND_63_BITS}", "after"),
        (f"{job}/metrics?from_step={BEYOND_63_BITS}", "from_step"),
        (f"{job}/metrics?to_step={BEYOND_63_BITS}", "to_step"),
        (f"{job}/logs?level=loud", "level"),
        (f"{job}/logs?rank=-1", "rank[0]"),
        (f"{job}/logs?since=1e300", "since"),
    ):
        problem = problem_in(api.http.get(f"/v1/{query}"), 422, "invalid_request")
        assert [fault["path"] for fault in problem["fields"]] == [path]


def test_an_unexpected_error_is_a_problem_without_its_secrets(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: JobStore, job_id: str) -> Job:
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(JobStore, "get_job", fail)
    response = api.http.get("/v1/jobs/job-x")
    problem = problem_in(response, 500, "internal_error")
    assert problem["request_id"] == response.headers["x-request-id"]
    assert response.headers["x-content-type-options"] == "nosniff"
    counted = 'shardloom_request_seconds_count{method="GET",route="/v1/jobs/{job}",status="500"} 1'
    assert counted in api.http.get("/metrics").text
    assert "hunter2" not in response.text


def test_a_foreign_last_event_id_is_refused(api: Api) -> None:
    job_id = api.submit()
    for last_event_id in (BEYOND_63_BITS, "9" * 5000, "-1", "x"):
        headers = {"Accept": "text/event-stream", "Last-Event-ID": last_event_id}
        response = api.http.get(f"/v1/jobs/{job_id}/events", headers=headers)
        problem = problem_in(response, 422, "invalid_request")
        assert problem["fields"][0]["path"] == "Last-Event-ID"


def test_a_forged_log_cursor_is_refused(api: Api) -> None:
    job_id = api.start()
    api.log(f"{job_id}-a0", "driver", "hello\n")
    forged = [
        f'["{job_id}-a0", {{"driver": Infinity}}]',
        f'["{job_id}-a0", {{"driver": 1e999}}]',
        f'["{job_id}-a0", {{"driver": 1000000000000000000000000000000}}]',
        '["a\\u0000b", {}]',  # no database can be asked for such an attempt
        "[[1], {}]",
        "[5, {}]",
        "[" * 20_000 + "]" * 20_000,
    ]
    cursors = [base64.urlsafe_b64encode(text.encode()).decode() for text in forged]
    for cursor in (*cursors, "junk", "%%%", "AAAA", "W10", "WzEsMl0", "bnVsbA"):
        response = api.http.get(f"/v1/jobs/{job_id}/logs", params={"after": cursor})
        assert problem_in(response, 422, "invalid_request")["fields"][0]["path"] == "after"


def test_a_job_that_cannot_be_read_is_named(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = api.submit()

    def spoil(*_: object, **__: object) -> None:
        raise ValueError("a field of tomorrow")

    monkeypatch.setattr("service.db.rows._spec_of", spoil)
    problem = problem_in(api.http.get(f"/v1/jobs/{job_id}"), 500, "job_unreadable")
    assert "a field of tomorrow" in problem["detail"]
    assert api.http.get("/v1/jobs").json()["items"] == []
