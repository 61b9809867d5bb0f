"""Requests that are repeated with their Idempotency-Key get the first answer, and do nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from sqlalchemy import Engine, select

from service.api.repeats import asker_of
from service.domain import JobStatus
from service.security.principal import Principal
from service.store.answers import ABANDONED_S, KEPT_S, Answer, AnswerStore, answers
from service.store.sql import SqlJobStore
from tests.unit.service.api_house import Api, problem_in

KEY = {"Idempotency-Key": "k-1"}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """A database of its own."""
    return SqlJobStore.open(f"sqlite:///{tmp_path / 'answers.db'}").engine


def test_a_repeated_pause_is_answered_as_the_first_one_was_and_undoes_nothing(api: Api) -> None:
    job = api.submit()
    first = api.http.post(f"/v1/jobs/{job}:pause", headers=KEY)
    assert api.http.post(f"/v1/jobs/{job}:resume").status_code == 202
    again = api.http.post(f"/v1/jobs/{job}:pause", headers=KEY)
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["ETag"] == first.headers["ETag"]
    assert again.headers["Idempotent-Replayed"] == "true"
    assert api.store.get_job(job).status is JobStatus.QUEUED


def test_a_key_is_made_once_and_shown_again_to_who_repeats_the_request(api: Api) -> None:
    body = {"name": "ci", "roles": {"*": "viewer"}}
    first = api.http.post("/v1/keys", json=body, headers=KEY)
    assert first.status_code == 201, first.text
    again = api.http.post("/v1/keys", json=body, headers=KEY)
    assert again.json() == first.json()
    assert len(api.http.get("/v1/keys").json()["items"]) == 1


def test_what_is_kept_of_an_answer_is_sealed(api: Api) -> None:
    body = {"name": "ci", "roles": {"*": "viewer"}}
    shown = api.http.post("/v1/keys", json=body, headers=KEY).json()
    secret = next(value for value in shown.values() if str(value).startswith("shl_"))
    with api.store.engine.connect() as connection:
        kept = connection.execute(select(answers.c.sealed_body)).scalar_one()
    assert kept and secret not in kept


def test_the_same_key_with_another_request_is_refused(api: Api) -> None:
    job = api.submit()
    assert api.http.post(f"/v1/jobs/{job}:pause", headers=KEY).status_code == 202
    other = api.http.post(f"/v1/jobs/{job}:resume", headers=KEY)
    problem_in(other, 409, "idempotency_conflict")
    assert api.store.get_job(job).status is JobStatus.PAUSED


def test_what_was_refused_may_be_asked_again_with_its_key(api: Api) -> None:
    job = api.submit()
    problem_in(api.http.post(f"/v1/jobs/{job}:resume", headers=KEY), 409, "job_not_paused")
    api.http.post(f"/v1/jobs/{job}:pause")
    assert api.http.post(f"/v1/jobs/{job}:resume", headers=KEY).status_code == 202


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there"])
def test_a_key_that_cannot_be_kept_is_refused(api: Api, key: str) -> None:
    job = api.submit()
    answer = api.http.post(f"/v1/jobs/{job}:pause", headers={"Idempotency-Key": key})
    problem_in(answer, 422, "invalid_request")


def test_a_request_under_way_is_not_begun_again_until_it_was_abandoned(engine: Engine) -> None:
    store = AnswerStore(engine)
    assert store.begin("me", "k", "hash", now=1000.0) is None
    under_way = store.begin("me", "k", "hash", now=1001.0)
    assert under_way == Answer("hash")
    assert store.begin("me", "k", "hash", now=1001.0 + ABANDONED_S) is None


def test_an_answer_is_forgotten_after_a_day_and_known_to_nobody_else(engine: Engine) -> None:
    store = AnswerStore(engine)
    now = time.time()
    answer = Answer("hash", 202, (("etag", '"3"'),), "sealed")
    assert store.begin("me", "k", "hash", now) is None
    store.finish("me", "k", answer)
    assert store.begin("you", "k", "hash", now) is None
    assert store.begin("me", "k", "hash", now + KEPT_S - 1) == answer
    assert store.begin("me", "k", "hash", now + KEPT_S + 1) is None


def test_a_request_that_came_to_nothing_leaves_no_trace(engine: Engine) -> None:
    store = AnswerStore(engine)
    store.begin("me", "k", "hash", 0.0)
    store.forget("me", "k")
    assert store.begin("me", "k", "hash", 1.0) is None


def test_who_asks_is_kept_in_few_characters_and_never_mixed_up() -> None:
    names = ["ada", "x" * 255, "x" * 254 + "y", "a\x00b", "a\ud800b"]
    askers = [asker_of(Principal(name, "oidc")) for name in names]
    assert askers[0] == "oidc:ada"
    assert len(set(askers)) == len(names)
    assert all(len(asker) <= 255 and asker.isprintable() for asker in askers)
