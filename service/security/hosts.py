"""Which hosts and sites a request may come through, and where the service may listen. Pure."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

from service.addresses import is_loopback
from service.errors import ServiceError
from service.security.errors import UnsafeAddress
from service.settings import Settings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def check_address(settings: Settings, *, has_credentials: bool) -> None:
    """Raise `UnsafeAddress` where the service would let anybody on the network in, or nobody."""
    where = f"SHARDLOOM_HOST={settings.host}"
    if settings.auth == "local" and not is_loopback(settings.host):
        raise UnsafeAddress(
            f"{where} can be reached from the network, and SHARDLOOM_AUTH=local would let anybody "
            "in: set SHARDLOOM_AUTH=required, or listen on 127.0.0.1"
        )
    if settings.auth == "required" and not has_credentials:
        raise UnsafeAddress(
            f"{where} with SHARDLOOM_AUTH=required, but there is no API key yet, so that nobody "
            "could call: make the first one with `shardloom keys create NAME --admin` (it works "
            "directly on the database), or set SHARDLOOM_OIDC_ISSUER"
        )
    if (settings.ssl_certfile is None) != (settings.ssl_keyfile is None):
        raise ServiceError("SHARDLOOM_SSL_CERTFILE and SHARDLOOM_SSL_KEYFILE go together")


def host_name(header: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_known_host(header: str, settings: Settings) -> bool:
    """Whether we answer for a Host header.

    In local mode a name that somebody's DNS may point at this machine is refused, or a web page
    could talk to us through its reader's browser.
    """
    name = host_name(header)
    if name in settings.allowed_hosts:
        return True
    if settings.auth == "required":
        return not settings.allowed_hosts
    return is_loopback(name)


def is_foreign(
    origin: str | None, fetch_site: str | None, host: str, allowed_origins: Collection[str]
) -> bool:
    """Whether a browser says that a request was made by a page of another site.

    `origin`, `fetch_site` and `host` are the headers Origin, Sec-Fetch-Site and Host. Programs
    send neither of the first two.
    """
    if origin is not None and origin in allowed_origins:
        return False
    if origin is not None:
        return origin == "null" or _place_of(origin) != host.lower()
    return fetch_site in ("cross-site", "same-site")


def _place_of(origin: str) -> str | None:
    """Host and port of an Origin header; None if it is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None
