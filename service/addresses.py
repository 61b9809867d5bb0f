"""From an address to listen on to the URL to connect to."""

from __future__ import annotations

# A wildcard address is a place to listen on, not one to connect to.
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def local_url(host: str, port: int) -> str:
    """URL under which this machine reaches a service that listens on `host` and `port`."""
    reachable = _LOOPBACK_OF.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"
