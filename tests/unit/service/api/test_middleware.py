"""What is around every request: hosts, origins, headers, sizes, rates, ids, sessions, repeats."""

from __future__ import annotations

import asyncio
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from nicegui.nicegui import sio
from sqlalchemy import Connection, delete, event, select
from starlette.types import Message
from starlette.websockets import WebSocketDisconnect
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from service.api import middleware
from service.api.authentication import CSRF_COOKIE, SESSION_COOKIE, RateLimiter
from service.api.middleware import caller_key, is_foreign, safe_headers
from service.app import build_app, check_address
from service.dashboard.app import safe_target
from service.db.idempotency import ABANDONED_S, KEPT_S, IdempotencyStore
from service.db.jobs import JobStore
from service.db.tables import answers
from service.domain.auth import AuditFilter, Principal, login_code
from service.domain.models import JobStatus
from service.errors import ServiceError, StoreUnavailable
from service.network import is_loopback
from service.settings import Settings
from tests.harness.service import (
    HOST,
    LOOPBACK_URL,
    Api,
    Guarded,
    GuardedApps,
    problem_in,
    with_checkpoint,
)


@pytest.fixture
def house(open_guarded: GuardedApps) -> Guarded:
    return open_guarded(dashboard=True, rate_limit_burst=30, rate_limit_per_s=0.001)


# ---- where it listens, and for whom


def test_only_loopback_has_other_modes_than_required(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.7", "shardloom.example"):
        settings = Settings(home=tmp_path, host=host)
        assert settings.auth == "required"
        check_address(settings, has_credentials=True)
        with pytest.raises(ServiceError, match=f"keys create .* SHARDLOOM_HOME={tmp_path} and"):
            check_address(settings, has_credentials=False)
        for auth in ("local", "none"):
            with pytest.raises(ServiceError, match=f"SHARDLOOM_AUTH={auth} is for one machine"):
                check_address(Settings(home=tmp_path, host=host, auth=auth), has_credentials=True)
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        settings = Settings(home=tmp_path, host=host)
        assert settings.auth == "local"
        check_address(settings, has_credentials=False)
    for name in ("127.0.0.1.evil.example", "localhost.evil", "", "0.0.0.0"):
        assert not is_loopback(name)


def test_settings_of_which_one_wants_another_are_refused_without_it(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, ssl_certfile=tmp_path / "cert.pem")
    assert settings.service_url == "https://127.0.0.1:8700"
    without_audience = Settings(home=tmp_path, oidc_issuer="https://id", oidc_jwks_url="https://id")
    for each in (settings, without_audience):
        with pytest.raises(ServiceError, match="go together"):
            check_address(each, has_credentials=True)


def test_local_mode_is_for_whoever_has_its_token(open_guarded: GuardedApps) -> None:
    house = open_guarded(auth="local", dashboard=True)
    other = TestClient(house.http.app, base_url=LOOPBACK_URL)
    house.keys["own"] = house.security.authenticator.local_token or ""
    browser = {"Host": "127.0.0.1", "Accept": "text/html"}

    def open_page(path: str, client: TestClient) -> tuple[int, str]:
        answer = client.get(path, headers=browser, follow_redirects=False)
        return answer.status_code, answer.headers.get("location", answer.text)

    for path in ("/v1/jobs", "/metrics", "/docs", "/v1/audit"):
        for headers in ({}, {"Authorization": "Bearer x"}):
            assert other.get(path, headers=headers).status_code == 401
    assert open_page("/dashboard/", other) == (303, "/login?next=/dashboard/")
    assert "shardloom status" in open_page("/login", other)[1]
    own = house.send("GET", "/v1/whoami", "own", headers={"Host": "127.0.0.1"}).json()
    assert (own["kind"], own["auth"], own["roles"]) == ("local", "local", {"*": "admin"})
    link = f"/login?code={login_code(house.keys['own'], time.time())}&next=/docs"
    assert open_page(link, house.http) == (303, "/docs")
    assert open_page(link, other)[0] == 401
    assert open_page("/v1/jobs", house.http)[0] == 200
    headers = {"Host": "127.0.0.1", "Origin": "http://127.0.0.1:9999"}
    refused = house.http.post("/v1/jobs/x:cancel", headers=headers)
    assert refused.json()["code"] == "foreign_origin"


def test_local_mode_answers_for_names_of_loopback_only(api: Api) -> None:
    for host in ("localhost:8700", "[::1]:8700", "127.0.0.1"):
        assert api.http.get("/v1/jobs", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "127.0.0.1.nip.io:8700", "evil@127.0.0.1.x", ""):
        answer = api.http.get("/v1/jobs", headers={"Host": host})
        assert (answer.status_code, answer.json()["code"]) == (421, "foreign_host")


def test_allowed_hosts_are_answered_for_in_any_case_and_loopback_beside_them(
    open_guarded: GuardedApps,
) -> None:
    house = open_guarded(allowed_hosts=["Shardloom.example"])
    for host in ("shardloom.example", "SHARDLOOM.example:8700", "127.0.0.1:8700", "localhost"):
        answer = house.send("GET", "/v1/jobs", "viewer", headers={"Host": host})
        assert answer.status_code == 200, host
    # Drivers and Prometheus call it otherwise; a page that rebinds its name has no key.
    inside = {"Host": "shardloom.ml.svc:8700"}
    assert house.send("GET", "/v1/jobs", "viewer", headers=inside).status_code == 200
    claim = house.http.post("/v1/attempts:claim", headers=inside, json={})
    assert claim.status_code == 422, "a driver's first request, which has its code in the body"
    for headers in ({}, {"Authorization": "Basic eDp5"}):
        problem_in(house.http.get("/v1/jobs", headers=inside | headers), 421, "foreign_host")


def test_local_mode_answers_no_proxy(api: Api, house: Guarded) -> None:
    for header in ("X-Forwarded-For", "Forwarded"):
        headers = {header: "203.0.113.7"}
        refused = api.http.get("/v1/jobs", headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (421, "behind_proxy")
        assert "SHARDLOOM_AUTH=required" in refused.json()["detail"]
        assert api.http.get("/healthz", headers=headers).status_code == 200
        assert house.send("GET", "/v1/jobs", "viewer", headers=headers).status_code == 200


def test_the_server_does_not_hide_that_a_proxy_passed_a_request_on(api: Api) -> None:
    wrapped = ProxyHeadersMiddleware(api.http.app, trusted_hosts="*")
    with_server = TestClient(wrapped, base_url="http://127.0.0.1:8700")
    refused = with_server.get("/v1/jobs", headers={"X-Forwarded-For": "127.0.0.1"})
    assert refused.json()["code"] == "behind_proxy"


def test_the_folder_of_the_service_is_for_its_owner_only(tmp_path: Path) -> None:
    new, old = tmp_path / "new" / "home", tmp_path / "old"
    old.mkdir(mode=0o755)
    for home in (new, old):
        app = build_app(Settings(home=home, backend="fake", dashboard=False))
        app.state.context.store.close()
    assert stat.S_IMODE(new.stat().st_mode) == 0o700
    assert stat.S_IMODE(old.stat().st_mode) == 0o755
    assert {stat.S_IMODE(each.stat().st_mode) for each in old.glob("shardloom.db*")} == {0o600}


def test_pages_of_other_sites_are_foreign() -> None:
    for origin, site, is_refused in (
        (None, None, False),
        ("http://127.0.0.1:8700", "same-origin", False),
        ("http://127.0.0.1:9999", "same-site", True),
        ("http://evil.example", "cross-site", True),
        ("null", None, True),
        ("http://[::1", None, True),
        (None, "cross-site", True),
        (None, "none", False),
        ("https://tools.example", "cross-site", False),
    ):
        found = is_foreign(origin, site, "127.0.0.1:8700", ["https://tools.example"])
        assert found is is_refused, (origin, site)


def test_other_origins_are_refused_unless_they_are_allowed(
    open_guarded: GuardedApps, api: Api, tmp_path: Path
) -> None:
    headers = {"Origin": "http://evil.example"}
    refused = api.http.post(f"/v1/jobs/{api.submit()}:cancel", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "foreign_origin")
    preflight = {"Origin": "https://tools.example", "Access-Control-Request-Method": "POST"}
    closed = api.http.options("/v1/jobs", headers=preflight)
    assert "access-control-allow-origin" not in closed.headers
    house = open_guarded(tmp_path / "open", allowed_origins=["https://tools.example"])
    opened = house.http.options("/v1/jobs", headers=preflight)
    assert opened.headers["access-control-allow-origin"] == "https://tools.example"
    evil = house.http.options("/v1/jobs", headers={**preflight, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in evil.headers


# ---- headers, ids, sizes, compression


def test_every_answer_carries_safe_headers(house: Guarded) -> None:
    for path in ("/healthz", "/v1/jobs", "/nowhere", "/login"):
        headers = house.http.get(path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["strict-transport-security"]
    assert "Strict-Transport-Security" not in safe_headers("/", "http")
    assert "unsafe-eval" not in safe_headers("/v1/jobs", "http")["Content-Security-Policy"]


def test_the_api_documents_itself_without_another_host(house: Guarded) -> None:
    assert house.http.get("/docs/assets/swagger-ui.css").status_code == 401
    page = house.send("GET", "/docs", "viewer")
    assert "//" not in page.headers["content-security-policy"]
    wanted = re.findall(r"""(?:src|href|url)(?:=|: )["']([^"']+)""", page.text)
    assert "/openapi.json" in wanted
    for path in wanted:
        assert house.send("GET", path, "viewer").status_code == 200, path


def test_a_request_has_an_id_in_answer_and_problem(api: Api) -> None:
    answer = api.http.get("/v1/jobs/none", headers={"X-Request-ID": "deploy-2026.11"})
    assert answer.headers["x-request-id"] == "deploy-2026.11"
    assert answer.json()["request_id"] == "deploy-2026.11"
    other = api.http.get("/v1/jobs/none", headers={"X-Request-ID": "<script>"})
    assert other.headers["x-request-id"].startswith("req-")


def test_a_body_that_is_too_large_is_refused_stated_or_not(open_guarded: GuardedApps) -> None:
    house = open_guarded(max_body_bytes=2048)
    stated = house.send("POST", "/v1/jobs", "root", content=b"x" * 2049)

    def chunks() -> Iterator[bytes]:
        for _ in range(5):
            yield b" " * 500

    streamed = house.send("POST", "/v1/jobs", "root", content=chunks())
    for answer in (stated, streamed):
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    assert house.send("POST", "/v1/jobs", "root", content=b" " * 2048).status_code == 422


@pytest.mark.parametrize("path", ["/login", "/v1/attempts:claim"])
def test_of_a_stranger_a_body_is_small_and_comes_soon(
    house: Guarded, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(5):
            yield b" " * 4096

    json_type = {"Content-Type": "application/json"}
    for content in (b" " * 16385, chunks()):
        large = house.http.post(path, content=content, headers=json_type)
        problem_in(large, 413, "body_too_large")
    assert house.http.post(path, content=b" " * 16384, headers=json_type).status_code != 413
    monkeypatch.setattr(middleware, "_PUBLIC_BODY_S", 0.05)

    async def never() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    assert house.post_raw(path, never) == [408]


def test_large_answers_are_compressed_but_streams_are_not(api: Api) -> None:
    job_id = api.submit()
    for path, is_large in (("/docs/assets/swagger-ui.css", True), (f"/v1/jobs/{job_id}", False)):
        answer = api.http.get(path, headers={"Accept-Encoding": "gzip"})
        assert ("content-encoding" in answer.headers) == is_large
    api.end(job_id)
    api.poll(2)
    headers = {"Accept-Encoding": "gzip", "Accept": "text/event-stream"}
    stream = api.http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert "content-encoding" not in stream.headers
    assert "event: end" in stream.text


def test_readiness_tells_strangers_no_more_than_whether_it_is_so(
    house: Guarded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = TestClient(house.http.app, base_url=HOST)
    for headers in ({}, {"Authorization": "Bearer shl_wrong"}, {"Cookie": "shardloom-session=x"}):
        answer = stranger.get("/readyz", headers=headers)
        assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    assert house.send("GET", "/readyz", "viewer").json()["storage"]["runs"] == "writable"
    assert _sign_in(house).get("/readyz").json()["store"]["migration"]
    house.keys["driver"] = house.security.master.attempt_token(f"{house.submit('submitter')}-a0")
    assert house.send("GET", "/readyz", "driver").json() == {"status": "ready"}

    def away(store: JobStore) -> object:
        raise StoreUnavailable("connection to server at 10.0.0.7 failed")

    monkeypatch.setattr(JobStore, "ping", away)
    problem = problem_in(stranger.get("/readyz"), 503, "store_unavailable")
    assert "10.0.0.7" not in problem["detail"]
    assert "10.0.0.7" in caplog.text
    assert "10.0.0.7" in house.send("GET", "/readyz", "viewer").json()["detail"]


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"X-Forwarded-For": "10.0.0.9"}])
def test_without_credentials_only_who_is_served_anything_is_told_why_it_is_ready(
    api: Api, headers: dict[str, str]
) -> None:
    answer = api.http.get("/readyz", headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})
    assert api.http.get("/readyz").json()["storage"]["runs"] == "writable"
    assert api.http.get("/v1/whoami", headers=headers).status_code in (403, 421)


# ---- rates


@given(st.lists(st.floats(0, 2), max_size=60), st.floats(0.1, 50), st.integers(1, 20))
def test_no_caller_gets_more_than_burst_and_rate(
    pauses: list[float], per_s: float, burst: int
) -> None:
    limiter, now, num_let_in, wait_s = RateLimiter(per_s, burst), 0.0, 0, 0.0
    for pause_s in pauses:
        now += pause_s
        wait_s = limiter.take("a", now)
        num_let_in += wait_s == 0
    start = pauses[0] if pauses else 0.0
    assert num_let_in <= burst + (now - start) * per_s + 1e-6
    assert limiter.take("a", now + max(wait_s, 1 / per_s) + 1e-6) == 0


@pytest.mark.parametrize(
    ("caller", "burst", "status"), [("viewer", 30, 200), ("guess", 20, 401), (None, 100, 401)]
)
def test_a_caller_that_asks_too_fast_is_told_when_to_come_again(
    house: Guarded, caller: str | None, burst: int, status: int
) -> None:
    house.keys["guess"] = "shl_000000000000_" + "a" * 43
    answers = [house.send("GET", "/v1/whoami", caller) for _ in range(burst + 50)]
    assert {answer.status_code for answer in answers[:burst]} == {status}
    refused = next(answer for answer in answers[burst:] if answer.status_code == 429)
    assert refused.json()["code"] == "too_many_requests"
    assert int(refused.headers["retry-after"]) > 0
    assert house.send("GET", "/v1/whoami", "admin").status_code == 200


def test_a_program_with_a_wrong_key_keeps_nobody_from_signing_in(house: Guarded) -> None:
    house.keys["guess"] = "shl_000000000000_" + "a" * 43
    answers = [house.send("GET", "/v1/whoami", "guess") for _ in range(30)]
    assert answers[-1].status_code == 429
    assert house.http.get("/v1/whoami").status_code == 401
    assert _sign_in(house).get("/v1/whoami").json()["kind"] == "session"
    wrong = [house.http.post("/login", data={"key": "shl_nothing"}) for _ in range(30)]
    assert wrong[-1].status_code == 429


# ---- sessions


def _sign_in(house: Guarded, key: str = "submitter") -> TestClient:
    form = {"key": house.keys[key], "next": "/dashboard/"}
    answer = house.http.post("/login", data=form, follow_redirects=False)
    assert answer.status_code == 303, answer.text
    return house.http


def test_a_reader_without_a_session_is_led_to_the_form_and_back(house: Guarded) -> None:
    html = {"Accept": "text/html"}
    led = house.http.get("/dashboard/jobs/x", headers=html, follow_redirects=False)
    assert led.headers["location"] == "/login?next=/dashboard/jobs/x"
    page = house.http.get(led.headers["location"])
    assert 'value="/dashboard/jobs/x"' in page.text
    # With what the list was filtered by.
    shared = "/dashboard/?label=team%3Da%26b&status=failed"
    led = house.http.get(shared, headers=html, follow_redirects=False)
    wanted = httpx.URL(led.headers["location"]).params["next"]
    form = {"key": house.keys["viewer"], "next": wanted}
    back = house.http.post("/login", data=form, follow_redirects=False)
    assert back.headers["location"] == shared
    house.http.cookies.clear()
    wrong = house.http.post("/login", data={"key": "shl_nothing"}, headers=html)
    assert wrong.status_code == 401
    assert "unknown, expired or revoked" in wrong.text
    assert house.http.get("/dashboard/").status_code == 401


def test_the_cookies_of_a_session_are_tight(house: Guarded) -> None:
    form = {"key": house.keys["viewer"]}
    answer = house.http.post("/login", data=form, follow_redirects=False)
    cookies = {c.partition("=")[0]: c for c in answer.headers.get_list("set-cookie")}
    session = cookies[SESSION_COOKIE]
    assert all(word in session.lower() for word in ("httponly", "secure", "samesite=lax"))
    assert house.keys["viewer"] not in session
    assert "httponly" not in cookies[CSRF_COOKIE].lower()
    lines = house.send("GET", "/v1/audit", "root").json()["items"]
    assert (lines[0]["actor"], lines[0]["action"]) == ("key:viewer", "POST /login")


def test_changes_by_a_session_want_its_token_and_our_own_page(house: Guarded) -> None:
    job_id = house.submit("submitter")
    http = _sign_in(house)
    path = f"/v1/jobs/{job_id}:cancel"
    assert http.get("/v1/whoami").json()["kind"] == "session"
    assert http.post(path).json()["code"] == "csrf_token"
    token = {"X-CSRF-Token": http.cookies[CSRF_COOKIE]}
    evil = {**token, "Origin": "https://evil.example"}
    assert http.post(path, headers=evil).json()["code"] == "foreign_origin"
    assert http.post(path, headers={**token, "Origin": HOST}).status_code == 202


def test_signing_out_ends_the_session_for_good(house: Guarded) -> None:
    http = _sign_in(house)
    cookie = http.cookies[SESSION_COOKIE]
    assert http.post("/logout", data={"csrf": "x"}).json()["code"] == "csrf_token"
    form = {"csrf": http.cookies[CSRF_COOKIE]}
    assert http.post("/logout", data=form, follow_redirects=False).status_code == 303
    again = {"Cookie": f"{SESSION_COOKIE}={cookie}"}
    assert house.http.get("/v1/whoami", headers=again).status_code == 401


def test_signing_in_leads_nowhere_else() -> None:
    for wanted in ("//evil.example", "https://evil.example", "/\\evil", "", "/login"):
        assert safe_target(wanted) == "/dashboard/"


def test_the_pages_socket_wants_a_session_from_our_own_page(house: Guarded) -> None:
    path = "/dashboard/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    evil = {"Origin": "https://evil.example"}
    # A client of tests sends no secure cookie to ws://.
    session = {"Cookie": f"{SESSION_COOKIE}={_sign_in(house).cookies[SESSION_COOKIE]}"}
    house.http.cookies.clear()
    for headers in ({}, evil, evil | session):
        refused = pytest.raises(WebSocketDisconnect)
        with refused as found, house.http.websocket_connect(path, headers=headers):
            pass
        assert found.value.code == 1008, "refused here, not by what is behind"


def test_a_browser_that_leaves_its_page_is_no_fault_of_the_service_and_not_audited(
    house: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sio.eio.sockets, "closed", Mock(closed=True))
    path = "/dashboard/_nicegui_ws/socket.io/"
    answer = house.send("POST", f"{path}?EIO=4&transport=polling&sid=closed", "viewer")
    assert answer.status_code == 400
    assert "'unsafe-eval'" in answer.headers["content-security-policy"]

    async def hang_up() -> Message:
        return {"type": "http.disconnect"}

    key = f"Bearer {house.keys['viewer']}"
    assert house.post_raw(path, hang_up, authorization=key) == [400]
    house.security.audit.flush()
    assert house.security.keys.list_audit(AuditFilter()) == []


def test_pages_show_only_what_their_reader_may_see(house: Guarded) -> None:
    mine, hidden = house.submit("root", name="mine"), house.submit("root", name="hid", project="h")
    with _sign_in(house, "viewer") as http:
        page = http.get("/dashboard/")
        assert mine in page.text
        assert hidden not in page.text
        assert "Sign out" in page.text
        # A page that one may see is drawn once for all its readers.
        assert house.send("GET", f"/dashboard/jobs/{hidden}", "root").status_code == 200
        assert http.get(f"/dashboard/jobs/{hidden}").status_code == 404
        assert http.get(f"/dashboard/jobs/{mine}").status_code == 200


# ---- repeats with an Idempotency-Key

KEY = {"Idempotency-Key": "k-1"}


def test_a_key_brings_the_first_answer_again_and_is_for_no_other_request(api: Api) -> None:
    job = api.submit()
    first = api.http.post(f"/v1/jobs/{job}:pause", headers=KEY)
    assert api.http.post(f"/v1/jobs/{job}:resume").status_code == 202
    again = api.http.post(f"/v1/jobs/{job}:pause", headers=KEY)
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["ETag"] == first.headers["ETag"]
    assert again.headers["Idempotent-Replayed"] == "true"
    other = api.http.post(f"/v1/jobs/{job}:cancel", headers=KEY)
    problem_in(other, 409, "idempotency_conflict")
    assert api.store.get_job(job).status is JobStatus.QUEUED


def test_a_key_is_made_once_shown_again_and_kept_sealed(api: Api) -> None:
    body = {"name": "ci", "roles": {"*": "viewer"}}
    first = api.http.post("/v1/keys", json=body, headers=KEY)
    assert first.status_code == 201, first.text
    assert api.http.post("/v1/keys", json=body, headers=KEY).json() == first.json()
    assert len(api.http.get("/v1/keys").json()["items"]) == 1
    with api.store.engine.connect() as connection:
        kept = connection.execute(select(answers.c.sealed_body)).scalar_one()
    assert kept and first.json()["key"] not in kept


def test_what_was_refused_may_be_asked_again_with_its_key(api: Api) -> None:
    job = api.submit()
    problem_in(api.http.post(f"/v1/jobs/{job}:resume", headers=KEY), 409, "job_not_paused")
    api.http.post(f"/v1/jobs/{job}:pause")
    assert api.http.post(f"/v1/jobs/{job}:resume", headers=KEY).status_code == 202


@pytest.mark.parametrize("has_key", [True, False])
def test_a_request_whose_body_is_cut_off_is_never_handled(api: Api, has_key: bool) -> None:
    job = with_checkpoint(api)
    api.end(job)
    api.poll(3)
    version = api.store.get_job(job).version
    for path in (f"/v1/jobs/{job}:restart", "/v1/jobs", "/v1/code"):
        wire: list[Message] = [
            {"type": "http.request", "body": b'{"step": ', "more_body": True},
            {"type": "http.disconnect"},
        ]

        async def receive(wire: list[Message] = wire) -> Message:
            return wire.pop(0)

        assert set(api.post_raw(path, receive, **(KEY if has_key else {}))) <= {400}
        assert not wire
    assert api.store.get_job(job).version == version
    again = api.http.post(f"/v1/jobs/{job}:restart", json={"step": 10}, headers=KEY)
    assert again.status_code == 202, again.text


def test_a_key_that_cannot_be_kept_is_refused(api: Api) -> None:
    job = api.submit()
    for key in ("", "x" * 256, "tab\there"):
        answer = api.http.post(f"/v1/jobs/{job}:pause", headers={"Idempotency-Key": key})
        problem_in(answer, 422, "invalid_request")


def test_a_request_under_way_is_not_begun_again_until_it_was_abandoned(store: JobStore) -> None:
    kept = IdempotencyStore(store.engine)
    assert kept.begin("me", "k", "hash", now=1000.0) is None
    under_way = kept.begin("me", "k", "hash", now=1001.0)
    assert (under_way.request_hash, under_way.status) == ("hash", None)
    assert kept.begin("me", "k", "hash", now=1001.0 + ABANDONED_S) is None
    kept.forget("me", "k")
    assert kept.begin("me", "k", "hash", now=1002.0 + ABANDONED_S) is None


def test_a_request_begins_where_the_one_before_fails_at_that_moment(store: JobStore) -> None:
    kept = IdempotencyStore(store.engine)
    kept.begin("me", "k", "hash", now=1000.0)
    forgotten: list[str] = []

    @event.listens_for(store.engine, "after_cursor_execute")
    def forget(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO answers") and not forgotten:
            forgotten.append(statement)
            connection.execute(delete(answers))

    assert kept.begin("me", "k", "other", now=1001.0) is None
    assert forgotten
    event.remove(store.engine, "after_cursor_execute", forget)
    assert kept.begin("me", "k", "other", now=1002.0).request_hash == "other"


@pytest.mark.every_database
def test_a_request_waits_for_nobody_who_forgets_old_answers(store: JobStore) -> None:
    kept = IdempotencyStore(store.engine)
    kept.begin("me", "old", "hash", now=1000.0)
    with store.read() as connection:
        connection.execute(select(answers).with_for_update())
        assert kept.begin("me", "new", "hash", now=1001.0 + KEPT_S) is None
    assert kept.begin("me", "new", "hash", now=1002.0 + KEPT_S).request_hash == "hash"
    assert len(kept.rows(select(answers))) == 1


def test_an_answer_is_forgotten_after_a_day_and_known_to_nobody_else(store: JobStore) -> None:
    kept = IdempotencyStore(store.engine)
    now = time.time()
    assert kept.begin("me", "k", "hash", now) is None
    kept.finish("me", "k", 202, [("etag", '"3"')], "sealed")
    assert kept.begin("you", "k", "hash", now) is None
    known = kept.begin("me", "k", "hash", now + KEPT_S - 1)
    assert (known.status, known.headers, known.sealed_body) == (202, [["etag", '"3"']], "sealed")
    assert kept.begin("me", "k", "hash", now + KEPT_S + 1) is None


def test_who_asks_is_kept_in_few_characters_and_never_mixed_up() -> None:
    names = ["ada", "x" * 255, "x" * 254 + "y", "a\x00b", "a\ud800b"]
    askers = [caller_key(Principal(name, "oidc")) for name in names]
    assert askers[0] == "oidc:ada"
    assert len(set(askers)) == len(names)
    assert all(len(asker) <= 255 and asker.isprintable() for asker in askers)
