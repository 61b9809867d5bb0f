"""Requests that cannot be answered: each is a problem that names what is wrong."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from service.domain import Job
from service.store.sql import SqlJobStore
from tests.unit.service.api_house import Api, problem_in
from tests.unit.service.builders import spec_document

BEYOND_63_BITS = str(2**63)


@pytest.mark.parametrize("query", ["", "?dry_run=true"])
def test_every_fault_of_a_spec_is_named_by_its_path(api: Api, query: str) -> None:
    document = spec_document(surprise=1)
    document["embedding_tables"][0]["embedding_dim"] = "wide"
    problem = problem_in(
        api.http.post(f"/v1/jobs{query}", json={"spec": document}), 422, "invalid_spec"
    )
    paths = {field["path"] for field in problem["fields"]}
    assert paths == {"surprise", "embedding_tables[0].embedding_dim"}


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "missing_path"),
        ("", "missing_manifest"),
        ("{ torn", "unreadable_manifest"),
        ("[]", "unreadable_manifest"),
    ],
)
def test_missing_or_unfinished_data_is_refused(
    api: Api, tmp_path: Path, content: str | None, code: str
) -> None:
    folder = tmp_path / "data"
    if content is not None:
        folder.mkdir()
    if content:
        (folder / "manifest.json").write_text(content)
    data = {"path": str(folder), "label": {"column": "rating"}}
    response = api.http.post("/v1/jobs", json={"spec": spec_document(data=data)})
    (field,) = problem_in(response, 422, "invalid_spec")["fields"]
    assert (field["path"], field["code"]) == ("data.path", code)
    assert str(folder) in field["message"]


def test_relative_data_is_refused(api: Api) -> None:
    data = {"path": "data/tiny", "label": {"column": "rating"}}
    response = api.http.post("/v1/jobs", json={"spec": spec_document(data=data)})
    assert problem_in(response, 422, "invalid_spec")["fields"][0]["code"] == "relative_path"


@pytest.mark.parametrize("scheme", ["http", "hdfs"])
def test_data_behind_an_unknown_url_is_refused(api: Api, scheme: str) -> None:
    data = {"path": f"{scheme}://bucket/ratings", "label": {"column": "rating"}}
    response = api.http.post("/v1/jobs", json={"spec": spec_document(data=data)})
    (field,) = problem_in(response, 422, "invalid_spec")["fields"]
    assert (field["path"], field["code"]) == ("data.path", "unknown_scheme")
    assert "s3:// or gs://" in field["message"]


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_data_in_an_object_store_is_seen_when_the_job_starts(api: Api, scheme: str) -> None:
    api.submit(data={"path": f"{scheme}://bucket/ratings", "label": {"column": "rating"}})


def test_plain_parquet_needs_no_manifest_where_tables_have_sizes(api: Api, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "part.parquet").touch()
    data = {"path": str(tmp_path), "label": {"column": "rating"}}
    document = spec_document(data=data)
    tables = [table | {"num_embeddings": 100} for table in document["embedding_tables"]]
    api.submit(data=data, embedding_tables=tables)
    unsized = [table | {"num_embeddings": "auto"} for table in tables]
    response = api.http.post(
        "/v1/jobs", json={"spec": spec_document(data=data, embedding_tables=unsized)}
    )
    (field,) = problem_in(response, 422, "invalid_spec")["fields"]
    assert (field["path"], field["code"]) == ("embedding_tables", "unknown_size")


def test_a_path_that_no_file_system_takes_is_refused(api: Api) -> None:
    data = {"path": "/" + "a" * 5000, "label": {"column": "rating"}}
    response = api.http.post("/v1/jobs", json={"spec": spec_document(data=data)})
    (field,) = problem_in(response, 422, "invalid_spec")["fields"]
    assert (field["path"], field["code"]) == ("data.path", "unreadable_path")
    assert len(field["message"]) < 400


def test_finished_local_data_is_accepted(api: Api, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"splits": {}}')
    api.submit(data={"path": str(tmp_path), "label": {"column": "rating"}})


# ---- errors of the request itself


def test_a_missing_body_is_a_problem_with_a_field(api: Api) -> None:
    problem = problem_in(api.http.post("/v1/jobs", json={}), 422, "invalid_request")
    assert problem["fields"][0]["path"] == "spec"
    assert problem["instance"] == "/v1/jobs"


def test_text_that_is_no_json_is_a_problem(api: Api) -> None:
    headers = {"Content-Type": "application/json"}
    response = api.http.post("/v1/jobs", content="{", headers=headers)
    assert problem_in(response, 422, "invalid_request")["fields"][0]["path"] == "body"


def test_an_unknown_route_and_method_are_problems(api: Api) -> None:
    problem_in(api.http.get("/v1/nowhere"), 404, "not_found")
    response = api.http.delete("/v1/jobs")
    problem_in(response, 405, "method_not_allowed")
    assert "POST" in response.headers["allow"] or "GET" in response.headers["allow"]


@pytest.mark.parametrize(
    ("query", "path"), [("limit=0", "limit"), ("status=LOST", "status[0]"), ("limit=x", "limit")]
)
def test_a_bad_query_is_named(api: Api, query: str, path: str) -> None:
    problem = problem_in(api.http.get(f"/v1/jobs?{query}"), 422, "invalid_request")
    assert problem["fields"][0]["path"] == path


def test_an_unexpected_error_is_a_problem_without_its_secrets(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: SqlJobStore, job_id: str) -> Job:
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(SqlJobStore, "get_job", fail)
    response = api.http.get("/v1/jobs/job-x")
    problem_in(response, 500, "internal_error")
    assert "hunter2" not in response.text


@pytest.mark.parametrize(
    ("query", "path"),
    [
        (f"events?after={BEYOND_63_BITS}", "after"),
        (f"metrics?from_step={BEYOND_63_BITS}", "from_step"),
        (f"metrics?to_step={BEYOND_63_BITS}", "to_step"),
    ],
)
def test_a_number_beyond_the_database_is_refused(api: Api, query: str, path: str) -> None:
    response = api.http.get(f"/v1/jobs/{api.submit()}/{query}")
    assert problem_in(response, 422, "invalid_request")["fields"][0]["path"] == path


@pytest.mark.parametrize("last_event_id", [BEYOND_63_BITS, "9" * 5000, "-1", "x"])
def test_a_foreign_last_event_id_is_refused(api: Api, last_event_id: str) -> None:
    headers = {"Accept": "text/event-stream", "Last-Event-ID": last_event_id}
    response = api.http.get(f"/v1/jobs/{api.submit()}/events", headers=headers)
    assert problem_in(response, 422, "invalid_request")["fields"][0]["path"] == "Last-Event-ID"


@pytest.mark.parametrize(
    "text",
    [
        '["ATTEMPT", {"driver": Infinity}]',
        '["ATTEMPT", {"driver": 1e999}]',
        '["ATTEMPT", {"driver": 1000000000000000000000000000000}]',
        "[[1], {}]",
        "[5, {}]",
        "[" * 20_000 + "]" * 20_000,
    ],
)
def test_a_forged_log_cursor_is_refused(api: Api, text: str) -> None:
    job_id = api.start()
    api.log(f"{job_id}-a0", "driver", "hello\n")
    forged = base64.urlsafe_b64encode(text.replace("ATTEMPT", f"{job_id}-a0").encode()).decode()
    response = api.http.get(f"/v1/jobs/{job_id}/logs?after={forged}")
    assert problem_in(response, 422, "invalid_request")["fields"][0]["path"] == "after"


def test_a_job_that_cannot_be_read_is_named(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = api.submit()

    def spoil(*_: object, **__: object) -> None:
        raise ValueError("a field of tomorrow")

    monkeypatch.setattr("service.store.rows._spec_of", spoil)
    problem = problem_in(api.http.get(f"/v1/jobs/{job_id}"), 500, "job_unreadable")
    assert "a field of tomorrow" in problem["detail"]
    assert api.http.get("/v1/jobs").json()["items"] == []
