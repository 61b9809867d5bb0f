"""Secrets of a job: fetched with patience, set in the environment, shown nowhere."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import httpx
import pytest

from trainer import failures
from trainer.attempt import DriverContext
from trainer.secret_env import SecretEnv, SecretsUnavailable, fetch_secrets, secret_names

URL = "http://service/v1/attempts/job-1-a0/secrets"


class Service:
    """Answers with each of `statuses` in turn; 0 stands for no answer."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.now = 0.0

    def answer(self, request: httpx.Request) -> httpx.Response:
        status = self.statuses.pop(0)
        if not status:
            raise httpx.ConnectError("refused")
        return httpx.Response(status, json={"secrets": {"PASSWORD": "hunter2"}})

    def fetch(self, patience_s: float = 10.0) -> SecretEnv:
        with httpx.Client(transport=httpx.MockTransport(self.answer)) as http:
            return fetch_secrets(http, URL, patience_s, self.wait, lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_service_that_comes_back_gives_the_secrets() -> None:
    assert Service(0, 503, 429, 200).fetch().values == {"PASSWORD": "hunter2"}


def test_a_refusal_ends_the_attempt_at_once() -> None:
    with pytest.raises(SecretsUnavailable, match=r"refuses.*403") as caught:
        Service(403).fetch()
    assert caught.value.failure.reason == failures.STORAGE_ERROR


def test_patience_has_an_end() -> None:
    with pytest.raises(SecretsUnavailable, match="does not give"):
        Service(*[0] * 6).fetch()


def test_values_are_shown_nowhere_but_reach_the_workers() -> None:
    secrets = SecretEnv({"PASSWORD": "hunter2"})
    for text in (repr(secrets), str(secrets), f"{[secrets]}"):
        assert "hunter2" not in text
        assert "PASSWORD" in text
    environment: dict[str, str] = {}
    pickle.loads(pickle.dumps(secrets)).set_in(environment)
    assert environment == {"PASSWORD": "hunter2"}


def test_a_job_without_secrets_asks_for_none(tmp_path: Path) -> None:
    path = tmp_path / "secret-names.json"
    assert secret_names(path) == []
    path.write_text(json.dumps(["A", "B"]))
    assert secret_names(path) == ["A", "B"]


def test_the_token_of_an_attempt_is_sent_and_not_shown(tmp_path: Path) -> None:
    context = DriverContext.from_env(
        {
            "SHARDLOOM_JOB_ID": "job-1",
            "SHARDLOOM_ATTEMPT_ID": "job-1-a0",
            "SHARDLOOM_RUN_DIR": str(tmp_path),
            "SHARDLOOM_ATTEMPT_TOKEN": "sla_token",
        }
    )
    assert "sla_token" not in repr(context)
    with context.connect(1.0) as http:
        assert http.headers["Authorization"] == "Bearer sla_token"
