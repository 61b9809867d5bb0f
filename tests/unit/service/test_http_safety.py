"""What is around every request: hosts, origins, headers, sizes, rates, ids, sessions."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from starlette.websockets import WebSocketDisconnect
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from service.addresses import is_loopback
from service.api.gate import CSRF_COOKIE, SESSION_COOKIE
from service.api.middleware import safe_headers
from service.dashboard.login import safe_target
from service.errors import ServiceError
from service.main import build_app
from service.request_ids import request_id_from
from service.security.errors import UnsafeAddress
from service.security.hosts import check_address, is_foreign
from service.security.rates import Bucket, Rate, take
from service.settings import Settings
from tests.unit.service.api_house import Api
from tests.unit.service.guarded import HOST, Guarded, guarded


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Guarded]:
    made = guarded(tmp_path, dashboard=True, rate_limit_burst=30, rate_limit_per_s=0.001)
    yield made
    made.http.close()
    made.store.close()


# ---- where it listens, and for whom


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "shardloom.example"])
def test_a_network_address_wants_credentials(host: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, host=host)
    assert settings.auth == "required"
    check_address(settings, has_credentials=True)
    with pytest.raises(UnsafeAddress, match="keys create NAME --admin"):
        check_address(settings, has_credentials=False)
    with pytest.raises(UnsafeAddress, match="let anybody in"):
        check_address(Settings(home=tmp_path, host=host, auth="local"), has_credentials=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_is_local_by_default(host: str, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, host=host)
    assert settings.auth == "local"
    check_address(settings, has_credentials=False)


def test_a_certificate_wants_its_key(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, ssl_certfile=tmp_path / "cert.pem")
    assert settings.service_url == "https://127.0.0.1:8700"
    with pytest.raises(ServiceError, match="go together"):
        check_address(settings, has_credentials=True)


@pytest.mark.parametrize("name", ["127.0.0.1.evil.example", "localhost.evil", "", "0.0.0.0"])
def test_a_name_that_only_looks_like_loopback_is_none(name: str) -> None:
    assert not is_loopback(name)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.nip.io:8700", "evil@127.0.0.1.x", ""])
def test_local_mode_answers_for_loopback_names_only(api: Api, host: str) -> None:
    answer = api.http.get("/v1/jobs", headers={"Host": host})
    assert (answer.status_code, answer.json()["code"]) == (421, "foreign_host")


@pytest.mark.parametrize("host", ["localhost:8700", "[::1]:8700", "127.0.0.1"])
def test_local_mode_answers_for_each_name_of_loopback(api: Api, host: str) -> None:
    assert api.http.get("/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
def test_local_mode_answers_no_proxy(api: Api, house: Guarded, header: str) -> None:
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


@pytest.mark.parametrize(
    ("origin", "site", "is_refused"),
    [
        (None, None, False),
        ("http://127.0.0.1:8700", "same-origin", False),
        ("http://127.0.0.1:9999", "same-site", True),
        ("http://evil.example", "cross-site", True),
        ("null", None, True),
        ("http://[::1", None, True),
        (None, "cross-site", True),
        (None, "none", False),
        ("https://tools.example", "cross-site", False),
    ],
)
def test_pages_of_other_sites_are_foreign(
    origin: str | None, site: str | None, is_refused: bool
) -> None:
    found = is_foreign(origin, site, "127.0.0.1:8700", ["https://tools.example"])
    assert found is is_refused


def test_a_page_of_another_site_cannot_cancel_a_local_job(api: Api) -> None:
    job_id = api.submit()
    headers = {"Origin": "http://evil.example"}
    refused = api.http.post(f"/v1/jobs/{job_id}:cancel", headers=headers)
    assert (refused.status_code, refused.json()["code"]) == (403, "foreign_origin")
    api.end(job_id)


def test_cors_is_closed_unless_origins_are_allowed(api: Api, tmp_path: Path) -> None:
    preflight = {"Origin": "https://tools.example", "Access-Control-Request-Method": "POST"}
    closed = api.http.options("/v1/jobs", headers=preflight)
    assert "access-control-allow-origin" not in closed.headers
    house = guarded(tmp_path / "open", allowed_origins=["https://tools.example"])
    opened = house.http.options("/v1/jobs", headers=preflight)
    assert opened.headers["access-control-allow-origin"] == "https://tools.example"
    evil = house.http.options("/v1/jobs", headers={**preflight, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in evil.headers
    house.store.close()


# ---- headers, ids, sizes, compression


def test_every_answer_carries_safe_headers(house: Guarded) -> None:
    for path in ("/healthz", "/v1/jobs", "/nowhere", "/login"):
        headers = house.http.get(path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["strict-transport-security"]


def test_hsts_is_for_tls_only() -> None:
    assert "Strict-Transport-Security" not in safe_headers("/", "http")
    assert "unsafe-eval" not in safe_headers("/v1/jobs", "http")["Content-Security-Policy"]


def test_a_request_has_an_id_in_answer_and_problem(api: Api) -> None:
    answer = api.http.get("/v1/jobs/none", headers={"X-Request-ID": "deploy-2026.11"})
    assert answer.headers["x-request-id"] == "deploy-2026.11"
    assert answer.json()["request_id"] == "deploy-2026.11"
    other = api.http.get("/v1/jobs/none", headers={"X-Request-ID": "<script>"})
    assert other.headers["x-request-id"].startswith("req-")


@given(st.text(max_size=80))
def test_an_id_is_always_fit_for_a_header_and_a_log(header: str) -> None:
    found = request_id_from(header)
    assert found.isascii()
    assert found.isprintable()
    assert 8 <= len(found) <= 64
    assert " " not in found


def test_a_body_that_is_too_large_is_refused_stated_or_not(tmp_path: Path) -> None:
    house = guarded(tmp_path, max_body_bytes=2048)
    stated = house.send("POST", "/v1/jobs", "root", content=b"x" * 2049)

    def chunks() -> Iterator[bytes]:
        for _ in range(5):
            yield b" " * 500

    streamed = house.send("POST", "/v1/jobs", "root", content=chunks())
    for answer in (stated, streamed):
        assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")
    assert house.send("POST", "/v1/jobs", "root", content=b" " * 2048).status_code == 422
    house.store.close()


def test_large_answers_are_compressed_but_streams_are_not(api: Api) -> None:
    job_id = api.submit()
    page = api.http.get(f"/v1/jobs/{job_id}", headers={"Accept-Encoding": "gzip"})
    assert page.headers["content-encoding"] == "gzip"
    api.end(job_id)
    for _ in range(2):
        api.look()
    headers = {"Accept-Encoding": "gzip", "Accept": "text/event-stream"}
    stream = api.http.get(f"/v1/jobs/{job_id}/events", headers=headers)
    assert "content-encoding" not in stream.headers
    assert "event: end" in stream.text


# ---- rates


def test_a_bucket_lets_a_burst_through_and_then_its_rate() -> None:
    rate, bucket, waits = Rate(per_s=2.0, burst=3), None, []
    for now in (0.0, 0.0, 0.0, 0.0, 0.5, 0.5):
        bucket, wait_s = take(bucket, rate, now)
        waits.append(wait_s)
    assert waits == [0.0, 0.0, 0.0, 0.5, 0.0, 0.5]


@given(
    st.lists(st.floats(0, 2), max_size=60),
    st.floats(0.1, 50),
    st.integers(1, 20),
)
def test_no_caller_gets_more_than_burst_and_rate(
    pauses: list[float], per_s: float, burst: int
) -> None:
    rate, now, num_let_in = Rate(per_s, burst), 0.0, 0
    bucket: Bucket | None = None
    for pause_s in pauses:
        now += pause_s
        bucket, wait_s = take(bucket, rate, now)
        num_let_in += wait_s == 0
        again, _ = take(bucket, rate, now + wait_s + 1e-6)
        assert again.left >= 0
    start = pauses[0] if pauses else 0.0
    assert num_let_in <= burst + (now - start) * per_s + 1e-6


def test_a_caller_that_asks_too_fast_is_told_when_to_come_again(house: Guarded) -> None:
    statuses = [house.send("GET", "/v1/whoami", "viewer").status_code for _ in range(31)]
    assert statuses == [200] * 30 + [429]
    refused = house.send("GET", "/v1/whoami", "viewer")
    assert refused.json()["code"] == "too_many_requests"
    assert int(refused.headers["retry-after"]) > 0
    assert house.send("GET", "/v1/whoami", "admin").status_code == 200


def test_guessing_keys_is_slow(house: Guarded) -> None:
    house.keys["guess"] = "shl_000000000000_" + "a" * 43
    statuses = [house.send("GET", "/v1/whoami", "guess").status_code for _ in range(25)]
    assert set(statuses[:20]) == {401}
    assert 429 in statuses[20:]
    assert house.send("GET", "/v1/whoami", "admin").status_code == 200


# ---- sessions


def _sign_in(house: Guarded, key: str = "submitter", **fields: str) -> TestClient:
    form = {"key": house.keys[key], "next": "/dashboard/", **fields}
    answer = house.http.post("/login", data=form, follow_redirects=False)
    assert answer.status_code == 303, answer.text
    return house.http


def test_a_reader_without_a_session_is_led_to_the_form_and_back(house: Guarded) -> None:
    html = {"Accept": "text/html"}
    led = house.http.get("/dashboard/jobs/x", headers=html, follow_redirects=False)
    assert led.headers["location"] == "/login?next=/dashboard/jobs/x"
    form = house.http.get(led.headers["location"])
    assert 'value="/dashboard/jobs/x"' in form.text
    wrong = house.http.post("/login", data={"key": "shl_nothing"}, headers=html)
    assert wrong.status_code == 401
    assert "unknown, expired or revoked" in wrong.text
    assert house.http.get("/dashboard/").status_code == 401


def test_the_cookies_of_a_session_are_tight(house: Guarded) -> None:
    form = {"key": house.keys["viewer"]}
    answer = house.http.post("/login", data=form, follow_redirects=False)
    cookies = {c.partition("=")[0]: c for c in answer.headers.get_list("set-cookie")}
    session = cookies[SESSION_COOKIE].lower()
    assert "httponly" in session
    assert "secure" in session
    assert "samesite=lax" in session
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


@pytest.mark.parametrize(
    "wanted", ["//evil.example", "https://evil.example", "/\\evil", "", "/login"]
)
def test_signing_in_leads_nowhere_else(wanted: str) -> None:
    assert safe_target(wanted) == "/dashboard/"


def test_the_pages_socket_wants_a_session_from_our_own_page(house: Guarded) -> None:
    path = "/dashboard/_nicegui_ws/socket.io/?EIO=4&transport=websocket"
    for headers in ({}, {"Origin": "https://evil.example"}):
        with (
            pytest.raises(WebSocketDisconnect),
            house.http.websocket_connect(path, headers=headers),
        ):
            pass
    http = _sign_in(house)
    with (
        pytest.raises(WebSocketDisconnect),
        http.websocket_connect(path, headers={"Origin": "https://evil.example"}),
    ):
        pass


def test_pages_show_only_what_their_reader_may_see(house: Guarded) -> None:
    mine, hidden = house.submit("root", name="mine"), house.submit("root", name="hid", project="h")
    with _sign_in(house, "viewer") as http:
        page = http.get("/dashboard/")
        assert mine in page.text
        assert hidden not in page.text
        assert "Sign out" in page.text
        assert http.get(f"/dashboard/jobs/{hidden}").status_code == 404
        assert http.get(f"/dashboard/jobs/{mine}").status_code == 200
