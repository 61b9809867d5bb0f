"""`shardloom up --head`: its options, its first key, and a service that has to start again."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from service import network
from service.cli import build_app
from service.commands import stack as stack_commands
from service.credentials import credentials_path
from service.local import LocalStack
from service.local_state import StackError, StackHome, StackState, boot_id
from tests.unit.service.test_machines import THIS_PROCESS


@pytest.fixture
def home(tmp_path: Path) -> StackHome:
    return StackHome(tmp_path / "home")


@pytest.mark.parametrize(
    "arguments", [["--host", "10.0.0.1"], ["--cpus", "2"], ["--ray-port", "6379"], ["--gpus", "1"]]
)
def test_options_of_a_head_are_not_ignored_without_one(home, monkeypatch, arguments):
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    done = CliRunner().invoke(build_app(), ["up", *arguments])
    assert done.exit_code == 2
    assert f"{arguments[0]} is for a head: add --head" in " ".join(done.output.split())
    assert not home.root.exists()


@pytest.fixture
def as_head(home, monkeypatch, tmp_path):
    """Runs `up --head` on a machine with an address, whose start of processes is a function."""
    monkeypatch.setattr(network, "own_addresses", lambda: {"10.0.0.7": "eth1"})
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    monkeypatch.setenv("SHARDLOOM_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.delenv("SHARDLOOM_DATABASE_URL", raising=False)

    def fail(*_, **__):
        raise StackError("the port is taken")

    monkeypatch.setattr(LocalStack, "up", fail)

    def act(*arguments: str):
        command = ["up", "--head", "--host", "10.0.0.7", *arguments]
        return CliRunner().invoke(build_app(), command)

    return act


def test_the_first_key_is_said_even_where_the_start_fails(home, as_head):
    first, second = as_head(), as_head()
    assert (first.exit_code, second.exit_code) == (3, 3)
    (key,) = re.findall(r"shl_\w+", first.output)
    assert key in credentials_path().read_text()
    assert "shl_" not in second.output


def test_the_first_key_is_not_kept_where_jobs_could_read_it(home, as_head):
    assert "shl_" in as_head("--no-keep-key").output
    assert not credentials_path().exists()


def test_a_database_that_is_away_is_told_without_a_traceback(as_head, monkeypatch):
    monkeypatch.setenv("SHARDLOOM_DATABASE_URL", "postgresql://u:secret@127.0.0.1:9/x")
    done = as_head()
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (3, True)
    assert "SHARDLOOM_DATABASE_URL" in done.output
    assert "secret" not in done.output


def test_a_head_with_other_ports_or_address_is_not_taken_for_the_one_that_runs(home, as_head):
    running = StackState(
        url="http://10.0.0.7:8700",
        boot_id=boot_id(),
        started_at=1.0,
        service=THIS_PROCESS,
        machine=socket.gethostname(),
        head_address="10.0.0.7",
        gcs_address="10.0.0.7:6379",
        ray_address="http://10.0.0.7:8265",
    )
    home.root.mkdir()
    home.write_state(running)
    assert "Shardloom is already up" in as_head("--detach").output
    done = as_head("--ray-port", "6380", "--detach")
    assert done.exit_code == 3
    assert "a head with Ray at 10.0.0.7:6379" in " ".join(done.output.split())


class Foreground:
    """A head's stack whose service dies once, and starts again at the third try at the latest."""

    def __init__(self, home, ray_lives, failures):
        self.home, self.ray_lives, self.failures = home, ray_lives, failures
        self.num_starts = 0

    def wait_until_broken(self, state):
        if state.url == "again":
            raise KeyboardInterrupt
        return "service has ended"

    def was_ended(self, state):
        return False

    def has_live_ray(self, state):
        return self.ray_lives(self.num_starts)

    def up(self, *, port, report):
        self.num_starts += 1
        if self.num_starts <= self.failures:
            raise StackError("the database is away")
        return self.state.model_copy(update={"url": "again"})

    def down(self, report, *, only):
        self.ended = only.url

    @property
    def state(self):
        return StackState(url="first", boot_id="b", started_at=1.0, head_address="10.0.0.7")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(stack_commands, "RESTART_PAUSE_S", 0.0)
    monkeypatch.setattr(stack_commands.signal, "signal", lambda *_: None)


def test_a_head_tries_to_start_its_service_until_it_can(home, quick, capsys):
    stack = Foreground(home, ray_lives=lambda _: True, failures=2)
    stack_commands._stay(cast(LocalStack, stack), stack.state)
    assert (stack.num_starts, stack.ended) == (3, "again")
    assert capsys.readouterr().err.count("the database is away") == 2


def test_a_head_without_ray_ends_for_its_supervisor_to_start_it(home, quick):
    stack = Foreground(home, ray_lives=lambda num_starts: num_starts == 0, failures=9)
    with pytest.raises(StackError, match="database is away"):
        stack_commands._stay(cast(LocalStack, stack), stack.state)
    assert stack.num_starts == 1
