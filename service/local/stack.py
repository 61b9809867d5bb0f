"""The local stack behind `shardloom up`: the service and a private Ray, as two child processes.

Both start at the same time and live in sessions of their own, so they outlive the command that
started them. Jobs go the same way as on a cluster: the service submits them to Ray's Jobs API.
`stack.json` remembers who was started; only those processes and what they started are ended.
With SHARDLOOM_RAY_ADDRESS set no Ray is started and that cluster is used; with
SHARDLOOM_BACKEND=fake there is no cluster at all.

Further hosts are Ray nodes with loopback addresses of their own. They share the cores of this
machine, but Ray, and so every job, takes them for different hosts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

import httpx
from pydantic import ValidationError

from service.files import make_private
from service.local.processes import (
    ProcessId,
    identify,
    is_alive,
    process_table,
    process_tree,
    terminate_tree,
)
from service.local.ray_node import (
    NODE_IP,
    RayHead,
    RayNode,
    RayState,
    make_temp_dir,
    node_environment,
)
from service.local.state import StackError, StackHome, StackState, boot_id
from service.network import local_url, port_fault
from trainer.protocol.versions import check_versions

# A busy machine of two cores has needed more than a minute until Ray counted its node.
START_TIMEOUT_S = 300.0
_READY_POLL_S = 0.1
_PORT_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Component:
    """One process of the stack; `url` says where it is asked for whether it `is_ready`."""

    name: str
    process: ProcessId
    url: str
    is_ready: Callable[[], bool]


def answers(url: str) -> bool:
    """Whether a GET succeeds; of this machine only, so that a certificate need not be checked."""
    try:
        return httpx.get(url, trust_env=False, timeout=2.0, verify=False).is_success
    except httpx.TransportError:
        return False


def wait_until_ready(
    parts: Sequence[Component], report: Callable[[str], None], log_tail: Callable[[str], str]
) -> None:
    """Wait until all are ready; `report` gets a line for each.

    Raises `StackError` with the end of its log for one that ends or is late.
    """
    started = time.monotonic()
    waiting = list(parts)
    while waiting:
        for part in list(waiting):
            is_ready = part.is_ready()
            elapsed_s = time.monotonic() - started
            if is_ready:
                waiting.remove(part)
                report(f"{part.name} ready after {elapsed_s:.1f} s")
            elif not is_alive(part.process):
                raise StackError(f"{part.name} did not start; {log_tail(part.name)}")
            elif elapsed_s > START_TIMEOUT_S:
                raise StackError(
                    f"{part.name} runs but is not ready at {part.url} after {elapsed_s:.0f} s; "
                    f"{log_tail(part.name)}"
                )
        time.sleep(_READY_POLL_S)


def end_process(name: str, process: ProcessId, grace_s: float) -> None:
    """End a process and all that it started; raises `StackError` if one survives."""
    if survivors := terminate_tree(process, grace_s=grace_s):
        pids = ", ".join(str(survivor.pid) for survivor in survivors)
        raise StackError(f"{name}: processes {pids} do not end, even by SIGKILL")


def check_port_free(host: str, port: int, patience_s: float = 0.0) -> None:
    """Raise `StackError`, naming the port and the way out, if nobody can listen on it.

    A service that was killed counts as dead once its first thread is, but keeps its port until its
    last I/O ends: it is given `patience_s` to be gone altogether.
    """
    deadline = time.monotonic() + patience_s
    try:
        while fault := port_fault(host, port):
            if time.monotonic() >= deadline:
                raise StackError(
                    f"{fault}; choose another one: `shardloom up --port {port + 1}` "
                    f"or SHARDLOOM_PORT={port + 1}"
                )
            time.sleep(_READY_POLL_S)
    except OSError as error:
        reason = f"SHARDLOOM_HOST={host} is no address of this machine"
        raise StackError(f"{reason} ({error.strerror}); name one of its own") from error


SERVICE_COMMAND = (sys.executable, "-m", "service.app")
DEFAULT_PORT = 8700
POLL_S = 0.1
# The service gives open requests 5 s before it closes them.
SERVICE_GRACE_S = 8.0
RAY_GRACE_S = 5.0
LOG_TAIL_LINES = 15
CPUS_PER_HOST = 4
_MAX_TRIES = 3
Report = Callable[[str], None]


class LocalStack:
    """Starts, finds and ends the stack of one home folder."""

    def __init__(
        self,
        home: StackHome,
        environment: Mapping[str, str] = os.environ,
        service_command: Sequence[str] = SERVICE_COMMAND,
    ) -> None:
        self.home = home
        self._environment = dict(environment)
        names_ray = bool(self._environment.get("SHARDLOOM_RAY_ADDRESS"))
        self._starts_ray = not names_ray and self._environment.get("SHARDLOOM_BACKEND") != "fake"
        self._service_command = list(service_command)
        self._started: list[ProcessId] = []
        # An object that is dropped while its process runs would raise a ResourceWarning.
        self._children: list[subprocess.Popen[bytes]] = []

    def running(self) -> StackState | None:
        state = self._own_state()
        return state if state is not None and state.is_running else None

    def up(self, *, port: int | None = None, num_hosts: int = 1, report: Report) -> StackState:
        """Start what does not run yet, wait until it answers, and return its state.

        `report` gets a line per milestone. Raises `StackError`; nothing that was started is left
        running then.
        """
        with self.home.lock(), ExitStack() as undo:
            # Of earlier starts of this object Ray may live, which is not this one's to undo.
            self._started = []
            state = self.running()
            before = state or self._end_leftovers(report)
            undo.callback(self._undo_start, before)
            if state is None:
                port = port or self._default_port(before)
                self._check_can_start(port, before)
                state, parts = self._launch(port, before)
                wait_until_ready(parts, report, self.log_tail)
            num_there = len(self.running_hosts()) if num_hosts > 1 else 0
            for _ in range(num_hosts - 1 - num_there):
                report(f"host {self._add_host()} joined")
            undo.pop_all()
            return state

    def down(self, report: Report, *, only: StackState | None = None) -> bool:
        """End the stack and all that it started; False if nothing ran. Raises `StackError`.

        With `only` a stack that others started in place of that one is left alone.
        """
        with self.home.lock():
            state = self._own_state()
            if state is None or (only is not None and not state.has_processes_of(only)):
                return False
            ended = self._end(state, report)
            self.home.state_path.unlink(missing_ok=True)
            return ended

    def wait_until_broken(self, state: StackState) -> str:
        """Block while all of the stack runs; then say which part ended, with its last lines."""
        while state.is_running:
            time.sleep(POLL_S * 5)
        name = "ray" if state.service is not None and is_alive(state.service) else "service"
        return f"{name} has ended by itself; {self.log_tail(name)}"

    def was_ended(self, state: StackState) -> bool:
        """Whether another `down` has ended a stack; waits for one that is under way."""
        with self.home.lock():
            found = self.home.read_state()
            return found is None or not found.has_processes_of(state)

    # ---- before

    def _own_state(self) -> StackState | None:
        """The state of this machine's stack; raises `StackError` for that of another machine."""
        state = self.home.read_state()
        is_here = state is None or state.boot_id == boot_id()
        if state is not None and not is_here and state.machine not in ("", socket.gethostname()):
            raise StackError(
                f"the stack of {self.home.root} runs on {state.machine}, and can be started and "
                "stopped there only; for one of this machine name another SHARDLOOM_HOME, or "
                f"remove {self.home.state_path} if that machine is no more"
            )
        return state

    @property
    def _host(self) -> str:
        return self._environment.get("SHARDLOOM_HOST") or "127.0.0.1"

    def _url(self, port: int) -> str:
        scheme = "https" if self._environment.get("SHARDLOOM_SSL_CERTFILE") else "http"
        return local_url(self._host, port, scheme)

    def _default_port(self, before: StackState | None) -> int:
        # Drivers that still run post to the old address, so a restarted service keeps it.
        if before is not None and (old_port := httpx.URL(before.url).port):
            return old_port
        text = self._environment.get("SHARDLOOM_PORT") or str(DEFAULT_PORT)
        if not text.isdecimal() or not 0 < int(text) < 2**16:
            raise StackError(f"SHARDLOOM_PORT={text} is not a port; it is a number up to 65535")
        return int(text)

    def _end_leftovers(self, report: Report) -> StackState | None:
        """End a half-dead stack; returns its state if its Ray lives and can be used again."""
        state = self._own_state()
        if state is None or state.boot_id != boot_id():
            self.home.state_path.unlink(missing_ok=True)
            return None
        if state.ray is not None and is_alive(state.ray) and self._starts_ray:
            report("the service had ended; its Ray still runs and is kept")
            if state.service is not None:
                terminate_tree(state.service, grace_s=0.0)
            return state
        self._end(state, report)
        self.home.state_path.unlink(missing_ok=True)
        return None

    def _check_can_start(self, port: int, before: StackState | None) -> None:
        starts_ray = self._starts_ray and before is None
        missing = [
            name
            for name in ("fastapi", "sqlalchemy", "uvicorn")
            if not importlib.util.find_spec(name)
        ]
        if missing:
            raise StackError(
                f"a local stack needs {', '.join(missing)}, not installed here: run `make setup`, "
                "or pip install 'shardloom[service]'. To use a service elsewhere, give its --url"
            )
        if starts_ray and (mismatches := check_versions()):
            raise StackError("\n".join(mismatches))
        patience_s = _PORT_PATIENCE_S if before is not None else 0.0
        check_port_free(self._host, port, patience_s)

    # ---- start

    def _launch(self, port: int, before: StackState | None) -> tuple[StackState, list[Component]]:
        url = self._url(port)
        state = before or StackState(
            url=url,
            boot_id=boot_id(),
            started_at=time.time(),
            ray_address=self._environment.get("SHARDLOOM_RAY_ADDRESS"),
            machine=socket.gethostname(),
        )
        parts = []
        if self._starts_ray and state.ray is None:
            state = self._launch_ray(state)
            assert state.ray is not None and state.ray_address is not None
            # Ray's Jobs API answers before it counts the node of this machine, and a job would
            # find no place.
            ray = RayState(state.ray_address, self.home.token())
            parts.append(Component("ray", state.ray, state.ray_address, ray.has_head))
        state = self._launch_service(state.model_copy(update={"url": url}), port)
        assert state.service is not None
        health = f"{url}/healthz"
        service = Component("service", state.service, health, lambda: answers(health))
        return state, [service, *parts]

    def _launch_ray(self, state: StackState) -> StackState:
        head = RayHead(os.cpu_count() or 1)
        command = head.command(self.home.ray_dir)
        self.home.token()
        make_temp_dir(self.home.ray_dir)
        environment = head.environment(self._environment, self.home.token_path)
        started = {
            "ray": self.spawn("ray", command, environment),
            "ray_address": head.ray_address,
            "gcs_address": head.gcs_address,
        }
        state = state.model_copy(update=started)
        self.home.write(state)
        return state

    def _launch_service(self, state: StackState, port: int) -> StackState:
        settings = self._paths()
        settings |= {"SHARDLOOM_HOME": str(self.home.root), "SHARDLOOM_PORT": str(port)}
        if state.ray is not None and state.ray_address is not None:
            settings["SHARDLOOM_RAY_ADDRESS"] = state.ray_address
            settings["SHARDLOOM_RAY_AUTH_TOKEN"] = self.home.token()
            if ca_file := self._ca_file():
                settings["SHARDLOOM_DRIVER_CA_FILE"] = ca_file
        process = self.spawn("service", self._service_command, self._environment | settings)
        state = state.model_copy(update={"service": process})
        self.home.write(state)
        return state

    def _paths(self) -> dict[str, str]:
        """Settings that are paths, as they are read in this folder: the service has another one."""
        from service.settings import Settings

        variables = {name: f"SHARDLOOM_{name.upper()}" for name in Settings.model_fields}
        texts = {name: self._environment.get(variable) for name, variable in variables.items()}
        given = {name: text for name, text in texts.items() if text is not None}
        try:
            settings = Settings.model_validate(given)
        except ValidationError:  # of which the service tells
            return {}
        values = {variables[name]: getattr(settings, name) for name in given}
        found = {name: str(value) for name, value in values.items() if isinstance(value, Path)}
        if roots := settings.storage_roots:
            found["SHARDLOOM_STORAGE_ROOTS"] = json.dumps([str(root) for root in roots])
        if file := re.fullmatch("sqlite:///((?!file:)[^/:].*)", settings.database_url):
            found["SHARDLOOM_DATABASE_URL"] = f"sqlite:///{Path(file[1]).absolute()}"
        return found

    def _ca_file(self) -> str | None:
        """By which drivers check the service, where that is not said: what clients do so by, else
        its own certificate where that signs itself."""
        names = ("SHARDLOOM_DRIVER_CA_FILE", "SHARDLOOM_CA_FILE", "SHARDLOOM_SSL_CERTFILE")
        said, found, own = (self._environment.get(name) for name in names)
        if said or not own:
            return None
        if not found:
            from cryptography import x509

            with suppress(OSError, ValueError):  # of a file that the service refuses
                certificate = x509.load_pem_x509_certificate(Path(own).read_bytes())
                found = own if certificate.issuer == certificate.subject else None
        # The service has another working folder.
        return str(Path(found).expanduser().absolute()) if found else None

    def spawn(self, name: str, command: list[str], environment: dict[str, str]) -> ProcessId:
        """Start a process in a session of its own, with a log of that name."""
        log = self.home.log_path(name)
        make_private(log.parent)
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        # The children run the code that this command runs, installed or not.
        code_root = str(Path(__file__).resolve().parents[2])
        inherited = environment.get("PYTHONPATH")
        path = os.pathsep.join([code_root, inherited] if inherited else [code_root])
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                env=environment | {"PYTHONPATH": path},
                cwd=self.home.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._children.append(child)
        self._started.append(identify(child.pid))
        return self._started[-1]

    def log_tail(self, name: str) -> str:
        path = self.home.log_path(name)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        tail = "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:])
        return f"the end of {path}:\n{tail}"

    # ---- end

    def _undo_start(self, before: StackState | None) -> None:
        """End what this start has begun; a Ray from before, and its jobs, go on."""
        for process in reversed(self._started):
            terminate_tree(process, grace_s=RAY_GRACE_S)
        if before is None:
            self.home.state_path.unlink(missing_ok=True)
        else:
            self.home.write(before)

    def _end(self, state: StackState, report: Report) -> bool:
        """End the service, then hosts and Ray, so that the service does not see its cluster go."""
        if state.boot_id != boot_id():
            return False
        ended = False
        graces = (
            ("service", state.service, SERVICE_GRACE_S),
            *((f"host {address}", host, 0.0) for address, host in state.hosts.items()),
            ("ray", state.ray, RAY_GRACE_S),
        )
        for name, process, grace_s in graces:
            if process is None:
                continue
            was_alive = is_alive(process)
            started = time.monotonic()
            end_process(name, process, grace_s)
            if was_alive:
                report(f"{name} ended after {time.monotonic() - started:.1f} s")
            ended = ended or was_alive
        return ended

    # ---- further hosts

    def running_hosts(self) -> list[str]:
        """Addresses of the hosts that live, without the head's."""
        return [address for address, root in self._running_state().hosts.items() if is_alive(root)]

    def add_host(self, address: str | None = None, num_cores: int = CPUS_PER_HOST) -> str:
        """Start a host and wait until it has joined; its address, the next free one by default.

        Raises `StackError`.
        """
        with self.home.lock():
            return self._add_host(address, num_cores)

    def _add_host(self, address: str | None = None, num_cores: int = CPUS_PER_HOST) -> str:
        state = self._running_state()
        free = _next_address(state)
        address = address or free
        if not _may_be_host(address):
            raise StackError(
                f"{address} is no loopback address that a host can have to itself, as {free} is"
            )
        if address in self.running_hosts() or address == NODE_IP:
            raise StackError(f"host {address} is there already; `shardloom host ls` shows all")
        assert state.ray_address is not None
        ray = RayState(state.ray_address, self.home.token())
        # On a busy machine a part of a node may be later than Ray allows, which then ends.
        started = time.monotonic()
        for _ in range(_MAX_TRIES):
            if self._try_host(state, ray, RayNode(address, num_cores)):
                return address
            if time.monotonic() - started > START_TIMEOUT_S:
                break
        log = self.log_tail(f"host-{address}")
        raise StackError(f"{address} did not join Ray: is its head still up? {log}")

    def _try_host(self, state: StackState, ray: RayState, node: RayNode) -> bool:
        """Start a host's Ray, and wait until it is counted; nothing of it stays where it is not."""
        assert state.gcs_address is not None
        # One that was killed may not be given up yet.
        known = ray.live_nodes() or {}
        command = node.join_command(state.gcs_address, self.home.ray_dir)
        environment = node_environment(self._environment, self.home.token_path)
        with ExitStack() as undo:
            process = self.spawn(f"host-{node.address}", command, environment)
            undo.callback(self._forget_host, node.address)
            undo.callback(end_process, "the host", process, RAY_GRACE_S)
            hosts = state.hosts | {node.address: process}
            self.home.write(state.model_copy(update={"hosts": hosts}))
            if not ray.wait_for_node(node.address, process, known):
                return False
            undo.pop_all()
        return True

    def _forget_host(self, address: str) -> None:
        state = self._running_state()
        hosts = {other: root for other, root in state.hosts.items() if other != address}
        self.home.write(state.model_copy(update={"hosts": hosts}))

    def kill_host(self, address: str) -> int:
        """End everything that runs on a host at once, as a power cut would; how many processes.

        Raises `StackError`.
        """
        with self.home.lock():
            state = self._running_state()
            if address not in self.running_hosts():
                there = ", ".join(self.running_hosts()) or "none"
                raise StackError(f"no host {address} beside the head; those that run: {there}")
            victims = process_tree(state.hosts[address], process_table())
            for victim in victims:
                with suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
            self._forget_host(address)
        return len(victims)

    def _running_state(self) -> StackState:
        state = self.running()
        if state is None:
            raise StackError("no stack runs here; `shardloom up` starts one")
        if state.gcs_address is None:
            raise StackError("only a Ray that `shardloom up` started has hosts of this machine")
        return state


def _may_be_host(address: str) -> bool:
    """Whether an address is this machine's, and none that Ray replaces (`ray_node`)."""
    try:
        found = IPv4Address(address)
    except ValueError:
        return False
    return found.is_loopback and found >= IPv4Address(NODE_IP)


def _next_address(state: StackState) -> str:
    candidate = IPv4Address(NODE_IP) + 1
    while str(candidate) in state.hosts:
        candidate += 1
    return str(candidate)
