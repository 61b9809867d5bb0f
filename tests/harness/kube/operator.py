"""A stand-in for the KubeRay operator v1.7, for RayJobs and their RayClusters; and for Kueue.

It watches RayJobs over the API like any client (so it serves a real API server too) and takes
them through KubeRay's states: Initializing, Running, Complete, Failed, Suspending, Suspended; with
KubeRay's finalizer, names, owners and reasons; deadlines. With the address of a real Ray
the entrypoint really runs there; else the test says how jobs go (`ScriptedRay`).

What it does not do: validation, clusters by selector, counts of ends, K8sJobMode, InteractiveMode
and SidecarMode (all submit like HTTPMode), back-off limits, heads that are lost, shutdown after the
ttl, another start after a suspension, deletionStrategy, RayServices, Services and Ingresses,
autoscaling, batch schedulers, events. All RayJobs share the one Ray: a RayCluster that goes takes
only its own RayJob's job with it.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import httpx
import urllib3
from kubernetes import client

from tests.harness.kube.cluster import KubeCluster, RealCluster
from tests.harness.kube.objects import Manifest, time_text

_log = logging.getLogger(__name__)
_NOT_THERE = 404
FINALIZER = "ray.io/rayjob-finalizer"
TERMINAL_JOB = ("SUCCEEDED", "FAILED", "STOPPED")
ENDED = ("Complete", "Failed")
_NAME_CHARS = "bcdfghjklmnpqrstvwxz2456789"


# ---- the states of a RayJob: what to do next, decided purely


@dataclass(frozen=True)
class JobInfo:
    """What Ray says of a job."""

    status: str
    message: str = ""


def _time_of(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def deployment_status(job: Manifest) -> str:
    """The state that the operator left a RayJob in; empty for a new one."""
    return str(job.get("status", {}).get("jobDeploymentStatus", ""))


def initialized(job: Manifest, now: datetime) -> Manifest:
    """Status of a RayJob that the operator takes on: names are chosen before anything is made."""
    suffix = "".join(secrets.choice(_NAME_CHARS) for _ in range(5))
    return {
        "jobId": job["spec"]["jobId"],
        "rayClusterName": f"{job['metadata']['name']}-{suffix}",
        "jobDeploymentStatus": "Initializing",
        "startTime": time_text(now),
    }


def past_deadline(job: Manifest, now: datetime) -> Manifest | None:
    """Status of a RayJob that took longer than it may; None if it did not."""
    started, limit_s = job["status"]["startTime"], job["spec"].get("activeDeadlineSeconds")
    if not limit_s or now < _time_of(started) + timedelta(seconds=limit_s):
        return None
    message = (
        f"The RayJob has passed the activeDeadlineSeconds. StartTime: {started}. "
        f"ActiveDeadlineSeconds: {limit_s}"
    )
    failed = {"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded", "message": message}
    return {**job["status"], **failed}


def after_check(job: Manifest, info: JobInfo) -> Manifest:
    """Status after Ray said how its job is."""
    status = {**job["status"], "jobStatus": info.status, "message": info.message}
    status.pop("reason", None)
    if info.status in TERMINAL_JOB:
        status["jobDeploymentStatus"] = "Failed" if info.status == "FAILED" else "Complete"
        if info.status == "FAILED":
            status["reason"] = "AppFailed"
    return status


def cluster_of(job: Manifest) -> Manifest:
    """The RayCluster that KubeRay makes for a RayJob."""
    about = job["metadata"]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": job["status"]["rayClusterName"],
            "namespace": about["namespace"],
            "labels": about.get("labels", {}),
            "annotations": about.get("annotations", {}),
            "ownerReferences": [owner_reference("RayJob", job)],
        },
        "spec": job["spec"]["rayClusterSpec"],
    }


def owner_reference(kind: str, owner: Manifest) -> Manifest:
    """The reference that makes an object go with its owner."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": kind,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _place_of(manifest: Manifest) -> tuple[str, ...]:
    """Where a RayJob or a RayCluster is, as the client wants it."""
    about, plural = manifest["metadata"], f"{manifest['kind'].lower()}s"
    return "ray.io", "v1", about["namespace"], plural, about["name"]


# ---- where jobs run


class RayAway(Exception):
    """Ray does not answer."""


@dataclass(frozen=True)
class RayJobRequest:
    """A job as it is submitted to Ray. `env` is what the pods of the cluster have set."""

    job_id: str
    entrypoint: str
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


class RealRay:
    """Jobs on one Ray that really runs; each RayJob's cluster is taken to be this one.

    Methods raise `RayAway`.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address = address.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._http = httpx.Client(base_url=self.address, headers=headers, timeout=30)

    def submit(self, request: RayJobRequest) -> None:
        """Start a job; what the pods would have in their environment becomes its runtime env."""
        body = {
            "entrypoint": request.entrypoint,
            "submission_id": request.job_id,
            "runtime_env": {"env_vars": request.env},
            "metadata": request.metadata,
        }
        self._call("POST", "/api/jobs/", json=body).raise_for_status()

    def info(self, job_id: str) -> JobInfo | None:
        """How a job is; None if Ray does not know it."""
        answer = self._call("GET", f"/api/jobs/{job_id}")
        if answer.status_code == 404:
            return None
        answer.raise_for_status()
        said = answer.json()
        return JobInfo(said["status"], said.get("message") or "")

    def stop(self, job_id: str) -> None:
        """End a job, if it is there."""
        self._call("POST", f"/api/jobs/{job_id}/stop")

    def _call(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **more)
        except httpx.TransportError as error:
            raise RayAway(str(error)) from error


class ScriptedRay:
    """A Ray that exists only as the test tells it: jobs run until the test ends them."""

    address = "http://ray-head.invalid:8265"

    def __init__(self) -> None:
        self.submitted: list[RayJobRequest] = []
        self._jobs: dict[str, JobInfo] = {}
        self._lock = threading.Lock()

    def submit(self, request: RayJobRequest) -> None:
        """Note a job as running."""
        with self._lock:
            self.submitted.append(request)
            self._jobs[request.job_id] = JobInfo("RUNNING", "Job is currently running.")

    def info(self, job_id: str) -> JobInfo | None:
        """What the test said of a job last."""
        with self._lock:
            return self._jobs.get(job_id)

    def stop(self, job_id: str) -> None:
        """End a job that runs."""
        with self._lock:
            known = self._jobs.get(job_id)
            is_live = known is not None and known.status not in TERMINAL_JOB
        if is_live:
            self.finish(job_id, "STOPPED", "Job was intentionally stopped.")

    def finish(self, job_id: str, status: str = "SUCCEEDED", message: str = "") -> None:
        """End a job in SUCCEEDED, FAILED or STOPPED."""
        with self._lock:
            self._jobs[job_id] = JobInfo(status, message)


# ---- RayClusters


def pods_of(cluster: Manifest) -> Iterator[Manifest]:
    """Pods that a RayCluster is to have: a head, and each group's hosts."""
    spec = cluster["spec"]
    yield _pod(cluster, "head", spec["headGroupSpec"]["template"])
    for group in spec.get("workerGroupSpecs", ()):
        for index in range(max(group.get("replicas", 0), group.get("minReplicas", 0))):
            yield _pod(cluster, f"{group['groupName']}-worker-{index}", group["template"])


def _pod(cluster: Manifest, name: str, template: Manifest) -> Manifest:
    about, cluster_name = template.get("metadata", {}), cluster["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{cluster_name}-{name}",
            "labels": {**about.get("labels", {}), "ray.io/cluster": cluster_name},
            "annotations": about.get("annotations", {}),
            "ownerReferences": [owner_reference("RayCluster", cluster)],
        },
        "spec": template["spec"],
    }


class RayClusters:
    """Makes the pods of RayClusters and says when a cluster is ready.

    `unschedulable` is a scheduler's message while there is no room: pods are made but stay
    Pending. It does not add or remove pods once they are there (no autoscaler), and makes no
    Services.
    """

    def __init__(self, api: client.ApiClient) -> None:
        self._core = client.CoreV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self.unschedulable: str | None = None

    def reconcile(self, cluster: Manifest) -> None:
        """One step for one cluster."""
        if "deletionTimestamp" in cluster["metadata"]:
            return
        wanted = list(pods_of(cluster))
        running = [self._bring_up(pod, cluster["metadata"]["namespace"]) for pod in wanted]
        status = {**cluster.get("status", {}), "desiredWorkerReplicas": len(wanted) - 1}
        if all(running):
            status["state"] = "ready"
        if status != cluster.get("status", {}):
            changed = {**cluster, "status": status}
            self._custom.replace_namespaced_custom_object_status(*_place_of(cluster), changed)

    def _bring_up(self, pod: Manifest, namespace: str) -> bool:
        """Make a pod if it is not there; says whether it runs."""
        name = pod["metadata"]["name"]
        try:
            found = self._core.read_namespaced_pod(name, namespace)
        except client.ApiException as error:
            if error.status != _NOT_THERE:
                raise
            self._core.create_namespaced_pod(namespace, pod)
            return False
        if found.status.phase == "Pending" and found.metadata.deletion_timestamp is None:
            self._core.patch_namespaced_pod_status(name, namespace, {"status": self._pod_status()})
        return bool(found.status.phase == "Running")

    def _pod_status(self) -> Manifest:
        if self.unschedulable:
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": self.unschedulable,
            }
            return {"phase": "Pending", "conditions": [condition]}
        ready = {"type": "Ready", "status": "True"}
        return {"phase": "Running", "conditions": [ready]}

    def env_of(self, cluster: Manifest) -> dict[str, str]:
        """Environment of the head's first container: plain values and those of Secrets.

        Ray's own variables are left out: they are about the pods of a real cluster.
        """
        namespace = cluster["metadata"]["namespace"]
        container = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        env: dict[str, str] = {}
        for source in container.get("envFrom", ()):
            name = source.get("secretRef", {}).get("name")
            env.update((name and self._secret(name, namespace)) or {})
        for each in container.get("env", ()):
            if "valueFrom" not in each:
                env[each["name"]] = each.get("value", "")
        return {name: value for name, value in env.items() if not name.startswith("RAY_")}

    def _secret(self, name: str, namespace: str) -> dict[str, str] | None:
        try:
            data = self._core.read_namespaced_secret(name, namespace).data or {}
        except client.ApiException as error:
            if error.status != _NOT_THERE:
                raise
            return None
        return {key: base64.b64decode(value).decode() for key, value in data.items()}


# ---- the operator


class RayJobOperator:
    """Drives the RayJobs of a cluster's namespace while the context lasts.

    `ray_address` is the dashboard of a Ray that really runs, `ray_token` its token. `poll_s` is
    the time between two polls of everything (KubeRay: 3 s). `frozen` (an event) makes the operator
    do nothing, as if its pod were down.
    """

    def __init__(
        self,
        cluster: KubeCluster,
        ray_address: str | None = None,
        *,
        ray_token: str | None = None,
        poll_s: float = 0.1,
    ) -> None:
        api = cluster.operator_client()
        self.scripted = ScriptedRay()
        self._ray: RealRay | ScriptedRay = (
            RealRay(ray_address, ray_token) if ray_address else self.scripted
        )
        self.clusters = RayClusters(api)
        self.frozen = threading.Event()
        self._custom = client.CustomObjectsApi(api)
        self._namespace = cluster.namespace
        self._poll_s = poll_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kuberay-stand-in", daemon=True)

    def __enter__(self) -> RayJobOperator:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._poll_s):
            if self.frozen.is_set():
                continue
            for plural, reconcile in (
                ("rayjobs", self._reconcile_job),
                ("rayclusters", self.clusters.reconcile),
            ):
                for manifest in self._try(partial(self._all, plural)) or ():
                    self._try(partial(reconcile, manifest))

    def _try(self, act: Callable[[], Any]) -> Any:
        """What fails is tried again in the next round: conflicts, an API server that is away."""
        try:
            return act()
        except (client.ApiException, urllib3.exceptions.HTTPError, RayAway) as error:
            _log.info("Stand-in for KubeRay tries again: %s", error)
            return None

    def _all(self, plural: str) -> list[Manifest]:
        place = ("ray.io", "v1", self._namespace, plural)
        return list(self._custom.list_namespaced_custom_object(*place)["items"])

    def _reconcile_job(self, job: Manifest) -> None:
        if "deletionTimestamp" in job["metadata"]:
            self._let_go(job)
            return
        now = datetime.now(UTC)
        status = self._next_status(job, now)
        if status is not None and status != job.get("status"):
            if status["jobDeploymentStatus"] in ENDED and deployment_status(job) not in ENDED:
                status["endTime"] = time_text(now)
            changed = {**job, "status": status}
            self._custom.replace_namespaced_custom_object_status(*_place_of(job), changed)

    def _next_status(self, job: Manifest, now: datetime) -> Manifest | None:
        state = deployment_status(job)
        if state == "":
            self._hold(job)
            return initialized(job, now)
        if state in ("Initializing", "Running"):
            if job["spec"].get("suspend"):
                return {**job["status"], "jobDeploymentStatus": "Suspending"}
            late = past_deadline(job, now)
            return late or (self._initialize(job) if state == "Initializing" else self._check(job))
        if state == "Suspending" and self._delete_cluster(job):
            return {"startTime": job["status"]["startTime"], "jobDeploymentStatus": "Suspended"}
        return None

    def _hold(self, job: Manifest) -> None:
        """Put KubeRay's finalizer on a RayJob."""
        finalizers = job["metadata"].setdefault("finalizers", [])
        if FINALIZER not in finalizers:
            finalizers.append(FINALIZER)
            job.update(self._replace(job))

    def _let_go(self, job: Manifest) -> None:
        """Stop the job of a RayJob that is to be deleted, and take the finalizer off."""
        status = job.get("status", {})
        if status.get("jobId") and status.get("jobStatus") not in TERMINAL_JOB:
            self._try(lambda: self._ray.stop(status["jobId"]))
        finalizers = job["metadata"].get("finalizers", [])
        if FINALIZER in finalizers:
            finalizers.remove(FINALIZER)
            self._replace(job)

    def _initialize(self, job: Manifest) -> Manifest | None:
        cluster = self._cluster(job)
        if cluster.get("status", {}).get("state") != "ready":
            return {**job["status"], "rayClusterStatus": cluster.get("status", {})}
        address = self._ray.address.removeprefix("http://")
        return {**job["status"], "dashboardURL": address, "jobDeploymentStatus": "Running"}

    def _check(self, job: Manifest) -> Manifest | None:
        cluster = self._cluster(job)
        info = self._ray.info(job["status"]["jobId"])
        if info is None:
            self._ray.submit(self._request(job, cluster))
            return None
        return {**after_check(job, info), "rayClusterStatus": cluster.get("status", {})}

    def _request(self, job: Manifest, cluster: Manifest) -> RayJobRequest:
        spec = job["spec"]
        return RayJobRequest(
            job_id=job["status"]["jobId"],
            entrypoint=spec.get("entrypoint", ""),
            metadata=spec.get("metadata", {}),
            env=self.clusters.env_of(cluster),
        )

    def _cluster(self, job: Manifest) -> Manifest:
        """The RayCluster of a RayJob; made if it is not there."""
        found = self._find_cluster(job)
        if found is not None:
            return found
        wanted = cluster_of(job)
        return self._custom.create_namespaced_custom_object(*_place_of(wanted)[:-1], wanted)

    def _find_cluster(self, job: Manifest) -> Manifest | None:
        if not job["status"].get("rayClusterName"):
            return None
        try:
            return self._custom.get_namespaced_custom_object(*_place_of(cluster_of(job)))
        except client.ApiException as error:
            if error.status != _NOT_THERE:
                raise
            return None

    def _delete_cluster(self, job: Manifest) -> bool:
        """Delete the RayCluster of a RayJob, and with it what runs there; says if it is gone."""
        cluster = self._find_cluster(job)
        if cluster is None:
            return True
        if job["status"].get("jobStatus") not in TERMINAL_JOB:
            self._try(lambda: self._ray.stop(job["status"]["jobId"]))
        if "deletionTimestamp" not in cluster["metadata"]:
            self._custom.delete_namespaced_custom_object(*_place_of(cluster))
        return False

    def _replace(self, job: Manifest) -> Manifest:
        return self._custom.replace_namespaced_custom_object(*_place_of(job), job)


@contextmanager
def operator_for(cluster: KubeCluster, **options: Any) -> Iterator[RayJobOperator | None]:
    """The stand-in for KubeRay; None where the real one runs."""
    if isinstance(cluster, RealCluster) and cluster.has_operator():
        yield None
        return
    with RayJobOperator(cluster, **options) as operator:
        yield operator


class KueueStandIn:
    """Kueue as a RayJob sees it that was made suspended: held back until it is admitted.

    There are no webhook, Workload objects and quotas: the test admits and evicts.
    """

    def __init__(self, cluster: KubeCluster) -> None:
        self._custom = client.CustomObjectsApi(cluster.operator_client())
        self._namespace = cluster.namespace

    def admit(self, name: str) -> None:
        """Let a RayJob start."""
        self._suspend(name, False)

    def evict(self, name: str) -> None:
        """Take the room of a RayJob away, as for one of higher priority."""
        self._suspend(name, True)

    def _suspend(self, name: str, is_suspended: bool) -> None:
        place = ("ray.io", "v1", self._namespace, "rayjobs", name)
        change = {"spec": {"suspend": is_suspended}}
        self._custom.patch_namespaced_custom_object(*place, change)
