"""A Ray cluster whose hosts share no folder with the service: files of the run go by HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.machines import RAY_PORT, Machine, machines, serve_beside, slow_until
from tests.harness.object_store import run_object_store
from tests.harness.wait import scaled, wait_for
from trainer.fault_injection import FAULTS, VARIABLE
from trainer.protocol.run_dir import RunDir

CHANGES = (
    "name=without",
    "data.batch_size=32",
    "parallelism.workers=2",
    "parallelism.shard_group_size=1",
    "training.epochs=6",
    "training.report_every_steps=5",
    "training.validate_every_steps=100000",
    "checkpoint.every_steps=100000",
    "export={on_success: true}",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Site:
    """A service on one machine, Ray on two others, and object storage that all reach."""

    service: Machine
    hosts: tuple[Machine, Machine]
    runs: Path
    attached: dict[str, str]
    user: dict[str, str]

    def shardloom(self, *arguments: str) -> str:
        return self.service.shardloom(*arguments, **self.user)

    def show(self, job: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.shardloom("show", job, "--json"))
        return found

    def run_on_head(self, *command: str) -> int:
        """Exit code of a command on the driver's host."""
        return self.service.hosts.start(self.hosts[0].index, command, self.runs.parent).wait()

    def events(self, job: str, kind: str) -> list[dict[str, Any]]:
        found = json.loads(self.shardloom("events", job, "--json"))
        return [event for event in found if event["kind"] == kind]


@pytest.fixture(scope="module")
def site(small_movielens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    runs = folder / "runs"
    runs.mkdir()
    (folder / "release").touch()
    settings = {
        "SHARDLOOM_RUNS_DIR": str(runs),
        "SHARDLOOM_RUNS_SHARED": "false",
        "SHARDLOOM_STORAGE_ROOTS": json.dumps([str(small_movielens)]),
        VARIABLE: FAULTS.dump_json([slow_until(folder / "release", 0.3)]).decode(),
    }
    with machines(folder, settings) as (service, *hosts):
        network = service.hosts.network(service.index)
        with run_object_store(service.address, network) as store:
            settings |= store.environment | {"SHARDLOOM_CHECKPOINT_ROOT": store.url("checkpoints")}
            for host in hosts:
                # The same path, another disk.
                mounted = ["mount", "-t", "tmpfs", "tmpfs", str(runs)]
                assert service.hosts.start(host.index, mounted, folder).wait() == 0
            head, other = hosts
            attached, user = serve_beside(service, head)
            other.start_ray(f"--address={head.address}:{RAY_PORT}")
            yield Site(service, (head, other), runs, attached, user)


def test_a_job_is_paused_resumed_followed_and_exported(site: Site, small_movielens: Path) -> None:
    changes = (f"data.path={small_movielens}", *CHANGES)
    options = [word for change in changes for word in ("--set", change)]
    spec = ("--code", "examples/code", "examples/movielens-module.yaml")
    job = site.shardloom("submit", *spec, *options).strip()
    wait_for(lambda: site.show(job)["progress"]["step"] >= 20, "step 20", limit_s=240)
    site.shardloom("pause", job)
    wait_for(lambda: site.show(job)["status"] == "PAUSED", "a pause", limit_s=120)
    site.shardloom("resume", job)
    assert "SUCCEEDED" in site.shardloom("follow", job)

    files = RunDir(site.runs / job)
    for index in (0, 1):
        logs = files.attempt(f"{job}-a{index}").logs_dir
        said = {log.stem: log.read_text() for log in logs.glob("*.log")}
        assert set(said) == {"driver", "rank-0", "rank-1"}
        assert "attempt ended" in said["driver"]
        assert all(text.count("is process") == 1 for text in said.values()), "nothing twice"
    assert not list(files.root.glob("attempts/*/token")), "hosts find no token there"
    assert [each["status"] for each in json.loads(site.shardloom("exports", job, "--json"))] == [
        "succeeded"
    ]


def test_a_lost_group_and_a_service_that_is_away_cost_a_job_nothing(
    site: Site, small_movielens: Path
) -> None:
    release = site.runs.parent / "release"
    release.unlink()
    changes = (
        f"data.path={small_movielens}",
        "name=groups",
        "data.batch_size=16",
        "parallelism.workers={min: 1, max: 2}",
        "parallelism.shard_group_size=1",
        "parallelism.sync.every_steps=4",
        f"recovery.heartbeat_timeout_s={scaled(3.0)}",
        "training.epochs=2",
        "training.validate_every_steps=100000",
    )
    options = [word for change in changes for word in ("--set", change)]
    job = site.shardloom("submit", "examples/movielens-survive.yaml", *options).strip()
    wait_for(lambda: site.events(job, "group_joined")[1:], "two groups", limit_s=240)
    wait_for(lambda: site.show(job)["progress"]["step"] >= 8, "step 8", limit_s=120)
    site.hosts[1].end_ray()
    wait_for(lambda: site.events(job, "group_lost"), "a loss", limit_s=120)

    # The service is away as the job ends, and finds nothing of that on a disk of its own.
    site.service.shardloom("down")
    release.touch()
    log = str(RunDir(site.runs / job).attempt(f"{job}-a0").log_path("driver"))
    wait_for(lambda: not site.run_on_head("grep", "-q", "attempt ended", log), "the end", 120)
    site.service.shardloom("up", "--detach", **site.attached)
    assert "SUCCEEDED" in site.shardloom("follow", job)
    logs = {log.stem for log in RunDir(site.runs / job).attempt(f"{job}-a0").logs_dir.iterdir()}
    assert {"coordinator", "driver", "group-0-rank-0", "group-1-rank-0"} <= logs
    wait_for(lambda: site.run_on_head("ls", log), "its copy is removed there")
