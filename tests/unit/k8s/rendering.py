"""What `helm install` sends: the chart, rendered by Helm with examples and options."""

from __future__ import annotations

import atexit
import tempfile
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.chart import EXAMPLES, copy_whole, render, values_of
from tests.harness.kube.objects import merged

Manifest = dict[str, Any]

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = PROJECT["version"]
# What a platform chooses beside an example.
OPTIONS: dict[str, dict[str, Any]] = {
    "kueue": {"queue": {"kind": "kueue"}},
    "volcano": {"queue": {"kind": "volcano"}},
    "own": {"ownClusters": {"enabled": True}},
    "own-only": {"ownClusters": {"enabled": True}, "ray": {"shared": False}},
    "isolated": {
        "ownClusters": {
            "enabled": True,
            "projects": {
                "ads": {
                    "namespace": "ads-training",
                    "runsVolume": "ads-runs",
                    "dataVolume": "ads-data",
                    "rayWorker": {"annotations": {"iam.gke.io/gcp-service-account": "ads"}},
                },
                "maps": {
                    "namespace": "maps-training",
                    "runsVolume": "maps-runs",
                    "dataVolume": "maps-data",
                },
            },
        }
    },
    "embedded": {"ray": {"faultTolerance": "embedded", "embedded": {"storageClass": "ssd"}}},
    "owner": {"storage": {"setOwner": True}, "backup": {"enabled": True}},
    "theirs": {
        "images": {
            "service": {"digest": "sha256:" + "0" * 64},
            "pullSecrets": ["pull"],
        },
        "ray": {
            "redis": {"address": "rediss://redis.example:6379"},
            # As on AWS with EFA, and on RKE2 with a secondary network.
            "hosts": {
                "rdma": {"resource": "vpc.amazonaws.com/efa", "count": 32, "net": "AWS Libfabric"},
                "resources": {"hugepages-2Mi": "5Gi"},
                "annotations": {"k8s.v1.cni.cncf.io/networks": "rail0"},
                "runtimeClassName": "nvidia",
                "env": {"FI_PROVIDER": "efa"},
            },
        },
        "storage": {
            "runs": {"existingClaim": "their-runs"},
            "data": {"existingClaim": "their-data"},
        },
        "serviceAccounts": {
            "rayWorker": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/ads"}}
        },
        "backup": {"enabled": True, "storageClass": "ssd"},
        "ingress": {"enabled": False},
        "gateway": {
            "enabled": True,
            "host": "shardloom.example.com",
            "parentRefs": [{"name": "gateway", "namespace": "gateways"}],
            "requestTimeout": "",
        },
        "networkPolicies": {
            "cilium": True,
            "inside": [
                {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "stores"}}}
            ],
            # A load balancer of Google's.
            "ingressFrom": [{"ipBlock": {"cidr": "35.191.0.0/16"}}],
            # EKS Pod Identity, and a store on a port of its own.
            "extraEgress": [
                {
                    "to": [{"ipBlock": {"cidr": "169.254.170.23/32"}}],
                    "ports": [{"protocol": "TCP", "port": 80}],
                },
                {
                    "to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}],
                    "ports": [{"protocol": "TCP", "port": 9000}],
                },
            ],
        },
    },
}
VARIANTS = [
    *(path.stem for path in sorted(EXAMPLES.glob("*.yaml"))),
    *("gpu+own", "gpu+kueue", "gpu+kueue+own", "gpu+volcano", "gpu+volcano+own"),
    *("gpu+own-only", "gpu+embedded", "gpu+owner", "gpu+theirs", "bucket+own", "dev+own"),
]
GPU_VARIANTS = tuple(each for each in VARIANTS if not each.startswith("dev"))
# The variant that has all of ours beside queues of the platform.
FULL = "gpu+own"

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_gpu_variant = pytest.mark.parametrize("variant", GPU_VARIANTS)


@cache
def chart() -> Path:
    """A whole copy of the chart, with rules and dashboards, for as long as the tests run."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    return copy_whole(Path(made.name))


def values(variant: str) -> dict[str, Any]:
    """The values of an example, and of the options that are added to it."""
    example, *options = variant.split("+")
    found = values_of(example)
    for option in options:
        found = merged(found, OPTIONS[option])
    return found


@cache
def build(variant: str) -> tuple[Manifest, ...]:
    """Every object of a variant."""
    return objects_of(values(variant))


def objects_of(wanted: dict[str, Any]) -> tuple[Manifest, ...]:
    """Every object that the chart makes of values."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return tuple(each for each in yaml.load_all(render(chart(), wanted), loader) if each)


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> list[Manifest]:
    """The objects of one kind."""
    return [each for each in manifests if each["kind"] == kind]


def one(manifests: tuple[Manifest, ...], kind: str, name: str) -> Manifest:
    """The object of that kind and name."""
    (found,) = [each for each in of_kind(manifests, kind) if each["metadata"]["name"] == name]
    return found


def ray_cluster(variant: str) -> Manifest:
    """The RayCluster of a variant, or the template that it has in its place."""
    if "own-only" in variant:
        return template_of(variant)
    return one(build(variant), "RayCluster", "shardloom-ray")


def template_of(variant: str) -> Manifest:
    """The RayCluster after which a variant makes clusters of jobs' own."""
    text = one(build(variant), "ConfigMap", "shardloom-raycluster")["data"]["raycluster.yaml"]
    found: Manifest = yaml.safe_load(text)
    return found


def settings_of(variant: str) -> dict[str, str]:
    """The ConfigMap with the settings of the service."""
    return dict(one(build(variant), "ConfigMap", "shardloom-settings")["data"])
