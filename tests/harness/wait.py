"""Waiting in tests: limits that suit the machine, and ports that suit the pytest-xdist worker.

Every limit in seconds that a test or a helper sets is meant for a fast core. `scaled` multiplies it
by the time that a fixed piece of work takes here over that on a fast core, measured once at the
start of the session. `SHARDLOOM_TEST_SCALE` sets the factor by hand.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

SCALE_VARIABLE = "SHARDLOOM_TEST_SCALE"
_MIN_SCALE, _MAX_SCALE = 1.0, 8.0
_WORK_ITEMS = 200_000
# `_work` on one core of a desktop of 2023 that has nothing else to do.
_WORK_ON_A_FAST_CORE_S = 0.010
_NUM_MEASUREMENTS = 7
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
_PORTS_OF_A_WORKER = 1_000

Found = TypeVar("Found")


def _time_of_work() -> float:
    began = time.perf_counter()
    sum(number * number for number in range(_WORK_ITEMS))
    return time.perf_counter() - began


def _clamp(factor: float) -> float:
    return max(_MIN_SCALE, min(_MAX_SCALE, factor))


def scale() -> float:
    """How many times slower than a fast core this machine is, between 1 and 8.

    The first call measures it, and leaves it in the environment.
    """
    if SCALE_VARIABLE not in os.environ:
        times = [_time_of_work() for _ in range(_NUM_MEASUREMENTS)]
        factor = statistics.median(times) / _WORK_ON_A_FAST_CORE_S
        os.environ[SCALE_VARIABLE] = f"{_clamp(factor):.2f}"
    return _clamp(float(os.environ[SCALE_VARIABLE]))


def scaled(seconds: float) -> float:
    """A limit, heartbeat or lease of `seconds` on a fast core, for this machine."""
    return seconds * scale()


def never() -> float:
    """A period in seconds longer than any test, for intervals and leases that must not elapse."""
    return 24 * 3600.0


def wait_for(
    look: Callable[[], Found | None], what: str, limit_s: float = 30.0, poll_s: float = 0.05
) -> Found:
    """The first true result of `look`; an AssertionError that names `what` and the last result.

    `limit_s` is the time on a fast core.
    """
    limit_s = scaled(limit_s)
    deadline = time.monotonic() + limit_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s:.0f} s in vain for {what}; last seen: {found!r}")
        time.sleep(poll_s)
    return found


_turns = itertools.count(secrets.randbelow(_NUM_PORTS))


def free_port() -> int:
    """A loopback port that nobody listens on, from the range of this pytest-xdist worker, in turn.

    All lie below those that outgoing connections are given: one of those might be taken while a
    service that was killed starts again.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    first, number = _FIRST_PORT, _NUM_PORTS
    if "PYTEST_XDIST_WORKER" in os.environ:
        num_ranges = _NUM_PORTS // _PORTS_OF_A_WORKER
        first += int(worker.removeprefix("gw")) % num_ranges * _PORTS_OF_A_WORKER
        number = _PORTS_OF_A_WORKER
    while True:
        port = first + next(_turns) % number
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
