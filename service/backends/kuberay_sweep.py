"""Which RayJobs nobody needs any more. Pure.

KubeRay takes the cluster of a job that has ended down and leaves the RayJob: it goes later, so that
its end is seen even by a service that was away for long.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from service.backends.kuberay_manifest import attempt_of, is_submitted
from service.backends.kuberay_status import is_over, is_suspended

KEEP_ENDED_S = 24 * 3600.0
# A submission is tried again within seconds; one that is not has no job any more.
KEEP_CUT_OFF_S = 3600.0


def is_garbage(rayjob: Mapping[str, Any], now: float) -> bool:
    """Whether a RayJob of ours has ended long ago, or was never submitted to the end."""
    if attempt_of(rayjob) is None or "deletionTimestamp" in rayjob["metadata"]:
        return False
    created_at = _unix_s(rayjob["metadata"]["creationTimestamp"])
    if is_over(rayjob):
        ended = (rayjob.get("status") or {}).get("endTime")
        return now - (_unix_s(ended) if ended else created_at) > KEEP_ENDED_S
    return is_cut_off(rayjob) and now - created_at > KEEP_CUT_OFF_S


def is_cut_off(rayjob: Mapping[str, Any]) -> bool:
    """Whether a submission ended before its RayJob was let go."""
    return is_suspended(rayjob) and not is_submitted(rayjob)


def _unix_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
