"""The real service with keys and TLS: from the first key to a driver's post."""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.client.client import ShardloomClient
from service.client.errors import NotSignedIn, ServiceUnreachable
from service.client.transport import RetryPolicy
from tests.harness.builders import spec_document
from tests.harness.certificates import make_certificate
from tests.harness.service import shardloom
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import free_port, scaled, wait_for
from trainer.driver.attempt import DriverContext
from trainer.driver.main import with_secrets
from trainer.protocol import events
from trainer.protocol.outbox import EventWriter, OutboxPoster

ONCE = RetryPolicy(num_retries=0)


class TlsService(ServiceProcess):
    """The service over HTTPS, asking who calls."""

    def __init__(self, home: Path, port: int) -> None:
        self.certificate, key = make_certificate(home, "127.0.0.1")
        settings = {
            "SHARDLOOM_AUTH": "required",
            "SHARDLOOM_LOG_FORMAT": "json",
            "SHARDLOOM_SSL_CERTFILE": str(self.certificate),
            "SHARDLOOM_SSL_KEYFILE": str(key),
            "SHARDLOOM_DRIVER_CA_FILE": str(self.certificate),
            "SHARDLOOM_CA_FILE": str(self.certificate),
            "SHARDLOOM_STORAGE_ROOTS": json.dumps([str(Path(spec_document()["data"]["path"]))]),
        }
        super().__init__(home, port, settings)
        self.url = f"https://127.0.0.1:{port}"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsService]:
    made = TlsService(tmp_path, free_port())
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path / "client"))
    yield made
    made.kill()


def test_from_the_first_key_to_a_driver_that_posts(
    service: TlsService, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = service.shell("keys", "create", "ops", "--admin").strip()
    assert key.startswith("shl_")
    service.start()
    url = {"SHARDLOOM_URL": service.url}

    with (
        pytest.raises(ServiceUnreachable, match=r"is not trusted .*certificate"),
        ShardloomClient(service.url, api_key=key, retry=ONCE) as client,
    ):
        client.whoami()
    told = shardloom("status", "--url", service.url)
    assert "name those (PEM) by which to check it" in told.stdout
    assert ("is not trusted" in told.stdout, "shardloom up" in told.stdout) == (True, False)
    monkeypatch.setenv("SHARDLOOM_CA_FILE", str(service.certificate))
    with pytest.raises(NotSignedIn), ShardloomClient(service.url, retry=ONCE) as client:
        client.whoami()

    # A terminal is asked for the key; here it comes from a variable, as in CI.
    made = service.shell(
        "keys", "create", "ci", "--role", "default=submitter", SHARDLOOM_API_KEY=key, **url
    ).strip()
    monkeypatch.setenv("SHARDLOOM_API_KEY", made)
    with ShardloomClient(service.url) as client:
        assert client.whoami().roles == {"default": "submitter"}
        job = client.submit(spec_document(), secrets={"DB_PASSWORD": "hunter2hunter2"})
        assert client.get_job(job.id).secret_names == ["DB_PASSWORD"]
        _drive(service, job.id)
        kinds = [line.kind for line in client.iter_events(job.id)]
    assert "note" in kinds
    assert f'"job_id": "{job.id}"' in service.log()
    assert key not in service.log()
    assert "hunter2" not in service.log()
    lines = json.loads(service.shell("audit", "--json", SHARDLOOM_API_KEY=key, **url))
    assert [(line["actor"], line["status"]) for line in lines] == [
        ("key:ci", 201),
        ("key:ops", 201),
    ]


def _drive(service: TlsService, job_id: str) -> None:
    """Do what the driver of the job's first attempt does."""
    record = wait_for(lambda: service.cluster.record(f"{job_id}-a0"), "the submission")
    context = DriverContext.from_env(record.env)
    assert context.token not in repr(context)
    context = with_secrets(context)
    assert context.secrets.values == {"DB_PASSWORD": "hunter2hunter2"}
    assert "hunter2" not in repr(context)
    assert os.environ.pop("DB_PASSWORD") == "hunter2hunter2"
    writer = EventWriter(context.files.stream_path("driver"))
    writer.write(events.Note(time=time.time(), level="info", message="hello"))
    url = f"{context.service_url}/v1/attempts/{context.attempt_id}/events"
    with context.connect(scaled(5.0)) as http:
        OutboxPoster(context.files, http, url).post_new()
    stranger = ssl.create_default_context(cafile=str(service.certificate))
    with httpx.Client(verify=stranger, trust_env=False) as http:
        assert http.get(url.replace("events", "secrets")).status_code == 401
