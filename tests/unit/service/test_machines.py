"""Machines of a cluster: who may join, with what command, and what is said where it cannot be."""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from service import join as joining
from service import machines, network
from service.cli import build_app
from service.commands.context import service_url
from service.join import JoinedMachine, ask_head, check_facts, head_url, read_token
from service.local import LocalStack
from service.local_process import ProcessId, identify
from service.local_state import JoinedState, StackError, StackHome, StackState, boot_id
from service.machines import (
    HeadFacts,
    changed_storage,
    differences,
    storage_fault,
    storage_id,
    versions_here,
)
from service.network import NoAddress, interface_of
from tests.unit.service.guarded import guarded

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


def joined(home: StackHome, node: ProcessId, **changes: str) -> JoinedState:
    state = JoinedState(
        address="10.0.0.7",
        head_url="http://10.0.0.1:8700",
        ray_address="http://10.0.0.1:8265",
        gcs_address="10.0.0.1:6379",
        boot_id=boot_id(),
        started_at=1.0,
        node=node,
    ).model_copy(update=changes)
    home.write_joined(state)
    return state


# ---- what must be the same


def test_versions_that_differ_are_told_with_both_sides():
    assert differences({"torch": "2.13.0", "ray": "2.60.0"}, {"torch": "2.13.0"}) == [
        "ray: 2.60.0 on the head, none here"
    ]
    assert differences(versions_here(), versions_here()) == []


def test_another_check_out_is_another_version(monkeypatch, tmp_path):
    here = versions_here()["Shardloom"]
    (tmp_path / "driver.py").write_text("print('another')")
    monkeypatch.setattr(machines, "_CODE", tmp_path)
    machines._own_version.cache_clear()
    try:
        assert versions_here()["Shardloom"] != here
    finally:
        machines._own_version.cache_clear()


def test_a_storage_keeps_its_id_and_another_one_has_another(tmp_path):
    known = storage_id(tmp_path / "runs")
    assert storage_id(tmp_path / "runs") == known
    assert storage_id(tmp_path / "other") != known
    assert storage_fault(tmp_path / "runs", known) is None
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".storage-id"]


def test_a_storage_that_is_not_the_heads_is_told_with_what_to_do(tmp_path):
    known = storage_id(tmp_path / "runs")
    missing = storage_fault(tmp_path / "nowhere", known)
    assert missing is not None
    assert f"{tmp_path / 'nowhere'} is not there: mount" in missing
    (tmp_path / "empty").mkdir()
    assert "is another folder than the head's" in str(storage_fault(tmp_path / "empty", known))
    storage_id(tmp_path / "second")
    assert "is another folder than the head's" in str(storage_fault(tmp_path / "second", known))


def test_versions_are_told_before_the_storage(tmp_path):
    faults = check_facts(facts(tmp_path / "runs", storage_id="unknown", torch="1.2.3"))
    assert [fault.split()[0] for fault in faults] == ["head", "the"]
    assert "torch: 1.2.3 on the head" in faults[0]
    assert check_facts(facts(tmp_path / "runs")) == []


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
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    assert read_token(path) == TOKEN
    path.chmod(0o640)
    with pytest.raises(StackError, match="chmod 600"):
        read_token(path)
    with pytest.raises(StackError, match="copy the file `ray-token`"):
        read_token(tmp_path / "nothing")


@pytest.mark.parametrize("text", ["", "two\nlines", "Bearer x"])
def test_a_file_that_holds_no_token_is_refused(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(StackError, match="holds no token"):
        read_token(path)


@pytest.mark.parametrize(
    ("given_address", "url"),
    [
        ("10.0.0.1", "http://10.0.0.1:8700"),
        ("10.0.0.1:9000", "http://10.0.0.1:9000"),
        ("gpu-1", "http://gpu-1:8700"),
        ("https://gpu-1:8700/", "https://gpu-1:8700"),
    ],
)
def test_a_head_is_named_by_address_port_or_url(given_address, url):
    assert head_url(given_address) == url


def test_a_head_that_is_away_is_told():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(StackError, match=r"no head answers at .*up --head"):
        ask_head(f"http://127.0.0.1:{port}", TOKEN)


@pytest.mark.parametrize(
    ("status", "document", "said"),
    [
        (503, {"detail": "run storage cannot be read"}, r"HTTP 503\): run storage cannot be read"),
        (500, {}, r"HTTP 500\): its logs/service.log"),
        (429, {"detail": "too many"}, r"cannot say now .*too many"),
        (404, {"detail": "none"}, "is not a head that machines can join"),
        (200, {"what": "else"}, "is not a head that machines can join"),
        (401, {}, "knows another token"),
    ],
)
def test_a_head_in_trouble_is_not_taken_for_no_head(monkeypatch, status, document, said):
    def answer(*_, **__):
        return httpx.Response(status, json=document, request=httpx.Request("GET", "http://head"))

    monkeypatch.setattr(httpx.Client, "get", answer)
    with pytest.raises(StackError, match=said):
        ask_head("http://head:8700", TOKEN)


# ---- the head's answer


def test_only_machines_with_the_token_and_administrators_learn_of_the_head(tmp_path):
    house = guarded(tmp_path, ray_auth_token=TOKEN, gcs_address="10.0.0.1:6379")
    path = "/v1/cluster/head"

    def asked(token: str, where: str = path) -> int:
        return house.http.get(where, headers={"Authorization": f"Bearer {token}"}).status_code

    found = house.http.get(path, headers={"Authorization": f"Bearer {TOKEN}"})
    assert found.status_code == 200
    head = HeadFacts.model_validate_json(found.content)
    assert head.gcs_address == "10.0.0.1:6379"
    assert check_facts(head) == []
    assert asked(house.keys["root"]) == 200
    assert asked(house.keys["admin"]) == 403
    assert asked("f" * 64) == 401
    assert house.http.get(path).status_code == 401
    # The token is good for nothing else.
    others = ("/v1/jobs", "/v1/keys", "/v1/cluster", "/metrics", "/v1/whoami")
    assert {asked(TOKEN, other) for other in others} == {403}
    house.http.close()
    house.store.close()


def test_a_service_that_is_no_head_says_so(tmp_path):
    house = guarded(tmp_path, ray_auth_token=TOKEN)
    found = house.http.get("/v1/cluster/head", headers={"Authorization": f"Bearer {TOKEN}"})
    assert (found.status_code, found.json()["code"]) == (404, "not_a_head")
    assert "shardloom up --head" in found.json()["detail"]
    house.http.close()
    house.store.close()


# ---- state of this machine


def test_a_machine_that_has_joined_cannot_join_again(home):
    joined(home, THIS_PROCESS)
    with pytest.raises(StackError, match=r"has joined http://10\.0\.0\.1:8700 already.*leave"):
        JoinedMachine(home).join(joining.JoinRequest("http://x", TOKEN), pytest.fail)


def test_a_machine_with_a_stack_of_its_own_cannot_join(home):
    home.write_state(
        StackState(
            url="http://127.0.0.1:1",
            boot_id=boot_id(),
            started_at=1.0,
            service=THIS_PROCESS,
            machine=socket.gethostname(),
        )
    )
    with pytest.raises(StackError, match="`shardloom down` ends it"):
        JoinedMachine(home).join(joining.JoinRequest("http://x", TOKEN), pytest.fail)


def test_leaving_forgets_a_node_that_is_gone_and_ends_nobody_of_an_earlier_boot(home):
    joined(home, DEAD_PROCESS)
    assert JoinedMachine(home).leave(0, pytest.fail) is False
    assert home.read_joined() is None
    joined(home, THIS_PROCESS, boot_id="another boot")
    assert JoinedMachine(home).leave(0, pytest.fail) is False
    assert home.read_joined() is None


def test_machines_that_share_a_home_do_not_share_what_they_run(home, monkeypatch):
    joined(home, THIS_PROCESS)
    monkeypatch.setattr(socket, "gethostname", lambda: "the-other")
    assert home.read_joined() is None
    assert JoinedMachine(home).leave(0, pytest.fail) is False


def test_the_stack_of_another_machine_is_left_alone(home):
    state = StackState(
        url="http://10.0.0.1:8700",
        boot_id="another boot",
        started_at=1.0,
        service=DEAD_PROCESS,
        machine="gpu-1",
    )
    home.write_state(state)
    stack = LocalStack(home, environment={})
    for act in (lambda: stack.up(report=pytest.fail), lambda: stack.down(pytest.fail)):
        with pytest.raises(StackError, match="runs on gpu-1"):
            act()
    assert home.read_state() == state


def test_the_token_of_a_cluster_is_kept_private(home):
    home.keep_cluster_token(TOKEN)
    assert read_token(home.cluster_token_path) == TOKEN
    assert stat.S_IMODE(home.cluster_token_path.stat().st_mode) == 0o600
    assert not home.token_path.exists(), "the token of a stack of its own is another one"


# ---- addresses


def test_an_address_must_be_one_of_this_machine_that_others_reach(monkeypatch):
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


def test_the_kernel_tells_the_loopback_address_and_its_interface():
    assert network.own_addresses()["127.0.0.1"] == "lo"
    assert network.address_towards("127.0.0.1") == "127.0.0.1"
    assert network._IFREQ.size == struct.calcsize("16s24s")


# ---- commands


def test_up_as_a_head_refuses_an_address_that_others_cannot_reach(home, monkeypatch):
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    done = CliRunner().invoke(build_app(), ["up", "--head", "--host", "127.0.0.1"])
    assert done.exit_code == 3
    assert "cannot be reached from other machines" in " ".join(done.output.split())
    assert "--host" in done.output


def test_leave_on_a_machine_that_has_not_joined_says_so(home, monkeypatch):
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    done = CliRunner().invoke(build_app(), ["leave"])
    assert (done.exit_code, done.output) == (0, "this machine is in no cluster\n")


def test_up_as_a_head_refuses_to_use_the_ray_of_others(home, monkeypatch):
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    monkeypatch.setenv("SHARDLOOM_RAY_ADDRESS", "http://ray:8265")
    done = CliRunner().invoke(build_app(), ["up", "--head"])
    assert done.exit_code == 3
    assert "unset SHARDLOOM_RAY_ADDRESS" in " ".join(done.output.split())
    assert not home.root.exists()


def test_commands_on_a_machine_that_has_joined_ask_its_head(home, monkeypatch):
    monkeypatch.setenv("SHARDLOOM_HOME", str(home.root))
    assert service_url(None) == "http://127.0.0.1:8700"
    joined(home, THIS_PROCESS)
    assert service_url(None) == "http://10.0.0.1:8700"
    assert service_url("http://other:1") == "http://other:1"
    stale = StackState(url="http://127.0.0.1:9", boot_id="before", started_at=1.0)
    home.write_state(stale)
    assert service_url(None) == "http://10.0.0.1:8700"
    joined(home, DEAD_PROCESS)
    assert service_url(None) == stale.url
