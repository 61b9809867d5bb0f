"""What every pod of ours keeps to, whichever values make it: safety, limits, availability."""

from __future__ import annotations

import re

import pytest
from kubernetes.utils.quantity import parse_quantity
from policy_guard.analyzers.pod_security import analyze
from policy_guard.models import PolicyLevel, Resource

from tests.unit.k8s.pods import Pod, pods, selects
from tests.unit.k8s.rendering import (
    FULL,
    VARIANTS,
    VERSION,
    Manifest,
    build,
    every_gpu_variant,
    every_variant,
    of_kind,
    one,
)

# Ours by the version of this tree; those of others by a whole version. Either may have a digest,
# which `images` of the values pins.
_OURS = re.compile(
    rf"(registry\.example|localhost)/shardloom/(service|trainer)"
    rf"(:{re.escape(VERSION)}(-cpu)?|@sha256:[0-9a-f]{{64}})"
)
_OTHERS = re.compile(r"[a-z0-9./-]+:\d+\.\d+(\.\d+)?[a-z0-9.-]*(@sha256:[0-9a-f]{64})?")
RESTRICTED = PolicyLevel.RESTRICTED
_SECRET_NAME = re.compile(r"TOKEN$|PASSWORD|SECRET|_KEY$|ACCESS_KEY|DATABASE_URL|CREDENTIAL")


def _containers(variant: str) -> list[tuple[Pod, Manifest]]:
    return [(pod, each) for pod in pods(variant) for each in pod.containers]


# ---- safety


def violations(pod: Pod, level: PolicyLevel) -> list[str]:
    """What the Pod Security Standards refuse at a level, as k8s-policy-guard has them.

    Of the pods that k8s.io/pod-security-admission v1.37 tests its rules by, it admits 7 of the 76
    that `restricted` refuses: a host of probes or hooks, SELinux users and roles. A real cluster
    knows these too (tests/integration/kube/test_helm.py).
    """
    annotations = pod.about.get("annotations", {})
    found = analyze([Resource("Pod", pod.owner, annotations=annotations, spec=pod.spec)])
    levels = (PolicyLevel.BASELINE, level)
    return [f"{each.field_path}: {each.message}" for each in found if each.policy_level in levels]


@pytest.mark.parametrize("variant", VARIANTS)
def test_pod_security_admits_every_pod_at_the_level_restricted(variant: str) -> None:
    for pod in pods(variant):
        level = PolicyLevel.BASELINE if pod.component == "owner" else RESTRICTED
        assert violations(pod, level) == [], pod.owner
        for volume in pod.spec.get("volumes", []):
            # What lies in memory or on the machine has a limit.
            assert "emptyDir" not in volume or "sizeLimit" in volume["emptyDir"], pod.owner


@every_variant
def test_containers_are_pinned_unprivileged_bounded_and_probed(variant: str) -> None:
    for pod, container in _containers(variant):
        where = f"{pod.owner}: {container['name']}"
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert "/tmp" in mounts or pod.component == "owner", where
        if container["name"] != "autoscaler":
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError", where
        image = container["image"]
        pattern = _OURS if "shardloom/" in image else _OTHERS
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
    with_token: list[str] = []
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
    makes_clusters = ["service"] if {"own", "own-only"} & set(variant.split("+")) else []
    assert sorted(with_token) == sorted([*makes_clusters, "autoscaler", "secrets"])


@every_variant
def test_nobody_is_given_rights_to_change_anything(variant: str) -> None:
    assert not of_kind(build(variant), "ClusterRole")
    assert not of_kind(build(variant), "ClusterRoleBinding")
    for role in of_kind(build(variant), "Role"):
        if role["metadata"]["name"] == "shardloom-own-clusters":
            continue
        if role["metadata"]["name"] == "shardloom-secrets":
            # As long as the hook runs.
            assert "hook-succeeded" in role["metadata"]["annotations"]["helm.sh/hook-delete-policy"]
            (rule,) = role["rules"]
            assert (rule["resources"], rule["verbs"]) == (["secrets"], ["create"])
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
    assert "rayclusters" not in str(role["rules"])
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


@every_variant
def test_data_is_prepared_where_there_is_room_for_its_working_files(variant: str) -> None:
    (pod,) = pods(variant, "data")
    requests = pod.containers[0]["resources"]["requests"]
    (room,) = [each["emptyDir"]["sizeLimit"] for each in pod.spec["volumes"] if "emptyDir" in each]
    # Without that the kubelet evicts it, as often as it comes back: nobody counts evictions.
    assert parse_quantity(requests["ephemeral-storage"]) == parse_quantity(room)
    if variant.startswith("dev"):
        (host,) = pods(variant, "ray-worker")
        of_host = host.containers[0]["resources"]["requests"]
        for name in ("cpu", "memory"):
            assert parse_quantity(requests[name]) <= parse_quantity(of_host[name])


# ---- availability


@every_variant
def test_of_replicas_one_is_kept_and_no_budget_blocks_a_drained_node(variant: str) -> None:
    budgets = of_kind(build(variant), "PodDisruptionBudget")
    for pod in pods(variant):
        covering = [each for each in budgets if selects(each["spec"]["selector"], pod.labels)]
        assert len(covering) == (pod.component == "service" and pod.replicas > 1), pod.owner
        assert all(1 <= each["spec"]["minAvailable"] < pod.replicas for each in covering)


@every_variant
def test_autoscalers_of_machines_leave_what_computes_where_it_is(variant: str) -> None:
    for component in ("ray-head", "ray-worker", "data", "redis", "postgresql"):
        for pod in pods(variant, component):
            found = pod.about["annotations"]
            assert found["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
            assert found["karpenter.sh/do-not-disrupt"] == "true"


def _spread(pod: Pod) -> dict[str, Manifest]:
    """The constraints on where pods like it are, by topology; they count pods like it."""
    found = {each["topologyKey"]: each for each in pod.spec["topologySpreadConstraints"]}
    assert all(selects(each["labelSelector"], pod.labels) for each in found.values())
    return found


@every_gpu_variant
def test_replicas_and_ray_hosts_are_on_different_machines(variant: str) -> None:
    (pod,) = pods(variant, "service")
    assert pod.replicas == (1 if variant.startswith("bucket") else 2)
    machines = _spread(pod)["kubernetes.io/hostname"]
    assert machines["whenUnsatisfiable"] == "DoNotSchedule"
    # A tainted machine is empty for ever: beside it no other could take a second replica.
    assert machines["nodeTaintsPolicy"] == "Honor"
    assert "topology.kubernetes.io/zone" in _spread(pod)
    # Shardloom tells hosts apart by pod; inter_host placement counts on their failing apart.
    workers = pods(variant, "ray-worker")
    for pod in workers:
        rules = pod.spec["affinity"]["podAntiAffinity"]
        (rule,) = rules["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        assert all(selects(rule["labelSelector"], other.labels) for other in workers)
        assert "topology.kubernetes.io/zone" in _spread(pod)
        if variant.startswith("multi-rack"):
            rack = _spread(pod)["shardloom.io/rack"]
            assert (rack["whenUnsatisfiable"], rack["maxSkew"]) == ("DoNotSchedule", 1)
            assert rack["nodeTaintsPolicy"] == "Honor"
