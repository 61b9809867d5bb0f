"""Take a machine out of a Ray cluster: python -m trainer.driver.drain_node GCS_ADDRESS HOST

Ray's own `ray drain-node` wants the id of a node, and does not wait. This one finds the node by the
address of its machine, tells Ray, and by it every job, that the machine is about to go, and waits
until Ray counts it no more: a drained node ends by itself once nothing of a job is left on it.
Ray's token comes from its usual variables (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection
from typing import Any

GRACE_S = 120.0
_POLL_S = 0.5


def wait_until_gone(
    live_nodes: Callable[[], Collection[str]],
    node_ids: Collection[str],
    grace_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> float | None:
    """Seconds until none of the nodes was alive any more; None where that took too long."""
    started = clock()
    while set(node_ids) & set(live_nodes()):
        if clock() - started >= grace_s:
            return None
        sleep(_POLL_S)
    return clock() - started


def live_nodes_of(gcs_address: str, host: str) -> list[str]:
    """Ids of a machine's nodes that are alive, the head's left out."""
    from ray.util.state import list_nodes

    filters: Any = [("node_ip", "=", host), ("state", "=", "ALIVE")]
    options: Any = {"limit": 10_000, "raise_on_missing_output": False}
    found = list_nodes(address=gcs_address, filters=filters, **options)
    return [node.node_id for node in found if not node.is_head_node]


def parser() -> argparse.ArgumentParser:
    """What the command line says."""
    made = argparse.ArgumentParser(prog="python -m trainer.driver.drain_node")
    made.add_argument("gcs_address", help="Ray's head, as 10.0.0.1:6379")
    made.add_argument("host", help="address of the machine, as 10.0.0.2")
    made.add_argument("--grace-s", type=float, default=GRACE_S, help="longest wait for jobs")
    return made


def main() -> str | None:
    """Drain, and wait; what went wrong, for the exit code."""
    given = parser().parse_args()
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    node_ids = live_nodes_of(given.gcs_address, given.host)
    if not node_ids:
        return f"{given.host} is no worker node of {given.gcs_address}: `ray list nodes` shows all"
    deadline_ms = int((time.time() + given.grace_s) * 1000)
    reasons: Any = autoscaler_pb2.DrainNodeReason  # type: ignore[attr-defined]
    reason = reasons.Value("DRAIN_NODE_REASON_PREEMPTION")
    gcs: Any = GcsClient(address=given.gcs_address)
    for node_id in node_ids:
        is_taken, why = gcs.drain_node(node_id, reason, "shardloom drain_node", deadline_ms)
        if not is_taken:
            return f"Ray refused to drain {given.host}: {why}"

    took_s = wait_until_gone(
        lambda: live_nodes_of(given.gcs_address, given.host), node_ids, given.grace_s
    )
    if took_s is None:
        return (
            f"jobs are still on {given.host} after {given.grace_s:g} s: end its node all the same"
        )
    print(f"{given.host} has left after {took_s:.1f} s")
    return None


if __name__ == "__main__":
    raise SystemExit(main())
