"""What every pod of ours keeps to, whichever overlay makes it: safety, limits, availability."""

from __future__ import annotations

import re
import tomllib

from kubernetes.utils.quantity import parse_quantity

from service.backends.kuberay.manifest import SHARED
from tests.unit.k8s.pods import Pod, pods, selects
from tests.unit.k8s.rendering import (
    FULL,
    ROOT,
    Manifest,
    build,
    every_gpu_variant,
    every_variant,
    of_kind,
    one,
)

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
# Ours by the version of this tree; those of others by a whole version. Either may have a digest,
# which a cluster's own overlay pins (docs/guides/kubernetes.md).
_OURS = re.compile(
    rf"shardloom/(service|trainer):{re.escape(VERSION)}(-cpu)?(@sha256:[0-9a-f]{{64}})?"
)
_OTHERS = re.compile(r"[a-z0-9./-]+:\d+\.\d+(\.\d+)?[a-z0-9.-]*(@sha256:[0-9a-f]{64})?")
_SECRET_NAME = re.compile(r"TOKEN$|PASSWORD|SECRET|_KEY$|ACCESS_KEY|DATABASE_URL|CREDENTIAL")


def _containers(variant: str) -> list[tuple[Pod, Manifest]]:
    return [(pod, each) for pod in pods(variant) for each in pod.containers]


# ---- safety


@every_variant
def test_pods_run_as_nobody_and_share_nothing_with_their_machine(variant: str) -> None:
    for pod in pods(variant):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True, pod.owner
        assert context["runAsUser"] >= 100 and context["runAsGroup"] >= 100, pod.owner
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, pod.owner
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod.spec), pod.owner
        for volume in pod.spec.get("volumes", []):
            assert "hostPath" not in volume, pod.owner
            # What lies in memory or on the machine has a limit.
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], pod.owner
        for container in pod.containers:
            assert all("hostPort" not in port for port in container.get("ports", [])), pod.owner
    # Kubernetes itself refuses less careful pods.
    labels = one(build(variant), "Namespace", "shardloom")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@every_variant
def test_containers_are_pinned_unprivileged_bounded_and_probed(variant: str) -> None:
    for pod, container in _containers(variant):
        where = f"{pod.owner}: {container['name']}"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, where
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, where
        image = container["image"]
        pattern = _OURS if image.startswith("shardloom/") else _OTHERS
        assert pattern.fullmatch(image), f"{where}: {image}"
        assert container.get("imagePullPolicy") != "Always"
        resources = container["resources"]
        for name in ("cpu", "memory"):
            asked, most = resources["requests"][name], resources["limits"][name]
            assert 0 < parse_quantity(asked) <= parse_quantity(most), where
        if pod.lasts and container["name"] != "autoscaler":  # KubeRay gives that one no probes
            assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container), where


@every_variant
def test_secrets_come_by_reference_only(variant: str) -> None:
    assert not of_kind(build(variant), "Secret")
    for pod, container in _containers(variant):
        for variable in container.get("env", []):
            if _SECRET_NAME.search(variable["name"]):
                assert "secretKeyRef" in variable.get("valueFrom", {}), (pod.owner, variable)
    for config in of_kind(build(variant), "ConfigMap"):
        assert not [name for name in config["data"] if _SECRET_NAME.search(name)]


@every_variant
def test_only_what_makes_pods_has_a_token_for_kubernetes(variant: str) -> None:
    with_token = []
    for pod in pods(variant):
        assert pod.spec["automountServiceAccountToken"] is False, pod.owner
        names = {
            volume["name"]
            for volume in pod.spec.get("volumes", [])
            if any(
                "serviceAccountToken" in each
                for each in volume.get("projected", {}).get("sources", [])
            )
        }
        with_token += [
            container["name"]
            for container in pod.containers
            if names & {mount["name"] for mount in container["volumeMounts"]}
        ]
    makes_clusters = ["service"] if "own-clusters" in variant else []
    assert with_token == [*makes_clusters, "autoscaler"]


@every_variant
def test_nobody_is_given_rights_to_change_anything(variant: str) -> None:
    assert not of_kind(build(variant), "ClusterRole")
    assert not of_kind(build(variant), "ClusterRoleBinding")
    for role in of_kind(build(variant), "Role"):
        if role["metadata"]["name"] == "shardloom-own-clusters":
            continue
        for rule in role["rules"]:
            assert set(rule["verbs"]) <= {"get", "list", "watch"}
            assert not {"*", "secrets", "pods/exec", "pods/attach"} & set(rule["resources"])
            assert "*" not in rule["apiGroups"]


def test_who_makes_clusters_may_do_that_alone() -> None:
    role = one(build(FULL), "Role", "shardloom-own-clusters")
    rights = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    changing = {each for each in rights if each[1] not in ("get", "list", "watch")}
    assert changing == {
        *(("rayjobs", verb) for verb in ("create", "delete", "patch")),
        ("secrets", "create"),
    }, "a Secret that is there can be neither read nor changed"
    (cluster,) = [rule for rule in role["rules"] if "rayclusters" in rule["resources"]]
    assert cluster["resourceNames"] == ["shardloom-ray"] and cluster["verbs"] == ["get"]
    binding = one(build(FULL), "RoleBinding", "shardloom-own-clusters")
    (account,) = binding["subjects"]
    (service,) = pods(FULL, "service")
    assert account["name"] == service.spec["serviceAccountName"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


# ---- limits


@every_gpu_variant
def test_machines_with_gpus_are_not_overbooked(variant: str) -> None:
    workers = pods(variant, "ray-worker")
    assert workers
    for pod in workers:
        (container,) = pod.containers
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        assert int(resources["limits"]["nvidia.com/gpu"]) >= 1
        emptied = [each["emptyDir"] for each in pod.spec["volumes"] if "emptyDir" in each]
        room = sum(parse_quantity(each["sizeLimit"]) for each in emptied)
        assert room <= parse_quantity(resources["requests"]["ephemeral-storage"])


# ---- availability


@every_variant
def test_replicas_and_the_head_are_kept_during_voluntary_disruptions(variant: str) -> None:
    budgets = of_kind(build(variant), "PodDisruptionBudget")
    for pod in pods(variant):
        covering = [each for each in budgets if selects(each["spec"]["selector"], pod.labels)]
        if pod.kind == "Deployment" and pod.replicas > 1:
            (budget,) = covering
            assert 1 <= budget["spec"]["minAvailable"] < pod.replicas
        if pod.component == "ray-head" and variant != "dev":
            (budget,) = covering
            assert budget["spec"]["minAvailable"] == 1
            # Heads of jobs' own clusters do not count: see `service.backends.kuberay.manifest`.
            own = {name: text for name, text in pod.labels.items() if name != SHARED}
            assert not selects(budget["spec"]["selector"], own)
    if variant == "dev":
        assert not budgets


def _spread(pod: Pod) -> dict[str, Manifest]:
    """The constraints on where pods like it are, by topology; they count pods like it."""
    found = {each["topologyKey"]: each for each in pod.spec["topologySpreadConstraints"]}
    assert all(selects(each["labelSelector"], pod.labels) for each in found.values())
    return found


@every_gpu_variant
def test_replicas_and_ray_hosts_are_on_different_machines(variant: str) -> None:
    (pod,) = pods(variant, "service")
    assert pod.replicas == 2
    assert _spread(pod)["kubernetes.io/hostname"]["whenUnsatisfiable"] == "DoNotSchedule"
    assert "topology.kubernetes.io/zone" in _spread(pod)
    # Shardloom tells hosts apart by pod; inter_host placement counts on their failing apart.
    workers = pods(variant, "ray-worker")
    for pod in workers:
        rules = pod.spec["affinity"]["podAntiAffinity"]
        (rule,) = rules["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        assert all(selects(rule["labelSelector"], other.labels) for other in workers)
        assert "topology.kubernetes.io/zone" in _spread(pod)
        if variant == "multi-rack":
            rack = _spread(pod)["shardloom.io/rack"]
            assert (rack["whenUnsatisfiable"], rack["maxSkew"]) == ("DoNotSchedule", 1)
