"""What an error of Ray or Ray Train says about a job's end: classification with evidence.

Ray names no exit code and no signal of an actor's process. What it knows for certain: whether the
node is gone, whether its memory monitor ended the worker, and whether the node was preempted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer import failures
from trainer.failures import Failure

# Ray's own words: where a node died, and the end of a process that nobody asked for.
_NODE_DIED_SIGNS = ("its node has died", "the node is dead", "node died")
_NODE_IP = re.compile(r"(?:node_ip='|\bip: )(?P<host>[^'\s]+)")
_PID = re.compile(r"\bpid[=:] ?(?P<pid>\d+)")
_EXIT = re.compile(r"Worker exit type: (?P<type>\w+) Worker exit detail: (?P<detail>[^.\n]*)")


def classify(error: Exception) -> Failure:
    """The cause behind an error that `TorchTrainer.fit` raised."""
    from ray.train.v2.api.exceptions import ControllerError, PreemptionError

    if isinstance(error, PreemptionError):
        ranks = ", ".join(str(rank) for rank in error.preemption_info.preempted_ranks)
        return Failure(failures.PREEMPTED, f"the host of rank {ranks} was preempted", is_death=True)
    if isinstance(error, ControllerError):
        return _classify_start(error.controller_failure)
    by_rank: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    if not by_rank:
        return Failure(failures.WORKERS_LOST, first_line(error))
    return failures.explain([_classify_rank(rank, by_rank[rank]) for rank in sorted(by_rank)])


def _classify_start(error: Exception) -> Failure:
    """The cause of workers that did not come up."""
    from ray.train.v2._internal.exceptions import (
        InsufficientClusterResourcesError,
        WorkerGroupStartupTimeoutError,
    )

    if isinstance(error, WorkerGroupStartupTimeoutError | InsufficientClusterResourcesError):
        return Failure(failures.NO_ROOM, f"no room for the workers: {first_line(error)}")
    reason = _reason_of_death(error)
    message = f"the workers did not start: {first_line(error)}"
    return Failure(reason, message, is_death=True, evidence=_evidence_of_death(error))


def _classify_rank(rank: int, error: Exception) -> Failure:
    from ray.exceptions import RayError
    from ray.train.v2._internal.exceptions import RayTrainError

    place = {"rank": str(rank)}
    if isinstance(error, failures.WorkerFailure):
        evidence = place | error.evidence
        return Failure(error.reason, f"rank {rank}: {error.message}", evidence=evidence)
    if isinstance(error, RayError | RayTrainError):
        reason = _reason_of_death(getattr(error, "health_check_failure", error))
        message = f"rank {rank} was lost: {first_line(error)}"
        evidence = place | _evidence_of_death(error)
        return Failure(reason, message, is_death=True, evidence=evidence)
    evidence = place | failures.evidence_of(error)
    message = f"rank {rank}: {type(error).__name__}: {error}"
    return Failure(failures.reason_of(error), message, evidence=evidence)


def _reason_of_death(error: BaseException) -> str:
    from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError

    text = _without_guesses(str(error)).lower()
    if isinstance(error, RayActorError) and error.preempted:
        return failures.PREEMPTED
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return failures.HOST_OOM
    if isinstance(error, NodeDiedError) or any(sign in text for sign in _NODE_DIED_SIGNS):
        return failures.HOST_LOST
    return failures.WORKERS_LOST


def _without_guesses(text: str) -> str:
    """The text without Ray's list of common causes, which names all of them for any death."""
    return text.partition("Some common causes include")[0]


def _evidence_of_death(error: BaseException) -> dict[str, str]:
    text = str(error)
    evidence = {"error": type(getattr(error, "health_check_failure", error)).__name__}
    if found := _NODE_IP.search(text):
        evidence["host"] = found["host"]
    if found := _PID.search(text):
        evidence["pid"] = found["pid"]
    if found := _EXIT.search(text):
        evidence["exit"] = f"{found['type']}: {found['detail'].strip()}"
    return evidence


def first_line(error: BaseException) -> str:
    """The first words of an error's text, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__
