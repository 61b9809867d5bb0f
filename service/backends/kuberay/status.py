"""What a RayJob, its pods and its events say of an attempt, as one observation. Pure.

The words are KubeRay's (ray-operator/apis/ray/v1/rayjob_types.go, v1.7.0): `jobDeploymentStatus` is
where the operator is, `jobStatus` what Ray says of the driver, `reason` why the operator gave up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from service.backends.kuberay.manifest import QUEUE, Manifest, is_submitted, was_let_go
from service.backends.ray_jobs import verdict_and_log
from service.domain.models import EndReason, Observation, ObservedState

_ENDS = ("SUCCEEDED", "FAILED", "STOPPED")
# A warning that is older than this tells of something that is over.
_WARNING_AGE_S = 300.0
# What the operator gives as its reason, and what that is to a job: None leaves it to what the
# driver said, and else counts it as the driver's loss.
_REASONS: dict[str, tuple[EndReason | None, str]] = {
    "AppFailed": (None, "the driver failed"),
    "SubmissionFailed": (None, "KubeRay could not hand the driver's command to Ray"),
    "DeadlineExceeded": (None, "the cluster reached resources.deadline_s"),
    "PreRunningDeadlineExceeded": (EndReason.NO_ROOM, "the cluster did not start in time"),
    "JobStatusCheckTimeoutExceeded": (EndReason.HOST_LOST, "the cluster's head was lost"),
    "JobDeploymentStatusTransitionGracePeriodExceeded": (None, "KubeRay gave the job up"),
    "ValidationFailed": (EndReason.SUBMISSION_REFUSED, "KubeRay refuses the RayJob"),
}
_BAD_WAITS = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)
_MAX_CHARS = 500
_UNREACHED = (
    "KubeRay's operator did not reach the head at {url}; is its port open to the operator's "
    "namespace?"
)


def observation_of(rayjob: Mapping[str, Any], pod_problem: str = "") -> Observation:
    """What a RayJob says; `pod_problem` is what keeps its pods from running, if anything does."""
    status = rayjob.get("status") or {}
    deployment, job = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    if is_evicted(rayjob):
        message = "Kueue took the cluster back for something else; it was deleted"
        return Observation(ObservedState.FAILED, message, EndReason.PREEMPTED)
    if (deployment, job) == ("Running", "RUNNING"):
        return Observation(ObservedState.RUNNING)
    if deployment in ("Running", "Complete") and job in _ENDS:
        return Observation(ObservedState[job], "".join(verdict_and_log(status.get("message"))))
    if is_over(rayjob):
        return _failure(status)
    return Observation(ObservedState.PENDING, _pending_message(rayjob, status, pod_problem))


def is_over(rayjob: Mapping[str, Any]) -> bool:
    """Whether KubeRay does nothing more for a job than to take its cluster down."""
    status = rayjob.get("status") or {}
    return status.get("jobDeploymentStatus") in ("Complete", "Failed", "ValidationFailed")


def is_given_up(rayjob: Mapping[str, Any]) -> bool:
    """Whether KubeRay gave a job up whose driver may run on, until its cluster goes."""
    status = rayjob.get("status") or {}
    is_failed = status.get("jobDeploymentStatus") == "Failed"
    return is_failed and status.get("jobStatus", "") not in _ENDS


def going_since(rayjob: Mapping[str, Any]) -> str | None:
    """When the deletion of a RayJob was asked for; None where it was not."""
    since = rayjob["metadata"].get("deletionTimestamp")
    return None if since is None else str(since)


def is_cut_off(rayjob: Mapping[str, Any]) -> bool:
    """Whether its submission did not get to the end; Kueue may have let it go all the same."""
    return not is_submitted(rayjob) and not is_over(rayjob)


def is_pending(rayjob: Mapping[str, Any]) -> bool:
    """Whether the driver has not been started."""
    return observation_of(rayjob).state is ObservedState.PENDING


def is_suspended(rayjob: Mapping[str, Any]) -> bool:
    """Whether the RayJob has no cluster because it waits to be admitted."""
    return bool(rayjob["spec"].get("suspend"))


def is_evicted(rayjob: Mapping[str, Any]) -> bool:
    """Whether a job that was let go has been suspended again.

    KubeRay would start the driver once more, in a new cluster and as the same attempt, when Kueue
    admits it again; attempts are for the service to make. That it was let go is noted on it, by
    who let it go or by the first poll that saw it so.
    """
    return is_suspended(rayjob) and not is_over(rayjob) and was_let_go(rayjob)


def _failure(status: Mapping[str, Any]) -> Observation:
    name = str(status.get("reason") or "")
    reason, words = _REASONS.get(name, (None, "KubeRay gave the job up"))
    detail, log = verdict_and_log(status.get("message"))
    if name == "JobStatusCheckTimeoutExceeded" and not status.get("jobStatus"):
        # No head was lost: it was never reached, and each attempt would meet the same.
        reason, words = None, _UNREACHED.format(url=status.get("dashboardURL", "its address"))
    message = f"{words} ({name}): {detail}" if detail else f"{words} ({name})"
    if "head pod not found" in detail.lower():
        reason = EndReason.HOST_LOST
    return Observation(ObservedState.FAILED, (message if name else words) + log, reason)


def _pending_message(rayjob: Mapping[str, Any], status: Mapping[str, Any], pod_problem: str) -> str:
    """Why a job has not started yet."""
    metadata = rayjob["metadata"]
    if is_suspended(rayjob):
        queue = (metadata.get("labels") or {}).get(QUEUE)
        what = f"admission by Kueue queue {queue}" if queue else "spec.suspend to be lifted"
        return f"its cluster waits for {what}"
    if pod_problem:
        return f"its cluster does not start: {pod_problem}"
    cluster = status.get("rayClusterStatus") or {}
    if status.get("jobStatusCheckFailureStartTime"):
        url = status.get("dashboardURL", "its address")
        since = status["jobStatusCheckFailureStartTime"]
        return f"its cluster is up, but since {since} {_UNREACHED.format(url=url)}"
    if status.get("jobDeploymentStatus") == "Running":
        return "its cluster is up, and the driver starts"
    ready, wanted = cluster.get("readyWorkerReplicas", 0), cluster.get("desiredWorkerReplicas")
    if wanted:
        return f"its cluster starts: {ready} of {wanted} hosts are ready"
    if status.get("jobDeploymentStatus"):
        return "its cluster starts"
    return "its RayJob waits for KubeRay's operator (if that lasts: is it at work?)"


def pod_problem_in(pods: Sequence[Manifest], *, with_ended: bool = False) -> str:
    """What keeps pods from running, in a sentence, with where it was seen; empty if nothing does.

    `with_ended` tells of those that have ended, too, where none of them should.
    """
    for found in (*([_ended] if with_ended else []), _stuck, _unscheduled):
        for pod in pods:
            message = found(pod.get("status") or {})
            if message:
                return f"pod {pod['metadata']['name']}: {message}"[:_MAX_CHARS]
    return ""


def event_problem_in(events: Sequence[Manifest], now: float) -> str:
    """The newest warning, as of pods that could not even be made; old ones are over."""
    warnings = [event for event in events if event.get("type") == "Warning"]
    newest = max(warnings, key=_time_of, default=None)
    if newest is None or now - unix_s(_time_of(newest), now) > _WARNING_AGE_S:
        return ""
    return f"{newest.get('reason')}: {newest.get('message')}"[:_MAX_CHARS]


def _containers(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    names = ("initContainerStatuses", "containerStatuses")
    return [each for name in names for each in status.get(name) or ()]


def _stuck(status: Mapping[str, Any]) -> str:
    """A container that cannot be started."""
    for each in _containers(status):
        waiting = (each.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in _BAD_WAITS:
            return f"{waiting['reason']}: {waiting.get('message', 'no message')}"
    return ""


def _ended(status: Mapping[str, Any]) -> str:
    """A pod that was evicted or not let in by its machine, or a container that failed."""
    if status.get("phase") == "Failed" and status.get("reason"):
        return f"{status['reason']}: {status.get('message', 'no message')}"
    for each in _containers(status):
        for state in (each.get("state") or {}, each.get("lastState") or {}):
            end = state.get("terminated") or {}
            if end.get("exitCode") and not each.get("ready"):
                return f"{each.get('name')} ended: {end.get('reason')}, exit code {end['exitCode']}"
    return ""


def _unscheduled(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or ():
        is_unscheduled = condition.get("type") == "PodScheduled" and condition["status"] == "False"
        if is_unscheduled and condition.get("reason") in ("Unschedulable", "SchedulingGated"):
            return f"{condition['reason']}: {condition.get('message', 'no message')}"
    return ""


def _time_of(event: Mapping[str, Any]) -> str:
    """When an event was last seen; texts of RFC 3339 sort by time."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return str(next((time for time in times if time), ""))


def unix_s(text: str, otherwise: float = 0.0) -> float:
    """A time as Kubernetes writes it in Unix seconds; `otherwise` where it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return otherwise
