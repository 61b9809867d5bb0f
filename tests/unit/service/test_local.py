"""Decisions of the local stack that need no process: families, state, ports, commands."""

from __future__ import annotations

import os
import re
import socket
import stat
from dataclasses import replace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import local_ready, local_state
from service.addresses import local_url
from service.local import LocalStack, StackError
from service.local_process import (
    ProcessId,
    ProcessInfo,
    end_family,
    family,
    identify,
    is_alive,
    parse_stat,
)
from service.local_ray import (
    TRAINER_SETTINGS,
    RayPorts,
    choose_ports,
    head_command,
    head_environment,
    make_temp_dir,
    node_command,
    node_environment,
)
from service.local_ready import Part, check_port_free, wait_for_port, wait_until_ready
from service.local_state import StackHome, StackState, boot_id
from service.settings import Settings
from tests.conftest import REPO
from trainer.versions import Mismatch

PORTS = RayPorts(*range(5001, 5010))
THIS_PROCESS = identify(os.getpid())
DEAD_PROCESS = ProcessId(os.getpid(), THIS_PROCESS.start_ticks - 1)


def process(pid: int, parent: int = 1, session: int = 1, start: int = 100) -> ProcessInfo:
    return ProcessInfo(ProcessId(pid, start), parent, session, is_zombie=False)


def pids(members: set[ProcessId]) -> set[int]:
    return {member.pid for member in members}


def state(home: StackHome, service: ProcessId, **changes) -> StackState:
    stored = StackState(
        url="http://127.0.0.1:1", boot_id=boot_id(), started_at=1.0, service=service
    ).model_copy(update=changes)
    home.write_state(stored)
    return stored


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
    assert pids(family(ProcessId(10, 100), table)) == {10, 11, 12, 13}


def test_orphans_of_a_dead_root_are_found_by_its_session():
    table = [process(11, parent=1, session=10), process(20, session=20)]
    assert pids(family(ProcessId(10, 100), table)) == {11}


def test_a_reused_pid_has_no_family_of_ours():
    table = [process(10, session=10, start=500), process(11, parent=10, session=10, start=501)]
    assert family(ProcessId(10, 100), table) == set()


@given(st.lists(st.tuples(st.integers(2, 30), st.integers(1, 30), st.integers(1, 30)), max_size=25))
def test_a_family_is_closed_and_never_reaches_outside(rows):
    table = [process(*row) for row in {row[0]: row for row in rows}.values()]
    root = ProcessId(2, 100)
    members = pids(family(root, table)) | {2}
    for row in table:
        belongs = row.parent_pid in members or row.session in members or row.id == root
        assert (row.id.pid in members) == belongs


def test_a_process_is_not_taken_for_an_earlier_one_with_its_pid():
    assert is_alive(THIS_PROCESS)
    assert not is_alive(DEAD_PROCESS)


def test_a_stack_runs_only_while_all_its_processes_do(home):
    assert state(home, THIS_PROCESS).is_running
    assert not state(home, DEAD_PROCESS).is_running
    assert not state(home, THIS_PROCESS, ray=DEAD_PROCESS).is_running


def test_a_stack_of_before_the_last_boot_does_not_run(home):
    stored = state(home, THIS_PROCESS, boot_id="another boot")
    assert not stored.is_running
    assert home.read_state() == stored


def test_a_torn_state_file_counts_as_none(home):
    state(home, THIS_PROCESS)
    home.state_path.write_text('{"url": "http')
    assert home.read_state() is None


def test_the_token_is_private_and_stays(home):
    token = home.token()
    assert len(token) == 64
    assert home.token() == token
    assert stat.S_IMODE(home.token_path.stat().st_mode) == 0o600


def test_the_ray_folder_is_short_enough_for_its_sockets(tmp_path):
    home = StackHome(tmp_path / ("long" * 40))
    socket_name = "session_2026-11-21_04-10-42_675862_1234567/sockets/plasma_store"
    assert len(str(home.ray_dir / socket_name)) < 107


def test_the_home_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path))
    assert StackHome.from_environment().root == tmp_path


def test_chosen_ports_differ():
    ports = vars(choose_ports()).values()
    assert len(set(ports)) == len(ports) == 9


@pytest.mark.parametrize(("num_cores", "slots"), [(2, 8), (64, 64)])
def test_the_head_has_slots_for_a_small_job_on_any_machine(home, num_cores, slots):
    command = head_command("ray", PORTS, home.ray_dir, num_cores)
    assert f"--num-cpus={slots}" in command


def test_a_node_need_not_wait_until_its_agents_have_chosen_ports(home):
    options = {"--dashboard-agent-grpc-port", "--runtime-env-agent-port", "--metrics-export-port"}
    head = head_command("ray", PORTS, home.ray_dir, 2)
    for command in (head, node_command("ray", "127.0.0.2:5001", "127.0.0.3", 2)):
        assert options <= {word.partition("=")[0] for word in command}


def test_the_head_listens_on_loopback_with_a_token_of_its_own(home):
    inherited = {"RAY_ADDRESS": "elsewhere:1", "RAY_AUTH_TOKEN": "old", "HOME": "/home/me"}
    environment = head_environment(inherited, PORTS, home.token_path)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(home.token_path)
    assert environment["HOME"] == "/home/me"
    assert not {"RAY_ADDRESS", "RAY_AUTH_TOKEN"} & set(environment)
    assert "--dashboard-host=127.0.0.1" in head_command("ray", PORTS, home.ray_dir, 2)


def test_code_of_jobs_sees_none_of_the_services_secrets(home):
    secrets = {
        "SHARDLOOM_SECRET_KEY": "s",
        "SHARDLOOM_DATABASE_URL": "postgresql://user:password@db/x",
        "SHARDLOOM_API_KEY": "shl_x",
        "SHARDLOOM_RAY_AUTH_TOKEN": "t",
        "SHARDLOOM_SOMETHING_NEW": "unknown",
        "PGPASSWORD": "p",
    }
    wanted = {"SHARDLOOM_DATA_CACHE": "/cache", "AWS_ACCESS_KEY_ID": "a", "PATH": "/bin"}
    for environment in (
        node_environment(secrets | wanted, home.token_path),
        head_environment(secrets | wanted, PORTS, home.token_path),
    ):
        assert not set(secrets) & set(environment)
        assert wanted.items() <= environment.items()


def test_what_the_trainer_reads_on_its_machine_reaches_it():
    # The attempt's own variables come with its submission.
    source = "".join(path.read_text() for path in (REPO / "trainer").rglob("*.py"))
    named = set(re.findall(r'"(SHARDLOOM_[A-Z_]+)"', source))
    assert named >= TRAINER_SETTINGS
    submission = (REPO / "service" / "submission.py").read_text()
    assert [name for name in named - TRAINER_SETTINGS if f'"{name}"' not in submission] == []


def test_the_ray_folder_is_made_afresh_for_this_user_only(tmp_path):
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
    monkeypatch.setattr(local_ready, "_POLL_S", 0.0)
    monkeypatch.setattr(
        local_ready, "port_fault", lambda *where: asked.append(where) or (len(asked) < 3 or None)
    )
    wait_for_port(8700, "10.0.0.1")
    assert asked == [("10.0.0.1", 8700)] * 3


def test_a_failed_start_of_the_service_leaves_the_ray_that_the_same_stack_started(home):
    """As in `up --head`, which starts a service that died again."""
    home.root.mkdir()
    stack = LocalStack(home, environment={"PATH": os.environ["PATH"]}, service_command=["false"])
    stack._check_can_start = lambda *_, **__: None  # this is about processes alone
    ray = stack.spawn("ray", ["sleep", "60"], {"PATH": os.environ["PATH"]})
    stored = state(home, DEAD_PROCESS, ray=ray, url="http://127.0.0.1:9")
    try:
        with pytest.raises(StackError, match="service did not start"):
            stack.up(report=lambda line: None)
        assert is_alive(ray)
        assert home.read_state() == stored
    finally:
        end_family(ray, grace_s=0.0)


def test_ray_is_ready_once_it_counts_the_heads_node():
    answers = iter([False, False, True])
    part = Part("ray", THIS_PROCESS, "http://ray/api/jobs/", "t", lambda: next(answers))
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200))) as http:
        assert "does not count the node" in part.fault(http)
        assert "does not count the node" in part.fault(http)
        assert part.fault(http) is None
    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(503))) as http:
        assert part.fault(http) == "does not answer at http://ray/api/jobs/"


def test_a_part_that_is_late_is_told_with_what_is_missing(monkeypatch):
    monkeypatch.setattr(local_ready, "START_TIMEOUT_S", -1.0)
    part = Part("ray", THIS_PROCESS, "http://127.0.0.1:9/")
    with pytest.raises(StackError, match=r"ray runs but does not answer at .*: end of log"):
        wait_until_ready([part], pytest.fail, lambda name: f"{name}: end of log")


def test_a_stack_that_runs_is_not_started_again(home):
    stored = state(home, THIS_PROCESS)
    stack = LocalStack(home, environment={}, service_command=["/nonexistent"])
    assert stack.up(report=pytest.fail) == stored


def test_a_stack_of_before_the_last_boot_is_forgotten_and_nobody_is_ended(home):
    state(home, THIS_PROCESS, boot_id="another boot")
    assert LocalStack(home, environment={}).down(pytest.fail) is False
    assert home.read_state() is None


def test_a_stack_that_others_started_since_is_left_alone(home):
    mine = state(home, DEAD_PROCESS)
    theirs = state(home, replace(DEAD_PROCESS, start_ticks=DEAD_PROCESS.start_ticks - 1))
    assert LocalStack(home, environment={}).down(pytest.fail, only=mine) is False
    assert home.read_state() == theirs


def test_the_own_stack_is_ended_with_its_leftovers(home):
    mine = state(home, DEAD_PROCESS)
    LocalStack(home, environment={}).down(pytest.fail, only=mine)
    assert home.read_state() is None


def test_a_home_that_can_be_no_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    stack = LocalStack(StackHome(tmp_path / "file" / "home"), environment={})
    with pytest.raises(StackError, match=r"Not a directory.*SHARDLOOM_HOME"):
        stack.up(report=pytest.fail)
    with pytest.raises(StackError, match="SHARDLOOM_HOME"):
        stack.down(pytest.fail)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8700"),
        ("0.0.0.0", "http://127.0.0.1:8700"),
        ("::", "http://[::1]:8700"),
        ("::1", "http://[::1]:8700"),
        ("ray-head", "http://ray-head:8700"),
    ],
)
def test_the_url_of_a_listening_address_can_be_connected_to(host, url):
    assert local_url(host, 8700) == url
    assert Settings(host=host, port=8700).service_url == url


def test_mismatched_versions_are_refused_before_anything_starts(home, monkeypatch):
    monkeypatch.setattr(
        "service.local.check_versions", lambda: [Mismatch("torchrec", "1.6.0", "1.8")]
    )
    stack = LocalStack(home, environment={}, service_command=["/nonexistent"])
    with pytest.raises(StackError, match=r"torchrec 1\.6\.0 is installed, .*make setup"):
        stack.up(report=pytest.fail)
    assert home.read_state() is None


@pytest.mark.parametrize("port", ["abc", "0", "70000"])
def test_a_port_that_is_none_is_refused(home, port):
    stack = LocalStack(home, {"SHARDLOOM_PORT": port}, service_command=["/nonexistent"])
    with pytest.raises(StackError, match="SHARDLOOM_PORT"):
        stack.up(report=pytest.fail)


def test_a_draft_of_a_private_file_is_never_left_behind(tmp_path):
    local_state.write_private(tmp_path / "secret", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
