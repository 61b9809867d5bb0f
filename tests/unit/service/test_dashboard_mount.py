"""The dashboard beside the API on one app, and many apps in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastapi import FastAPI
from fastapi.testclient import TestClient

from service.dashboard.pages import mount
from service.settings import Settings
from service.store.sql import SqlJobStore
from tests.unit.service.builders import queued_job


@contextmanager
def client_of(store: SqlJobStore, home: Path) -> Iterator[TestClient]:
    """A client of a started app that serves the dashboard over `store`."""
    app = FastAPI()
    mount(app, store, Settings(home=home), wake=lambda: None)
    with TestClient(app) as client:
        yield client


def test_the_root_leads_to_the_list_and_other_paths_stay_with_the_api(
    store: SqlJobStore, tmp_path: Path
) -> None:
    with client_of(store, tmp_path) as client:
        assert client.get("/", follow_redirects=False).headers["location"] == "/dashboard/"
        assert client.get("/v1/unknown").json() == {"detail": "Not Found"}
        assert client.get("/dashboard/").status_code == 200


def test_each_app_of_a_process_shows_its_own_store(store: SqlJobStore, tmp_path: Path) -> None:
    with client_of(store, tmp_path) as client:
        assert "movie-nights" not in client.get("/dashboard/").text
    other = SqlJobStore.open(f"sqlite:///{tmp_path / 'other.db'}")
    other.create_job(queued_job(name="movie-nights"), idempotency_key=None, request_hash="")
    with client_of(other, tmp_path) as client:
        assert "movie-nights" in client.get("/dashboard/").text
    other.close()


def test_an_unknown_job_is_a_404_page(store: SqlJobStore, tmp_path: Path) -> None:
    with client_of(store, tmp_path) as client:
        answer = client.get("/dashboard/jobs/job-unknown")
    assert answer.status_code == 404
    assert "There is no such job" in answer.text
