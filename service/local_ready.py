"""Whether the parts of a local stack can start, and when they are ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from service.local_process import ProcessId, is_alive
from service.local_state import StackError
from service.network import port_fault

# A busy machine of two cores has needed more than a minute until Ray counted its node.
START_TIMEOUT_S = 180.0
_POLL_S = 0.1
_PORT_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Part:
    """One process of the stack and how to tell that it is ready.

    `url` answers with success, and then `has_node`, where there is one, says that Ray counts the
    node of this machine: its Jobs API answers before that, and a job would find no place.
    """

    name: str
    process: ProcessId
    url: str
    token: str | None = None
    has_node: Callable[[], bool] | None = None

    def fault(self, http: httpx.Client) -> str | None:
        """What is not ready yet, as a clause; None if all is."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            answers = http.get(self.url, headers=headers).is_success
        except httpx.TransportError:
            answers = False
        if not answers:
            return f"does not answer at {self.url}"
        if self.has_node is not None and not self.has_node():
            return "does not count the node of this machine as alive"
        return None


def wait_until_ready(
    parts: Sequence[Part], report: Callable[[str], None], log_tail: Callable[[str], str]
) -> None:
    """Wait until all are ready; `report` gets a line for each.

    Raises `StackError` with the end of its log for one that ends or is late.
    """
    started = time.monotonic()
    waiting = list(parts)
    # It asks this machine whether it is well: whose certificate that has is no matter.
    with httpx.Client(trust_env=False, timeout=2.0, verify=False) as http:
        while waiting:
            for part in list(waiting):
                fault = part.fault(http)
                elapsed_s = time.monotonic() - started
                if fault is None:
                    waiting.remove(part)
                    report(f"{part.name} ready after {elapsed_s:.1f} s")
                elif not is_alive(part.process):
                    raise StackError(f"{part.name} did not start; {log_tail(part.name)}")
                elif elapsed_s > START_TIMEOUT_S:
                    raise StackError(
                        f"{part.name} runs but {fault} after {elapsed_s:.0f} s; "
                        f"{log_tail(part.name)}"
                    )
            time.sleep(_POLL_S)


def wait_for_port(port: int, host: str) -> None:
    """Give a service that was killed the time to be gone altogether.

    It has died when its first thread has, but keeps its port until the last one is back from the
    disk.
    """
    deadline = time.monotonic() + _PORT_PATIENCE_S
    while port_fault(host, port) is not None and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def check_port_free(port: int, host: str = "127.0.0.1") -> None:
    """Raise `StackError`, naming the port and the way out, if something listens on it."""
    if fault := port_fault(host, port):
        raise StackError(
            f"{fault}; choose another one: `shardloom up --port {port + 1}` "
            f"or SHARDLOOM_PORT={port + 1}"
        )
