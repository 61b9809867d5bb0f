"""The local stack: process trees, state, ports, commands, and `shardloom up --head`."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import network
from service.cli import stack as stack_commands
from service.client.credentials import credentials_path
from service.local import stack as stack_module
from service.local.processes import (
    ProcessId,
    ProcessInfo,
    identify,
    is_alive,
    parse_stat,
    process_tree,
    terminate_tree,
)
from service.local.ray_node import (
    TRAINER_SETTINGS,
    free_ports,
    join_command,
    make_temp_dir,
    private_head,
    private_node,
)
from service.local.stack import Component, LocalStack, check_port_free, wait_until_ready
from service.local.state import StackError, StackHome, StackState
from service.network import local_url
from service.settings import Settings
from tests.conftest import REPO
from tests.harness.machines import keep_stack
from tests.harness.service import shardloom

THIS_PROCESS = identify(os.getpid())
DEAD_PROCESS = ProcessId(os.getpid(), THIS_PROCESS.start_ticks - 1)


def process(pid: int, parent: int = 1, session: int = 1, start: int = 100) -> ProcessInfo:
    return ProcessInfo(ProcessId(pid, start), parent, session, is_zombie=False)


def pids(members: set[ProcessId]) -> set[int]:
    return {member.pid for member in members}


@pytest.fixture
def home(tmp_path):
    return StackHome(tmp_path / "home")


def test_a_command_with_spaces_and_parentheses_is_read():
    line = "42 (a (b) c) S 7 42 40 0 -1 4194304" + " 0" * 12 + " 12345 0 0"
    assert parse_stat(line) == ProcessInfo(ProcessId(42, 12345), 7, 40, is_zombie=False)


def test_a_family_is_descendants_and_members_of_their_sessions():
    table = [
        process(10, session=10),
        process(11, parent=10, session=10),
        process(12, parent=11, session=12),
        process(13, parent=1, session=12),
        process(20, session=20),
    ]
    assert pids(process_tree(ProcessId(10, 100), table)) == {10, 11, 12, 13}
    # Those of a dead root are found by its session, and a reused pid has none of ours.
    orphans = [process(11, parent=1, session=10), process(20, session=20)]
    assert pids(process_tree(ProcessId(10, 100), orphans)) == {11}
    reused = [process(10, session=10, start=500), process(11, parent=10, session=10, start=501)]
    assert process_tree(ProcessId(10, 100), reused) == set()


@given(st.lists(st.tuples(st.integers(2, 30), st.integers(1, 30), st.integers(1, 30)), max_size=25))
def test_a_family_is_closed_and_never_reaches_outside(rows):
    table = [process(*row) for row in {row[0]: row for row in rows}.values()]
    root = ProcessId(2, 100)
    members = pids(process_tree(root, table)) | {2}
    for row in table:
        belongs = row.parent_pid in members or row.session in members or row.id == root
        assert (row.id.pid in members) == belongs


def test_a_stack_runs_only_while_all_its_processes_do(home):
    assert (is_alive(THIS_PROCESS), is_alive(DEAD_PROCESS)) == (True, False)
    assert not keep_stack(home, service=DEAD_PROCESS).is_running
    assert not keep_stack(home, service=THIS_PROCESS, ray=DEAD_PROCESS).is_running
    stored = keep_stack(home, service=THIS_PROCESS)
    assert stored.is_running
    stack = LocalStack(home, environment={}, service_command=["/nonexistent"])
    assert stack.up(report=pytest.fail) == stored, "it is not started again"
    # One of before the last boot is forgotten, and nobody is ended.
    assert not keep_stack(home, service=THIS_PROCESS, boot_id="another boot").is_running
    assert stack.down(pytest.fail) is False
    assert home.read_state() is None
    home.state_path.write_text('{"url": "http')
    assert home.read_state() is None, "a torn file counts as none"


def test_the_token_is_private_and_stays(home):
    token = home.token()
    assert (len(token), home.token()) == (64, token)
    assert stat.S_IMODE(home.token_path.stat().st_mode) == 0o600
    assert list(home.root.iterdir()) == [home.token_path], "no draft is left behind"


def test_a_node_has_ports_for_its_agents_and_slots_for_a_small_job(home):
    assert len(set(free_ports(7))) == 7
    options = {"--dashboard-agent-grpc-port", "--runtime-env-agent-port", "--metrics-export-port"}
    head = private_head(2).command(home.ray_dir)
    node = join_command(private_node("127.0.0.3", 2), "127.0.0.2:5001", home.ray_dir)
    for command in (head, node):
        assert options <= {word.partition("=")[0] for word in command}
        assert {"--node-manager-port=0", "--min-worker-port=0", "--max-worker-port=0"} < {*command}
    assert "--num-cpus=8" in head
    assert "--num-cpus=64" in private_head(64).command(home.ray_dir)


def test_the_head_listens_on_loopback_with_a_token_of_its_own(home):
    inherited = {"RAY_ADDRESS": "elsewhere:1", "RAY_AUTH_TOKEN": "old", "HOME": "/home/me"}
    head = private_head(2)
    environment = head.environment(inherited, home.token_path)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(home.token_path)
    assert environment["HOME"] == "/home/me"
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN", "GLOO_SOCKET_IFNAME"} & set(environment)
    assert "--dashboard-host=127.0.0.1" in head.command(home.ray_dir)
    assert head.ray_address == f"http://127.0.0.1:{head.dashboard_port}"


def test_code_of_jobs_sees_none_of_the_services_secrets(home):
    secrets = {
        "SHARDLOOM_SECRET_KEY": "s",
        "SHARDLOOM_DATABASE_URL": "postgresql://user:password@db/x",
        "SHARDLOOM_API_KEY": "shl_x",
        "SHARDLOOM_RAY_AUTH_TOKEN": "t",
        "SHARDLOOM_SOMETHING_NEW": "unknown",
        "PGPASSWORD": "p",
    }
    wanted = {"SHARDLOOM_STORAGE_RETRY_S": "9", "AWS_ACCESS_KEY_ID": "a", "PATH": "/bin"}
    for each in (private_node("127.0.0.3", 2), private_head(2)):
        environment = each.environment(secrets | wanted, home.token_path)
        assert not set(secrets) & set(environment)
        assert wanted.items() <= environment.items()


def test_what_the_trainer_reads_on_its_machine_reaches_it():
    # The attempt's own variables come with its submission.
    source = "".join(path.read_text() for path in (REPO / "trainer").rglob("*.py"))
    named = set(re.findall(r'"(SHARDLOOM_[A-Z_]+)"', source))
    assert named >= TRAINER_SETTINGS
    submission = (REPO / "service" / "reconciler" / "submission.py").read_text()
    assert [name for name in named - TRAINER_SETTINGS if f'"{name}"' not in submission] == []


def test_the_ray_folder_is_short_and_made_afresh_for_this_user_only(tmp_path):
    socket_name = "session_2026-11-21_04-10-42_675862_1234567/sockets/plasma_store"
    assert len(str(StackHome(tmp_path / ("long" * 40)).ray_dir / socket_name)) < 107
    folder = tmp_path / "ray"
    folder.mkdir()
    (folder / "old-session").touch()
    make_temp_dir(folder)
    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_port_in_use_is_named_with_the_option_that_changes_it():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(StackError, match=f"port {port} is in use.*--port {port + 1}"):
            check_port_free(port)
    check_port_free(port)


def test_a_port_that_is_held_on_the_heads_own_address_is_waited_for(monkeypatch):
    asked = []
    monkeypatch.setattr(stack_module, "_READY_POLL_S", 0.0)
    monkeypatch.setattr(
        stack_module, "port_fault", lambda *where: asked.append(where) or (len(asked) < 3 or None)
    )
    check_port_free(8700, "10.0.0.1", patience_s=60.0)
    assert asked == [("10.0.0.1", 8700)] * 3


def test_a_failed_start_of_the_service_leaves_the_ray_that_the_same_stack_started(home):
    """As in `up --head`, which starts a service that died again."""
    home.root.mkdir()
    stack = LocalStack(home, environment={"PATH": os.environ["PATH"]}, service_command=["false"])
    stack._check_can_start = lambda *_, **__: None  # this is about processes alone
    ray = stack.spawn("ray", ["sleep", "60"], {"PATH": os.environ["PATH"]})
    stored = keep_stack(home, service=DEAD_PROCESS, ray=ray, url="http://127.0.0.1:9")
    try:
        with pytest.raises(StackError, match="service did not start"):
            stack.up(report=lambda line: None)
        assert is_alive(ray)
        assert home.read_state() == stored
    finally:
        terminate_tree(ray, grace_s=0.0)


def test_a_part_is_waited_for_until_it_is_ready_or_late(monkeypatch):
    told = []
    monkeypatch.setattr(stack_module, "_READY_POLL_S", 0.0)
    answers = iter([False, False, True])
    part = Component("ray", THIS_PROCESS, "http://127.0.0.1:9/", lambda: next(answers))
    wait_until_ready([part], told.append, pytest.fail)
    assert told[0].startswith("ray ready after")
    monkeypatch.setattr(stack_module, "START_TIMEOUT_S", -1.0)
    late = replace(part, is_ready=lambda: stack_module.answers(part.url))
    with pytest.raises(StackError, match=r"ray runs but is not ready at .*: end of log"):
        wait_until_ready([late], pytest.fail, lambda name: f"{name}: end of log")


def test_the_own_stack_is_ended_and_one_that_others_started_since_left_alone(home):
    mine = keep_stack(home, service=DEAD_PROCESS)
    theirs = keep_stack(
        home, service=replace(DEAD_PROCESS, start_ticks=DEAD_PROCESS.start_ticks - 1)
    )
    assert LocalStack(home, environment={}).down(pytest.fail, only=mine) is False
    assert home.read_state() == theirs
    LocalStack(home, environment={}).down(pytest.fail, only=theirs)
    assert home.read_state() is None


def test_the_url_of_a_listening_address_can_be_connected_to():
    for host, url in (
        ("127.0.0.1", "http://127.0.0.1:8700"),
        ("0.0.0.0", "http://127.0.0.1:8700"),
        ("::", "http://[::1]:8700"),
        ("ray-head", "http://ray-head:8700"),
    ):
        assert local_url(host, 8700) == url
        assert Settings(host=host, port=8700).service_url == url


def test_wrong_ports_and_versions_are_refused_before_anything_starts(home, monkeypatch):
    def refused(match: str, **environment: str) -> None:
        stack = LocalStack(home, environment, service_command=["/nonexistent"])
        with pytest.raises(StackError, match=match):
            stack.up(report=pytest.fail)
        assert home.read_state() is None

    for port in ("abc", "0", "70000"):
        refused("SHARDLOOM_PORT", SHARDLOOM_PORT=port)
    wrong = ["torchrec 1.6.0 is installed, 1.8 is needed: run `make setup`"]
    monkeypatch.setattr("service.local.stack.check_versions", lambda: wrong)
    refused(r"torchrec 1\.6\.0 is installed, .*make setup")


# ---- `shardloom up --head`


def test_options_of_a_head_are_not_ignored_without_one(home, monkeypatch):
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    for option, value in (("--host", "10.0.0.1"), ("--cpus", "2"), ("--gpus", "1")):
        done = shardloom("up", option, value)
        assert done.exit_code == 2
        assert f"{option} is for a head: add --head" in " ".join(done.output.split())
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
        return shardloom("up", "--head", "--host", "10.0.0.7", *arguments)

    return act


def test_the_first_key_is_said_even_where_the_start_fails(as_head):
    first, second = as_head(), as_head()
    assert (first.exit_code, second.exit_code) == (3, 3)
    (key,) = re.findall(r"shl_\w+", first.output)
    assert key in credentials_path().read_text()
    assert "shl_" not in second.output


def test_the_first_key_is_not_kept_where_jobs_could_read_it(as_head):
    assert "shl_" in as_head("--no-keep-key").output
    assert not credentials_path().exists()


def test_a_database_that_is_away_is_told_without_a_traceback(as_head, monkeypatch):
    monkeypatch.setenv("SHARDLOOM_DATABASE_URL", "postgresql://u:secret@127.0.0.1:9/x")
    done = as_head()
    assert (done.exit_code, isinstance(done.exception, SystemExit)) == (3, True)
    assert "SHARDLOOM_DATABASE_URL" in done.output
    assert "secret" not in done.output


def test_a_head_with_other_ports_or_address_is_not_taken_for_the_one_that_runs(home, as_head):
    keep_stack(
        home,
        url="http://10.0.0.7:8700",
        service=THIS_PROCESS,
        machine=socket.gethostname(),
        head_address="10.0.0.7",
        gcs_address="10.0.0.7:6379",
        ray_address="http://10.0.0.7:8265",
    )
    assert "Shardloom is already up" in as_head("--detach").output
    done = as_head("--ray-port", "6380", "--detach")
    assert done.exit_code == 3
    assert "a head with Ray at 10.0.0.7:6379" in " ".join(done.output.split())


FIRST = StackState(url="first", boot_id="b", started_at=1.0, head_address="10.0.0.7")


def broken_stack(*starts: StackState | StackError) -> Mock:
    """A head's stack whose service dies once; `starts` are what its further starts come to."""
    stack = Mock(spec=LocalStack)
    stack.wait_until_broken.side_effect = ["service has ended", KeyboardInterrupt]
    stack.was_ended.return_value = False
    stack.up.side_effect = starts
    return stack


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(stack_commands, "RESTART_PAUSE_S", 0.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def test_a_head_tries_to_start_its_service_until_it_can(quick, capsys):
    away, again = StackError("the database is away"), FIRST.model_copy(update={"url": "again"})
    stack = broken_stack(away, away, again)
    stack_commands._stay(stack, FIRST)
    assert stack.down.call_args.kwargs == {"only": again}
    assert capsys.readouterr().err.count("the database is away") == 2


def test_a_head_without_ray_ends_for_its_supervisor_to_start_it(quick):
    stack = broken_stack(StackError("the database is away"))
    stack.has_lost_service_only.side_effect = [True, False]
    with pytest.raises(StackError, match="database is away"):
        stack_commands._stay(stack, FIRST)
