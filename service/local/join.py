"""`shardloom join` and `leave`: this machine as a node of the cluster that another one heads.

Head and token, versions, run storage, address and ports are checked before anything starts; what
is wrong raises `StackError`. `joined-HOSTNAME.json` remembers the node, and only that process and
what it started is ended. Durations are in seconds.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from service.client.credentials import tls_context
from service.compatibility import HeadFacts, differences, storage_fault, versions_here
from service.local.processes import ProcessId, is_alive
from service.local.ray_node import (
    MachineNode,
    RayNode,
    RayState,
    check_node_ports_free,
    drain_command,
    join_command,
    make_temp_dir,
    node_environment,
)
from service.local.stack import DEFAULT_PORT, RAY_GRACE_S, LocalStack, Report, end_process
from service.local.state import JoinedState, StackError, StackHome, boot_id
from service.network import NoAddress, address_towards, interface_of
from trainer.protocol.versions import check_versions

_HTTP_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 5.0
_DRAIN_TIMEOUT_S = 30.0
# A busy head may leave a request open; one that is gone for good must not cost the whole grace.
_HEAD_PATIENCE_S = 20.0
_POLL_S = 0.5


@dataclass
class JoinedMachine:
    """This machine beside its head."""

    home: StackHome
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def join(
        self, head_url: str, token: str, node: MachineNode, report: Report
    ) -> tuple[JoinedState, RayNode]:
        """Start the node and wait until the head counts it; raises `StackError`.

        Where `node` has no address it takes the one that leads to the head. `report` gets a line
        per milestone. Nothing is left running after an error.
        """
        with self.home.lock():
            self._check_is_free()
            facts = ask_head(head_url, token)
            node = _node_towards(facts, node)
            check_facts(facts)
            _check_reaches(facts.gcs_address)
            check_node_ports_free(node.address, node.ports.fixed)
            self.home.keep_cluster_token(token)
            report(f"the head's versions and run storage {facts.runs_dir} are here, too")
            return self._start(node, facts, head_url, token)

    def leave(self, grace_s: int, report: Report) -> bool:
        """Let jobs leave this machine for at most `grace_s`, then end its node.

        False if it has not joined. Raises `StackError` if a process does not end.
        """
        with self.home.lock():
            state = self.home.read_joined()
            if state is None:
                return False
            was_running = state.is_running
            if was_running and grace_s > 0:
                self._drain(state, grace_s, report)
            if state.boot_id == boot_id():
                end_process("the node", state.node, RAY_GRACE_S)
            self.home.joined_path.unlink(missing_ok=True)
            if was_running:
                report(f"the node at {state.address} has ended")
            return was_running

    def wait_until_ended(self, state: JoinedState) -> str | None:
        """Block while the node runs; why it ended, with its last lines; None after a `leave`."""
        while is_alive(state.node):
            time.sleep(_POLL_S)
        with self.home.lock():  # a `leave` under way forgets the node as its last act
            left = self.home.read_joined() != state
        if left:
            return None
        return f"the node has ended by itself; {self._stack.log_tail(_log(state.address))}"

    @property
    def _stack(self) -> LocalStack:
        return LocalStack(self.home, self.environment)

    def _check_is_free(self) -> None:
        """Raise `StackError` where this machine is part of a cluster already."""
        if (state := self.home.read_joined()) and state.is_running:
            raise StackError(
                f"this machine has joined {state.head_url} already, as {state.address}; "
                "`shardloom leave` ends that"
            )
        stack = self.home.read_state()
        if stack is not None and stack.is_running and stack.machine == socket.gethostname():
            raise StackError(
                f"a stack of {self.home.root} runs on this machine, which cannot join another "
                "one; `shardloom down` ends it"
            )
        if mismatches := check_versions():
            raise StackError("\n".join(mismatches))

    def _start(
        self, node: MachineNode, facts: HeadFacts, head_url: str, token: str
    ) -> tuple[JoinedState, RayNode]:
        home, address, gcs_address = self.home, node.address, facts.gcs_address

        def start() -> tuple[list[str], dict[str, str]]:
            command = join_command(node, gcs_address, home.ray_dir)
            make_temp_dir(home.ray_dir)
            return command, node.environment(self.environment, home.cluster_token_path)

        def keep(process: ProcessId) -> None:
            home.write(
                JoinedState(
                    address=address,
                    head_url=head_url,
                    ray_address=facts.ray_address,
                    gcs_address=gcs_address,
                    boot_id=boot_id(),
                    started_at=time.time(),
                    node=process,
                )
            )

        with ExitStack() as undo:
            undo.callback(home.joined_path.unlink, missing_ok=True)
            ray = RayState(facts.ray_address, token)
            found = self._stack.start_node(_log(address), address, ray, start, keep)
            state = home.read_joined()
            assert state is not None
            state = state.model_copy(update={"node_id": found.node_id})
            home.write(state)
            undo.pop_all()
        return state, found

    def _drain(self, state: JoinedState, grace_s: int, report: Report) -> None:
        """Announce to jobs that this machine leaves, and wait until none has a worker here."""
        try:
            ray = RayState(state.ray_address, read_token(self.home.cluster_token_path))
        except StackError as error:
            report(f"{error}; the node ends without notice to its jobs")
            return
        started = time.monotonic()
        deadline = started + min(grace_s, _HEAD_PATIENCE_S)
        while (nodes := ray.live_nodes()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if nodes is None:
            report("the head does not answer: the node ends without notice to its jobs")
            return
        node_id = _own_node_id(state, nodes)
        if node_id is None:
            report("the head no longer counts this node: its jobs have lost it already")
            return
        left_s = grace_s - (time.monotonic() - started)
        if self._ask_to_drain(state, node_id, max(1, round(left_s)), report):
            report(_wait_for_jobs(ray, state.node, node_id, started, grace_s))

    def _ask_to_drain(self, state: JoinedState, node_id: str, grace_s: int, report: Report) -> bool:
        environment = node_environment(self.environment, self.home.cluster_token_path)
        try:
            done = subprocess.run(
                drain_command(state.gcs_address, node_id, grace_s),
                env=environment,
                capture_output=True,
                text=True,
                timeout=_DRAIN_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            report(f"Ray did not take the drain within {_DRAIN_TIMEOUT_S:.0f} s")
            return False
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no reason given"]
            report(f"Ray refused the drain: {lines[-1]}")
        return done.returncode == 0


def head_url(address: str) -> str:
    """URL of the head's service from what `join` is given: ADDRESS, ADDRESS:PORT or a URL."""
    if "://" in address:
        return address.rstrip("/")
    _, _, port = address.rpartition(":")
    return f"http://{address}" if port.isdecimal() else f"http://{address}:{DEFAULT_PORT}"


def read_token(path: Path) -> str:
    """The Ray token in a file that only its owner can read; raises `StackError`."""
    try:
        if path.stat().st_mode & 0o077:
            raise StackError(f"{path} can be read by others: chmod 600 {path}")
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise StackError(
            f"no token in {path} ({reason}): copy the file `ray-token` from the head's "
            "SHARDLOOM_HOME, as by scp, and name the copy with --token-file"
        ) from None
    if not token.isalnum():
        raise StackError(f"{path} holds no token: it is a copy of the head's file `ray-token`")
    return token


def ask_head(url: str, token: str) -> HeadFacts:
    """What the head says of itself; raises `StackError`."""
    headers = {"Authorization": f"Bearer {token}"}
    try:
        with httpx.Client(trust_env=False, timeout=_HTTP_TIMEOUT_S, verify=tls_context()) as http:
            answer = http.get(f"{url}/v1/cluster/head", headers=headers)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise StackError(
            f"no head answers at {url} ({error or type(error).__name__}): is `shardloom up --head` "
            "running there, and its port open?"
        ) from None
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise StackError(
            f"the head at {url} knows another token: copy its file `ray-token` again; it changes "
            "when the head's SHARDLOOM_HOME is made anew"
        )
    code = answer.status_code
    if code == httpx.codes.TOO_MANY_REQUESTS or code >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise StackError(
            f"the head at {url} cannot say now how to join it (HTTP {code}): {_detail(answer)}"
        )
    try:
        return HeadFacts.model_validate_json(answer.raise_for_status().content)
    except (httpx.HTTPStatusError, ValueError):
        raise StackError(
            f"what answers at {url} is not a head that machines can join (HTTP {code}): start it "
            "there by `shardloom up --head`"
        ) from None


def _detail(answer: httpx.Response) -> str:
    """The detail of a problem document, or where to look."""
    try:
        return str(answer.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return "its logs/service.log says why"


def check_facts(facts: HeadFacts) -> None:
    """Raise `StackError` where this machine has other versions or another run storage."""
    if unlike := differences(facts.versions, versions_here()):
        rows = "\n".join(f"  {line}" for line in unlike)
        raise StackError(f"head and machine must have the same versions; they differ:\n{rows}")
    if fault := storage_fault(Path(facts.runs_dir), facts.storage_id):
        raise StackError(fault)


def _node_towards(facts: HeadFacts, node: MachineNode) -> MachineNode:
    """This machine as the head will see it; raises `StackError`."""
    host = facts.gcs_address.rpartition(":")[0]
    try:
        address = node.address or address_towards(host)
        interface = interface_of(address)
    except NoAddress as error:
        raise StackError(f"{error}; --address names the one by which the head sees it") from None
    if address == host:
        raise StackError(f"{address} is the head itself, which has workers without joining")
    return replace(node, address=address, interface=interface)


def _check_reaches(gcs_address: str) -> None:
    """Raise `StackError` where Ray's own port of the head is closed to us."""
    host, _, port = gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or "no answer"
        raise StackError(
            f"Ray of the head cannot be reached at {gcs_address} ({reason}): open its ports "
            "between the machines (docs/guides/machines.md lists them)"
        ) from None


def _own_node_id(state: JoinedState, nodes: Sequence[RayNode]) -> str | None:
    """This machine's node among those that the head counts; None if it is not there.

    Its address alone may also be that of an earlier node that is not given up yet.
    """
    here = [node.node_id for node in nodes if node.address == state.address]
    if state.node_id is not None:
        return state.node_id if state.node_id in here else None
    return here[0] if here else None


def _wait_for_jobs(
    ray: RayState, process: ProcessId, node_id: str, started: float, grace_s: float
) -> str:
    """Wait until no job is on a node, at most until its grace is over; how that ended."""
    while True:
        num_actors = ray.num_actors_on(node_id)
        elapsed_s = time.monotonic() - started
        if num_actors == 0:
            return f"no job is on this machine any more, after {elapsed_s:.1f} s"
        if not is_alive(process):
            return f"the node has ended by itself, after {elapsed_s:.1f} s"
        if elapsed_s > grace_s:
            break
        time.sleep(_POLL_S)
    if num_actors is None:
        return f"the head has not said within {grace_s:g} s whether jobs are still here"
    return f"{num_actors} processes of jobs are still here after {grace_s:g} s"


def _log(address: str) -> str:
    return f"node-{address}"
