"""The states of a RayJob as KubeRay v1.7 goes through them: what to do next, decided purely."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml

Manifest = dict[str, Any]

FINALIZER = "ray.io/rayjob-finalizer"
TERMINAL_JOB = ("SUCCEEDED", "FAILED", "STOPPED")
ENDED = ("Complete", "Failed")
_NAME_CHARS = "bcdfghjklmnpqrstvwxz2456789"
_MOST_NAME_CHARS = 47
_NEVER_RETRIED = ("DeadlineExceeded", "JobStatusCheckTimeoutExceeded")


@dataclass(frozen=True)
class JobInfo:
    """What Ray says of a job; times in milliseconds since the epoch, 0 for none."""

    status: str
    message: str = ""
    start_ms: int = 0
    end_ms: int = 0


def time_text(moment: datetime) -> str:
    """A time as Kubernetes writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _time_of(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def deployment_status(job: Manifest) -> str:
    """The state that the operator left a RayJob in; empty for a new one."""
    return str(job.get("status", {}).get("jobDeploymentStatus", ""))


def validation_error(job: Manifest) -> str | None:
    """Why KubeRay would not run a RayJob that its schema allows."""
    name, spec = job["metadata"]["name"], job.get("spec", {})
    about, body = "The RayJob metadata is invalid: ", "The RayJob spec is invalid: "
    if len(name) > _MOST_NAME_CHARS:
        return f"{about}RayJob name should be no more than {_MOST_NAME_CHARS} characters"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        return f"{about}RayJob name should be a valid DNS1035 label: {name}"
    if spec.get("suspend") and not spec.get("shutdownAfterJobFinishes"):
        return (
            f"{body}a RayJob with shutdownAfterJobFinishes set to false is not allowed to be "
            "suspended"
        )
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        return f"{body}a RayJob with TTLSecondsAfterFinished needs shutdownAfterJobFinishes"
    if not spec.get("rayClusterSpec") and not spec.get("clusterSelector"):
        return f"{body}one of RayClusterSpec or ClusterSelector must be set"
    if spec.get("activeDeadlineSeconds", 1) <= 0:
        return f"{body}activeDeadlineSeconds must be a positive integer"
    if spec.get("backoffLimit", 0) < 0:
        return f"{body}backoffLimit must be a positive integer"
    return _sidecar_error(spec) or _runtime_env_error(spec)


def _sidecar_error(spec: Manifest) -> str | None:
    if spec.get("submissionMode") != "SidecarMode":
        return None
    for name in ("submitterPodTemplate", "submitterConfig"):
        if name in spec:
            return f"Currently, SidecarMode doesn't support {name[0].upper()}{name[1:]}"
    pod = spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {})
    if pod.get("spec", {}).get("restartPolicy", "Never") != "Never":
        return "restartPolicy for head Pod should be Never or unset when using SidecarMode"
    return None


def _runtime_env_error(spec: Manifest) -> str | None:
    try:
        runtime_env = yaml.safe_load(spec.get("runtimeEnvYAML") or "{}")
    except yaml.YAMLError as error:
        return f"failed to unmarshal RuntimeEnvYAML: {error}"
    return None if isinstance(runtime_env, dict) else "failed to unmarshal RuntimeEnvYAML"


def initialized(job: Manifest, now: datetime) -> Manifest:
    """Status of a RayJob that the operator takes on: names are chosen before anything is made."""
    name, spec, status = job["metadata"]["name"], job["spec"], dict(job.get("status", {}))
    if not status.get("jobId"):
        status["jobId"] = spec.get("jobId") or f"{name}-{_suffix()}"
    if not status.get("rayClusterName"):
        chosen = spec.get("clusterSelector", {}).get("ray.io/cluster")
        status["rayClusterName"] = chosen or f"{name}-{_suffix()}"
    return {**status, "jobDeploymentStatus": "Initializing", "startTime": time_text(now)}


def _suffix() -> str:
    return "".join(secrets.choice(_NAME_CHARS) for _ in range(5))


def past_deadline(job: Manifest, now: datetime) -> Manifest | None:
    """Status of a RayJob that took longer than it may; None if it did not."""
    spec, status = job["spec"], job["status"]
    started = status.get("startTime")
    limits = [("activeDeadlineSeconds", "DeadlineExceeded")]
    if status["jobDeploymentStatus"] == "Initializing":
        limits.append(("preRunningDeadlineSeconds", "PreRunningDeadlineExceeded"))
    for field, reason in limits:
        limit_s = spec.get(field)
        if limit_s and started and now >= _time_of(started) + timedelta(seconds=limit_s):
            message = (
                f"The RayJob has passed the {field}. StartTime: {started}. "
                f"{field[0].upper()}{field[1:]}: {limit_s}"
            )
            failed = {"jobDeploymentStatus": "Failed", "reason": reason, "message": message}
            return {**status, **failed}
    return None


def has_lost_its_head(job: Manifest) -> bool:
    """Whether Ray, knowing nothing of a job that it had, is away for good: no second head."""
    annotations = job["metadata"].get("annotations", {})
    is_single = annotations.get("ray.io/disable-provisioned-head-restart") == "true"
    return is_single and bool(job["status"].get("jobStatus"))


def after_check(job: Manifest, info: JobInfo) -> Manifest:
    """Status after Ray said how its job is."""
    status = {**job["status"], "jobStatus": info.status, "message": info.message}
    status.pop("reason", None)
    status.pop("jobStatusCheckFailureStartTime", None)
    if info.status in TERMINAL_JOB:
        status["jobDeploymentStatus"] = "Failed" if info.status == "FAILED" else "Complete"
        if info.status == "FAILED":
            status["reason"] = "AppFailed"
    times = {"startTime": info.start_ms, "endTime": info.end_ms}
    told = {k: time_text(datetime.fromtimestamp(v / 1000, UTC)) for k, v in times.items() if v}
    return {**status, **({"rayJobInfo": told} if told else {})}


def check_failed(job: Manifest, now: datetime, timeout_s: float) -> Manifest | None:
    """Status after Ray did not answer; Failed once that has gone on for too long."""
    status = job["status"]
    since = status.get("jobStatusCheckFailureStartTime")
    if since is None:
        return {**status, "jobStatusCheckFailureStartTime": time_text(now)}
    if now < _time_of(since) + timedelta(seconds=timeout_s):
        return None
    message = (
        f"Job status checks have been failing since {since}; exceeded timeout of {timeout_s:g}s"
    )
    reason = "JobStatusCheckTimeoutExceeded"
    return {**status, "jobDeploymentStatus": "Failed", "reason": reason, "message": message}


def counted(job: Manifest, status: Manifest, now: datetime) -> Manifest:
    """The status with its counts of ends; Retrying where the back-off limit allows one more."""
    status = {**status, "failed": status.get("failed", 0), "succeeded": status.get("succeeded", 0)}
    state = status.get("jobDeploymentStatus")
    if state == deployment_status(job):
        return status
    if state in ENDED:
        status["endTime"] = time_text(now)
    if state == "Complete" and status.get("jobStatus") == "SUCCEEDED":
        status["succeeded"] += 1
    if state == "Failed":
        status["failed"] += 1
        is_final = status.get("reason") in _NEVER_RETRIED
        if not is_final and status["failed"] <= job["spec"].get("backoffLimit", 0):
            status["jobDeploymentStatus"] = "Retrying"
    return status


def released(status: Manifest) -> Manifest:
    """Status after all that a suspended or retried RayJob had is gone."""
    kept: Manifest = {
        name: status[name] for name in ("failed", "succeeded", "startTime") if name in status
    }
    is_suspended = status["jobDeploymentStatus"] == "Suspending"
    if is_suspended:
        kept["jobDeploymentStatus"] = "Suspended"
    return kept


def is_over(job: Manifest, now: datetime) -> bool:
    """Whether the RayCluster of an ended RayJob is to be deleted by now."""
    spec, ended = job["spec"], job["status"].get("endTime")
    if not spec.get("shutdownAfterJobFinishes") or spec.get("clusterSelector") or not ended:
        return False
    return now >= _time_of(ended) + timedelta(seconds=spec.get("ttlSecondsAfterFinished", 0))


def cluster_of(job: Manifest) -> Manifest:
    """The RayCluster that KubeRay makes for a RayJob."""
    about, spec = job["metadata"], job["spec"]
    mode = spec.get("submissionMode", "K8sJobMode")
    labels = {
        **about.get("labels", {}),
        "ray.io/originated-from-cr-name": about["name"],
        "ray.io/originated-from-crd": "RayJob",
        "ray.io/job-submission-mode": mode,
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {
            "name": job["status"]["rayClusterName"],
            "namespace": about["namespace"],
            "labels": labels,
            "annotations": about.get("annotations", {}),
            "ownerReferences": [owner_reference("RayJob", job)],
        },
        "spec": spec["rayClusterSpec"],
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
