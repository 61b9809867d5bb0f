"""Emulated hosts on one machine: network namespaces joined by a switch with shaped links.

     host 0 [eth0 10.77.0.1] ──── port0 ┐
                                        ├ switch (a bridge in a namespace of its own)
     host 1 [eth0 10.77.0.2] ──── port1 ┘

Each host has one full-duplex link to the switch, held to the same rate in both directions by a
token bucket (`tc tbf`). Where packets are to take longer, `delayed_switch` is there for the bridge.
Processes of one host reach each other's eth0 address through the host's own loopback, which is not
shaped. Nothing of this touches the machine's own network.

A host is also a PID namespace: its processes see only each other, and end with it. The namespaces
have no names. Each lives as long as its init, a `cat` that ends when its pipe to us closes:
whatever ends this process, SIGKILL included, the kernel kills all that run on the hosts, and takes
the namespaces and their links away.

Needs root, and `ip` and `tc` of iproute2, `unshare` and `nsenter` of util-linux.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.harness.ray_hosts import processes_below

INTERFACE = "eth0"
_DELAYED_SWITCH = str(Path(__file__).with_name("delayed_switch.py"))
_NOBODY = "02:00:00:00:00:ff"  # the address of no interface
_NAMESPACE = "{}/net"
_NETWORK = f"--net={_NAMESPACE}"
# Its mounts hold the /proc that shows the host's own processes.
_NAMESPACES = (_NETWORK, "--mount={}/mnt", "--pid={}/pid_for_children")
_TOOLS = ("ip", "tc", "unshare", "nsenter")
_CLONE_NEWNET = 0x40000000


class EmulationError(Exception):
    """The machine cannot emulate hosts; the message has the command and what it answered."""


@dataclass(frozen=True)
class Link:
    """A host's link to the switch, in each direction.

    From host to host a packet takes `delay_ms` longer.
    """

    rate_bits_per_s: int
    delay_ms: float = 0


class EmulatedHosts:
    """`num_hosts` hosts with a `link` each. A context manager: the hosts are gone after it."""

    def __init__(self, num_hosts: int, link: Link) -> None:
        self.link = link
        self.addresses = tuple(f"10.77.0.{host + 1}" for host in range(num_hosts))
        self._stack = ExitStack()
        self._holders: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        """Bring the hosts up; raises `EmulationError` where the machine cannot."""
        with self._stack:
            self._switch = self._hold_namespace()
            self._holders = [self._hold_namespace() for _ in self.addresses]
            if not self.link.delay_ms:
                _configure(self._switch, "ip link add switch type bridge", "ip link set switch up")
            for host in range(len(self.addresses)):
                self._plug_in(host)
            if self.link.delay_ms:
                self._switch_late()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def start(
        self, host: int, command: Sequence[str], cwd: Path, **popen: Any
    ) -> subprocess.Popen[Any]:
        """Start `command` in folder `cwd` of `host`; the rest is Popen's own.

        The child is `nsenter`, which waits for the command and ends as it does, but hands no
        signals on: what must end early should watch a pipe. All end with the hosts.
        """
        inside = [*_enter(self._holders[host], *_NAMESPACES), f"--wdns={cwd}", "--", *command]
        return subprocess.Popen(inside, start_new_session=True, **popen)

    def processes(self, host: int) -> list[int]:
        """Ids, as this machine counts, of what runs on a host, orphans too."""
        _holder, _init, *started = processes_below(self._holders[host].pid)
        return started

    def network(self, host: int) -> Path:
        """The network namespace of a host, for `enter_network`."""
        return Path(_NAMESPACE.format(f"/proc/{self._holders[host].pid}/ns"))

    def cut(self, host: int, *others: int) -> None:
        """Lose all packets between a host and `others`: by default pull its cable.

        No connection ends by it.
        """
        if not others:
            _configure(self._switch, f"ip link set port{host} down")
        for one, other in self._directions(host, others):
            peer = f"{self.addresses[other]} dev {INTERFACE}"
            _configure(
                self._holders[one], f"ip neigh replace {peer} lladdr {_NOBODY} nud permanent"
            )

    def mend(self, host: int, *others: int) -> None:
        if not others:
            _configure(self._switch, f"ip link set port{host} up")
        for one, other in self._directions(host, others):
            _configure(self._holders[one], f"ip neigh del {self.addresses[other]} dev {INTERFACE}")

    def _directions(self, host: int, others: Sequence[int]) -> list[tuple[int, int]]:
        return [pair for other in others for pair in ((host, other), (other, host))]

    def _hold_namespace(self) -> subprocess.Popen[bytes]:
        holder = subprocess.Popen(
            ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C is ours to pass on, after the hosts' processes
        )
        self._stack.callback(_end, holder)
        # `cat` answers from inside the namespace, so an answer says that it is there.
        try:
            holder.stdin.write(b"\n")
            holder.stdin.flush()
            answer = holder.stdout.read(1)
        except BrokenPipeError:
            answer = b""
        if not answer:
            raise EmulationError("new namespaces were refused: run as root, outside of a sandbox")
        return holder

    def _switch_late(self) -> None:
        ports = [f"port{host}" for host in range(len(self.addresses))]
        command = [sys.executable, _DELAYED_SWITCH, str(self.link.delay_ms / 1e3), *ports]
        started = subprocess.Popen(
            [*_enter(self._switch, _NETWORK), "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._stack.callback(_end, started)
        if not started.stdout.readline():
            raise EmulationError(f"a switch with a delay did not start: {' '.join(command)}")

    def _plug_in(self, host: int) -> None:
        port, link = f"port{host}", self.link
        # The burst lets whole 64 KiB segments through, which spares the cores from cutting them up.
        shape = f"root tbf rate {link.rate_bits_per_s}bit burst 262144 latency 50ms"
        _configure(
            self._holders[host],
            f"ip link add {INTERFACE} type veth peer name {port} netns {self._switch.pid}",
            f"ip address add {self.addresses[host]}/24 dev {INTERFACE}",
            f"ip link set {INTERFACE} up",
            "ip link set lo up",
            f"tc qdisc add dev {INTERFACE} {shape}",
        )
        _configure(
            self._switch,
            f"ip link set {port} {'' if link.delay_ms else 'master switch '}up",
            f"tc qdisc add dev {port} {shape}",
        )


def missing_requirement() -> str | None:
    """Why this machine cannot emulate hosts, as a sentence; None when it can."""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    missing = [tool for tool in _TOOLS if not shutil.which(tool)]
    if missing:
        return f"emulated hosts need {', '.join(missing)} (Debian: iproute2 and util-linux)"
    try:
        with EmulatedHosts(1, Link(10**9)):
            return None
    except EmulationError as error:
        return f"this machine cannot emulate hosts: {error}"


def enter_network(network: Path) -> None:
    """Move this thread, and what it starts from now on, to a host's network; raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    with network.open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")


def sent_bytes() -> int:
    """Bytes that the host of the calling process has sent over its link, headers included."""
    # /proc/net follows the network namespace of the reader; /sys/class/net does not.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise EmulationError(f"no {INTERFACE} here: this process is not on an emulated host")


def namespaces_in_use() -> set[str]:
    """Network namespaces that some process of this machine lives in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(str(entry.readlink()))
        except FileNotFoundError:
            continue  # it ended meanwhile
    return found


def _enter(holder: subprocess.Popen[bytes], *namespaces: str) -> list[str]:
    return ["nsenter", *(each.format(f"/proc/{holder.pid}/ns") for each in namespaces)]


def _configure(holder: subprocess.Popen[bytes], *commands: str) -> None:
    """Run commands in a namespace; raises `EmulationError` when one fails."""
    for command in commands:
        # Without the host's own /proc, because `netns PID` is looked up there.
        inside = [*_enter(holder, _NETWORK), "--", *command.split()]
        done = subprocess.run(inside, capture_output=True, text=True, check=False)
        if done.returncode:
            raise EmulationError(f"`{command}` said: {done.stderr.strip() or done.stdout.strip()}")


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.communicate()  # closes its pipe, which ends it
