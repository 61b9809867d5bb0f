"""Machines of a cluster: who may join, how its Ray is started, and how one leaves."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service import compatibility, network
from service.cli.common import service_url
from service.compatibility import (
    HeadFacts,
    changed_storage,
    differences,
    storage_fault,
    storage_id,
    versions_here,
)
from service.local import join as joining
from service.local.join import JoinedMachine, ask_head, check_facts, head_url, read_token
from service.local.processes import ProcessId, identify
from service.local.ray_node import (
    MachineHead,
    MachineNode,
    NodePorts,
    RayNode,
    RayState,
    check_node_ports_free,
    drain_command,
    join_command,
    parse_ports,
)
from service.local.stack import LocalStack
from service.local.state import StackError, StackHome
from service.network import NoAddress, interface_of
from tests.harness.clock import FakeClock
from tests.harness.machines import keep_joined, keep_stack
from tests.harness.service import shardloom

TOKEN = "0123456789abcdef" * 4
THIS_PROCESS = identify(os.getpid())
DEAD_PROCESS = ProcessId(os.getpid(), THIS_PROCESS.start_ticks - 1)


@pytest.fixture
def home(tmp_path: Path) -> StackHome:
    return StackHome(tmp_path / "home")


def facts(runs_dir: Path, **changes: str) -> HeadFacts:
    return HeadFacts(
        gcs_address="10.0.0.1:6379",
        ray_address="http://10.0.0.1:8265",
        runs_dir=str(runs_dir),
        storage_id=changes.pop("storage_id", "") or storage_id(runs_dir),
        versions=versions_here() | changes,
    )


# ---- what must be the same


def test_another_check_out_is_another_version(monkeypatch, tmp_path):
    here = versions_here()["Shardloom"]
    (tmp_path / "driver.py").write_text("print('another')")
    monkeypatch.setattr(compatibility, "_CODE", tmp_path)
    compatibility._own_version.cache_clear()
    try:
        assert versions_here()["Shardloom"] != here
    finally:
        compatibility._own_version.cache_clear()


def test_a_storage_keeps_its_id_and_another_one_is_told_with_what_to_do(tmp_path):
    known = storage_id(tmp_path / "runs")
    assert storage_id(tmp_path / "runs") == known != storage_id(tmp_path / "third")
    assert storage_fault(tmp_path / "runs", known) is None
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".storage-id"]
    missing = storage_fault(tmp_path / "nowhere", known)
    assert missing is not None
    assert f"{tmp_path / 'nowhere'} is not there: mount" in missing
    (tmp_path / "empty").mkdir()
    assert "is another folder than the head's" in str(storage_fault(tmp_path / "empty", known))
    storage_id(tmp_path / "second")
    assert "is another folder than the head's" in str(storage_fault(tmp_path / "second", known))


def test_versions_are_told_before_the_storage(tmp_path):
    assert differences({"torch": "2.13.0", "ray": "2.60.0"}, {"torch": "2.13.0"}) == [
        "ray: 2.60.0 on the head, none here"
    ]
    with pytest.raises(StackError, match=r"torch: 1\.2\.3 on the head"):
        check_facts(facts(tmp_path / "runs", storage_id="unknown", torch="1.2.3"))
    with pytest.raises(StackError, match="run storage"):
        check_facts(facts(tmp_path / "runs", storage_id="unknown"))
    check_facts(facts(tmp_path / "runs"))


def test_a_head_refuses_another_run_storage_than_it_had(tmp_path):
    memory, runs = tmp_path / "home" / "storage-id", tmp_path / "runs"
    assert changed_storage(runs, memory) is None
    assert changed_storage(runs, memory) is None
    hidden = tmp_path / "mount-point"  # where NFS failed to mount
    for _ in range(2):
        assert "is not the one that this head had" in str(changed_storage(hidden, memory))
    assert not hidden.exists()
    storage_id(hidden)
    assert str(memory) in str(changed_storage(hidden, memory))


# ---- token and head


def test_a_token_is_read_from_a_private_file_only(tmp_path):
    path = tmp_path / "token"
    for text in ("", "two\nlines", "Bearer x", f"{TOKEN}\n"):
        path.write_text(text)
        path.chmod(0o600)
        if TOKEN not in text:
            with pytest.raises(StackError, match="holds no token"):
                read_token(path)
    assert read_token(path) == TOKEN
    path.chmod(0o640)
    with pytest.raises(StackError, match="chmod 600"):
        read_token(path)
    with pytest.raises(StackError, match="copy the file `ray-token`"):
        read_token(tmp_path / "nothing")
    home = StackHome(tmp_path / "home")
    home.keep_cluster_token(TOKEN)
    assert read_token(home.cluster_token_path) == TOKEN
    assert not home.token_path.exists(), "the token of a stack of its own is another one"


def test_a_head_is_named_by_address_port_or_url():
    for address, url in (
        ("10.0.0.1", "http://10.0.0.1:8700"),
        ("10.0.0.1:9000", "http://10.0.0.1:9000"),
        ("gpu-1", "http://gpu-1:8700"),
        ("https://gpu-1:8700/", "https://gpu-1:8700"),
    ):
        assert head_url(address) == url


def test_a_head_in_trouble_is_not_taken_for_no_head(monkeypatch):
    for status, document, said in (
        (503, {"detail": "run storage cannot be read"}, r"HTTP 503\): run storage cannot be read"),
        (500, {}, r"HTTP 500\): its logs/service.log"),
        (429, {"detail": "too many"}, r"cannot say now .*too many"),
        (404, {"detail": "none"}, "is not a head that machines can join"),
        (200, {"what": "else"}, "is not a head that machines can join"),
        (401, {}, "knows another token"),
    ):
        request = httpx.Request("GET", "http://head")
        answer = httpx.Response(status, json=document, request=request)
        monkeypatch.setattr(httpx.Client, "get", lambda *_, answer=answer, **__: answer)
        with pytest.raises(StackError, match=said):
            ask_head("http://head:8700", TOKEN)


# ---- the head's answer


def test_only_machines_with_the_token_and_administrators_learn_of_the_head(open_guarded, tmp_path):
    house = open_guarded(ray_auth_token=TOKEN, gcs_address="10.0.0.1:6379")
    path = "/v1/cluster/head"

    def asked(token: str, where: str = path) -> int:
        return house.http.get(where, headers={"Authorization": f"Bearer {token}"}).status_code

    found = house.http.get(path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert found.status_code == 200
    head = HeadFacts.model_validate_json(found.content)
    assert head.gcs_address == "10.0.0.1:6379"
    check_facts(head)
    assert asked(house.keys["root"]) == 200
    assert asked(house.keys["admin"]) == 403
    assert asked("f" * 64) == 401
    assert house.http.get(path).status_code == 401
    # The token is good for nothing else.
    others = ("/v1/jobs", "/v1/keys", "/v1/cluster", "/metrics", "/v1/whoami")
    assert {asked(TOKEN, other) for other in others} == {403}
    house = open_guarded(tmp_path / "no-head", ray_auth_token=TOKEN)
    found = house.http.get(path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert (found.status_code, found.json()["code"]) == (404, "not_a_head")
    assert "shardloom up --head" in found.json()["detail"]


# ---- state of this machine


def test_a_machine_that_has_joined_or_has_a_stack_of_its_own_cannot_join(home):
    keep_joined(home, THIS_PROCESS)
    with pytest.raises(StackError, match=r"has joined http://10\.0\.0\.1:8700 already.*leave"):
        JoinedMachine(home).join("http://x", TOKEN, NODE, pytest.fail)
    keep_joined(home, DEAD_PROCESS)
    keep_stack(home, service=THIS_PROCESS, machine=socket.gethostname())
    with pytest.raises(StackError, match="`shardloom down` ends it"):
        JoinedMachine(home).join("http://x", TOKEN, NODE, pytest.fail)


def test_leaving_forgets_a_node_that_is_gone_and_ends_nobody_else(home, monkeypatch):
    for node, changes in ((DEAD_PROCESS, {}), (THIS_PROCESS, {"boot_id": "another boot"})):
        keep_joined(home, node, **changes)
        assert JoinedMachine(home).leave(0, pytest.fail) is False
        assert home.read_joined() is None
    # Machines that share a home do not share what they run.
    keep_joined(home, THIS_PROCESS)
    monkeypatch.setattr(socket, "gethostname", lambda: "the-other")
    assert home.read_joined() is None
    assert JoinedMachine(home).leave(0, pytest.fail) is False


def test_the_stack_of_another_machine_is_left_alone(home):
    state = keep_stack(home, boot_id="another boot", service=DEAD_PROCESS, machine="gpu-1")
    stack = LocalStack(home, environment={})
    for act in (lambda: stack.up(report=pytest.fail), lambda: stack.down(pytest.fail)):
        with pytest.raises(StackError, match="runs on gpu-1"):
            act()
    assert home.read_state() == state


# ---- addresses


def test_an_address_must_be_one_of_this_machine_that_others_reach(monkeypatch):
    assert network.own_addresses()["127.0.0.1"] == "lo"
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(network, "own_addresses", lambda: {"127.0.0.1": "lo", "10.0.0.7": "eth1"})
    assert interface_of("10.0.0.7") == "eth1"
    with pytest.raises(NoAddress, match=r"not an address of this machine; it has 10\.0\.0\.7"):
        interface_of("10.0.0.8")
    for address in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(NoAddress, match="cannot be reached from other machines"):
            interface_of(address)
    for address in ("gpu-1", "::1"):
        with pytest.raises(NoAddress, match="not an IPv4 address"):
            interface_of(address)


# ---- commands


def test_up_as_a_head_refuses_the_ray_of_others_and_an_address_that_nobody_reaches(
    home, monkeypatch
):
    def told(*arguments: str, code: int = 3) -> str:
        done = shardloom(*arguments)
        assert done.exit_code == code
        return " ".join(done.output.split())

    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    with monkeypatch.context() as others:
        others.setenv("SHARDLOOM_RAY_ADDRESS", "http://ray:8265")
        assert "unset SHARDLOOM_RAY_ADDRESS" in told("up", "--head")
    assert not home.root.exists()
    said = told("up", "--head", "--host", "127.0.0.1")
    assert "cannot be reached from other machines" in said and "--host" in said
    assert told("leave", code=0) == "this machine is in no cluster"


def test_commands_on_a_machine_that_has_joined_ask_its_head(home, monkeypatch):
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    assert service_url(None) == "http://127.0.0.1:8700"
    keep_joined(home, THIS_PROCESS)
    assert service_url(None) == "http://10.0.0.1:8700"
    assert service_url("http://other:1") == "http://other:1"
    stale = keep_stack(home, url="http://127.0.0.1:9", boot_id="before")
    assert service_url(None) == "http://10.0.0.1:8700"
    keep_joined(home, DEAD_PROCESS)
    assert service_url(None) == stale.url


# ---- Ray on machines

NODE = MachineNode("10.0.0.7", "eth1", num_cpus=12)


@given(st.integers(1024, 65530), st.integers(1, 70_000), st.integers(1, 70_000))
def test_ports_that_are_taken_never_overlap_nor_leave_the_range(first, low, high):
    try:
        ports = parse_ports(first, f"{low}-{high}")
    except ValueError:
        return
    workers = range(ports.first_worker, ports.last_worker + 1)
    assert workers
    assert not set(ports.fixed) & set(workers)
    assert max(*ports.fixed, *workers) < 2**16
    assert min(workers) >= 1024


def test_the_usual_ports_are_taken_and_a_range_that_is_none_refused():
    assert parse_ports(8710, "10002-19999") == NodePorts()
    for text in ("", "10002", "9-8", "20000-10000", "10002-99999", "a-b"):
        with pytest.raises(ValueError, match="range"):
            parse_ports(8710, text)


def test_a_node_is_started_with_its_address_its_ports_and_all_its_gpus():
    command = join_command(NODE, "10.0.0.1:6379", Path("/tmp/x"))
    assert "--address=10.0.0.1:6379" in command
    assert "--node-ip-address=10.0.0.7" in command
    assert {f"--min-worker-port={10002}", f"--max-worker-port={19999}"} <= set(command)
    assert "--node-manager-port=8710" in command
    assert not [word for word in command if word.startswith("--num-gpus")]
    head = MachineHead(NODE)
    drained = drain_command(head.gcs_address, "abc", 9)
    words = [*command, *head.command(Path("/tmp/x")), *drained]
    assert not [word for word in words if "token" in word]


def test_collectives_use_the_interface_that_leads_to_the_others_unless_told_otherwise(tmp_path):
    environment = NODE.environment({}, tmp_path / "token")
    assert environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert environment["NCCL_SOCKET_IFNAME"] == "=eth1"
    chosen = NODE.environment({"NCCL_SOCKET_IFNAME": "ib0"}, tmp_path / "token")
    assert chosen["NCCL_SOCKET_IFNAME"] == "ib0"


def test_the_head_is_reached_at_its_address_with_a_token_only(tmp_path):
    head = MachineHead(NODE)
    assert (head.gcs_address, head.ray_address) == ("10.0.0.7:6379", "http://10.0.0.7:8265")
    environment = head.environment({}, tmp_path / "token")
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert "--dashboard-host=10.0.0.7" in head.command(tmp_path)


def test_ports_of_a_head_that_have_two_uses_are_refused():
    parse_ports(8710, "10002-19999", 6379, 8265)
    for others, message in (
        ((12000, 8265), "12000 lies in the workers' range"),
        ((6379, 8712), "8712 has two uses"),
        ((8265, 8265), "8265 has two uses"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_ports(8710, "10002-19999", *others)


def test_the_service_of_a_head_takes_no_port_of_its_ray(home, monkeypatch):
    monkeypatch.setattr("service.local.stack.check_versions", list)
    monkeypatch.setattr("service.local.stack.check_port_free", lambda *where: None)
    stack = LocalStack(home, environment={}, head=MachineHead(NODE))
    for port in (8711, 6379, 10002):
        with pytest.raises(StackError, match=f"port {port} is both the service's and one of Ray's"):
            stack.up(port=port, report=pytest.fail)


def test_a_port_in_use_and_a_head_that_is_away_are_told_with_what_to_change():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(StackError, match=rf"port {port} is in use.*--node-port"):
            check_node_ports_free("127.0.0.1", [port])
    check_node_ports_free("127.0.0.1", [port])
    with pytest.raises(StackError, match=r"no head answers at .*up --head"):
        ask_head(f"http://127.0.0.1:{port}", TOKEN)


# ---- `shardloom leave`


def head_with(nodes, num_actors=(0,)) -> Mock:
    """A head of Ray that gives these answers, one after another."""
    head = Mock(spec=RayState)
    head.live_nodes.side_effect, head.num_actors_on.side_effect = nodes, num_actors
    return head


@pytest.fixture
def leave(home, monkeypatch):
    """Leaves with a head; what was said, and which node was drained."""
    home.keep_cluster_token(TOKEN)
    monkeypatch.setattr(joining, "_POLL_S", 0.0)
    ended: list[ProcessId] = []
    monkeypatch.setattr(joining, "end_process", lambda name, process, _: ended.append(process))
    drained: list[str] = []

    def drain(_machine, _state, node_id, *_) -> bool:
        drained.append(node_id)
        return True

    monkeypatch.setattr(JoinedMachine, "_ask_to_drain", drain)

    def act(head: Mock, grace_s: int = 120, **state: str) -> tuple[str, list[str]]:
        keep_joined(home, THIS_PROCESS, **state)
        monkeypatch.setattr(joining, "RayState", lambda *_: head)
        said: list[str] = []
        assert JoinedMachine(home).leave(grace_s, said.append)
        assert ended == [THIS_PROCESS]
        assert home.read_joined() is None
        return said[0], drained

    return act


def node(node_id: str) -> RayNode:
    return RayNode(node_id, "10.0.0.7", False, 1, 0, 1)


def test_a_head_that_does_not_answer_for_a_while_is_asked_again(leave):
    said, drained = leave(head_with([None, None, [node("n")]], [None, 2, None, 0]))
    assert said.startswith("no job is on this machine any more")
    assert drained == ["n"]


def test_a_head_that_never_says_is_not_taken_for_one_without_jobs(leave, monkeypatch):
    monkeypatch.setattr(joining, "time", FakeClock())
    monkeypatch.setattr(joining, "_POLL_S", 1.0)
    said, _ = leave(head_with([[node("n")]], itertools.repeat(None)), grace_s=30)
    assert said == "the head has not said within 30 s whether jobs are still here"


def test_a_machine_whose_token_is_gone_leaves_all_the_same(home, leave):
    home.cluster_token_path.unlink()
    said, drained = leave(head_with([[node("n")]]))
    assert "the node ends without notice to its jobs" in said
    assert drained == []


def test_a_node_that_the_head_has_given_up_is_not_drained(leave):
    said, drained = leave(head_with([[node("other")]]), node_id="given-up")
    assert "no longer counts this node" in said
    assert drained == []


def test_of_two_nodes_with_this_address_the_own_one_is_drained(leave):
    assert leave(head_with([[node("dead"), node("new")]]), node_id="new")[1] == ["new"]
