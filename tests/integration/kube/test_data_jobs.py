"""`shardloom data prepare --on cluster`: one Job for a command, its log, its end, what keeps it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner, Result

from service.cli import data
from service.cli.main import build_app
from service.errors import BackendUnreachable
from tests.harness.clock import FakeClock
from tests.harness.kube.cluster import KubeCluster
from tests.harness.kube.objects import LOG, Manifest, Target
from tests.harness.kube.server import KubeApiServer
from tests.harness.wait import wait_for
from tests.unit.k8s.rendering import build, one

COMMAND = ("criteo", "s3://ads/raw", "s3://ads/prepared", "--min-count", "5")
# What whoever prepares data must be allowed in the namespace of the chart.
RIGHTS = [
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create", "get", "list"]},
    {"apiGroups": ["batch"], "resources": ["cronjobs"], "verbs": ["get"]},
    {"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]},
]


@dataclass
class Jobs:
    """Jobs of a namespace, and what Kubernetes would do with them; only as the test says."""

    server: KubeApiServer
    namespace: str
    kubeconfig: str
    num_pods: int = field(default=0)

    def prepare(self, *arguments: str) -> Result:
        """Run `shardloom data prepare` with these arguments."""
        variables = {"KUBECONFIG": self.kubeconfig, "SHARDLOOM_KUBERAY_NAMESPACE": self.namespace}
        return CliRunner().invoke(build_app(), ["data", "prepare", *arguments], env=variables)

    def all(self) -> list[Manifest]:
        """Every Job."""
        return self.server.store.under("jobs.batch", self.namespace)

    def add_template(self, template: Manifest) -> None:
        """Make the CronJob of the chart."""
        about = {**template["metadata"], "namespace": self.namespace}
        target = Target(self.server.find("cronjobs.batch"), self.namespace)
        self.server.verbs.create(target, {**template, "metadata": about}, is_strict=True)

    def add_pod(self, job: Manifest, status: Manifest, *lines: str) -> None:
        """Make the next pod of a Job, with its log."""
        self.num_pods += 1
        text = "".join(f"2026-01-01T00:00:00.{n:09d}Z {line}\n" for n, line in enumerate(lines, 1))
        labels = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
        about = {"name": f"pod-{self.num_pods}", "labels": labels, "annotations": {LOG: text}}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "status": status}
        self.server.verbs.create(Target(self.server.find("pods"), self.namespace), body)

    def num_asked(self) -> int:
        """How often somebody looked for pods."""
        return sum("/pods?" in each for each in self.server.requests)

    def end(self, job: Manifest, kind: str, message: str = "") -> None:
        """Let a Job be Complete or Failed."""
        name = job["metadata"]["name"]
        target = Target(self.server.find("jobs.batch"), self.namespace, name, "status")
        condition = {"type": kind, "status": "True", "message": message}
        self.server.verbs.patch(target, {"status": {"conditions": [condition]}})

    @contextmanager
    def doing(self, act: Callable[[Manifest], None]) -> Iterator[None]:
        """Act on the next Job as soon as it is there."""
        known = {job["metadata"]["name"] for job in self.all()}

        def new() -> list[Manifest]:
            return [job for job in self.all() if job["metadata"]["name"] not in known]

        def run() -> None:
            wait_for(new, "a Job")
            act(new()[0])

        thread = threading.Thread(target=run)
        thread.start()
        yield
        thread.join()


@pytest.fixture
def jobs(
    kube: KubeCluster, server: KubeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Jobs:
    monkeypatch.setattr(data, "_POLL_S", 0.02)
    token = kube.token_for("data", RIGHTS)
    found = Jobs(server, kube.namespace, kube.kubeconfig(tmp_path / "config", token))
    found.add_template(one(build("gpu"), "CronJob", "shardloom-data"))
    return found


def test_a_command_becomes_a_job_of_the_charts_making_and_its_log_is_followed(jobs: Jobs) -> None:
    def run(job: Manifest) -> None:
        message = 'container "data" in pod "pod-1" is waiting to start'
        jobs.server.faults.fail(409, verb="get", path="/log", message=message)
        jobs.add_pod(job, {"phase": "Failed", "reason": "Evicted"})
        jobs.add_pod(job, {"phase": "Failed"}, "reading: 10 %")
        jobs.add_pod(job, {"phase": "Succeeded"}, "reading: 50 %", "reading: 99 %")
        jobs.end(job, "Complete")

    with jobs.doing(run):
        done = jobs.prepare("--on", "cluster", *COMMAND)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == ["reading: 10 %", "reading: 50 %", "reading: 99 %"]
    (job,) = jobs.all()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["shardloom", "data"]
    assert container["args"] == ["prepare", *COMMAND]
    assert {each["name"] for each in container["volumeMounts"]} == {"tmp", "data"}
    (code, _) = job["spec"]["podFailurePolicy"]["rules"]
    assert code["onExitCodes"]["values"] == [2], "bad data is not tried again"
    again = jobs.prepare("--on", "cluster", "--job", job["metadata"]["name"])
    assert (again.exit_code, again.stdout) == (0, done.stdout), "shown by its name"
    assert len(jobs.all()) == 1
    missing = jobs.prepare("--on", "cluster", "--job", "none")
    assert (missing.exit_code, "none" in missing.output) == (2, True)


def test_a_job_that_runs_is_followed_again_and_one_that_ended_is_not(jobs: Jobs) -> None:
    for is_first in (True, False):
        with jobs.doing(lambda job: jobs.end(job, "Complete")):
            assert jobs.prepare("--on", "cluster", *COMMAND).exit_code == 0
        assert len(jobs.all()) == (1 if is_first else 2)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "_follow", interrupted)
        left = jobs.prepare("--on", "cluster", *COMMAND)
    assert left.exit_code == 4 and "goes on" in left.stderr
    (job,) = [each for each in jobs.all() if not data._ended(each)]
    jobs.add_pod(job, {"phase": "Succeeded"}, "done")
    num_asked = jobs.num_asked()

    def end_when_followed() -> None:
        wait_for(lambda: jobs.num_asked() > num_asked, "the CLI to look")
        jobs.end(job, "Complete")

    thread = threading.Thread(target=end_when_followed)
    thread.start()
    again = jobs.prepare("--on=cluster", *COMMAND)
    thread.join()
    assert again.exit_code == 0 and again.stdout.startswith("done")
    assert len(jobs.all()) == 3


def test_a_log_that_breaks_off_after_long_is_followed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(data, "time", clock)
    pod = {"metadata": {"name": "pod-1", "creationTimestamp": ""}, "status": {"phase": "Running"}}

    def log(name: str, since: str) -> Iterator[tuple[str, str]]:
        for number in range(5 if not since else 0):
            clock.sleep(data._PATIENCE_S / 2)
            yield f"{number}", f"reading: {number} %"
        if not since:
            clock.sleep(data._PATIENCE_S / 2)
            raise BackendUnreachable("no answer: Read timed out.")

    running, done = {}, {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    jobs_told = iter([running, done])
    api = Mock(get=lambda *_: next(jobs_told), list=lambda *_, **__: {"items": [pod]}, log=log)
    assert data._follow(api, "prepare") == ""
    assert capsys.readouterr().out.splitlines() == [f"reading: {n} %" for n in range(5)]


def test_why_a_job_waits_or_failed_is_told(jobs: Jobs) -> None:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient memory.",
    }

    def run(job: Manifest) -> None:
        jobs.add_pod(job, {"phase": "Pending", "conditions": [condition]})
        num_asked = jobs.num_asked()
        wait_for(lambda: jobs.num_asked() > num_asked, "the CLI to look")
        ended = {"terminated": {"exitCode": 2, "reason": "Error", "message": "x\nno such bucket\n"}}
        states = [{"name": "data", "state": ended}]
        jobs.add_pod(job, {"phase": "Failed", "containerStatuses": states}, "no such bucket")
        jobs.end(job, "Failed", "Pod failed")

    with jobs.doing(run):
        done = jobs.prepare("--on", "cluster", *COMMAND)
    assert done.exit_code == 1
    assert "waiting: pod pod-1" in done.stderr and "Insufficient memory" in done.stderr
    assert "failed: no such bucket" in done.stderr


def test_what_cannot_be_started_is_refused_with_what_to_do(
    jobs: Jobs, kube: KubeCluster, tmp_path: Path
) -> None:
    here = tmp_path / "raw"
    here.mkdir()
    refused = jobs.prepare("--on", "cluster", "criteo", str(here), "s3://ads/prepared")
    assert refused.exit_code == 2
    assert "is on this machine" in re.sub(r"[\s│]+", " ", refused.stderr)
    refused = jobs.prepare("--on", "cluster", "--namespace", "elsewhere", *COMMAND)
    assert refused.exit_code == 3 and "no right to list jobs in namespace elsewhere" in (
        refused.stderr.replace("\n", " ")
    )
    jobs.server.verbs.delete(
        Target(jobs.server.find("cronjobs.batch"), jobs.namespace, "shardloom-data"),
        is_foreground=False,
    )
    refused = jobs.prepare("--on", "cluster", *COMMAND)
    assert refused.exit_code == 3 and "is the chart installed there?" in refused.stderr
    assert jobs.all() == []
