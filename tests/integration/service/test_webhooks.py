"""Webhooks between processes: a real service, a real receiver, and kills in between.

Over HTTPS they go to the address that was checked, and to whoever has the name.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.client.client import ShardloomClient
from service.domain.webhooks import Answer
from service.webhooks.safe_http import post
from tests.harness.builders import spec_document
from tests.harness.certificates import make_certificate
from tests.harness.http_stub import HttpStub, http_stub
from tests.harness.service_process import ServiceProcess
from tests.harness.wait import free_port, scaled, wait_for

NAME = "hooks.test"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    settings = {
        "SHARDLOOM_WEBHOOK_ALLOWED_NETWORKS": '["127.0.0.0/8"]',
        "SHARDLOOM_WEBHOOK_POLL_S": "0.05",
    }
    home = tmp_path_factory.mktemp("home")
    with ServiceProcess(home, free_port(), settings, is_killable=True) as started:
        yield started


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[ShardloomClient]:
    """Its webhooks go with it: those of a test before would be told of the next one's jobs."""
    service.start_if_ended()
    with ShardloomClient(service.url) as opened:
        yield opened
        for hook in opened.webhooks():
            opened.delete_webhook(hook.id)


def _told(stub: HttpStub) -> list[tuple[str, str]]:
    """Job and kind of what was received."""
    bodies = [json.loads(each.body) for each in stub.received]
    return [(body["data"].get("job_id", ""), body["type"]) for body in bodies]


def test_what_happens_to_a_job_arrives_signed(client: ShardloomClient) -> None:
    with http_stub() as receiver:
        hook = client.create_webhook(f"{receiver.url}/in")
        job = client.submit(spec_document()).id
        client.cancel(job)
        wanted = {(job, "job_submitted"), (job, "job_ended")}
        wait_for(lambda: wanted <= set(_told(receiver)), "what happened to the job")
        key = base64.b64decode(hook.secret.removeprefix("whsec_"))
        for request in receiver.received:
            head = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}."
            digest = hmac.digest(key, head.encode() + request.body, hashlib.sha256)
            signed = f"v1,{base64.b64encode(digest).decode()}"
            assert request.headers["webhook-signature"] == signed
            assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
        # Noted once the receiver has answered.
        wait_for(
            lambda: {each.state for each in client.deliveries(hook.id)} == {"delivered"},
            "all deliveries to be noted",
        )


def test_a_delivery_whose_service_died_before_it_was_noted_is_sent_again_with_its_id(
    service: ServiceProcess, client: ShardloomClient
) -> None:
    with http_stub() as receiver:
        hook = client.create_webhook(receiver.url, kinds=["job_submitted"])
        service.kill_at("before webhooks.settle")
        job = client.submit(spec_document()).id
        service.start_once_killed()
        (delivery,) = client.deliveries(hook.id)
        client.redeliver(hook.id, delivery.id)
        wait_for(lambda: len(receiver.received) == 2, "the second try")
        assert {each for each, _ in _told(receiver)} == {job}
        assert len({request.headers["webhook-id"] for request in receiver.received}) == 1


# ---- over HTTPS


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[HttpStub, Path]]:
    """An HTTPS server, and its certificate."""
    certificate, private = make_certificate(tmp_path, NAME)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, private)
    with http_stub(204, tls=context) as stub:
        yield stub, certificate


def _send(name: str, port: int, certificate: Path) -> Answer:
    async def _resolve(host: str, _: int) -> list[str]:
        assert host == name
        return ["127.0.0.1"]

    async def _post() -> Answer:
        trusted = ssl.create_default_context(cafile=str(certificate))
        return await post(
            f"https://{name}:{port}/in",
            "{}",
            {},
            allowed=[ipaddress.ip_network("127.0.0.0/8")],
            timeout_s=scaled(10.0),
            resolve=_resolve,
            transport=httpx.AsyncHTTPTransport(verify=trusted),
        )

    return asyncio.run(_post())


def test_the_name_is_what_the_certificate_is_checked_for(receiver: tuple[HttpStub, Path]) -> None:
    stub, certificate = receiver
    assert _send(NAME, stub.port, certificate).status_code == 204
    assert [each.headers["host"] for each in stub.received] == [f"{NAME}:{stub.port}"]


def test_a_server_without_the_name_hears_nothing(receiver: tuple[HttpStub, Path]) -> None:
    stub, certificate = receiver
    answer = _send("other.test", stub.port, certificate)
    assert answer.status_code is None
    assert "CERTIFICATE_VERIFY_FAILED" in answer.message
    assert stub.received == []
