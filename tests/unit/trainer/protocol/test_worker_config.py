"""Secrets of a job: fetched with patience, shown nowhere; packages that must match."""

from __future__ import annotations

import pickle
from pathlib import Path

import httpx
import pytest

from tests.harness.builders import spec
from tests.harness.clock import FakeClock
from tests.unit.trainer.driver.scripted import attempt_in
from trainer.driver.attempt import AttemptFailed, DriverContext, claim
from trainer.driver.main import with_secrets
from trainer.failures import EndReason
from trainer.protocol.run_dir import RunDir
from trainer.protocol.versions import STACK, check_versions
from trainer.protocol.worker_config import SecretEnv

URL = "http://service/v1/attempts/job-1-a0/secrets"


class Service:
    """Answers with each of `statuses` in turn; 0 stands for no answer, 202 for a proxy's page."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.bodies: set[bytes] = set()

    def answer(self, request: httpx.Request) -> httpx.Response:
        status = self.statuses.pop(0)
        self.bodies.add(request.content)
        if not status:
            raise httpx.ConnectError("refused")
        if status == httpx.codes.ACCEPTED:
            return httpx.Response(status, text="<html>sign in</html>")
        return httpx.Response(status, json={"secrets": {"PASSWORD": "hunter2"}})

    def fetch(self) -> dict[str, str]:
        clock = FakeClock()
        with httpx.Client(transport=httpx.MockTransport(self.answer)) as http:
            patience = {"patience_s": 10.0, "wait": clock.sleep, "clock": clock}
            return dict(claim(http, URL, {"claim": "c" * 43}, "secrets", **patience))


def test_a_service_that_comes_back_gives_the_secrets_to_the_same_claim() -> None:
    service = Service(0, 503, 429, 408, 202, 200)
    assert service.fetch() == {"PASSWORD": "hunter2"}
    assert len(service.bodies) == 1


def test_a_refusal_ends_the_attempt_at_once_and_patience_has_an_end() -> None:
    with pytest.raises(AttemptFailed, match=r"refuses.*403") as caught:
        Service(403).fetch()
    assert caught.value.failure.reason == EndReason.STORAGE_ERROR
    with pytest.raises(AttemptFailed, match="does not give"):
        Service(*[0] * 6).fetch()


def test_values_are_shown_nowhere_but_reach_the_workers() -> None:
    secrets = SecretEnv({"PASSWORD": "hunter2"})
    for text in (repr(secrets), str(secrets), f"{[secrets]}"):
        assert "hunter2" not in text
        assert "PASSWORD" in text
    assert pickle.loads(pickle.dumps(secrets)).values == {"PASSWORD": "hunter2"}


def test_the_token_of_workers_is_another_for_each_attempt_and_shown_nowhere(tmp_path: Path) -> None:
    attempts = [attempt_in(tmp_path / name, spec()) for name in "ab"]
    tokens = [attempt.config(0).token for attempt in attempts]
    assert tokens == [attempt.token for attempt in attempts]
    assert len(set(tokens)) == 2 and min(map(len, tokens)) == 32
    for shown in (attempts[0], attempts[0].config(0)):
        assert str(tokens[0]) not in repr(shown) and "token=" not in repr(shown)


def test_a_job_without_secrets_asks_for_none(tmp_path: Path) -> None:
    context = DriverContext("job-1", "job-1-a0", tmp_path, "http://nobody.invalid", 0)
    assert with_secrets(context) is context


def test_the_token_of_an_attempt_is_sent_and_not_shown(tmp_path: Path) -> None:
    given = {"JOB_ID": "job-1", "ATTEMPT_ID": "job-1-a0", "RUN_DIR": str(tmp_path)}
    token_path = RunDir(tmp_path).attempt("job-1-a0").token_path
    token_path.parent.mkdir(parents=True)
    token_path.write_text("sla_token")
    context = DriverContext.from_env({f"SHARDLOOM_{name}": text for name, text in given.items()})
    assert "sla_token" not in repr(context)
    with context.connect(1.0) as http:
        assert http.headers["Authorization"] == "Bearer sla_token"
    assert not token_path.exists()


def test_a_package_of_another_version_is_named_with_what_is_wanted():
    installed = {name: f"{minor}.3" for name, minor in STACK.items()}
    assert check_versions(installed) == []
    (found,) = check_versions(installed | {"ray": "2.6.0"})
    assert found.startswith("ray 2.6.0 is installed, 2.60 is needed: run `make setup`")


def test_missing_packages_are_named_with_the_extra_that_brings_them():
    found = check_versions({})
    assert [mismatch.split()[0] for mismatch in found] == list(STACK)
    assert found[0].startswith("torch is missing, 2.13 is needed")
    # No extra for CPUs can have it: its metadata asks for the CUDA build of fbgemm.
    assert found[2].endswith("'shardloom[trainer-cpu]', then pip install --no-deps torchrec==1.8.0")
