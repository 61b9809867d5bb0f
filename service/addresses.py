"""Addresses to listen on: which of them only this machine reaches, and the URL to connect to."""

from __future__ import annotations

import ipaddress

# A wildcard address is a place to listen on, not one to connect to.
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def local_url(host: str, port: int, scheme: str = "http") -> str:
    """URL under which this machine reaches a service that listens on `host` and `port`."""
    reachable = _LOOPBACK_OF.get(host, host)
    name = f"[{reachable}]" if ":" in reachable else reachable
    return f"{scheme}://{name}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address or a host of this name."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
