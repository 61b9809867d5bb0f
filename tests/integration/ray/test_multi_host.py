"""Three machines, by the commands of docs/guides/machines.md: one loses its link, the job goes on.

A cut link loses packets and ends no connection: only time-outs can find it.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from service.local.state import StackHome
from tests.harness.emulated import missing_requirement, namespaces_in_use
from tests.harness.machines import Machine, machines
from tests.harness.wait import scaled, wait_for
from trainer.data.manifest import load_manifest
from trainer.fault_injection import FAULTS, VARIABLE, Fault

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

    @property
    def token_copy(self) -> Path:
        """The head's token, as an administrator has carried it to the others."""
        return self.folder / "ray-token"

    def let_the_job_end(self) -> None:
        """From here on it trains at full speed."""
        (self.folder / "release").touch()

    def events(self) -> list[dict[str, Any]]:
        """The job's timeline, asked for by the user from another machine."""
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
        """What `shardloom host ls` lists on the head."""
        listed: list[str] = json.loads(self.head.shardloom("host", "ls", "--json"))["hosts"]
        return listed


@pytest.fixture(scope="module")
def network(small_movielens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """The head is up and nobody has joined; afterwards nothing of it is left."""
    if reason := missing_requirement():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("network")
    settings = {
        "SHARDLOOM_RUNS_DIR": str(folder / "runs"),
        "SHARDLOOM_STORAGE_ROOTS": json.dumps([str(small_movielens)]),
        VARIABLE: FAULTS.dump_json([_slow_until(folder / "release")]).decode(),
    }
    with machines(3, folder, settings) as (head, *others):
        yield _network(head, others, folder)
        namespaces = {_network_namespace(each) for each in (head, *others)}
    assert not namespaces & namespaces_in_use()


def _slow_until(release: Path) -> Fault:
    """The others wait for group 0 at every sync, so that the job lasts as long as a test needs."""
    return Fault(
        kind="slow",
        group=0,
        rank=0,
        step=0,
        phase="lookup",
        arg=0.5,
        times=10**6,
        until=release,
    )


def _network(head: Machine, others: Sequence[Machine], folder: Path) -> Network:
    said = head.shardloom("up", "--head", "--host", head.address, "--detach", "--cpus", "1")
    (key,) = re.findall(r"shl_\S+", said)
    shutil.copy(head.token_path, folder / "ray-token")
    user = {"SHARDLOOM_URL": f"http://{head.address}:8700", "SHARDLOOM_API_KEY": key}
    return Network(head, (others[0], others[1]), user, folder)


def _network_namespace(machine: Machine) -> str:
    return str(machine.hosts.network(machine.index).readlink())


def _join(network: Network, machine: Machine, *arguments: str) -> str:
    where = network.head.address
    return machine.shardloom("join", where, "--detach", "--cpus", "1", *arguments)


def _refused(machine: Machine, *arguments: str, **settings: str) -> str:
    """What a machine that may not join is told, in one line."""
    done = machine.try_shardloom("join", *arguments, **settings)
    assert done.returncode == 3, done.stdout
    assert machine.processes() == []
    return " ".join(done.stderr.split())


def test_who_may_not_join_is_told_why_and_nothing_is_started(
    network: Network, tmp_path: Path
) -> None:
    head, machine, token = network.head.address, network.others[0], str(network.token_copy)
    network.token_copy.chmod(0o644)
    assert "can be read by others: chmod 600" in _refused(machine, head, "--token-file", token)
    network.token_copy.chmod(0o600)
    assert "copy the file `ray-token`" in _refused(machine, head)
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    assert "knows another token" in _refused(machine, head, "--token-file", str(wrong))
    away = "10.77.0.77"
    assert f"no head answers at http://{away}" in _refused(machine, away, "--token-file", token)
    foreign = _refused(machine, head, "--token-file", token, "--address", "10.77.0.9")
    assert f"not an address of this machine; it has {machine.address}" in foreign
    anonymous = machine.try_shardloom("ps", SHARDLOOM_URL=network.user["SHARDLOOM_URL"])
    assert anonymous.returncode == 2, anonymous.stdout
    assert "key" in anonymous.stderr


def test_other_versions_or_another_storage_are_told_by_name(network: Network) -> None:
    head, machine, token = network.head.address, network.others[0], str(network.token_copy)
    site = network.token_copy.with_name("other-site")
    here = version("torch").partition("+")[0]
    other = f"{here.rpartition('.')[0]}.99"
    (site / f"torch-{other}.dist-info").mkdir(parents=True)
    metadata = site / f"torch-{other}.dist-info" / "METADATA"
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {other}\n")
    unlike = _refused(machine, head, "--token-file", token, PYTHONPATH=str(site))
    assert f"they differ: torch: {here} on the head, {other} here" in unlike

    runs_dir = Path(network.head.settings["SHARDLOOM_RUNS_DIR"])
    machine.mount_another_disk(runs_dir)
    alone = _refused(machine, head, "--token-file", token)
    machine.unmount(runs_dir)
    assert f"the run storage {runs_dir} is another folder than the head's" in alone


def test_a_job_survives_a_cut_link_and_the_machine_comes_back(
    network: Network, small_movielens: Path
) -> None:
    head, (staying, lost) = network.head, network.others
    for machine in network.others:
        assert f"as {machine.address}: 1 CPUs" in _join(
            network, machine, "--token-file", str(network.token_copy)
        )
    assert network.hosts() == [head.address, staying.address, lost.address]
    assert "joined" in lost.try_shardloom("join", head.address).stderr  # twice is refused

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
    lost.shardloom("leave", "--grace-s", "0")
    assert lost.processes() == []
    _join(network, lost)  # it remembers the token
    newcomer = network.wait_for_events("group_joined", 4)[-1]
    assert (newcomer["how"], newcomer["hosts"]) == ("peer_copy", [lost.address])
    assert "no job is on this machine any more" in staying.shardloom("leave")
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


def test_what_is_still_there_ends_by_down_and_nothing_stays_behind(network: Network) -> None:
    """After the job above, when one machine has left."""
    head, (gone, there) = network.head, network.others
    assert network.hosts() == [head.address, there.address]
    assert "no cluster" in gone.shardloom("leave")
    assert "the node at" in there.shardloom("down")
    assert "ray ended" in head.shardloom("down")
    for machine in (head, gone, there):
        assert machine.processes() == []
    assert not StackHome(head.home).state_path.exists()
