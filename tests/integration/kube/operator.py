"""A stand-in for the KubeRay operator v1.7, for RayJobs and their RayClusters.

It watches RayJobs over the API like any client (so it serves a real API server too) and takes
them through KubeRay's states: Initializing, Running, Complete, Failed, ValidationFailed,
Suspending, Suspended, Retrying; with KubeRay's finalizer, names, labels, owners, reasons and
counts; deadlines, back-off limit, shutdown after the ttl. With the address of a real Ray the
entrypoint really runs there; else the test says how jobs go (`ScriptedRay`).

What it does not do: K8sJobMode and InteractiveMode (a job of K8sJobMode is submitted like one of
HTTPMode, without a Kubernetes Job), SidecarMode (it submits like HTTPMode too),
deletionStrategy, RayServices, Services and Ingresses, autoscaling, batch schedulers, events.
All RayJobs share the one Ray: a RayCluster that goes takes only its own RayJob's job with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import urllib3
import yaml
from kubernetes import client

from tests.integration.kube import rayjob_states as states
from tests.integration.kube.ray_clusters import RayClusters
from tests.integration.kube.ray_jobs_api import Ray, RayAway, RayJobRequest, RealRay, ScriptedRay
from tests.integration.kube.rayjob_states import Manifest

_log = logging.getLogger(__name__)
_GROUP, _VERSION = "ray.io", "v1"
_NOT_THERE = 404


class HasOperatorClient(Protocol):
    """An API server, ours or a real one, that gives the operator a client of its own."""

    def operator_client(self) -> client.ApiClient:
        """A client that may do all that KubeRay may."""


class RayJobOperator:
    """Drives the RayJobs of all namespaces (or of one) while the context lasts.

    `ray_address` is the dashboard of a Ray that really runs, `ray_token` its token. `poll_s` is
    the time between two looks at everything (KubeRay: 3 s); `check_timeout_s` how long Ray may be
    away before a RayJob fails. `frozen` (an event) makes the operator do nothing, as if its pod
    were down.
    """

    def __init__(
        self,
        server: HasOperatorClient,
        ray_address: str | None = None,
        *,
        ray_token: str | None = None,
        namespace: str | None = None,
        poll_s: float = 0.1,
        check_timeout_s: float = 300.0,
    ) -> None:
        api = server.operator_client()
        self.scripted = ScriptedRay()
        self._ray: Ray = RealRay(ray_address, ray_token) if ray_address else self.scripted
        self.clusters = RayClusters(api)
        self.frozen = threading.Event()
        self._custom = client.CustomObjectsApi(api)
        self._namespace = namespace
        self._poll_s = poll_s
        self._check_timeout_s = check_timeout_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kuberay-stand-in", daemon=True)

    def __enter__(self) -> RayJobOperator:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        if self._namespace is None:
            found = self._custom.list_cluster_custom_object(_GROUP, _VERSION, plural)
        else:
            found = self._custom.list_namespaced_custom_object(
                _GROUP, _VERSION, self._namespace, plural
            )
        items: list[Manifest] = found["items"]
        return items

    def _reconcile_job(self, job: Manifest) -> None:
        if "deletionTimestamp" in job["metadata"]:
            self._let_go(job)
            return
        if states.deployment_status(job) == "ValidationFailed":
            return
        now = datetime.now(UTC)
        error = states.validation_error(job)
        if error:
            failed = {"jobDeploymentStatus": "ValidationFailed", "reason": "ValidationFailed"}
            self._write_status(job, {**job.get("status", {}), **failed, "message": error})
            return
        status = self._next_status(job, now)
        if status is not None and status != job.get("status"):
            self._write_status(job, states.counted(job, status, now))

    def _next_status(self, job: Manifest, now: datetime) -> Manifest | None:
        state = states.deployment_status(job)
        if state == "":
            self._hold(job)
            return states.initialized(job, now)
        if state in ("Initializing", "Running"):
            if job["spec"].get("suspend"):
                return {**job["status"], "jobDeploymentStatus": "Suspending"}
            late = states.past_deadline(job, now)
            return late or (
                self._initialize(job) if state == "Initializing" else self._check(job, now)
            )
        if state in ("Suspending", "Retrying"):
            return states.released(job["status"]) if self._delete_cluster(job) else None
        if state == "Suspended" and not job["spec"].get("suspend"):
            return {**job["status"], "jobDeploymentStatus": ""}
        if state in states.ENDED and states.is_over(job, now):
            self._delete_cluster(job)
        return None

    def _hold(self, job: Manifest) -> None:
        """Put KubeRay's finalizer on a RayJob."""
        finalizers = job["metadata"].setdefault("finalizers", [])
        if states.FINALIZER not in finalizers:
            finalizers.append(states.FINALIZER)
            job.update(self._replace(job))

    def _let_go(self, job: Manifest) -> None:
        """Stop the job of a RayJob that is to be deleted, and take the finalizer off."""
        status = job.get("status", {})
        if status.get("jobId") and status.get("jobStatus") not in states.TERMINAL_JOB:
            self._try(lambda: self._ray.stop(status["jobId"]))
        finalizers = job["metadata"].get("finalizers", [])
        if states.FINALIZER in finalizers:
            finalizers.remove(states.FINALIZER)
            self._replace(job)

    def _initialize(self, job: Manifest) -> Manifest | None:
        cluster = self._cluster(job)
        if cluster.get("status", {}).get("state") != "ready":
            return {**job["status"], "rayClusterStatus": cluster.get("status", {})}
        address = self._ray.address.removeprefix("http://")
        return {**job["status"], "dashboardURL": address, "jobDeploymentStatus": "Running"}

    def _check(self, job: Manifest, now: datetime) -> Manifest | None:
        cluster = self._cluster(job)
        try:
            info = self._ray.info(job["status"]["jobId"])
            if info is None and states.has_lost_its_head(job):
                raise RayAway("its head is gone, and is not made again")
            if info is None:
                self._ray.submit(self._request(job, cluster))
                return None
        except RayAway:
            return states.check_failed(job, now, self._check_timeout_s)
        return {**states.after_check(job, info), "rayClusterStatus": cluster.get("status", {})}

    def _request(self, job: Manifest, cluster: Manifest) -> RayJobRequest:
        spec = job["spec"]
        return RayJobRequest(
            job_id=job["status"]["jobId"],
            entrypoint=spec.get("entrypoint", ""),
            runtime_env=yaml.safe_load(spec.get("runtimeEnvYAML") or "{}"),
            metadata=spec.get("metadata", {}),
            env=self.clusters.env_of(cluster),
            num_cpus=spec.get("entrypointNumCpus"),
            num_gpus=spec.get("entrypointNumGpus"),
        )

    def _cluster(self, job: Manifest) -> Manifest:
        """The RayCluster of a RayJob; made if it is not there."""
        found = self._find_cluster(job)
        if found is not None:
            return found
        about = job["metadata"]
        made: Manifest = self._custom.create_namespaced_custom_object(
            _GROUP, _VERSION, about["namespace"], "rayclusters", states.cluster_of(job)
        )
        return made

    def _find_cluster(self, job: Manifest) -> Manifest | None:
        namespace, name = job["metadata"]["namespace"], job["status"].get("rayClusterName")
        if not name:
            return None
        try:
            found: Manifest = self._custom.get_namespaced_custom_object(
                _GROUP, _VERSION, namespace, "rayclusters", name
            )
        except client.ApiException as error:
            if error.status != _NOT_THERE:
                raise
            return None
        return found

    def _delete_cluster(self, job: Manifest) -> bool:
        """Delete the RayCluster of a RayJob, and with it what runs there; says if it is gone."""
        cluster = self._find_cluster(job)
        if cluster is None:
            return True
        if job["status"].get("jobStatus") not in states.TERMINAL_JOB:
            self._try(lambda: self._ray.stop(job["status"]["jobId"]))
        if "deletionTimestamp" not in cluster["metadata"]:
            about = cluster["metadata"]
            self._custom.delete_namespaced_custom_object(
                _GROUP, _VERSION, about["namespace"], "rayclusters", about["name"]
            )
        return False

    def _replace(self, job: Manifest) -> Manifest:
        about = job["metadata"]
        replaced: Manifest = self._custom.replace_namespaced_custom_object(
            _GROUP, _VERSION, about["namespace"], "rayjobs", about["name"], job
        )
        return replaced

    def _write_status(self, job: Manifest, status: Manifest) -> None:
        about = job["metadata"]
        self._custom.replace_namespaced_custom_object_status(
            _GROUP,
            _VERSION,
            about["namespace"],
            "rayjobs",
            about["name"],
            {**job, "status": status},
        )


class KueueStandIn:
    """Kueue as a RayJob sees it: held back by `suspend` until it is admitted.

    In an API server of ours it acts as Kueue's webhook too: a RayJob with a queue is suspended as
    it is created. In a real one without Kueue, whoever creates it must suspend it. There are no
    Workload objects and no quotas: the test admits and evicts.
    """

    QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

    def __init__(self, server: HasOperatorClient) -> None:
        self._custom = client.CustomObjectsApi(server.operator_client())
        ours = getattr(server, "server", server)
        mutators: list[Callable[[Manifest], Manifest]] = getattr(ours, "mutators", [])
        mutators.append(self._suspended)

    def _suspended(self, manifest: Manifest) -> Manifest:
        labels = manifest["metadata"].get("labels") or {}
        if manifest["kind"] != "RayJob" or self.QUEUE_LABEL not in labels:
            return manifest
        return {**manifest, "spec": {**manifest["spec"], "suspend": True}}

    def admit(self, namespace: str, name: str) -> None:
        """Let a RayJob start."""
        self._suspend(namespace, name, False)

    def evict(self, namespace: str, name: str) -> None:
        """Take the room of a RayJob away, as for one of higher priority."""
        self._suspend(namespace, name, True)

    def _suspend(self, namespace: str, name: str, is_suspended: bool) -> None:
        self._custom.patch_namespaced_custom_object(
            _GROUP, _VERSION, namespace, "rayjobs", name, {"spec": {"suspend": is_suspended}}
        )
