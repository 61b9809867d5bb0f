"""Who may talk to whom, worked out from the network policies as Kubernetes would."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from ipaddress import ip_address, ip_network
from typing import Any, Literal

from tests.unit.k8s.pods import pods, selects
from tests.unit.k8s.rendering import FULL, Manifest, build, every_variant, of_kind

Direction = Literal["ingress", "egress"]
# What stands at the other end: the labels of a pod of ours (with its namespace, where it is not the
# release's), the name of another namespace, or an address outside.
Peer = Mapping[str, str] | str
_NAMESPACE = "kubernetes.io/metadata.name"


@cache
def _labels(variant: str) -> dict[str, Mapping[str, str]]:
    return {pod.component: pod.labels for pod in pods(variant)}


@cache
def _policies(variant: str) -> list[Manifest]:
    return of_kind(build(variant), "NetworkPolicy")


def _lets(
    policies: list[Manifest], direction: Direction, here: Peer, there: Peer, port: int
) -> bool:
    """Whether one end lets a connection pass; pods of other namespaces are not ours to limit."""
    if isinstance(here, str):
        return True
    mine = [
        each["spec"]
        for each in policies
        if each["metadata"]["namespace"] == _namespace_of(here)
        and direction.capitalize() in each["spec"]["policyTypes"]
        and selects(each["spec"]["podSelector"], here)
    ]
    rules = [rule for spec in mine for rule in spec.get(direction, [])]
    side = "from" if direction == "ingress" else "to"
    return not mine or any(
        _has_port(rule, port)
        and any(_is_peer(each, there, _namespace_of(here)) for each in rule[side])
        for rule in rules
    )


def _has_port(rule: Mapping[str, Any], port: int) -> bool:
    return "ports" not in rule or any(each["port"] == port for each in rule["ports"])


def _namespace_of(end: Mapping[str, str]) -> str:
    return end.get(_NAMESPACE, "shardloom")


def _is_peer(peer: Mapping[str, Any], end: Peer, here: str) -> bool:
    """Whether a peer of a policy in the namespace `here` is the one at the other end."""
    if "ipBlock" in peer:
        return isinstance(end, str) and end[0].isdigit() and _is_in(peer["ipBlock"], end)
    wanted = peer.get("namespaceSelector", {"matchLabels": {_NAMESPACE: here}})
    if isinstance(end, str):
        return selects(wanted, {_NAMESPACE: end})
    is_there = selects(wanted, {_NAMESPACE: _namespace_of(end)})
    return is_there and selects(peer.get("podSelector", {}), end)


def _is_in(block: Mapping[str, Any], address: str) -> bool:
    inside = ip_address(address) in ip_network(block["cidr"])
    return inside and not any(
        ip_address(address) in ip_network(each) for each in block.get("except", [])
    )


def _may_connect(variant: str, source: str, target: str, port: int) -> bool:
    labels, policies = _labels(variant), _policies(variant)
    here, there = labels.get(source, source), labels.get(target, target)
    return _lets(policies, "egress", here, there, port) and _lets(
        policies, "ingress", there, here, port
    )


@every_variant
def test_every_pod_is_closed_but_for_what_a_policy_of_its_own_allows(variant: str) -> None:
    policies = _policies(variant)
    (deny,) = [each for each in policies if each["metadata"]["name"] == "default-deny"]
    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for component, labels in _labels(variant).items():
        if component == "owner":
            continue  # it talks to nobody
        selectors = [each["spec"]["podSelector"] for each in policies]
        assert any(each and selects(each, labels) for each in selectors), component
    for policy in policies:
        # Every rule says who is at the other end.
        for rule in policy["spec"].get("ingress", []):
            assert rule["from"]
        for rule in policy["spec"].get("egress", []):
            # To addresses only through ports that are named.
            assert rule["to"]
            assert rule.get("ports") or all("ipBlock" not in each for each in rule["to"])


# Source, target and port of connections; a name that is no component is another namespace.
_NEEDED = (
    ("service", "ray-head", 8265),
    ("ray-head", "service", 8700),
    ("ray-worker", "service", 8700),
    ("ray-worker", "ray-head", 6379),
    ("ray-head", "ray-worker", 40_000),
    ("ray-worker", "ray-worker", 29_500),
    ("ingress", "service", 8700),
    ("monitoring", "service", 8700),
    ("monitoring", "ray-worker", 8080),
    ("kuberay-system", "ray-head", 8265),
    # Names, by NodeLocal DNSCache and on OpenShift; object stores; the API server.
    ("ray-worker", "169.254.20.10", 53),
    ("service", "openshift-dns", 5353),
    ("ray-worker", "52.0.0.1", 443),
    ("ray-head", "10.0.0.1", 6443),
    ("secrets", "10.0.0.1", 6443),
)
_FORBIDDEN = (
    ("default", "service", 8700),
    ("default", "ray-head", 8265),
    ("default", "ray-head", 6379),
    ("ingress", "ray-head", 8265),
    ("ray-worker", "169.254.169.254", 80),
    ("service", "169.254.169.254", 443),
    ("ray-worker", "10.0.0.1", 6443),
    ("monitoring", "ray-head", 8265),
    ("migrate", "service", 8700),
    ("migrate", "ray-head", 8265),
    ("service", "ray-worker", 6379),
    ("service", "ray-head", 6379),
)


@every_variant
def test_what_must_talk_can_talk_and_nothing_else(variant: str) -> None:
    assert [each for each in _NEEDED if not _may_connect(variant, *each)] == []
    assert [each for each in _FORBIDDEN if _may_connect(variant, *each)] == []


def test_a_load_balancer_outside_the_cluster_reaches_the_service_where_it_is_named() -> None:
    assert _may_connect("gpu+theirs", "35.191.0.9", "service", 8700)
    assert not _may_connect("gpu+theirs", "35.191.0.9", "ray-head", 8265)
    assert not _may_connect("gpu", "35.191.0.9", "service", 8700)


def test_stores_may_be_pods_and_cilium_s_api_server_a_node() -> None:
    for source, port in (("service", 443), ("migrate", 5432), ("ray-head", 6379)):
        assert _may_connect("gpu+theirs", source, "stores", port)
        assert not _may_connect("gpu", source, "stores", port)
    (policy,) = of_kind(build("gpu+theirs"), "CiliumNetworkPolicy")
    selector, labels = policy["spec"]["endpointSelector"], _labels("gpu+theirs")
    assert {each for each in labels if selects(selector, labels[each])} == {"ray-head", "secrets"}


def test_the_database_is_open_to_what_needs_it_and_closed_to_code_of_users() -> None:
    assert _may_connect("dev", "service", "postgresql", 5432)
    for source in ("ray-head", "ray-worker", "default", "ingress"):
        assert not _may_connect("dev", source, "postgresql", 5432), source
    for source in ("service", "migrate"):
        assert _may_connect("gpu", source, "10.0.0.7", 5432), source
    assert not _may_connect("gpu", "ray-worker", "10.0.0.7", 5432)


def test_the_heads_state_is_open_to_heads_alone() -> None:
    assert _may_connect("gpu", "ray-head", "redis", 6379)
    assert _may_connect("gpu+theirs", "ray-head", "10.0.0.7", 6379)
    for source in ("ray-worker", "service", "migrate", "default"):
        assert not _may_connect("gpu", source, "redis", 6379), source


def test_more_may_be_opened_for_cloud_identities_and_stores_on_ports_of_their_own() -> None:
    for source in ("service", "ray-head", "ray-worker"):
        for address, port in (("169.254.170.23", 80), ("10.9.0.4", 9000)):
            assert _may_connect("gpu+theirs", source, address, port)
            assert not _may_connect("gpu", source, address, port)


def test_clusters_of_isolated_projects_reach_the_service_and_not_one_another() -> None:
    variant = "gpu+isolated"
    labels, policies = _labels(variant), _policies(variant)

    def end(component: str, project: str = "") -> Peer:
        namespace = {_NAMESPACE: f"{project}-training"} if project else {}
        return {**labels[component], **namespace}

    def may_connect(here: Peer, there: Peer, port: int) -> bool:
        return _lets(policies, "egress", here, there, port) and _lets(
            policies, "ingress", there, here, port
        )

    service, head, worker = end("service"), end("ray-head", "ads"), end("ray-worker", "ads")
    for here, there, port in (
        (service, head, 8265),
        ("kuberay-system", head, 8265),
        ("monitoring", worker, 8080),
        (head, service, 8700),
        (worker, service, 8700),
        (worker, head, 6379),
        (worker, "169.254.20.10", 53),
        (worker, "52.0.0.1", 443),
        (head, "10.0.0.1", 6443),
    ):
        assert may_connect(here, there, port), (here, there, port)
    for other in ("", "maps"):
        for component in ("ray-head", "ray-worker"):
            for port in (6379, 8265, 10_001, 40_000):
                assert not may_connect(worker, end(component, other), port), (other, component)
                assert not may_connect(end(component, other), head, port), (other, component)
    assert not may_connect(head, end("redis"), 6379)
    assert not may_connect("default", head, 8265)


def test_without_own_clusters_the_service_cannot_reach_the_api_server() -> None:
    assert _may_connect(FULL, "service", "10.0.0.1", 6443)
    assert not _may_connect("gpu", "service", "10.0.0.1", 6443)
