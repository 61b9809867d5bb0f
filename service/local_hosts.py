"""Further hosts of the local stack: Ray nodes with loopback addresses of their own.

They share the cores of this machine, but Ray, and so every job, takes them for different hosts. A
laptop can show that way what becomes of a job when a host dies (`kill`) or comes (`add`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address

from service import local_ray
from service.local import LocalStack
from service.local_process import ProcessId, end_family, family, is_alive, process_table
from service.local_state import StackError, StackState

CPUS_PER_HOST = 4
_MAX_TRIES = 3
_JOIN_TIMEOUT_S = 120.0
_POLL_S = 0.5


@dataclass
class LocalHosts:
    """The hosts beside the head of a stack that runs."""

    stack: LocalStack
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def running(self) -> list[str]:
        """Addresses of those that live, without the head's."""
        return [address for address, root in self._state().hosts.items() if is_alive(root)]

    def add(self, address: str | None = None, num_cores: int = CPUS_PER_HOST) -> str:
        """Start a host and wait until it has joined; its address, the next free one by default.

        Raises `StackError`.
        """
        with self.stack.home.lock():
            state = self._state()
            if state.head_address is not None:
                raise StackError(
                    f"other machines join this head, by `shardloom join {state.head_address}` there"
                )
            address = address or self._next_address(state)
            if address in self.running() or address == local_ray.NODE_IP:
                raise StackError(f"host {address} is there already; `shardloom host ls` shows all")
            if state.gcs_address is None or state.ray_address is None:
                raise StackError("hosts can be added to a Ray that `shardloom up` started, only")
            for _ in range(_MAX_TRIES):
                process = self._start(address, state.gcs_address, num_cores)
                hosts = state.hosts | {address: process}
                self.stack.home.write_state(state.model_copy(update={"hosts": hosts}))
                if self._wait_until_joined(address, process, state.ray_address):
                    return address
                # On a busy machine a node's agent may be later than Ray's patience with it.
                end_family(process, grace_s=0.0)
        self._forget(address)
        raise StackError(
            f"host {address} did not join Ray in {_MAX_TRIES} tries; see "
            f"{self.stack.home.log_path(_name(address))}"
        )

    def _start(self, address: str, gcs_address: str, num_cores: int) -> ProcessId:
        executable = local_ray.ray_executable()
        if executable is None:
            raise StackError("the `ray` command is missing: pip install 'shardloom[trainer-cpu]'")
        return self.stack.spawn(
            _name(address),
            local_ray.node_command(executable, gcs_address, address, num_cores),
            local_ray.node_environment(self.environment, self.stack.home.token_path),
        )

    def _wait_until_joined(self, address: str, process: ProcessId, ray_address: str) -> bool:
        """Whether Ray counts the host among its nodes before it gives up or a minute has passed."""
        deadline = time.monotonic() + _JOIN_TIMEOUT_S
        while is_alive(process) and time.monotonic() < deadline:
            if address in local_ray.live_addresses(ray_address, self.stack.home.token()):
                return True
            time.sleep(_POLL_S)
        return False

    def _forget(self, address: str) -> None:
        state = self._state()
        hosts = {other: root for other, root in state.hosts.items() if other != address}
        self.stack.home.write_state(state.model_copy(update={"hosts": hosts}))

    def kill(self, address: str) -> int:
        """End everything that runs on a host at once, as a power cut would; how many processes.

        Raises `StackError`.
        """
        with self.stack.home.lock():
            state = self._state()
            if address not in self.running():
                there = ", ".join(self.running()) or "none"
                raise StackError(f"no host {address} beside the head; those that run: {there}")
            victims = family(state.hosts[address], process_table())
            for victim in victims:
                with suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
            self._forget(address)
        return len(victims)

    def _state(self) -> StackState:
        state = self.stack.running()
        if state is None:
            raise StackError("no stack runs here; `shardloom up` starts one")
        return state

    def _next_address(self, state: StackState) -> str:
        candidate = IPv4Address(local_ray.NODE_IP) + 1
        while str(candidate) in state.hosts:
            candidate += 1
        return str(candidate)


def _name(address: str) -> str:
    return f"host-{address}"
