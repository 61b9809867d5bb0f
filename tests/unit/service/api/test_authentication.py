"""The gate over time: streams outlive no key, drivers have a rate of their own, tokens get in."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
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
from service.api.sse import HEARTBEAT_S
from service.auth.authenticator import Credentials
from service.auth.oidc import TokenVerifier
from service.domain.auth import AuditFilter, AuditRecord, Role, key_id_of
from tests.harness.builders import audit_record
from tests.harness.clock import FakeClock
from tests.harness.service import Guarded, GuardedApps
from tests.harness.wait import scaled
from tests.unit.service.auth.test_oidc import AUDIENCE, ISSUER, NOW, URL, Issuer


@pytest.fixture
def house(open_guarded: GuardedApps) -> Guarded:
    return open_guarded()


class Wire:
    """Keeps what an app sends to the caller of a key."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def connect(
        self,
        gate: AuthenticationMiddleware,
        key: str,
        kind: str = "http",
        path: str = "/v1/jobs/x/events",
        method: str = "GET",
    ) -> None:
        headers = [(b"authorization", f"Bearer {key}".encode()), (b"host", b"shardloom.example")]
        scope = {"type": kind, "method": method, "path": path, "headers": headers}
        await gate({**scope, "query_string": b""}, self._receive, self._send)

    async def _receive(self) -> Message:
        return {"type": "websocket.receive", "text": "ping"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)


async def answered(*wires: Wire) -> None:
    async with asyncio.timeout(scaled(30)):
        while not all(wire.sent for wire in wires):
            await asyncio.sleep(0)


def test_a_stream_ends_soon_after_its_key(house: Guarded) -> None:
    clock, wire = FakeClock(), Wire()
    viewer = key_id_of(house.keys["viewer"]) or ""

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in range(10):
            clock.now += HEARTBEAT_S
            if piece == 1:
                house.security.keys.revoke_key(viewer, 0.0)
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    gate = AuthenticationMiddleware(stream, house.settings, house.security, clock)
    asyncio.run(wire.connect(gate, house.keys["viewer"]))
    pieces = [message for message in wire.sent if message["type"] == "http.response.body"]
    # The last one with the key, and one more at most 15 s later.
    assert len(pieces) <= 2
    assert pieces[-1]["more_body"] is True, "a download is not whole then"


HELLOS: dict[str, Message] = {
    "http": {"type": "http.response.start", "status": 200, "headers": []},
    "websocket": {"type": "websocket.accept"},
}


@pytest.mark.parametrize(
    ("kind", "path"),
    [("http", "/v1/jobs/x/events"), ("websocket", "/dashboard/_nicegui_ws")],
)
def test_who_follows_too_much_at_once_is_refused_until_a_connection_ends(
    open_guarded: GuardedApps, kind: str, path: str
) -> None:
    house = open_guarded(max_open_requests=2)

    async def follow() -> list[bool]:
        gate = AuthenticationMiddleware(stream, house.settings, house.security)
        wires = [Wire() for _ in range(4)]
        begun = [asyncio.create_task(wire.connect(gate, key, kind, path)) for wire in wires[:2]]
        await answered(*wires[:2])
        refused = asyncio.create_task(wires[2].connect(gate, key, kind, path))
        await answered(wires[2])
        end.set()
        await asyncio.gather(*begun, refused)
        await wires[3].connect(gate, key, kind, path)
        return [wire.sent[0] == HELLOS[kind] for wire in wires]

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send(HELLOS[kind])
        await end.wait()

    key, end = house.keys["viewer"], asyncio.Event()
    assert asyncio.run(follow()) == [True, True, False, True]


def test_open_requests_of_strangers_keep_neither_probes_nor_drivers_out(
    open_guarded: GuardedApps,
) -> None:
    house, login = open_guarded(max_open_requests=1), ("POST", "/login")
    claim = ("POST", "/v1/attempts:claim")

    async def ask(gate: AuthenticationMiddleware, method: str, path: str) -> Wire:
        wire = Wire()
        held.append(asyncio.create_task(wire.connect(gate, "", "http", path, method)))
        await answered(wire)
        return wire

    async def ask_all() -> list[bool]:
        gate = AuthenticationMiddleware(stay, house.settings, house.security)
        asked = (login, login, claim, claim, *([("GET", "/healthz"), ("GET", "/login")] * 2))
        wires = [await ask(gate, *each) for each in (*asked, ("GET", "/readyz"))]
        for each in held:
            each.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        return [wire.sent[0] == HELLOS["http"] for wire in wires]

    async def stay(scope: Any, receive: Any, send: Any) -> None:
        await send(HELLOS["http"])
        await asyncio.Event().wait()

    held: list[asyncio.Task[None]] = []
    assert asyncio.run(ask_all()) == [True, False, True, False, *[True] * 5]


def test_who_opens_websockets_too_fast_is_refused(open_guarded: GuardedApps) -> None:
    house = open_guarded(rate_limit_burst=2, rate_limit_per_s=0.001)

    async def greet(scope: Any, receive: Any, send: Any) -> None:
        await send(HELLOS["websocket"])

    gate, wire = AuthenticationMiddleware(greet, house.settings, house.security), Wire()
    for _ in range(3):
        asyncio.run(wire.connect(gate, house.keys["viewer"], "websocket"))
    assert wire.sent == [*[HELLOS["websocket"]] * 2, {"type": "websocket.close", "code": 1008}]


def test_a_websocket_ends_soon_after_its_key(house: Guarded) -> None:
    clock, wire, heard = FakeClock(), Wire(), []
    viewer = key_id_of(house.keys["viewer"]) or ""

    async def listen(scope: Any, receive: Any, send: Any) -> None:
        while (message := await receive())["type"] != "websocket.disconnect":
            heard.append(message)
            clock.now += 10.0
            if len(heard) == 2:
                house.security.keys.revoke_key(viewer, 0.0)

    gate = AuthenticationMiddleware(listen, house.settings, house.security, clock)
    asyncio.run(wire.connect(gate, house.keys["viewer"], "websocket"))
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
    cookie = {"cookie": f"{SESSION_COOKIE}=t"}
    cases: list[tuple[dict[str, str], Credentials]] = [
        ({}, Credentials()),
        ({"authorization": "Bearer a"}, Credentials(bearer="a")),
        ({"authorization": "bearer  a "}, Credentials(bearer="a")),
        ({"authorization": "Basic YTpi"}, Credentials()),
        ({"authorization": "Basic YTpi", **cookie}, Credentials(cookie="t")),
        (cookie, Credentials(cookie="t")),
        ({"authorization": "Bearer a", **cookie}, Credentials(bearer="a")),
    ]
    for headers, found in cases:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        assert credentials_of(HTTPConnection({"type": "http", "headers": raw})) == found


def test_credentials_of_an_unknown_kind_are_refused_with_what_to_send(house: Guarded) -> None:
    refused = house.http.get("/v1/jobs", headers={"Authorization": "Basic YTpi"})
    assert refused.status_code == 401
    assert "send 'Authorization: Bearer KEY'" in refused.json()["detail"]


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
    house.keys["driver"] = house.security.master.attempt_token("job-1-a0")
    for number in range(10):
        assert house.send("POST", "/v1/attempts/job-1-a0/events", "viewer").status_code == 403
        assert house.send("POST", f"/v1/jobs/{number}:cancel").status_code == 401
        assert house.send("POST", f"/v1/jobs/{number}:cancel", "driver").status_code == 403
    house.security.audit.flush()
    lines = house.send("GET", "/v1/audit", "root").json()["items"]
    actors = Counter(line["actor"] for line in lines)
    assert actors == {"anonymous": 3, "key:viewer": 3, "job-1-a0": 3}


def test_what_an_editor_asks_for_with_every_change_is_not_in_the_audit_log(house: Guarded) -> None:
    for path in ("/v1/jobs?dry_run=true", "/v1/plans", "/v1/jobs"):
        assert house.send("POST", path, "submitter", json={}).status_code == 422
    house.security.audit.flush()
    lines = house.security.keys.list_audit(AuditFilter())
    assert [line.action for line in lines] == ["POST /v1/jobs"]


def test_a_line_that_cannot_be_written_does_not_stop_those_after_it(house: Guarded) -> None:
    audit = house.security.audit
    audit.append(audit_record(actor=None))
    audit.flush()
    audit.append(audit_record())
    audit.flush()
    assert [kept.actor for kept in house.security.keys.list_audit(AuditFilter())] == ["key:ci"]


def test_the_audit_log_of_a_slow_database_drops_lines_rather_than_grow(
    house: Guarded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    audit = house.security.audit
    monkeypatch.setattr("service.auth.security._MAX_PENDING", 5)
    is_open, is_writing = threading.Event(), threading.Event()
    kept: list[AuditRecord] = []

    def write(records: Sequence[AuditRecord]) -> None:
        is_writing.set()
        is_open.wait(scaled(10))
        kept.extend(records)

    monkeypatch.setattr(house.security.keys, "append_audit", write)
    audit.append(audit_record())
    assert is_writing.wait(scaled(10))
    for _ in range(20):
        audit.append(audit_record())
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
