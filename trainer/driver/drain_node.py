"""Take a machine out of a Ray cluster: python -m trainer.driver.drain_node GCS_ADDRESS HOST

Ray's own `ray drain-node` wants the id of a node, and does not wait. This one finds the node by the
address of its machine, tells Ray, and by it every job, that the machine is about to go, and waits
until Ray calls it dead: a drained node ends by itself once nothing of a job is left on it.
Ray's token comes from its usual variables (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

GRACE_S = 120.0
_POLL_S = 0.5
_ANSWER_S = 30.0
# Of Ray's `DrainNodeReason` and `GcsNodeInfo.GcsNodeState`; Ray itself is imported by `main` only.
_PREEMPTION = 2
_DEAD = 1


def drain(
    gcs: Any,
    host: str,
    grace_s: float,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """Drain a machine's nodes, and wait until Ray says of each that it is dead; what went wrong."""
    started = clock()
    node_ids = _node_ids(
        gcs,
        lambda node: (
            node.node_manager_address == host and node.state != _DEAD and not node.is_head_node
        ),
    )
    if not node_ids:
        return f"{host} is no worker node of this Ray: `ray list nodes` shows all"
    for node_id in node_ids:
        deadline_ms = int((started + grace_s) * 1000)
        is_taken, why = gcs.drain_node(node_id, _PREEMPTION, "shardloom drain_node", deadline_ms)
        if not is_taken:
            return f"Ray refused to drain {host}: {why}"
    # A node that an answer leaves out may live: only one that is called dead has left.
    while not node_ids <= _node_ids(gcs, lambda node: node.state == _DEAD):
        if clock() - started >= grace_s:
            return f"jobs are still on {host} after {grace_s:g} s: end its node all the same"
        sleep(_POLL_S)
    return None


def _node_ids(gcs: Any, is_meant: Callable[[Any], bool]) -> set[str]:
    """Ids of the nodes that are meant, of all that Ray's head knows, the dead ones too."""
    nodes = gcs.get_all_node_info(timeout=_ANSWER_S)
    return {node_id.hex() for node_id, node in nodes.items() if is_meant(node)}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m trainer.driver.drain_node")
    made.add_argument("gcs_address", help="Ray's head, as 10.0.0.1:6379")
    made.add_argument("host", help="address of the machine, as 10.0.0.2")
    made.add_argument("--grace-s", type=float, default=GRACE_S, help="longest wait for jobs")
    return made


def main() -> str | None:
    """Drain, and wait; what went wrong, for the exit code."""
    given = parser().parse_args()
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    fault = drain(GcsClient(address=given.gcs_address), given.host, given.grace_s)
    if fault is None:
        print(f"{given.host} has left")
    return fault


if __name__ == "__main__":
    raise SystemExit(main())
