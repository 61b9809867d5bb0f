"""Ray on machines: its ports, and the commands and environments that it is started with."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.local import LocalStack
from service.local_ray import RayPorts
from service.local_state import StackError, StackHome
from service.machine_ray import (
    MachineHead,
    MachineNode,
    NodePorts,
    check_node_ports_free,
    drain_command,
    join_command,
    parse_ports,
)

NODE = MachineNode("10.0.0.7", "eth1", num_cpus=12)


@pytest.fixture
def home(tmp_path: Path) -> StackHome:
    return StackHome(tmp_path / "home")


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


@pytest.mark.parametrize("text", ["", "10002", "9-8", "20000-10000", "10002-99999", "a-b"])
def test_a_range_that_is_none_is_refused_with_a_sentence(text):
    with pytest.raises(ValueError, match="range"):
        parse_ports(8710, text)


def test_the_usual_ports_are_taken():
    assert parse_ports(8710, "10002-19999") == NodePorts()


def test_a_node_is_started_with_its_address_its_ports_and_all_its_gpus():
    command = join_command("ray", NODE, "10.0.0.1:6379", Path("/tmp/x"))
    assert command[:3] == ["ray", "start", "--address=10.0.0.1:6379"]
    assert "--node-ip-address=10.0.0.7" in command
    assert {f"--min-worker-port={10002}", f"--max-worker-port={19999}"} <= set(command)
    assert "--node-manager-port=8710" in command
    assert not [word for word in command if word.startswith("--num-gpus")]


def test_the_token_is_in_no_command():
    head = MachineHead(NODE)
    commands = [
        head.command("ray", Path("/tmp/x")),
        join_command("ray", NODE, head.gcs_address, Path("/tmp/x")),
        drain_command("ray", head.gcs_address, "abc", 9),
    ]
    assert not [word for command in commands for word in command if "token" in word]


def test_collectives_use_the_interface_that_leads_to_the_others_unless_told_otherwise(tmp_path):
    environment = NODE.environment({}, tmp_path / "token")
    assert environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert environment["NCCL_SOCKET_IFNAME"] == "=eth1"
    chosen = NODE.environment({"NCCL_SOCKET_IFNAME": "ib0"}, tmp_path / "token")
    assert chosen["NCCL_SOCKET_IFNAME"] == "ib0"


def test_the_head_is_reached_at_its_address_with_a_token_only(tmp_path):
    head = MachineHead(NODE)
    assert (head.gcs_address, head.ray_address) == ("10.0.0.7:6379", "http://10.0.0.7:8265")
    environment = head.environment({}, RayPorts(*range(5001, 5010)), tmp_path / "token")
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert "--dashboard-host=10.0.0.7" in head.command("ray", tmp_path)


def test_ports_of_a_head_that_have_two_uses_are_refused():
    MachineHead(NODE).check_ports()
    assert MachineHead(NODE).client_port == 8716
    for faulty, message in (
        (MachineHead(NODE, ray_port=12000), "12000 of the head lies in the workers' range"),
        (MachineHead(NODE, dashboard_port=8712), "8712 has two uses"),
        (MachineHead(NODE, dashboard_port=8716), "8716 has two uses"),
        (MachineHead(NODE, ray_port=8265), "8265 has two uses"),
        (MachineHead(replace(NODE, ports=NodePorts(65530))), "beyond 65535"),
    ):
        with pytest.raises(ValueError, match=message):
            faulty.check_ports()


@pytest.mark.parametrize("port", [8711, 6379, 10002])
def test_the_service_of_a_head_takes_no_port_of_its_ray(home, monkeypatch, port):
    monkeypatch.setattr("service.local.check_versions", list)
    monkeypatch.setattr("service.local.check_port_free", lambda *where: None)
    stack = LocalStack(home, environment={}, head=MachineHead(NODE))
    with pytest.raises(StackError, match=f"port {port} is both the service's and one of Ray's"):
        stack.up(port=port, report=pytest.fail)


def test_a_node_port_in_use_is_named_with_the_options_that_change_it():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(StackError, match=rf"port {port} is in use.*--node-port"):
            check_node_ports_free("127.0.0.1", [port])
    check_node_ports_free("127.0.0.1", [port])
