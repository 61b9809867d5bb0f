"""The gate over time: streams outlive no key, drivers have a rate of their own, tokens get in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import HTTPConnection
from starlette.types import Message

from service.api.authentication import (
    SESSION_COOKIE,
    AuthenticationMiddleware,
    credentials_of,
    plain,
)
from service.auth.authenticator import Credentials
from service.auth.oidc import TokenVerifier
from service.domain.auth import AuditFilter, AuditRecord, Role
from tests.harness.clock import FakeClock
from tests.harness.service import Guarded, GuardedApps
from tests.harness.wait import scaled
from tests.unit.service.auth.test_oidc import AUDIENCE, ISSUER, NOW, URL, Issuer


@pytest.fixture
def house(open_guarded: GuardedApps) -> Guarded:
    return open_guarded()


def _scope(kind: str, key: str, path: str = "/v1/jobs/x/events") -> dict[str, Any]:
    headers = [(b"authorization", f"Bearer {key}".encode()), (b"host", b"shardloom.example")]
    return {"type": kind, "method": "GET", "path": path, "headers": headers, "query_string": b""}


async def _silent() -> Message:
    return {"type": "websocket.receive", "text": "ping"}


class Wire:
    """Keeps what an app sends."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def send(self, message: Message) -> None:
        self.sent.append(message)


def test_a_stream_ends_soon_after_its_key(house: Guarded) -> None:
    clock, wire = FakeClock(), Wire()
    key_id = house.send("GET", "/v1/keys", "root").json()["items"]
    viewer = next(key["id"] for key in key_id if key["name"] == "viewer")

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in range(100):
            clock.now += 1.0
            if piece == 10:
                house.security.keys.revoke_key(viewer, 0.0)
                house.security.authenticator.forget_key(viewer)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    gate = AuthenticationMiddleware(stream, house.settings, house.security, clock)
    asyncio.run(gate(_scope("http", house.keys["viewer"]), _silent, wire.send))
    pieces = [message for message in wire.sent if message["type"] == "http.response.body"]
    assert 25 < len(pieces) < 35
    assert pieces[-1]["more_body"] is False


def test_who_follows_too_much_at_once_is_refused_until_a_stream_ends(
    open_guarded: GuardedApps,
) -> None:
    house = open_guarded(max_open_requests=2)

    async def follow() -> list[int]:
        gate = AuthenticationMiddleware(stream, house.settings, house.security)
        wires = [Wire() for _ in range(4)]
        begun = [asyncio.create_task(call(gate, "viewer", wire)) for wire in wires[:2]]
        while not all(wire.sent for wire in wires[:2]):
            await asyncio.sleep(0)
        await call(gate, "viewer", wires[2])
        end.set()
        await asyncio.gather(*begun)
        await call(gate, "viewer", wires[3])
        return [wire.sent[0]["status"] for wire in wires]

    async def call(gate: AuthenticationMiddleware, who: str, wire: Wire) -> None:
        await gate(_scope("http", house.keys[who]), _silent, wire.send)

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await end.wait()

    end = asyncio.Event()
    assert asyncio.run(follow()) == [200, 200, 429, 200]


def test_a_websocket_ends_soon_after_its_key(house: Guarded) -> None:
    clock, wire, heard = FakeClock(), Wire(), []

    async def listen(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] != "websocket.disconnect":
            heard.append(message)
            clock.now += 10.0
            if len(heard) == 2:
                for key in house.security.keys.list_keys():
                    house.security.keys.revoke_key(key.id, 0.0)
                    house.security.authenticator.forget_key(key.id)

    gate = AuthenticationMiddleware(listen, house.settings, house.security, clock)
    asyncio.run(gate(_scope("websocket", house.keys["viewer"]), _silent, wire.send))
    assert len(heard) < 6
    assert wire.sent == [{"type": "websocket.close", "code": 1008}]


def test_a_driver_has_a_generous_rate_of_its_own(open_guarded: GuardedApps) -> None:
    rates = {"attempt_rate_limit_burst": 5, "attempt_rate_limit_per_s": 0.001}
    house = open_guarded(rate_limit_burst=2, **rates)
    house.keys["driver"] = house.security.master.attempt_token("job-1-a0")
    body = {"stream": "driver", "first_seq": 0, "events": []}
    path = "/v1/attempts/job-1-a0/events"
    statuses = [house.send("POST", path, "driver", json=body).status_code for _ in range(6)]
    assert statuses == [404] * 5 + [429]


def test_a_token_of_the_identity_provider_gets_in_with_its_roles(
    open_guarded: GuardedApps, monkeypatch: pytest.MonkeyPatch
) -> None:
    issuer = Issuer()
    monkeypatch.setenv("SHARDLOOM_OIDC_ROLES", '{"ml": {"default": "submitter"}}')
    house = open_guarded(
        oidc_issuer=ISSUER,
        oidc_audience=AUDIENCE,
        oidc_jwks_url=URL,
        oidc_roles_claim="realm.roles",
    )
    assert house.security.authenticator.verifier is not None
    transport = httpx.MockTransport(issuer.answer)
    verifier = TokenVerifier(house.settings, transport, clock=lambda: NOW)
    monkeypatch.setattr(house.security.authenticator, "verifier", verifier)
    house.keys["ada"], house.keys["mallory"] = issuer.token(), issuer.token(aud="others")
    answer = house.send("GET", "/v1/whoami", "ada").json()
    assert (answer["name"], answer["roles"]) == ("oidc:ada", {"default": "submitter"})
    house.submit("ada")
    assert house.send("GET", "/v1/whoami", "mallory").status_code == 401


def test_whoever_opens_a_connection_is_known_by_header_or_cookie() -> None:
    def seen(**headers: str) -> Credentials:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        return credentials_of(HTTPConnection({"type": "http", "headers": raw}))

    assert seen() == Credentials()
    assert seen(authorization="Bearer a") == Credentials(bearer="a")
    assert seen(authorization="bearer  a ") == Credentials(bearer="a")
    assert seen(authorization="Basic YTpi") == Credentials(bearer="")
    assert seen(cookie=f"{SESSION_COOKIE}=t") == Credentials(cookie="t")
    both = seen(authorization="Bearer a", cookie=f"{SESSION_COOKIE}=t")
    assert both == Credentials(bearer="a")


def test_a_nul_character_gets_to_no_database(house: Guarded) -> None:
    for path in ("/v1/jobs/a%00b", "/v1/jobs?name=%00", "/v1/audit?actor=a%00"):
        answer = house.send("GET", path, "root")
        assert (answer.status_code, answer.json()["fields"][0]["code"]) == (422, "nul")


@given(st.text(max_size=50))
def test_what_the_audit_log_keeps_is_fit_for_every_database(text: str) -> None:
    kept = plain(text)
    assert kept.isascii()
    assert kept.isprintable()


def test_who_is_refused_again_and_again_does_not_fill_the_audit_log(house: Guarded) -> None:
    for number in range(10):
        assert house.send("POST", "/v1/attempts/job-1-a0/events", "viewer").status_code == 403
        assert house.send("POST", f"/v1/jobs/{number}:cancel").status_code == 401
    house.security.audit.flush()
    lines = house.send("GET", "/v1/audit", "root").json()["items"]
    assert sorted(line["actor"] for line in lines) == ["anonymous"] * 3 + ["key:viewer"] * 3


def test_a_line_that_cannot_be_written_does_not_stop_those_after_it(house: Guarded) -> None:
    audit = house.security.audit
    line = AuditRecord(0, 1.0, "ada", "key", "POST /x", "/x", "", 200, "")
    audit.append(replace(line, actor=None))  # type: ignore[arg-type]
    audit.flush()
    audit.append(line)
    audit.flush()
    assert [kept.actor for kept in house.security.keys.list_audit(AuditFilter())] == ["ada"]


def test_who_asks_without_credentials_again_and_again_is_told_to_wait(house: Guarded) -> None:
    statuses = [house.send("GET", "/v1/jobs").status_code for _ in range(150)]
    assert set(statuses[:100]) == {401}
    assert statuses[-1] == 429
    assert house.send("GET", "/v1/jobs", "viewer").status_code == 200


def test_the_audit_log_of_a_slow_database_drops_lines_rather_than_grow(
    house: Guarded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    audit = house.security.audit
    monkeypatch.setattr("service.auth.security._MAX_PENDING", 5)
    line = AuditRecord(0, 1.0, "ada", "key", "POST /x", "/x", "", 200, "")
    is_open, is_writing = threading.Event(), threading.Event()
    kept: list[AuditRecord] = []

    def write(records: Sequence[AuditRecord]) -> None:
        is_writing.set()
        is_open.wait(scaled(10))
        kept.extend(records)

    monkeypatch.setattr(house.security.keys, "append_audit", write)
    audit.append(line)
    assert is_writing.wait(scaled(10))
    for _ in range(20):
        audit.append(line)
    is_open.set()
    audit.flush()
    assert len(kept) == 6
    assert "15 lines of the audit log are lost" in caplog.text


def test_an_actor_with_a_long_name_fits_into_the_audit_log(house: Guarded) -> None:
    name = "é" * 255
    house.add_key(name, {"default": Role.SUBMITTER})
    assert house.send("POST", "/v1/jobs/none:cancel", name).status_code == 404
    house.security.audit.flush()
    [line] = house.security.keys.list_audit(AuditFilter())
    assert len(line.actor) == 255
