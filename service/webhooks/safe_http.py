"""HTTP POST to URLs that users give, protected against server-side request forgery (SSRF).

The host is resolved, every address is checked, and the connection is made to a checked *address*,
so that DNS rebinding changes nothing. Only public addresses, and networks that the operator
allows, can be reached. Redirects are not followed, proxies not used, and a request as a whole has
a time limit. `check_url` and `check_address` raise `AddressRefused`; `post` never raises.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import cache

import httpx

from service.domain.webhooks import Answer

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[list[str]]]
# How much of a refusal is kept, to show why a delivery failed.
_MAX_SHOWN_BYTES = 500
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_NUM_PORTS = 65_536
_resolvers = ThreadPoolExecutor(32, "webhook-names")
# By host and port, while they are under way.
_look_ups: dict[tuple[str, int], Future[list[str]]] = {}
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# What `is_global` of some Python takes for public, and is not: protocol assignments, 6to4 relays,
# the platform of a cloud, IPv4 in IPv6 of old, local NAT64, site-local, documentation, SRv6.
_NEVER_PUBLIC = tuple(
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",
        "192.88.99.0/24",
        "168.63.129.16/32",
        "::/96",
        "::ffff:0:0:0/96",
        "64:ff9b:1::/48",
        "fec0::/10",
        "3fff::/20",
        "5f00::/16",
    )
)


class AddressRefused(Exception):
    """A webhook may not be sent there."""


def check_url(url: str, allowed: Sequence[Network] = ()) -> httpx.URL:
    """The URL parsed; raises `AddressRefused` for one that can never be sent to.

    What its host resolves to is checked when something is sent.
    """
    try:
        parsed = httpx.URL(url)
        host = parsed.host
    except (httpx.InvalidURL, UnicodeError) as error:  # idna's errors are among the latter
        raise AddressRefused(f"not a URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not host:
        raise AddressRefused("give a URL as in https://HOST/PATH")
    is_address = ":" in host  # of version 6; httpx has read it already
    if not (is_address or _HOST.fullmatch(parsed.raw_host.decode())):
        raise AddressRefused(f"'{host}' is not a host name")
    if parsed.port is not None and not 0 < parsed.port < _NUM_PORTS:
        raise AddressRefused(f"there is no port {parsed.port}")
    if parsed.userinfo:
        raise AddressRefused("a URL with a user or password would show it to every reader")
    if f".{host.rstrip('.')}".endswith(".localhost"):
        check_address("127.0.0.1", allowed)
    with suppress(ValueError):
        check_address(str(ipaddress.ip_address(host)), allowed)
    return parsed


def check_address(text: str, allowed: Sequence[Network]) -> Address:
    """The address, if webhooks may go there; raises `AddressRefused`.

    Only public addresses may, and what the operator allows: not this machine, not its network,
    not the metadata service of a cloud.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    for each in (address, _embedded(address)):
        if each is not None and not _may_reach(each, allowed):
            raise AddressRefused(
                f"{text} is not a public address; the operator can allow its network with "
                "SHARDLOOM_WEBHOOK_ALLOWED_NETWORKS"
            )
    return address


def _may_reach(address: Address, allowed: Sequence[Network]) -> bool:
    if any(address in network for network in allowed):
        return True
    if any(address in network for network in _NEVER_PUBLIC):
        return False
    # The IPv4 address in it is judged by itself.
    is_public = address in _NAT64 or address.is_global
    return is_public and not address.is_multicast


def _embedded(address: Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for."""
    if not isinstance(address, ipaddress.IPv6Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)


async def resolve(host: str, port: int) -> list[str]:
    """Addresses of a host, as the system's resolver orders them; raises OSError."""
    # Threads of its own, and one for each name although a look-up outlives who waits for it:
    # servers of names that never answer hold up nothing else.
    look_up = _look_ups.get((host, port))
    if look_up is None:
        look_up = _look_ups[host, port] = _resolvers.submit(_look_up, host, port)
        look_up.add_done_callback(lambda _: _look_ups.pop((host, port), None))
    return await asyncio.shield(asyncio.wrap_future(look_up))


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def post(
    url: str,
    body: str,
    headers: Mapping[str, str],
    *,
    allowed: Sequence[Network],
    timeout_s: float,
    resolve: Resolve = resolve,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Answer:
    """Post `body` once; whatever goes wrong is part of the answer. Never raises."""
    client = httpx.AsyncClient(
        transport=transport,
        trust_env=False,
        follow_redirects=False,
        timeout=None,
        verify=_tls_context(),
    )
    try:
        async with asyncio.timeout(timeout_s), client:
            request = await _request(url, body, headers, allowed, resolve)
            async with aclosing(await client.send(request, stream=True)) as response:
                return Answer(response.status_code, await _refusal(response))
    except TimeoutError:
        return Answer(None, f"no answer within {timeout_s:g} s")
    except AddressRefused as error:
        return Answer(None, f"refused: {error}")
    except (httpx.HTTPError, httpx.StreamError, OSError, UnicodeError, ValueError) as error:
        return Answer(None, f"{type(error).__name__}: {error}")


@cache
def _tls_context() -> ssl.SSLContext:
    """Made once: reading the certificates takes longer than to send a message."""
    return httpx.create_ssl_context(trust_env=False)


async def _request(
    url: str, body: str, headers: Mapping[str, str], allowed: Sequence[Network], resolve: Resolve
) -> httpx.Request:
    """The request to a checked address, while Host and the certificate are those of the name."""
    parsed = check_url(url, allowed)
    port = parsed.port or (443 if parsed.scheme == "https" else 80)
    addresses = [check_address(text, allowed) for text in await resolve(parsed.host, port)]
    if not addresses:
        raise AddressRefused(f"{parsed.host} has no address")
    return httpx.Request(
        "POST",
        parsed.copy_with(host=str(addresses[0])),
        content=body.encode(),
        headers={**headers, "host": parsed.netloc.decode("ascii")},
        extensions={"sni_hostname": parsed.raw_host.decode("ascii")},
    )


async def _refusal(response: httpx.Response) -> str:
    """Why a receiver refused: the beginning of its answer; empty where it did not."""
    if response.is_success:
        return ""
    if response.has_redirect_location:
        return f"answered {response.status_code}: redirects are not followed, give the final URL"
    start = b""
    async for chunk in response.aiter_raw(_MAX_SHOWN_BYTES):
        start += chunk
        if len(start) >= _MAX_SHOWN_BYTES:
            break
    text = "".join(
        char if char.isprintable() else " " for char in start.decode("utf-8", "replace")
    ).strip()
    return f"answered {response.status_code}" + (f": {text[:_MAX_SHOWN_BYTES]}" if text else "")
