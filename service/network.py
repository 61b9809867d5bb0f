"""Ports of this machine, and URLs of what listens on them."""

from __future__ import annotations

import errno
import ipaddress
import socket

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


def port_fault(host: str, port: int) -> str | None:
    """Why nobody can listen on a port of this machine, as a clause; None if one can."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return f"port {port} is in use by another program"
            if error.errno == errno.EACCES:
                return f"port {port} needs privileges that you lack"
            raise
    return None
