"""Ports for what tests start."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress

_FIRST, _NUM_PORTS = 20_000, 12_000


def free_port() -> int:
    """A loopback port that nobody listens on, below those that outgoing connections are given.

    One of those might be taken while a service that was killed starts again.
    """
    while True:
        port = _FIRST + secrets.randbelow(_NUM_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
