"""Three machines, by the commands of docs/guides/machines.md: one loses its link, the job goes on.

A cut link loses packets and ends no connection: only time-outs can find it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.emulated import namespaces_in_use
from tests.harness.machines import RAY_PORT, Machine, machines, serve_beside, slow_until
from tests.harness.wait import scaled, wait_for
from trainer.data.manifest import load_manifest
from trainer.fault_injection import FAULTS, VARIABLE

SPEC = "examples/movielens-survive.yaml"
JOB = "movielens-survive"
EPOCHS = 4
CHANGES = (
    "data.batch_size=16",
    "parallelism.workers={min: 1, max: 3}",
    "parallelism.shard_group_size=1",
    "parallelism.sync.every_steps=4",
    f"recovery.heartbeat_timeout_s={scaled(3.0)}",
    f"training.epochs={EPOCHS}",
    "training.validate_every_steps=100000",
    "checkpoint.every_steps=100000",
)
MAX_PAUSE_S = scaled(10.0)
# Each look is a process of its own, and the job wants the cores.
LOOK_EVERY_S = 1.5

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Network:
    """A head and two more machines, and what a user elsewhere needs."""

    head: Machine
    others: tuple[Machine, Machine]
    user: dict[str, str]
    folder: Path

    def let_the_job_end(self) -> None:
        """From here on it trains at full speed."""
        (self.folder / "release").touch()

    def events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(
            self.others[0].shardloom("events", JOB, "--json", **self.user)
        )
        return found

    def wait_for_events(self, kind: str, number: int = 1) -> list[dict[str, Any]]:
        """The data of events of a kind, once there are so many; fails when the job ends before."""

        def look() -> list[dict[str, Any]] | None:
            time.sleep(LOOK_EVERY_S)
            events = self.events()
            found = [event["data"] for event in events if event["kind"] == kind]
            if len(found) >= number:
                return found
            ended = [event["message"] for event in events if event["kind"] == "job_ended"]
            assert not ended, f"{ended} without {number} x {kind}"
            return None

        return wait_for(look, f"{number} x {kind}", limit_s=240)

    def hosts(self) -> list[str]:
        found = json.loads(self.others[0].shardloom("cluster", "--json", **self.user))
        return [each["address"] for each in found["hosts"]]


@pytest.fixture(scope="module")
def network(small_movielens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """The head is up and nobody has joined; afterwards nothing of it is left."""
    folder = tmp_path_factory.mktemp("network")
    settings = {
        "SHARDLOOM_RUNS_DIR": str(folder / "runs"),
        "SHARDLOOM_STORAGE_ROOTS": json.dumps([str(small_movielens)]),
        VARIABLE: FAULTS.dump_json([slow_until(folder / "release", 0.5)]).decode(),
    }
    with machines(folder, settings) as (head, first, second):
        _, user = serve_beside(head, head)
        yield Network(head, (first, second), user, folder)
        namespaces = {_network_namespace(each) for each in (head, first, second)}
    assert not namespaces & namespaces_in_use()


def _network_namespace(machine: Machine) -> str:
    return str(machine.hosts.network(machine.index).readlink())


def _join(network: Network, machine: Machine) -> None:
    machine.start_ray(f"--address={network.head.address}:{RAY_PORT}")
    wait_for(lambda: machine.address in network.hosts(), f"{machine.address} counts", limit_s=120)


def test_a_job_survives_a_cut_link_and_the_machine_comes_back(
    network: Network, small_movielens: Path
) -> None:
    head, (staying, lost) = network.head, network.others
    for machine in network.others:
        _join(network, machine)
    assert set(network.hosts()) == {head.address, staying.address, lost.address}

    changes = (f"data.path={small_movielens}", *CHANGES)
    options = [word for change in changes for word in ("--set", change)]
    job_id = staying.shardloom("submit", SPEC, *options, **network.user).strip()
    joined = network.wait_for_events("group_joined", 3)
    assert {each["hosts"][0] for each in joined} == set(network.hosts())

    lost.cut()
    (loss,) = network.wait_for_events("group_lost")
    assert loss["hosts"] == [lost.address]
    (recovery,) = network.wait_for_events("recovered")
    assert recovery["pause_s"] < MAX_PAUSE_S
    lost.mend()
    lost.end_ray()
    _join(network, lost)
    newcomer = network.wait_for_events("group_joined", 4)[-1]
    assert (newcomer["how"], newcomer["hosts"]) == ("peer_copy", [lost.address])
    drain = ("-m", "trainer.driver.drain_node", f"{head.address}:{RAY_PORT}", staying.address)
    staying.python(*drain)
    left = network.wait_for_events("group_left")[0]
    assert (left["cause"], left["hosts"]) == ("drain", [staying.address])
    network.let_the_job_end()

    assert "SUCCEEDED" in staying.shardloom("follow", job_id, **network.user)
    shown = json.loads(staying.shardloom("show", job_id, "--json", **network.user))
    num_rows = load_manifest(small_movielens).splits["train"].num_rows
    assert shown["progress"]["rows"] == num_rows * EPOCHS
    kinds = [event["kind"] for event in network.events()]
    assert kinds.count("attempt_started") == 1, "nothing was restarted"
    print(f"the survivors paused for {recovery['pause_s']:.2f} s")
