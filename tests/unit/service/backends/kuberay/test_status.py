"""What a RayJob and its pods say of an attempt, in the words of the lifecycle."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from service.backends.kuberay.backend import KEEP_CUT_OFF_S, KEEP_ENDED_S, is_garbage
from service.backends.kuberay.manifest import LET_GO
from service.backends.kuberay.status import (
    event_problem_in,
    is_evicted,
    is_given_up,
    is_over,
    observation_of,
    pod_problem_in,
)
from service.domain.models import EndReason, ObservedState
from tests.harness.kuberay import ATTEMPT, rayjob
from trainer.failures import Budget

_DEPLOYMENTS = [
    *("", "Initializing", "Running", "Complete", "Failed", "ValidationFailed"),
    *("Suspending", "Suspended", "Retrying", "Waiting"),
]
_JOBS = ["", "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]


def _status(deployment: str, job: str = "", **more: Any) -> dict[str, Any]:
    return {"jobDeploymentStatus": deployment, "jobStatus": job, **more}


def test_the_operators_words_become_ours() -> None:
    for deployment, job, state in (
        ("", "", ObservedState.PENDING),
        ("Initializing", "", ObservedState.PENDING),
        ("Running", "", ObservedState.PENDING),
        ("Running", "PENDING", ObservedState.PENDING),
        ("Running", "RUNNING", ObservedState.RUNNING),
        ("Running", "SUCCEEDED", ObservedState.SUCCEEDED),
        ("Complete", "SUCCEEDED", ObservedState.SUCCEEDED),
        ("Complete", "STOPPED", ObservedState.STOPPED),
        ("Failed", "FAILED", ObservedState.FAILED),
        # Its cluster was over its time, whatever the driver was doing.
        ("Failed", "RUNNING", ObservedState.FAILED),
    ):
        assert observation_of(rayjob(_status(deployment, job))).state is state, (deployment, job)


def test_why_the_operator_gave_up_decides_who_pays() -> None:
    for name, reason, budget in (
        ("AppFailed", None, Budget.USER),
        ("DeadlineExceeded", None, Budget.USER),
        ("SubmissionFailed", None, Budget.USER),
        ("PreRunningDeadlineExceeded", EndReason.NO_ROOM, Budget.FREE),
        ("JobStatusCheckTimeoutExceeded", EndReason.HOST_LOST, Budget.FREE),
        ("ValidationFailed", EndReason.SUBMISSION_REFUSED, Budget.NONE),
        ("SomethingNew", None, Budget.USER),
    ):
        found = rayjob(_status("Failed", "RUNNING", reason=name, message="as it says"))
        assert is_given_up(found), "its driver may run on"
        seen = observation_of(found)
        assert (seen.state, seen.reason) == (ObservedState.FAILED, reason)
        assert name in seen.message and "as it says" in seen.message
        assert (reason or EndReason.DRIVER_LOST).rule.budget is budget


def test_a_head_that_was_never_reached_is_not_lost() -> None:
    url = "raycluster-head-svc.shardloom.svc:8265"
    away = _status("Failed", reason="JobStatusCheckTimeoutExceeded", dashboardURL=url)
    seen = observation_of(rayjob(away))
    assert seen.reason is None and f"did not reach the head at {url}" in seen.message
    since = {"jobStatusCheckFailureStartTime": "2026-01-01T00:00:00Z", "dashboardURL": url}
    waiting = observation_of(rayjob(_status("Running", **since)))
    assert (
        waiting.state is ObservedState.PENDING and "since 2026-01-01T00:00:00Z" in waiting.message
    )


def test_a_lost_head_is_a_lost_host() -> None:
    lost = _status("Failed", reason="AppFailed", message="Ray head pod not found.")
    assert observation_of(rayjob(lost)).reason is EndReason.HOST_LOST


def test_a_failure_ends_with_the_drivers_log_which_is_no_part_of_the_verdict() -> None:
    log = "Ray head pod not found.\n"
    message = f"Job failed, last available logs (truncated to 20,000 chars):\n{log}"
    seen = observation_of(rayjob(_status("Failed", "FAILED", reason="AppFailed", message=message)))
    assert seen.message.endswith("(AppFailed): Job failed\nRay head pod not found.")
    assert seen.reason is None


# ---- why it waits


def test_a_job_that_waits_for_kueue_says_for_which_queue() -> None:
    waiting = rayjob(
        _status("Suspended"), generation=1, labels={"kueue.x-k8s.io/queue-name": "ads"}
    )
    waiting["spec"]["suspend"] = True
    seen = observation_of(waiting)
    assert seen.state is ObservedState.PENDING
    assert "waits for admission by Kueue queue ads" in seen.message


def test_a_job_that_was_let_go_and_suspended_again_was_preempted() -> None:
    # KubeRay writes a template's quantities in its own way: the generation says nothing.
    waiting = rayjob(_status("Suspended"), generation=7)
    waiting["spec"]["suspend"] = True
    assert not is_evicted(waiting)
    evicted = rayjob(_status("Suspended"), annotations={LET_GO: "true"})
    evicted["spec"]["suspend"] = True
    seen = observation_of(evicted)
    assert (seen.state, seen.reason) == (ObservedState.FAILED, EndReason.PREEMPTED)
    assert not is_evicted(rayjob(_status("Running"), annotations={LET_GO: "true"}))


def test_a_cluster_that_starts_says_how_far_it_is() -> None:
    ready = {"rayClusterStatus": {"readyWorkerReplicas": 1, "desiredWorkerReplicas": 3}}
    seen = observation_of(rayjob(_status("Initializing", **ready)))
    assert "1 of 3 hosts are ready" in seen.message
    assert "waits for KubeRay's operator" in observation_of(rayjob()).message
    told = observation_of(rayjob(_status("Initializing", **ready)), "pod x: Unschedulable")
    assert told.message == "its cluster does not start: pod x: Unschedulable"


def _pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "pod-1"}, "status": status}


def _waiting(reason: str) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": "no such image"}}}


def test_pods_say_what_keeps_them() -> None:
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    }
    found = pod_problem_in([_pod(phase="Pending", conditions=[unscheduled])])
    assert found == f"pod pod-1: Unschedulable: {unscheduled['message']}"
    stuck = _pod(containerStatuses=[_waiting("ImagePullBackOff")])
    # What somebody has to mend comes before what may change by itself.
    both = pod_problem_in([_pod(conditions=[unscheduled]), stuck])
    assert both == "pod pod-1: ImagePullBackOff: no such image"
    assert pod_problem_in([_pod(containerStatuses=[_waiting("ContainerCreating")])]) == ""
    early = _pod(initContainerStatuses=[_waiting("ErrImagePull")])
    assert "ErrImagePull" in pod_problem_in([early])


def test_pods_that_were_killed_as_they_started_say_why() -> None:
    killed = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    head = _pod(containerStatuses=[{"name": "ray-head", "state": killed}])
    told = pod_problem_in([head], with_ended=True)
    assert told == "pod pod-1: ray-head ended: OOMKilled, exit code 137"
    assert pod_problem_in([head]) == "", "a Job of Kubernetes makes another pod"
    again = {"name": "ray-head", "lastState": killed, **_waiting("CrashLoopBackOff")}
    assert pod_problem_in([_pod(containerStatuses=[again])], with_ended=True) == told
    well = {"name": "ray-head", "ready": True, "state": {"running": {}}, "lastState": killed}
    done = {"state": {"terminated": {"reason": "Completed", "exitCode": 0}}}
    up = _pod(initContainerStatuses=[done], containerStatuses=[well])
    assert pod_problem_in([up], with_ended=True) == "", "what runs again is no problem any more"
    evicted = _pod(phase="Failed", reason="Evicted", message="The node was low on memory.")
    told = pod_problem_in([evicted], with_ended=True)
    assert told == "pod pod-1: Evicted: The node was low on memory."


def test_pods_that_could_not_be_made_are_told_of_by_the_newest_warning() -> None:
    events = [
        {"type": "Warning", "reason": "Old", "message": "a", "lastTimestamp": "2026-01-01T00:00Z"},
        {"type": "Warning", "reason": "FailedToCreateHeadPod", "message": "exceeded quota: team"}
        | {"lastTimestamp": None, "eventTime": "2026-01-01T00:01Z"},
        {"type": "Normal", "reason": "Fine", "message": "c", "lastTimestamp": "2026-01-03T00:00Z"},
    ]
    told = event_problem_in(events, _CREATED_AT + 120)
    assert told == "FailedToCreateHeadPod: exceeded quota: team"
    assert event_problem_in(events, _CREATED_AT + 3600) == "", "that is long ago"


@given(st.sampled_from(_DEPLOYMENTS), st.sampled_from(_JOBS), st.booleans(), st.booleans())
def test_any_status_is_an_observation_that_never_says_away(
    deployment: str, job: str, is_suspended: bool, was_let_go: bool
) -> None:
    noted = {LET_GO: "true"} if was_let_go else {}
    found = rayjob(_status(deployment, job), annotations=noted)
    found["spec"]["suspend"] = is_suspended
    seen = observation_of(found)
    assert seen.state not in (ObservedState.UNREACHABLE, ObservedState.NOT_FOUND)
    if is_over(found):
        assert seen.state not in (ObservedState.RUNNING, ObservedState.PENDING)
    if seen.reason is not None:
        assert seen.state is ObservedState.FAILED


# ---- garbage


def _ours(status: dict[str, Any], *, is_submitted: bool = True) -> dict[str, Any]:
    annotations = {"shardloom.io/attempt": ATTEMPT}
    if is_submitted:
        annotations["shardloom.io/submitted"] = "true"
    return rayjob(
        status,
        labels={"app.kubernetes.io/managed-by": "shardloom"},
        annotations=annotations,
        creationTimestamp="2026-01-01T00:00:00Z",
    )


_CREATED_AT = 1767225600.0


def test_ended_rayjobs_go_after_a_day_and_living_ones_never() -> None:
    ended = _ours(_status("Complete", "SUCCEEDED", endTime="2026-01-01T01:00:00Z"))
    end = _CREATED_AT + 3600
    assert not is_garbage(ended, end + KEEP_ENDED_S - 1)
    assert is_garbage(ended, end + KEEP_ENDED_S + 1)
    assert not is_garbage(_ours(_status("Running", "RUNNING")), end + 1e9)
    del ended["metadata"]["labels"]
    assert not is_garbage(ended, end + 1e9), "somebody else's"


def test_a_submission_that_was_cut_off_and_never_taken_up_goes() -> None:
    cut_off = _ours({}, is_submitted=False)
    cut_off["spec"]["suspend"] = True
    assert not is_garbage(cut_off, _CREATED_AT + KEEP_CUT_OFF_S - 1)
    assert is_garbage(cut_off, _CREATED_AT + KEEP_CUT_OFF_S + 1)
    admitted = _ours(_status("Initializing"), is_submitted=False)
    assert is_garbage(admitted, _CREATED_AT + KEEP_CUT_OFF_S + 1), "by Kueue, and never carried on"
    waiting = _ours({})
    waiting["spec"]["suspend"] = True
    assert not is_garbage(waiting, _CREATED_AT + 1e9), "Kueue may let it wait for long"
