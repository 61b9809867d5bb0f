"""Who may talk to whom, worked out from the network policies as Kubernetes would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from tests.unit.k8s.pods import pods, selects
from tests.unit.k8s.rendering import Manifest, build, every_variant, of_kind

Direction = Literal["ingress", "egress"]
# What stands at the other end: the labels of a pod of ours, or the name of another namespace.
Peer = Mapping[str, str] | str


def _labels(variant: str) -> dict[str, Mapping[str, str]]:
    return {pod.component: pod.labels for pod in pods(variant)}


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
        if direction.capitalize() in each["spec"]["policyTypes"]
        and selects(each["spec"]["podSelector"], here)
    ]
    rules = [rule for spec in mine for rule in spec.get(direction, [])]
    side = "from" if direction == "ingress" else "to"
    return not mine or any(
        _has_port(rule, port) and any(_is_peer(each, there) for each in rule[side])
        for rule in rules
    )


def _has_port(rule: Mapping[str, Any], port: int) -> bool:
    return "ports" not in rule or any(each["port"] == port for each in rule["ports"])


def _is_peer(peer: Mapping[str, Any], end: Peer) -> bool:
    if "ipBlock" in peer:
        return True  # a pod's address may lie in it, as far as we know
    if isinstance(end, str):
        wanted = peer.get("namespaceSelector")
        return wanted is not None and selects(wanted, {"kubernetes.io/metadata.name": end})
    return "namespaceSelector" not in peer and selects(peer["podSelector"], end)


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
        selectors = [each["spec"]["podSelector"] for each in policies]
        assert any(each and selects(each, labels) for each in selectors), component


@every_variant
def test_every_rule_says_who_is_at_the_other_end(variant: str) -> None:
    for policy in _policies(variant):
        for rule in policy["spec"].get("ingress", []):
            assert rule["from"] and all("ipBlock" not in each for each in rule["from"])
        for rule in policy["spec"].get("egress", []):
            assert rule["to"]
            # To anywhere only through ports that are named, and never to the cloud's metadata.
            for peer in rule["to"]:
                if "ipBlock" in peer:
                    assert rule["ports"] and "169.254.0.0/16" in peer["ipBlock"]["except"]


# Source, target and port of connections; a name that is no component is another namespace.
_NEEDED = (
    ("service", "ray-head", 8265),
    ("ray-head", "service", 8700),
    ("ray-worker", "service", 8700),
    ("ray-worker", "ray-head", 6379),
    ("ray-head", "ray-worker", 40_000),
    ("ray-worker", "ray-worker", 29_500),
    ("ingress-nginx", "service", 8700),
    ("monitoring", "service", 8700),
    ("monitoring", "ray-worker", 8080),
    ("kuberay-system", "ray-head", 8265),
)
_FORBIDDEN = (
    ("default", "service", 8700),
    ("default", "ray-head", 8265),
    ("default", "ray-head", 6379),
    ("ingress-nginx", "ray-head", 8265),
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


def test_the_database_is_open_to_what_needs_it_and_closed_to_code_of_users() -> None:
    for source in ("service", "migrate", "first-key"):
        assert _may_connect("dev", source, "postgresql", 5432), source
    for source in ("ray-head", "ray-worker", "default", "ingress-nginx"):
        assert not _may_connect("dev", source, "postgresql", 5432), source
