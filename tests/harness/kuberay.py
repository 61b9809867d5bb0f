"""Submissions, templates and RayJobs for tests of the KubeRay backend."""

from __future__ import annotations

import copy
from typing import Any

from service.backends.base import Submission
from service.backends.kuberay.manifest import ClusterOptions
from tests.harness.builders import spec
from tests.unit.k8s.rendering import ray_cluster
from trainer.spec.job import JobSpec
from trainer.spec.parallelism import SurviveSpec, WorkersSpec

OPTIONS = ClusterOptions("shardloom")
ATTEMPT = "job-0123456789ab-a0"


def template(*groups: dict[str, Any]) -> dict[str, Any]:
    """The RayCluster of the example `spot`, with these worker groups if any are given."""
    manifest = copy.deepcopy(ray_cluster("spot"))
    del manifest["metadata"]["namespace"]
    if groups:
        manifest["spec"]["workerGroupSpecs"] = list(groups)
    return manifest


def group(name: str, cpus: str, gpus: int = 0) -> dict[str, Any]:
    """A worker group whose pods have so many CPUs and GPUs."""
    limits = {"cpu": cpus, "memory": "8Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    container = {"name": "ray-worker", "image": "trainer", "resources": {"limits": limits}}
    return {
        "groupName": name,
        "replicas": 0,
        "minReplicas": 0,
        "maxReplicas": 4,
        "rayStartParams": {},
        "template": {"spec": {"containers": [container]}},
    }


def spec_of(
    *,
    min_workers: int = 1,
    max_workers: int = 1,
    group_size: int | None = None,
    num_hosts: int = 1,
    project: str = "default",
    **resources: Any,
) -> JobSpec:
    """A job that wants a cluster of its own, with sizes that need not be legal together."""
    made = spec(name="ads", resources={"cluster": "own", **resources})
    parallelism = made.parallelism.model_copy(
        update={
            "workers": WorkersSpec.model_construct(min=min_workers, max=max_workers),
            "shard_group_size": group_size or "auto",
            "survive": SurviveSpec(hosts=num_hosts - 1) if num_hosts > 1 else None,
        }
    )
    return made.model_copy(update={"parallelism": parallelism, "project": project})


def submission(attempt_id: str = ATTEMPT, **changes: Any) -> Submission:
    """An attempt on a cluster of its own; `changes` are those of `spec_of`."""
    job_id = attempt_id.rpartition("-a")[0]
    return Submission(
        attempt_id=attempt_id,
        job_id=job_id,
        spec=spec_of(**changes),
        entrypoint="python -m trainer.driver",
        env={
            "SHARDLOOM_JOB_ID": job_id,
            "SHARDLOOM_RUN_DIR": f"/var/lib/shardloom/runs/{job_id}",
            "SHARDLOOM_ATTEMPT_TOKEN": "a secret",
        },
        metadata={"shardloom_job_id": job_id, "shardloom_job_name": "ads"},
    )


def rayjob(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    """A RayJob that was let go, with a status."""
    return {
        "metadata": {"name": ATTEMPT, "generation": 2, **metadata},
        "spec": {"suspend": False},
        "status": status or {},
    }
