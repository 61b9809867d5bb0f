"""What the Ray cluster offers a job: its hosts and the workers that each has room for.

Ray is imported late, so that a faulty spec is reported seconds sooner without it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.layout.hosts import HostFacts, hosts_by_address, num_that_fit

logger = logging.getLogger(__name__)
NODE_ID_LABEL = "ray.io/node-id"
_CONNECT_TIMEOUT_S = 10.0
_LAST_WORDS_S = 0.5


@dataclass(frozen=True)
class Host:
    """A live host: `num_slots` workers of the job fit when it is empty, `num_free` more do now.

    While it is being checked none do, and `num_unchecked` may after that. `address` is what tells
    hosts apart; `node_id` is Ray's. `memory_bytes` is what Ray may use. One that is draining is
    gone at `deadline` (Unix seconds; None where nobody said when).
    """

    address: str
    num_slots: int
    num_free: int
    node_id: str = ""
    memory_bytes: int = 0
    is_draining: bool = False
    deadline: float | None = None
    num_unchecked: int = 0


def num_gpus() -> float:
    import ray

    return float(ray.cluster_resources().get("GPU", 0))


def read_facts() -> tuple[HostFacts, ...]:
    """Live hosts, whoever uses them, without those that are draining."""
    import ray
    from ray._private.state import state

    draining = state.get_draining_nodes()
    return hosts_by_address(
        (node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in draining
    )


def free_placements_of_the_dead() -> None:
    """Remove placement groups of this job whose maker, a controller of Ray Train, is dead.

    Ray itself keeps them, and the room that they hold, until the job ends.
    """
    import ray
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    job_id = ray.get_runtime_context().get_job_id()
    for told in state._connect_and_get_accessor().get_placement_group_table():
        found = PlacementGroupTableData.FromString(told)
        if found.creator_actor_dead and found.creator_job_id.hex() == job_id:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(found.placement_group_id)))


def read_hosts(demand: Mapping[str, float]) -> list[Host]:
    """Live hosts by address, with room for workers of `demand` each."""
    import ray
    from ray._private.state import available_resources_per_node, state

    free = available_resources_per_node()
    return hosts_of(ray.nodes(), free, state.get_draining_nodes(), demand)


def hosts_of(
    nodes: Iterable[Mapping[str, Any]],
    free: Mapping[str, Mapping[str, float]],
    draining: Mapping[str, int],
    demand: Mapping[str, float],
) -> list[Host]:
    """`read_hosts` from what Ray says of its nodes.

    `free` and `draining` go by node id; the latter has deadlines in ms, 0 for none.
    """
    found = (
        Host(
            address=node["NodeManagerAddress"],
            num_slots=num_that_fit(demand, node["Resources"]),
            num_free=num_that_fit(demand, free.get(node["NodeID"], {})),
            node_id=node["NodeID"],
            memory_bytes=int(node["Resources"].get("memory", 0)),
            is_draining=node["NodeID"] in draining,
            deadline=draining.get(node["NodeID"], 0) / 1000 or None,
        )
        for node in nodes
        if node["Alive"]
    )
    return sorted(found, key=lambda host: host.address)


def fill_hosts(hosts: Iterable[Host], num_workers: int) -> tuple[Host, ...]:
    """A host for each worker that there is room for, on as few hosts as possible."""
    by_room = sorted(hosts, key=lambda host: (-host.num_free, host.address))
    places = [host for host in by_room for _ in range(host.num_free)]
    return tuple(places[:num_workers])


def shortage(
    demand_per_worker: Mapping[str, float], num_workers: int, cluster: Mapping[str, float]
) -> str | None:
    """What a cluster of that size lacks for the job, in a sentence; None when all fits."""
    lacks = [
        f"{num_workers * amount:g} {name} (the cluster has {cluster.get(name, 0):g})"
        for name, amount in demand_per_worker.items()
        if num_workers * amount > cluster.get(name, 0)
    ]
    if not lacks:
        return None
    return (
        f"{num_workers} workers need {' and '.join(lacks)}: waiting until the cluster grows; "
        "else cancel, and lower parallelism.workers or resources.cpus_per_worker"
    )


def cluster_answers() -> bool:
    """Whether somebody listens at the cluster's address (GCS) and knows of a node that is alive."""
    import ray
    from ray.exceptions import RayError

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            return any(node["Alive"] for node in ray.nodes())
    except (OSError, RayError):
        return False


def kill_on(host: Host, pids: Collection[int]) -> None:
    """Kill workers of ours on `host`, stopped ones too; does not wait, and may fail silently.

    For workers that nobody waits for any more: a coordinator keeps them out in any case.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    logger.warning("killing processes %s on %s", sorted(pids), host.address)
    pinned = NodeAffinitySchedulingStrategy(host.node_id, soft=False)
    task: Any = ray.remote(kill_workers)
    options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": pinned}
    task.options(**options).remote(sorted(pids))


def kill_workers(pids: Collection[int], wait: Callable[[float], None] = time.sleep) -> None:
    """End those of `pids` that are Ray workers: another process may have the number by now.

    By SIGABRT first, on which faulthandler logs the stacks of all threads, whoever holds the GIL.
    """
    for number in (signal.SIGABRT, signal.SIGKILL):
        for pid in pids:
            with suppress(OSError):  # gone, or another user's
                if b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, number)
        if number is signal.SIGABRT:
            wait(_LAST_WORDS_S)
