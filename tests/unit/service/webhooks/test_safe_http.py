"""Where webhooks may go, and that they go there: URLs, addresses, redirects."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from service.domain.webhooks import Answer
from service.webhooks.safe_http import AddressRefused, check_address, check_url, post, resolve
from tests.harness.wait import free_port, scaled

PRIVATE = """
127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 0.0.0.0
100.64.0.1 224.0.0.1 255.255.255.255 ::1 :: fe80::1
fc00::1 fd00:ec2::254 ::ffff:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1 2002:7f00:1::
ff02::1 192.0.0.9 192.88.99.1 168.63.129.16 ::ffff:168.63.129.16 ::8.8.8.8
::ffff:0:808:808 64:ff9b:1::808:808 64:ff9b::a83f:8110 fec0::1 3fff::1 5f00::1
"""


def test_only_public_addresses_are_taken() -> None:
    for address in PRIVATE.split():
        with pytest.raises(AddressRefused, match="not a public address"):
            check_address(address, [])
    for address in ("8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808"):
        assert str(check_address(address, [])) == address
    # The operator can allow a network, and no more.
    allowed = [ipaddress.ip_network("10.0.0.0/8")]
    assert str(check_address("10.9.9.9", allowed)) == "10.9.9.9"
    with pytest.raises(AddressRefused):
        check_address("169.254.169.254", allowed)


def test_urls_that_can_never_be_sent_to_are_refused_at_once() -> None:
    for url in (
        "ftp://example.com/",
        "example.com",
        "http:///x",
        "https://user:secret@example.com/",
        "http://localhost:8700/",
        "http://a.localhost./",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://169.254.169.254/latest/meta-data",
        "http://\x00/",
        "http://xn--/",
        "http://xn--a/",
        "http://[bad",
        "http://exa mple/",
        "http://a..b/",
        "http://example.com:0/",
        "http://example.com:99999/",
    ):
        with pytest.raises(AddressRefused):
            check_url(url)
    assert check_url("https://mylocalhost/").host == "mylocalhost"


def _send(url: str, addresses: list[str], answer: httpx.Response) -> tuple[Answer, list[Any]]:
    """Post to a host that resolves to `addresses`; returns the answer and what was requested."""
    seen: list[httpx.Request] = []

    def _answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer

    async def _resolve(host: str, port: int) -> list[str]:
        return addresses

    transport = httpx.MockTransport(_answer)
    sent = post(url, "{}", {}, allowed=[], timeout_s=5.0, resolve=_resolve, transport=transport)
    return asyncio.run(sent), seen


def test_the_request_goes_to_the_address_that_was_checked() -> None:
    url = "https://hooks.example:8443/in?x=1"
    answer, seen = _send(url, ["93.184.215.14"], httpx.Response(204))
    assert answer.is_success
    [request] = seen
    assert str(request.url) == "https://93.184.215.14:8443/in?x=1"
    assert request.headers["host"] == "hooks.example:8443"
    assert request.extensions["sni_hostname"] == "hooks.example"


def test_a_name_that_leads_inside_is_refused_after_it_was_resolved() -> None:
    for addresses in (["10.0.0.1"], ["93.184.215.14", "127.0.0.1"], []):
        answer, seen = _send("https://hooks.example/", addresses, httpx.Response(200))
        assert answer.message.startswith("refused")
        assert seen == []


def test_a_redirect_is_not_followed() -> None:
    redirect = httpx.Response(302, headers={"location": "http://169.254.169.254/"})
    answer, seen = _send("https://hooks.example/", ["93.184.215.14"], redirect)
    assert (answer.status_code, len(seen)) == (302, 1)
    assert "redirects are not followed" in answer.message


def test_of_a_refusal_the_beginning_is_kept() -> None:
    async def _flood() -> AsyncIterator[bytes]:
        yield b"broken\x00"
        while True:
            yield b"x" * 1000

    refusal = httpx.Response(500, content=_flood())
    answer, _ = _send("https://hooks.example/", ["93.184.215.14"], refusal)
    assert answer.message.startswith("answered 500: broken xxx")
    assert len(answer.message) < 600


def test_a_name_that_never_resolves_holds_one_thread_however_often_it_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    may_end = threading.Event()

    def look_up(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        if host == "dead.example":
            may_end.wait(scaled(30))
        return [(0, 0, 0, "", (f"192.0.2.{len(asked)}", port))]

    async def try_often() -> list[str]:
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await resolve("dead.example", 443)
        found = await resolve("live.example", 443)
        ended = asyncio.create_task(resolve("dead.example", 443))
        await asyncio.sleep(0)
        may_end.set()
        return [*found, *await ended, *await resolve("live.example", 443)]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    try:
        found = asyncio.run(try_often())
    finally:
        may_end.set()
    assert asked == ["dead.example", "live.example", "live.example"]
    assert found == ["192.0.2.2", "192.0.2.2", "192.0.2.3"]


def test_certificates_are_read_once_for_all_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    url, allowed = f"https://127.0.0.1:{free_port()}/", [ipaddress.ip_network("127.0.0.0/8")]

    def send() -> Answer:
        return asyncio.run(post(url, "{}", {}, allowed=allowed, timeout_s=scaled(5.0)))

    send()
    monkeypatch.setattr(ssl, "create_default_context", lambda **_: pytest.fail("read again"))
    assert "ConnectError" in send().message
