"""`up --head` and `join` in the foreground: what they do when a part of them ends, and by whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from service.cli import machines as machine_commands
from service.cli import stack as commands
from service.local.join import JoinedMachine
from service.local.processes import ProcessId, identify, is_alive, terminate_tree
from service.local.ray_node import MachineHead, MachineNode
from service.local.stack import LocalStack
from service.local.state import JoinedState, StackHome, StackState
from tests.harness.machines import keep_joined, keep_stack
from tests.harness.wait import free_port, scaled, wait_for

pytestmark = pytest.mark.slow

# Answers /healthz, so that this test is about Ray alone.
SERVICE_STAND_IN = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(os.environ["SHARDLOOM_PORT"])), Handler).serve_forever()
"""
# Loopback, which `up --head` itself refuses: this test is about processes alone.
HEAD = MachineHead(MachineNode("127.0.0.1", "lo", num_cpus=1))


@pytest.fixture
def ray_stand_in() -> Iterator[ProcessId]:
    """A process that lives, as Ray's does; what `up` takes for the Ray of before."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield identify(child.pid)
    child.kill()
    child.wait()


@pytest.fixture
def signals() -> Iterator[None]:
    """The handlers of this process, as they were.

    Until the command has set its own on a busy machine, a signal is to end the test, not pytest.
    """
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in kept:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_service_that_dies_is_started_again_while_ray_lives(
    ray_stand_in: ProcessId, signals: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "RESTART_PAUSE_S", 0.1)
    stack = _stack(tmp_path / "home", ray_stand_in)
    first = stack.up(port=free_port(), report=lambda line: None)
    assert first.service is not None
    seen: list[StackState] = []
    is_seen = threading.Event()
    wait_until_broken = stack.wait_until_broken

    def note(state: StackState) -> str:
        if state.service != first.service:
            seen.append(state)
            is_seen.set()
        return wait_until_broken(state)

    monkeypatch.setattr(stack, "wait_until_broken", note)

    def strike() -> None:
        assert first.service is not None
        os.kill(first.service.pid, signal.SIGKILL)
        assert is_seen.wait(scaled(60))
        os.kill(ray_stand_in.pid, signal.SIGKILL)

    striker = threading.Thread(target=strike)
    striker.start()
    with pytest.raises(typer.Exit):  # without Ray the whole stack has to start again
        commands._stay(stack, first)
    striker.join()
    (second,) = seen
    assert (second.url, second.ray) == (first.url, ray_stand_in)
    assert second.service is not None
    assert not is_alive(second.service)
    terminate_tree(second.service, grace_s=0.0)
    assert stack.home.read_state() is None


def test_join_fails_when_its_node_ends_by_itself_so_that_a_supervisor_joins_again(
    ray_stand_in: ProcessId,
    signals: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine, state = _joined(tmp_path, ray_stand_in)
    log = machine.home.log_path(f"node-{state.address}")
    log.parent.mkdir()
    log.write_text("the head has given this node up\n")
    os.kill(ray_stand_in.pid, signal.SIGKILL)
    with pytest.raises(typer.Exit) as ended:
        machine_commands._stay(machine, state, grace_s=0)
    assert ended.value.exit_code == 3
    assert "the head has given this node up" in capsys.readouterr().err
    assert machine.home.read_joined() is None


def test_sigterm_lets_a_foreground_join_leave(
    ray_stand_in: ProcessId, signals: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, state = _joined(tmp_path, ray_stand_in)
    waits = threading.Event()

    def wait_until_ended(_: JoinedMachine, joined: JoinedState) -> None:
        waits.set()
        wait_for(lambda: not is_alive(joined.node), "an end that nobody asked for", limit_s=60)

    def strike() -> None:
        assert waits.wait(scaled(60))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(JoinedMachine, "wait_until_ended", wait_until_ended)
    striker = threading.Thread(target=strike)
    striker.start()
    machine_commands._stay(machine, state, grace_s=0)
    striker.join()
    assert machine.home.read_joined() is None
    assert not is_alive(ray_stand_in)


def _joined(folder: Path, node: ProcessId) -> tuple[JoinedMachine, JoinedState]:
    """A machine that has joined by a node that stands in for Ray."""
    home = StackHome(folder / "home")
    return JoinedMachine(home), keep_joined(home, node)


def _stack(folder: Path, ray: ProcessId) -> LocalStack:
    """A head whose Ray runs already."""
    home = StackHome(folder)
    keep_stack(
        home,
        url=f"http://127.0.0.1:{free_port()}",
        ray=ray,
        ray_address=HEAD.ray_address,
        gcs_address=HEAD.gcs_address,
        head_address=HEAD.node.address,
    )
    kept = {key: text for key, text in os.environ.items() if not key.startswith("SHARDLOOM_")}
    return LocalStack(home, kept, [sys.executable, "-c", SERVICE_STAND_IN], head=HEAD)
