"""Emulated hosts with network namespaces of their own, whose links a test can cut.

    hub (this namespace)  10.203.N.1 ── bridge ── host 0  10.203.N.2  (namespace, `eth0`)
                                            └──── host 1  10.203.N.3

A link that is cut swallows packets, as a pulled cable does: no connection ends by it. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
INTERFACE = "eth0"


def why_not() -> str:
    """Why there can be no such hosts on this machine; empty if there can."""
    if os.geteuid() != 0:
        return "network namespaces of its own need root"
    if not shutil.which("ip"):
        return "there is no `ip` command (iproute2)"
    probe = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True)
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


@dataclass(frozen=True)
class CutOffHosts:
    """`num_hosts` namespaces on one bridge; `subnet` is the third byte of their addresses."""

    num_hosts: int
    subnet: int

    @property
    def hub_address(self) -> str:
        """Address of the namespace that the test itself runs in."""
        return f"10.203.{self.subnet}.1"

    def address(self, host: int) -> str:
        """Address of a host."""
        return f"10.203.{self.subnet}.{host + 2}"

    def namespace(self, host: int) -> str:
        """Name of a host's network namespace; for `enter`."""
        return f"shl{self.subnet}-{host}"

    def cut(self, host: int) -> None:
        """Pull the host's cable."""
        _ip("link", "set", self._link(host), "down")

    def mend(self, host: int) -> None:
        """Put it in again."""
        _ip("link", "set", self._link(host), "up")

    def _link(self, host: int) -> str:
        return f"shl{self.subnet}v{host}"

    @property
    def _bridge(self) -> str:
        return f"shl{self.subnet}br"

    def _build(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("address", "add", f"{self.hub_address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in range(self.num_hosts):
            inside = self.namespace(host)
            _ip("netns", "add", inside)
            peer = ("peer", "name", INTERFACE, "netns", inside)
            _ip("link", "add", self._link(host), "type", "veth", *peer)
            _ip("link", "set", self._link(host), "master", self._bridge, "up")
            _ip("-n", inside, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                _ip("-n", inside, "link", "set", device, "up")

    def _remove(self) -> None:
        for host in range(self.num_hosts):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", self.namespace(host))
        with suppress(subprocess.CalledProcessError):
            _ip("link", "delete", self._bridge)


@contextmanager
def cut_off_hosts(num_hosts: int) -> Iterator[CutOffHosts]:
    """Hosts that are gone after the block. Raises CalledProcessError where they cannot be made."""
    hosts = CutOffHosts(num_hosts, subnet=1 + os.getpid() % 250)
    hosts._remove()  # of a test that was killed
    try:
        hosts._build()
        yield hosts
    finally:
        hosts._remove()


def enter(namespace: str) -> None:
    """Move this thread, and what it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
