"""Which RayJobs nobody needs any more. Pure.

KubeRay takes the cluster of a job that has ended down and leaves the RayJob: it goes later, so that
its end is seen even by a service that was away for long.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.backends.kuberay_manifest import attempt_of
from service.backends.kuberay_status import is_cut_off, is_over, unix_s

KEEP_ENDED_S = 24 * 3600.0
# A submission is tried again within half a minute; one that is not has no job any more. One that
# is, and cannot be carried through, makes it again.
KEEP_CUT_OFF_S = 900.0


def is_garbage(rayjob: Mapping[str, Any], now: float) -> bool:
    """Whether a RayJob of ours has ended long ago, or was never submitted to the end."""
    if attempt_of(rayjob) is None or "deletionTimestamp" in rayjob["metadata"]:
        return False
    created_at = unix_s(rayjob["metadata"]["creationTimestamp"])
    if is_over(rayjob):
        ended = (rayjob.get("status") or {}).get("endTime")
        return now - (unix_s(ended) if ended else created_at) > KEEP_ENDED_S
    return is_cut_off(rayjob) and now - created_at > KEEP_CUT_OFF_S
