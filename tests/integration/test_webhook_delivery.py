"""Webhooks between processes: a real service, a real receiver, and kills in between."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.http_stub import HttpStub, http_stub, wait_for
from tests.integration.ports import free_port
from tests.integration.service_process import ServiceProcess
from tests.unit.service.builders import spec_document


class _Service(ServiceProcess):
    def environment(self) -> dict[str, str]:
        return {
            **super().environment(),
            "SHARDLOOM_WEBHOOK_ALLOWED_NETWORKS": '["127.0.0.0/8"]',
            "SHARDLOOM_WEBHOOK_POLL_S": "0.05",
        }


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    with _Service(tmp_path, free_port()) as started:
        yield started


def _post(service: ServiceProcess, path: str, body: dict[str, Any] | None = None) -> Any:
    response = httpx.post(f"{service.url}{path}", json=body, trust_env=False)
    assert response.is_success, response.text
    return response.json()


def _submit(service: ServiceProcess) -> str:
    return str(_post(service, "/v1/jobs", {"spec": spec_document()})["id"])


def _told(stub: HttpStub) -> list[tuple[str, str]]:
    """Job and kind of what was received."""
    bodies = [json.loads(each.body) for each in stub.received]
    return [(body["data"].get("job_id", ""), body["type"]) for body in bodies]


def test_what_happens_to_a_job_arrives_signed(service: ServiceProcess) -> None:
    with http_stub() as receiver:
        hook = _post(service, "/v1/webhooks", {"url": f"{receiver.url}/in"})
        job = _submit(service)
        _post(service, f"/v1/jobs/{job}:cancel")
        wait_for(lambda: (job, "job_ended") in _told(receiver))
        wait_for(lambda: (job, "job_submitted") in _told(receiver))
        key = base64.b64decode(hook["secret"].removeprefix("whsec_"))
        for request in receiver.received:
            head = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}."
            digest = hmac.digest(key, head.encode() + request.body, hashlib.sha256)
            signed = f"v1,{base64.b64encode(digest).decode()}"
            assert request.headers["webhook-signature"] == signed
            assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    found = httpx.get(f"{service.url}/v1/webhooks/{hook['id']}/deliveries", trust_env=False)
    assert {item["state"] for item in found.json()["items"]} == {"delivered"}


def test_nothing_is_lost_when_the_service_is_killed(service: ServiceProcess) -> None:
    with http_stub(503) as receiver:
        _post(service, "/v1/webhooks", {"url": receiver.url, "kinds": ["job_submitted"]})
        jobs = [_submit(service) for _ in range(5)]
        wait_for(lambda: len(receiver.received) >= 3)
        service.kill()
        receiver.statuses[:] = [200]
        receiver.received.clear()
        service.start()
        # A claim of the killed service has to run out, a failed try has to wait its turn.
        for delivery in _deliveries(service):
            if delivery["state"] == "pending":
                _redeliver(service, delivery)
        wait_for(lambda: {job for job, _ in _told(receiver)} >= set(jobs), timeout_s=180.0)
        # At least once: what is sent again by hand just when its turn has come goes out twice, with
        # the same id.
        assert len({request.headers["webhook-id"] for request in receiver.received}) == 5


def _deliveries(service: ServiceProcess) -> list[dict[str, Any]]:
    [hook] = httpx.get(f"{service.url}/v1/webhooks", trust_env=False).json()["items"]
    path = f"{service.url}/v1/webhooks/{hook['id']}/deliveries"
    items: list[dict[str, Any]] = httpx.get(path, trust_env=False).json()["items"]
    return [{**item, "hook": hook["id"]} for item in items]


def _redeliver(service: ServiceProcess, delivery: dict[str, Any]) -> None:
    _post(service, f"/v1/webhooks/{delivery['hook']}/deliveries/{delivery['id']}:redeliver")


def test_a_redirect_leads_nowhere(service: ServiceProcess) -> None:
    with http_stub(302) as receiver, http_stub() as inside:
        receiver.headers["location"] = inside.url
        hook = _post(service, "/v1/webhooks", {"url": receiver.url})
        _post(service, f"/v1/webhooks/{hook['id']}:test")
        wait_for(lambda: any(each["num_tries"] for each in _deliveries(service)))
        [delivery] = _deliveries(service)
        assert (delivery["state"], delivery["status_code"]) == ("pending", 302)
        assert "redirects are not followed" in delivery["message"]
        assert inside.received == []
