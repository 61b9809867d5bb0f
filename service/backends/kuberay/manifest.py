"""RayJob and Secret of an attempt with a cluster of its own, and the size of that cluster. Pure.

    RayJob  NAME         the template's cluster, sized for the job, and the driver's command
    Secret  NAME-env-X   the driver's environment, tokens included; goes with the RayJob

X differs with each RayJob that is made, so that none meets the Secret of an earlier one. NAME
follows from the attempt's id, so that a repeated submission finds what an earlier one made. The
RayJob comes first and suspended, then the Secret that it owns, then the RayJob is let go: a
submission that is cut off leaves nothing that is not found again by the RayJob's labels, and no pod
starts without its environment. With a queue it is Kueue that lets go, perhaps before the Secret is
there: the pods then wait for it. KubeRay retries nothing (`backoffLimit: 0`, and no second head,
as the driver ends with the first one): the service counts. So heads keep no state anywhere, which
would outlive a cluster whose RayJob is deleted: KubeRay's Redis cleanup wants the Secret, too.

Clusters of an isolated project are in a namespace of the project, where the template's names of
service accounts, Secrets and claims are those of that namespace. Its pods see of run storage the
folder of their job alone, and Ray's token is one of their own in the Secret.

The driver is started over HTTP. KubeRay's SidecarMode adds a container without a security context,
which a namespace that enforces the level `restricted`, as ours does, admits no head with.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from service.backends.base import Submission
from service.errors import SubmissionRefused
from trainer.layout.hosts import HostFacts, rooms, wants_gpu
from trainer.spec.job import JobSpec

Manifest = dict[str, Any]


@dataclass(frozen=True)
class GroupShape:
    """What each pod of a worker group offers to Ray."""

    pod: HostFacts
    num_hosts: int = 1

    def num_fitting(self, spec: JobSpec) -> int:
        """How many workers fit a pod, as whole sharding groups where such must not be split."""
        (fitting,) = rooms(spec, [self.pod], use_gpu=self.gives_gpus(spec))
        parallelism = spec.parallelism
        size = parallelism.shard_group_size
        if not parallelism.num_hosts_needed or size == "auto" or size > fitting:
            return fitting
        return fitting // size * size

    def gives_gpus(self, spec: JobSpec) -> bool:
        """Whether each worker takes a GPU of the pod."""
        return wants_gpu(spec, self.pod.num_gpus, may_grow=True)


@dataclass(frozen=True)
class ClusterSize:
    """The pods of a cluster: those that start, and the most that there may be."""

    shape: GroupShape
    num_fitting: int
    min_pods: int
    max_pods: int

    @property
    def is_elastic(self) -> bool:
        """Whether the autoscaler has anything to do."""
        return self.min_pods < self.max_pods


def size_of(spec: JobSpec, groups: Sequence[Mapping[str, Any]]) -> ClusterSize:
    """The size for a job, in pods of the first worker group that holds its workers.

    Raises `SubmissionRefused` where none does.
    """
    resources, parallelism = spec.resources, spec.parallelism
    shapes = [shape_of(group) for group in groups]
    # Machines with GPUs are the last that workers without any are given.
    for shape in sorted(shapes, key=lambda s: resources.device == "cpu" and s.pod.num_gpus > 0):
        fitting = shape.num_fitting(spec)
        if fitting:
            if shape.num_hosts > 1:
                raise SubmissionRefused(
                    f"worker group {shape.pod.address} of the cluster template has numOfHosts "
                    f"{shape.num_hosts}; clusters of jobs' own are made of groups with 1"
                )
            least = max(parallelism.num_hosts_needed, math.ceil(parallelism.min_workers / fitting))
            most = max(least, math.ceil(parallelism.world_size / fitting))
            spares = math.ceil(parallelism.spare_workers / fitting)
            spares = max(parallelism.spares, spares) if spares else 0
            return ClusterSize(shape, fitting, least + spares, most + spares)
    gpu = " and a GPU" if resources.device == "cuda" else ""
    wanted = f"{resources.cpus_per_worker:g} CPU(s){gpu}"
    offers = "; ".join(
        f"{each.address}: {each.num_cpus:g} CPU(s), {each.num_gpus:g} GPU(s)"
        for each in (shape.pod for shape in shapes)
    )
    raise SubmissionRefused(
        f"a worker takes {wanted}, which no pod of the cluster template has ({offers or 'none'}); "
        "lower resources.cpus_per_worker, change resources.device, or enlarge a worker group of "
        "the template"
    )


def shape_of(group: Mapping[str, Any]) -> GroupShape:
    """What Ray will count on a pod of a worker group, as KubeRay tells it.

    Raises `SubmissionRefused` where the group is no usable one.
    """
    try:
        (container, *_) = group["template"]["spec"]["containers"]
        resources = container.get("resources", {})
        amounts = {**resources.get("requests", {}), **resources.get("limits", {})}
        start = group.get("rayStartParams") or {}
        gpus = sum(parse_quantity(amounts[name]) for name in amounts if _GPU.search(name))
        # Ray rounds a share of a CPU up.
        cpus = math.ceil(parse_quantity(amounts.get("cpu", 0)))
        pod = HostFacts(
            address=group["groupName"],
            num_cpus=float(start.get("num-cpus", cpus)),
            num_gpus=float(start.get("num-gpus", gpus)),
            memory_bytes=int(start.get("memory", parse_quantity(amounts.get("memory", 0)))),
        )
        return GroupShape(pod, num_hosts=int(group.get("numOfHosts", 1)))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise SubmissionRefused(
            f"a worker group of the cluster template cannot be read ({type(error).__name__}: "
            f"{error}); the template is no usable RayCluster, compare it with "
            "k8s/chart/templates/raycluster.yaml"
        ) from error


def hosts_of(size: ClusterSize) -> tuple[HostFacts, ...]:
    """The hosts of a cluster at its largest, which have no addresses yet."""
    pod = size.shape.pod
    return tuple(replace(pod, address=f"{pod.address}-{index}") for index in range(size.max_pods))


# ---- RayJob and Secret

GROUP, VERSION = "ray.io", "v1"
MANAGER = "shardloom"
MANAGED_BY = "app.kubernetes.io/managed-by"
ATTEMPT = "shardloom.io/attempt"
JOB = "shardloom.io/job"
PROJECT = "shardloom.io/project"
JOB_NAME = "shardloom.io/job-name"
PRIORITY = "shardloom.io/priority"
SUBMITTED = "shardloom.io/submitted"
LET_GO = "shardloom.io/let-go"
SECRET = "shardloom.io/secret"
SELECTOR = f"{MANAGED_BY}={MANAGER}"
QUEUE = "kueue.x-k8s.io/queue-name"
VOLCANO_QUEUE = "volcano.sh/queue-name"
ELASTIC = "kueue.x-k8s.io/elastic-job"
# Of KubeRay: a head that is lost is not made again to start the driver a second time.
_NO_SECOND_HEAD = "ray.io/disable-provisioned-head-restart"
# KubeRay: a RayJob's name is a DNS-1035 label of no more than this.
_MAX_NAME_CHARS = 47
# Key of Ray's token in the Secret that `authOptions.secretName` names.
_RAY_TOKEN = "auth_token"
# KubeRay: what it tells Ray of as GPUs, slices of NVIDIA's among them.
_GPU = re.compile(r"gpu$|nvidia\.com/mig-\d+g\.\d+gb$")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
# Of one cluster's life, not of how clusters are made.
_OF_CLUSTER = ("gcsFaultToleranceOptions", "managedBy", "suspend", "upgradeStrategy")
_OF_GROUP = ("scaleStrategy", "suspend")


@dataclass(frozen=True)
class ClusterOptions:
    """What the service's settings say of clusters that it makes.

    A cluster goes `ttl_s` seconds after its job has ended. `queue` is the Kueue queue of jobs that
    name none. `ray_token_of` gives the token of the Ray of an attempt where clusters are isolated;
    without, they are not, and have the template's token.
    """

    namespace: str
    ttl_s: int = 60
    queue: str | None = None
    ray_token_of: Callable[[str], str] | None = None


def name_of(attempt_id: str) -> str:
    if len(attempt_id) <= _MAX_NAME_CHARS and _NAME.fullmatch(attempt_id):
        return attempt_id
    return f"{MANAGER}-{hashlib.sha256(attempt_id.encode()).hexdigest()[:24]}"


def secret_name_of(rayjob: Mapping[str, Any]) -> str:
    """The name of the Secret that the pods of a RayJob take their environment from."""
    return str(rayjob["metadata"]["annotations"][SECRET])


def attempt_of(manifest: Mapping[str, Any]) -> str | None:
    """The attempt that an object was made for; None where it is none of ours."""
    metadata = manifest.get("metadata", {})
    if (metadata.get("labels") or {}).get(MANAGED_BY) != MANAGER:
        return None
    found = (metadata.get("annotations") or {}).get(ATTEMPT)
    return None if found is None else str(found)


def secret_of(
    submission: Submission, rayjob: Mapping[str, Any], options: ClusterOptions
) -> Manifest:
    """The environment of the driver and its workers, to be deleted with the RayJob."""
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "RayJob",
        "name": rayjob["metadata"]["name"],
        "uid": rayjob["metadata"]["uid"],
    }
    metadata = _metadata(submission, options, secret_name_of(rayjob))
    data = dict(submission.env)
    if options.ray_token_of:
        data[_RAY_TOKEN] = options.ray_token_of(submission.attempt_id)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {**metadata, "ownerReferences": [owner]},
        "type": "Opaque",
        "stringData": data,
    }


def release_of(rayjob: Mapping[str, Any]) -> Manifest:
    """The change that ends a submission: what Kueue does not hold back may start."""
    annotations = {SUBMITTED: "true"}
    if QUEUE in rayjob["metadata"].get("labels", {}):
        return {"metadata": {"annotations": annotations}}
    return {
        "metadata": {"annotations": {**annotations, LET_GO: "true"}},
        "spec": {"suspend": False},
    }


def was_let_go(rayjob: Mapping[str, Any]) -> bool:
    """Whether a RayJob is known to have been let go, whether or not it still is."""
    return (rayjob["metadata"].get("annotations") or {}).get(LET_GO) == "true"


def is_submitted(rayjob: Mapping[str, Any]) -> bool:
    """Whether a submission was carried through."""
    annotations = rayjob["metadata"].get("annotations") or {}
    return annotations.get(SUBMITTED) == "true"


def rayjob_of(
    submission: Submission, template: Mapping[str, Any], options: ClusterOptions, nonce: str = "0"
) -> Manifest:
    """The RayJob of an attempt, from the manifest of a RayCluster.

    `nonce` tells its Secret from those of other RayJobs of the same name. Raises
    `SubmissionRefused` where the template holds none of the job's workers, or is none.
    """
    name = name_of(submission.attempt_id)
    secret = f"{name}-env-{nonce}"
    try:
        spec = _cluster_spec(submission, template["spec"], secret)
        if options.ray_token_of:
            _isolate(spec, submission, secret)
        labels = (template.get("metadata") or {}).get("labels") or {}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise SubmissionRefused(
            f"the cluster template is no usable RayCluster ({type(error).__name__}: {error}); "
            "compare it with k8s/chart/templates/raycluster.yaml"
        ) from error
    resources = submission.spec.resources
    queue = resources.queue or options.queue
    metadata = _metadata(submission, options, name)
    metadata["annotations"] |= {SECRET: secret, _NO_SECOND_HEAD: "true"}
    spec["headGroupSpec"]["template"]["spec"]["restartPolicy"] = "Never"
    if VOLCANO_QUEUE in labels:
        metadata["labels"][VOLCANO_QUEUE] = labels[VOLCANO_QUEUE]
    if queue:
        metadata["labels"][QUEUE] = queue
        if spec["enableInTreeAutoscaling"]:
            metadata["annotations"][ELASTIC] = "true"
    job = {
        "entrypoint": submission.entrypoint,
        "jobId": submission.attempt_id,
        "metadata": dict(submission.metadata),
        "submissionMode": "HTTPMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": options.ttl_s,
        "backoffLimit": 0,
        "suspend": True,
        "rayClusterSpec": spec,
    }
    if resources.deadline_s:
        job["activeDeadlineSeconds"] = resources.deadline_s
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "RayJob", "metadata": metadata, "spec": job}


def _metadata(submission: Submission, options: ClusterOptions, name: str) -> Manifest:
    return {
        "name": name,
        "namespace": options.namespace,
        "labels": {
            "app.kubernetes.io/part-of": MANAGER,
            MANAGED_BY: MANAGER,
            **_own_labels(submission),
        },
        # What need not fit a label, in full.
        "annotations": {
            ATTEMPT: submission.attempt_id,
            JOB_NAME: submission.spec.name,
            PRIORITY: str(submission.spec.priority),
        },
    }


def _own_labels(submission: Submission) -> dict[str, str]:
    return {
        JOB: label_value(submission.job_id),
        ATTEMPT: label_value(submission.attempt_id),
        PROJECT: label_value(submission.spec.project),
    }


def label_value(text: str) -> str:
    """A text as the value of a label: itself, or its hash where that is not allowed."""
    if _LABEL_VALUE.fullmatch(text):
        return text
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _cluster_spec(submission: Submission, template: Mapping[str, Any], secret: str) -> Manifest:
    spec: Manifest = copy.deepcopy({**template})
    for name in _OF_CLUSTER:
        spec.pop(name, None)
    size = size_of(submission.spec, spec["workerGroupSpecs"])
    spec["workerGroupSpecs"] = _groups(spec["workerGroupSpecs"], size, submission.spec)
    # A cluster of one size is kept at it by the operator.
    spec["enableInTreeAutoscaling"] = size.is_elastic
    if not size.is_elastic:
        spec.pop("autoscalerOptions", None)
    source = {"secretRef": {"name": secret}}
    for pod in _pods(spec):
        labels = pod.setdefault("metadata", {}).setdefault("labels", {})
        labels |= _own_labels(submission)
        container = pod["spec"]["containers"][0]
        container["envFrom"] = [*container.get("envFrom", []), source]
    return spec


def _pods(spec: Manifest) -> list[Manifest]:
    """The templates of a cluster's pods, the head's first."""
    return [each["template"] for each in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def _isolate(spec: Manifest, submission: Submission, secret: str) -> None:
    """Take from a cluster what it would share with those of other projects."""
    spec["authOptions"] = {"mode": "token", "secretName": secret}
    run_dir = PurePosixPath(submission.env["SHARDLOOM_RUN_DIR"])
    for pod in _pods(spec):
        containers = [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
        mounts = [mount for each in containers for mount in each.get("volumeMounts", [])]
        found = [each for each in mounts if run_dir.is_relative_to(each["mountPath"])]
        if not found:
            raise SubmissionRefused(
                f"no volume of the cluster template is mounted over run storage ({run_dir}), of "
                "which a job of an isolated project sees its own folder only; compare it with "
                "k8s/chart/templates/raycluster.yaml"
            )
        for mount in found:
            below = run_dir.relative_to(mount["mountPath"])
            mount["subPath"] = str(PurePosixPath(mount.get("subPath", ""), below))
            mount["mountPath"] = str(run_dir)


def _groups(groups: list[Manifest], size: ClusterSize, spec: JobSpec) -> list[Manifest]:
    """The group that holds the fewest workers, and those of its kind that may add more."""
    kept = []
    for group in groups:
        if group["groupName"] == size.shape.pod.address:
            kept.append(_resized(group, size.min_pods, size.max_pods, size))
        elif size.is_elastic and kept and _is_alike(group, size, spec):
            kept.append(_resized(group, 0, size.max_pods - size.min_pods, size))
    return kept


def _is_alike(group: Manifest, size: ClusterSize, spec: JobSpec) -> bool:
    """Whether as many workers fit its pods, on the same device, and each pod comes alone."""
    shape = shape_of(group)
    is_same_device = shape.gives_gpus(spec) == size.shape.gives_gpus(spec)
    is_same_room = shape.num_fitting(spec) == size.num_fitting
    return is_same_device and is_same_room and shape.num_hosts == size.shape.num_hosts


def _resized(group: Manifest, least: int, most: int, size: ClusterSize) -> Manifest:
    resized = {name: value for name, value in group.items() if name not in _OF_GROUP}
    if not size.is_elastic:
        resized.pop("idleTimeoutSeconds", None)
    return {**resized, "replicas": least, "minReplicas": least, "maxReplicas": most}
