"""`ray start` for a small or busy machine: python -m trainer.driver.ray_start OPTIONS

Ray gives a raylet a fixed 30 s from its start to its registration, and the raylet gives its agent a
fixed 15 s to say at which port it listens, even if that was told. Where four workers train on two
cores neither is enough, and the node is given up. And Ray starts processes with every head that
nobody asks here: its client server, and the parts of its dashboard that make no Jobs API.
Options are those of `ray start`.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 240.0
# Jobs, nodes and actors by HTTP.
_DASHBOARD_PARTS = ("JobHead", "NodeHead", "StateHead")
_POLL_S = 0.2


def patient(
    get_node: Callable[[str, str], Any],
    may_come: Callable[[], bool],
    patience_s: float = PATIENCE_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Callable[[str, str], Any]:
    """`get_node` that is asked again while the node `may_come` and the patience lasts.

    It raises the RuntimeError of the last try then.
    """

    def _get_node(gcs_address: str, node_id: str) -> Any:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:
                if not may_come() or time.monotonic() >= deadline:
                    raise
            sleep(_POLL_S)

    return _get_node


class _Processes:
    """Starts Ray's processes in place of `ray._private.services`."""

    def __init__(self, services: Any) -> None:
        self._start_process = services.start_ray_process
        self._start_raylet = services.start_raylet
        self._raylet: subprocess.Popen[bytes] | None = None

    def start_process(
        self, command: list[str], process_type: str, *args: Any, **options: Any
    ) -> Any:
        """Start one, the dashboard with few of its parts."""
        from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD, PROCESS_TYPE_RAYLET

        if process_type == PROCESS_TYPE_DASHBOARD:
            parts = ",".join(_DASHBOARD_PARTS)
            command = [*command, f"--modules-to-load={parts}"]
        started = self._start_process(command, process_type, *args, **options)
        if process_type == PROCESS_TYPE_RAYLET:
            self._raylet = started.process
        return started

    def start_raylet(self, *args: Any, **options: Any) -> Any:
        """Start the raylet, which finds the port of its agent where that would note it."""
        from ray._raylet import (  # type: ignore[attr-defined]
            DASHBOARD_AGENT_LISTEN_PORT_NAME,
            persist_port,
        )

        told = inspect.signature(self._start_raylet).bind(*args, **options).arguments
        if port := told.get("dashboard_agent_listen_port"):
            where = told["session_dir"], told["node_id"]
            persist_port(*where, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        return self._start_raylet(*args, **options)

    def raylet_lives(self) -> bool:
        return self._raylet is not None and self._raylet.poll() is None


def main() -> None:
    from ray._private import services
    from ray.scripts import scripts

    processes = _Processes(services)
    services.start_ray_process = processes.start_process
    services.start_raylet = processes.start_raylet
    services.get_node = patient(services.get_node, processes.raylet_lives)
    # Ray starts the client server where it finds what that needs.
    scripts.get_ray_client_dependency_error = lambda: ImportError("left out")
    sys.argv = ["ray", "start", *sys.argv[1:]]
    scripts.main()


if __name__ == "__main__":
    main()
