"""Helm itself installs the chart into an API server: hooks in time, upgrade, rollback, what stays.

Nothing runs what is made; the test says how the Job of the hook ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import helm_python
import pytest

from service.jobs.actions import merged
from tests.harness.kube.cluster import KubeCluster
from tests.harness.kube.objects import Manifest, Target
from tests.harness.kube.server import ADMIN, KubeApiServer
from tests.harness.wait import scaled, wait_for
from tests.unit.k8s.rendering import chart, values

_MIGRATE = "shardloom-migrate-0-1-0"


@dataclass
class Release:
    """The release `shardloom` in a namespace; `ran` has the images that hooks ran."""

    server: KubeApiServer
    namespace: str
    helm: helm_python.Config
    ran: list[str] = field(default_factory=list)

    def objects(self, kind: str) -> dict[str, Manifest]:
        """Objects of a kind by name."""
        found = self.server.store.under(kind, self.namespace)
        return {each["metadata"]["name"]: each for each in found}

    def image(self) -> str:
        """Of the service."""
        pod = self.objects("deployments.apps")["shardloom"]["spec"]["template"]["spec"]
        return str(pod["containers"][0]["image"])

    def trainer_image(self) -> str:
        """Of Ray's hosts."""
        (group,) = self.objects("rayclusters.ray.io")["shardloom-ray"]["spec"]["workerGroupSpecs"]
        return str(group["template"]["spec"]["containers"][0]["image"])

    @contextmanager
    def hook_ends(self, kind: str) -> Iterator[None]:
        """Let the next Job of the hook end as Complete or Failed, before anything else is made."""

        def started() -> list[Manifest]:
            jobs = self.objects("jobs.batch").values()
            return [job for job in jobs if not job.get("status")]

        def end() -> None:
            wait_for(started, "the hook")
            (job,) = started()
            self.ran.append(job["spec"]["template"]["spec"]["containers"][0]["image"])
            condition = {"type": kind, "status": "True", "reason": "Test", "message": "no database"}
            status: Manifest = {"conditions": [condition]}
            status |= {"succeeded": 1} if kind == "Complete" else {"failed": 7}
            name = job["metadata"]["name"]
            target = Target(self.server.find("jobs.batch"), self.namespace, name, "status")
            self.server.verbs.patch(target, {"status": status})

        thread = threading.Thread(target=end)
        thread.start()
        yield
        thread.join()

    def options(self) -> dict[str, Any]:
        """Of an operation."""
        return {"namespace": self.namespace, "timeout": int(scaled(20))}


@pytest.fixture
def release(kube: KubeCluster, server: KubeApiServer, tmp_path: Path) -> Iterator[Release]:
    # Go's client keeps its token to itself where there is no TLS.
    server.anonymous = ADMIN
    config = kube.kubeconfig(tmp_path / "config")
    with helm_python.Config(
        kubeconfig_path=config, namespace=kube.namespace, storage_driver="memory"
    ) as helm:
        yield Release(server, kube.namespace, helm)


def _values(tag: str) -> dict[str, Any]:
    images = {"service": {"tag": tag}, "trainer": {"tag": tag}}
    return merged(values("gpu"), {"images": images, "monitoring": {"enabled": False}})


def test_install_upgrade_and_rollback_migrate_first_and_leave_volumes(release: Release) -> None:
    helm, options = release.helm, release.options()
    with release.hook_ends("Complete"):
        helm.install(str(chart()), "shardloom", _values("1"), **options)
    assert release.ran == [release.image()] and release.image().endswith(":1")
    assert release.trainer_image().endswith(":1")
    with release.hook_ends("Failed"), pytest.raises(helm_python.HelmError, match=_MIGRATE):
        helm.upgrade(str(chart()), "shardloom", _values("2"), **options)
    assert release.image().endswith(":1"), "nothing is rolled out over an old database"
    with release.hook_ends("Complete"):
        helm.upgrade(str(chart()), "shardloom", _values("3"), **options)
    assert [image[-1] for image in release.ran] == ["1", "2", "3"]
    assert (release.image()[-1], release.trainer_image()[-1]) == ("3", "3")
    helm.rollback("shardloom", version=1, timeout=options["timeout"])
    assert (release.image()[-1], release.trainer_image()[-1]) == ("1", "1")
    helm.uninstall("shardloom")
    assert not release.objects("deployments.apps") and not release.objects("rayclusters.ray.io")
    assert {"shardloom-runs", "shardloom-data"} <= release.objects("persistentvolumeclaims").keys()


def test_an_install_whose_database_cannot_be_migrated_makes_nothing(release: Release) -> None:
    with release.hook_ends("Failed"), pytest.raises(helm_python.HelmError, match="pre-install"):
        release.helm.install(str(chart()), "shardloom", _values("1"), **release.options())
    assert not release.objects("deployments.apps")
    # Its log is there to read.
    assert release.objects("jobs.batch").keys() == {_MIGRATE}
