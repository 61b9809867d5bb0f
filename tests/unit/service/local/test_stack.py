"""The local stack: process trees, state, ports and commands."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import stat
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.cli import common
from service.client.client import ShardloomClient
from service.local import stack as stack_module
from service.local.processes import (
    ProcessId,
    ProcessInfo,
    identify,
    is_alive,
    parse_stat,
    process_table,
    process_tree,
    terminate_tree,
)
from service.local.ray_node import (
    TRAINER_SETTINGS,
    RayHead,
    RayNode,
    RayState,
    free_ports,
    make_temp_dir,
)
from service.local.stack import Component, LocalStack, check_port_free, wait_until_ready
from service.local.state import StackError, StackHome, StackState
from tests.conftest import REPO
from tests.harness.certificates import make_certificate
from tests.harness.machines import keep_stack
from tests.harness.service import FakeService, shardloom

THIS_PROCESS = identify(os.getpid())
DEAD_PROCESS = ProcessId(os.getpid(), THIS_PROCESS.start_ticks - 1)
RAY_URLS = {"ray_address": "http://127.0.0.1:9", "gcs_address": "127.0.0.2:9"}


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


def test_processes_that_proc_lists_and_tells_nothing_of_are_none(monkeypatch):
    read_text = Path.read_text

    def hidepid_1(path: Path) -> str:
        if path == Path("/proc/1/stat"):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", hidepid_1)
    found = {process.id.pid for process in process_table()}
    assert os.getpid() in found and 1 not in found


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
    ray = RayHead(2)
    head = ray.command(home.ray_dir)
    node = RayNode("127.0.0.3", 2).join_command("127.0.0.2:5001", home.ray_dir)
    for command in (head, node):
        assert options <= {word.partition("=")[0] for word in command}
        assert {"--node-manager-port=0", "--min-worker-port=0", "--max-worker-port=0"} < {*command}
        assert not [word for word in command if "token" in word]
    assert "--num-cpus=8" in head
    assert "--num-cpus=64" in RayHead(64).command(home.ray_dir)
    assert "--dashboard-host=127.0.0.1" in head
    (option,) = [word.partition("=")[2] for word in head if "--dashboard-port" in word]
    assert ray.ray_address == "http://127.0.0.1:" + option


def test_a_node_has_a_token_of_its_own_and_none_of_the_services_secrets(home):
    secrets = {
        "RAY_ADDRESS": "elsewhere:1",
        "RAY_AUTH_TOKEN": "old",
        "SHARDLOOM_SECRET_KEY": "s",
        "SHARDLOOM_DATABASE_URL": "postgresql://user:password@db/x",
        "SHARDLOOM_API_KEY": "shl_x",
        "SHARDLOOM_RAY_AUTH_TOKEN": "t",
        "SHARDLOOM_SOMETHING_NEW": "unknown",
        "PGPASSWORD": "p",
    }
    wanted = {"SHARDLOOM_STORAGE_RETRY_S": "9", "AWS_ACCESS_KEY_ID": "a", "PATH": "/bin"}
    # The head's is that of any node, and more.
    environment = RayHead(2).environment(secrets | wanted, home.token_path)
    assert not {*secrets, "GLOO_SOCKET_IFNAME"} & set(environment)
    wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(home.token_path)}
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


def test_a_port_that_a_killed_service_still_holds_is_waited_for(monkeypatch):
    asked = []
    monkeypatch.setattr(stack_module, "_READY_POLL_S", 0.0)
    monkeypatch.setattr(
        stack_module, "port_fault", lambda *where: asked.append(where) or (len(asked) < 3 or None)
    )
    check_port_free("127.0.0.1", 8700, patience_s=60.0)
    assert asked == [("127.0.0.1", 8700)] * 3


def test_the_stack_of_another_machine_is_left_alone(home):
    state = keep_stack(home, boot_id="another boot", service=DEAD_PROCESS, machine="gpu-1")
    stack = LocalStack(home, environment={})
    for act in (lambda: stack.up(report=pytest.fail), lambda: stack.down(pytest.fail)):
        with pytest.raises(StackError, match="runs on gpu-1"):
            act()
    assert home.read_state() == state


def test_a_failed_start_of_the_service_leaves_the_ray_that_the_same_stack_started(home):
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


def test_drivers_check_the_service_by_what_clients_do_or_by_a_certificate_that_signs_itself(
    home, tmp_path, monkeypatch
):
    certificate, _ = make_certificate(tmp_path, "127.0.0.1")
    (tmp_path / "none.pem").touch()
    started = Mock(return_value=THIS_PROCESS)
    monkeypatch.setattr(LocalStack, "spawn", started)
    state = keep_stack(home, ray=THIS_PROCESS, **RAY_URLS)
    for named, expected in (
        ({}, None),
        ({"SSL_CERTFILE": str(certificate)}, str(certificate)),
        ({"SSL_CERTFILE": str(tmp_path / "none.pem")}, None),
        ({"SSL_CERTFILE": str(certificate), "CA_FILE": "/ca"}, "/ca"),
        ({"SSL_CERTFILE": str(certificate), "CA_FILE": "ca"}, str(Path.cwd() / "ca")),
        ({"CA_FILE": "/ca"}, None),
        (
            {"SSL_CERTFILE": str(certificate), "CA_FILE": "/ca", "DRIVER_CA_FILE": "/other"},
            "/other",
        ),
    ):
        environment = {f"SHARDLOOM_{name}": value for name, value in named.items()}
        LocalStack(home, environment)._launch_service(state, 8700)
        assert started.call_args.args[2].get("SHARDLOOM_DRIVER_CA_FILE") == expected


def test_relative_paths_of_settings_are_those_of_the_folder_where_the_stack_is_started(
    home, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    started = Mock(return_value=THIS_PROCESS)
    monkeypatch.setattr(LocalStack, "spawn", started)
    given = {"RUNS_DIR": "runs", "CHECKPOINT_ROOT": "s3://bucket/x", "SSL_KEYFILE": "/key.pem"}
    given |= {"DATABASE_URL": "sqlite:///x.db", "STORAGE_ROOTS": '["data", "s3://bucket"]'}
    environment = {f"SHARDLOOM_{name}": value for name, value in given.items()}
    LocalStack(home, environment)._launch_service(keep_stack(home), 8700)
    sent = started.call_args.args[2]
    here = {"RUNS_DIR": f"{tmp_path}/runs", "DATABASE_URL": f"sqlite:///{tmp_path}/x.db"}
    here["STORAGE_ROOTS"] = f'["{tmp_path}/data", "s3://bucket"]'
    assert {name: sent[f"SHARDLOOM_{name}"] for name in given} == given | here
    with_fault = {"SHARDLOOM_RUNS_DIR": "runs", "SHARDLOOM_AUTH": "any"}
    LocalStack(home, with_fault)._launch_service(keep_stack(home), 8700)
    assert started.call_args.args[2]["SHARDLOOM_AUTH"] == "any", "the service says what is wrong"


@pytest.fixture
def starting(home, monkeypatch):
    """A home whose service starts at once, beside the Ray that is there."""

    def launch(stack: LocalStack, port: int, before: StackState | None):
        service = stack.spawn("service", ["sleep", "60"], {"PATH": os.environ["PATH"]})
        return keep_stack(home, **{**dict(before or {}), "service": service, **RAY_URLS}), []

    monkeypatch.setattr(LocalStack, "_launch", launch)
    monkeypatch.setattr(LocalStack, "_check_can_start", lambda *_: None)
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield home
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("ending", [StackError("127.0.0.3 did not join"), signal.SIGTERM])
@pytest.mark.parametrize("options", [[], ["--detach"]], ids=["foreground", "detached"])
def test_a_stack_whose_hosts_do_not_all_start_is_ended(monkeypatch, starting, ending, options):
    """Be it that one cannot join, or that somebody ends the command meanwhile."""
    begun = []

    def add_host(stack: LocalStack) -> str:
        begun.append(starting.read_state().service)
        if isinstance(ending, StackError):
            raise ending
        signal.raise_signal(ending)
        return "127.0.0.3"

    monkeypatch.setattr(LocalStack, "_add_host", add_host)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    result = shardloom("up", "--hosts", "2", *options)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "as under nohup"
    assert result.exit_code != 0
    assert starting.read_state() is None
    assert [is_alive(service) for service in begun] == [False]


def test_hosts_that_do_not_start_end_no_ray_that_was_there_before(monkeypatch, starting):
    stack = LocalStack(starting)
    starting.root.mkdir()
    ray = stack.spawn("ray", ["sleep", "60"], {"PATH": os.environ["PATH"]})
    kept = keep_stack(starting, ray=ray, **RAY_URLS)
    monkeypatch.setattr(LocalStack, "_add_host", Mock(side_effect=StackError("did not join")))
    assert shardloom("up", "--hosts", "2").exit_code == 3
    assert starting.read_state() == kept
    monkeypatch.setattr(LocalStack, "_add_host", Mock(side_effect=KeyboardInterrupt))
    for options, left in (("--detach",), kept), ((), None):
        assert shardloom("up", "--hosts", "2", *options).exit_code != 0
        assert starting.read_state() == left, "Ctrl-C stops what is not detached"
    assert not is_alive(ray)


def test_a_stack_that_runs_gets_the_hosts_that_it_lacks(monkeypatch, home):
    hosts = {"127.0.0.3": THIS_PROCESS}
    keep_stack(home, service=THIS_PROCESS, hosts=hosts, **RAY_URLS)
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))

    started = iter([THIS_PROCESS, DEAD_PROCESS])

    def join(stack: LocalStack, state: StackState, ray: RayState, node: RayNode) -> bool:
        hosts = state.hosts | {node.address: next(started)}
        return home.write(state.model_copy(update={"hosts": hosts})) is None

    monkeypatch.setattr(LocalStack, "_try_host", join)
    assert "host 127.0.0.4 joined" in shardloom("up", "--hosts", "3").stdout
    assert "joined" not in shardloom("up", "--hosts", "2").stdout
    assert [*home.read_state().hosts] == ["127.0.0.3", "127.0.0.4"]
    done = shardloom("up", "--hosts", "4")
    assert done.exit_code == 0, "one that ends at once is not replaced again and again"


@pytest.mark.parametrize("address", ["10.0.0.1", "127.0.0.1", "::1", "gpu-1"])
def test_a_host_has_a_loopback_address_to_itself(home, monkeypatch, address):
    keep_stack(home, service=THIS_PROCESS, **RAY_URLS)
    monkeypatch.setattr(LocalStack, "_try_host", pytest.fail)
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    refused = shardloom("host", "add", address)
    assert (refused.exit_code, "as 127.0.0.3 is" in refused.stderr) == (3, True)


def test_a_ray_of_others_has_no_hosts_of_this_machine(home, monkeypatch):
    keep_stack(home, service=THIS_PROCESS, ray_address="http://elsewhere:8265")
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    for command in (["ls"], ["add"], ["kill", "127.0.0.3"]):
        refused = shardloom("host", *command)
        assert (refused.exit_code, "only a Ray that" in refused.stderr) == (3, True)


def test_of_a_stack_that_has_ended_status_says_how_to_start_it(home, monkeypatch):
    keep_stack(home, service=DEAD_PROCESS)
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    told = shardloom("status")
    assert (told.exit_code, "start one on this machine" in told.stdout) == (3, True)


def test_status_tells_a_service_that_this_home_did_not_start(home, monkeypatch):
    monkeypatch.setattr(common, "open_client", FakeService().client)
    monkeypatch.setattr(ShardloomClient, "why_not_alive", lambda client: None)
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    monkeypatch.delenv("SHARDLOOM_URL", raising=False)
    said = f"no stack of {home.root} (SHARDLOOM_HOME) runs"
    assert said in shardloom("status").stdout
    assert said not in shardloom("status", "--url", "http://127.0.0.1:8700").stdout
    keep_stack(home, service=THIS_PROCESS)
    assert said not in shardloom("status").stdout


def test_wrong_ports_and_versions_are_refused_before_anything_starts(home, monkeypatch):
    def refused(match: str, **environment: str) -> None:
        stack = LocalStack(home, environment, service_command=["/nonexistent"])
        with pytest.raises(StackError, match=match):
            stack.up(report=pytest.fail)
        assert home.read_state() is None

    for port in ("abc", "0", "70000"):
        refused("SHARDLOOM_PORT", SHARDLOOM_PORT=port)
    with socket.create_server(("127.0.0.5", 0)) as other:
        port = other.getsockname()[1]
        said = f"port {port} is in use.*--port {port + 1}"
        refused(said, SHARDLOOM_PORT=str(port), SHARDLOOM_HOST="127.0.0.5")
    refused("no address of this machine", SHARDLOOM_HOST="192.0.2.1")
    wrong = ["torchrec 1.6.0 is installed, 1.8 is needed: run `make setup`"]
    monkeypatch.setattr("service.local.stack.check_versions", lambda: wrong)
    refused(r"torchrec 1\.6\.0 is installed, .*make setup")
