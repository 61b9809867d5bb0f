"""Helm itself installs the chart into an API server: hooks in time, upgrade, rollback, what stays.

The hook that makes Secrets runs, with the rights of its Role; of the migration the test says how it
ends. Nothing else that is made is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import helm_python
import pytest
from kubernetes import client

from tests.harness.kube.cluster import KubeCluster
from tests.harness.kube.objects import Manifest, Target, merged
from tests.harness.kube.server import ADMIN, KubeApiServer
from tests.harness.wait import scaled, wait_for
from tests.unit.k8s.pods import pods
from tests.unit.k8s.rendering import VARIANTS, chart, values

_MADE = ("service", "ray-token", "first-key", "redis")
_MIGRATE, _SECRETS = "shardloom-migrate-0-1-0", "shardloom-secrets"


@dataclass
class Release:
    """The release `shardloom` in a namespace; `ran` has the images that migrations ran."""

    server: KubeApiServer
    kube: KubeCluster
    helm: helm_python.Config
    folder: Path
    ran: list[str] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return self.kube.namespace

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
    def hooks_end(self, kind: str) -> Iterator[None]:
        """Let the migration end as Complete or Failed, before anything but Secrets is made."""

        def end() -> None:
            self._run_secrets_hook(self._started(_SECRETS))
            self._end(_SECRETS, "Complete")
            job = self._started(_MIGRATE)
            self.ran.append(job["spec"]["template"]["spec"]["containers"][0]["image"])
            self._end(_MIGRATE, kind)

        thread = threading.Thread(target=end)
        thread.start()
        yield
        thread.join()

    def _started(self, name: str) -> Manifest:
        def job() -> Manifest | None:
            found = self.objects("jobs.batch").get(name)
            return found if found and not found.get("status") else None

        wait_for(job, f"the hook {name}")
        return self.objects("jobs.batch")[name]

    def _end(self, name: str, kind: str) -> None:
        condition = {"type": kind, "status": "True", "reason": "Test", "message": "no database"}
        status: Manifest = {"conditions": [condition]}
        status |= {"succeeded": 1} if kind == "Complete" else {"failed": 7}
        target = Target(self.server.find("jobs.batch"), self.namespace, name, "status")
        self.server.verbs.patch(target, {"status": status})

    def _run_secrets_hook(self, job: Manifest) -> None:
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        rules = self.objects("roles.rbac.authorization.k8s.io")[_SECRETS]["rules"]
        token = self.kube.token_for(pod["serviceAccountName"], rules)
        variables = {each["name"]: each["value"] for each in container["env"]}
        variables["KUBECONFIG"] = self.kube.kubeconfig(self.folder / "hook", token)
        command = [sys.executable, *container["command"][1:], *container["args"]]
        subprocess.run(command, env=os.environ | variables, check=True, timeout=scaled(60))

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
        yield Release(server, kube, helm, tmp_path)


def _values(tag: str) -> dict[str, Any]:
    images = {"service": {"tag": tag}, "trainer": {"tag": tag}}
    return merged(values("gpu"), {"images": images, "monitoring": {"enabled": False}})


def test_install_upgrade_and_rollback_migrate_first_and_leave_volumes(release: Release) -> None:
    helm, options = release.helm, release.options()
    with release.hooks_end("Complete"):
        helm.install(str(chart()), "shardloom", _values("1"), **options)
    assert release.ran == [release.image()] and release.image().endswith(":1")
    assert release.trainer_image().endswith(":1")
    made = {name: each["data"] for name, each in release.objects("secrets").items()}
    assert made.keys() == {f"shardloom-{each}" for each in _MADE}
    with release.hooks_end("Failed"), pytest.raises(helm_python.HelmError, match=_MIGRATE):
        helm.upgrade(str(chart()), "shardloom", _values("2"), **options)
    assert release.image().endswith(":1"), "nothing is rolled out over an old database"
    with release.hooks_end("Complete"):
        helm.upgrade(str(chart()), "shardloom", _values("3"), **options)
    assert [image[-1] for image in release.ran] == ["1", "2", "3"]
    assert {name: each["data"] for name, each in release.objects("secrets").items()} == made
    assert (release.image()[-1], release.trainer_image()[-1]) == ("3", "3")
    helm.rollback("shardloom", version=1, timeout=options["timeout"])
    assert (release.image()[-1], release.trainer_image()[-1]) == ("1", "1")
    helm.uninstall("shardloom")
    assert release.objects("secrets").keys() == made.keys()
    assert not release.objects("deployments.apps") and not release.objects("rayclusters.ray.io")
    assert {"shardloom-runs", "shardloom-data"} <= release.objects("persistentvolumeclaims").keys()


def test_an_install_whose_database_cannot_be_migrated_makes_nothing(release: Release) -> None:
    with release.hooks_end("Failed"), pytest.raises(helm_python.HelmError, match="pre-install"):
        release.helm.install(str(chart()), "shardloom", _values("1"), **release.options())
    assert not release.objects("deployments.apps")
    # Its log is there to read.
    assert release.objects("jobs.batch").keys() == {_MIGRATE}


@pytest.mark.slow
def test_pod_security_of_a_real_cluster_admits_every_pod(kube: KubeCluster) -> None:
    if kube.server is not None:
        pytest.skip("needs SHARDLOOM_TEST_KUBECONFIG: the API server of tests has no PodSecurity")
    core = client.CoreV1Api(kube.client())
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    core.patch_namespace(kube.namespace, {"metadata": {"labels": label}})
    for pod in [each for variant in VARIANTS for each in pods(variant)]:
        if pod.component == "owner":
            continue  # root: `storage.setOwner` says that it wants the level `baseline`
        spec = {key: value for key, value in pod.spec.items() if key != "serviceAccountName"}
        volumes = {each["name"]: each for each in spec.get("volumes", [])}
        for mount in [each for found in pod.containers for each in found["volumeMounts"]]:
            volumes.setdefault(mount["name"], {"name": mount["name"], "emptyDir": {}})
        body = {
            "metadata": {"generateName": "pod-"},
            "spec": spec | {"volumes": [*volumes.values()]},
        }
        core.create_namespaced_pod(kube.namespace, body, dry_run="All")
