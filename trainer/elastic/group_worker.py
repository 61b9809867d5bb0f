"""The loop of a rank whose group is a failure domain, on one screen: train a lease, sync, lead."""

from __future__ import annotations

import torch.distributed as dist

from trainer.elastic.group_session import GroupSession
from trainer.elastic.member import Identity, Member
from trainer.elastic.ray_coordinator import NAMESPACE
from trainer.elastic.watched import end_process
from trainer.parallel.layout import Layout
from trainer.ray_worker import GroupConfig, WorkerConfig
from trainer.worker import groups_of, named_failures, prepare_process

_LOCATE_S = 2.0  # less than a new coordinator waits for the groups of the one before


def train_group(session: GroupSession) -> dict[str, float]:
    """Train with the other groups to the end, or until asked to leave; the final metrics."""
    try:
        session.begin()
        while not session.is_over:
            session.train_lease()
            session.sync_groups()
            session.announce()
            session.checkpoints.poll()
            if session.is_report_due():
                session.report()
            if session.is_leader:
                session.lead()
    finally:
        session.close()
    return session.final_metrics


def run_group(config: WorkerConfig, member: Member, host: str | None = None) -> dict[str, float]:
    """One life of one rank inside its group's initialised default process group.

    Raises `WorkerFailure` with a reason that the control plane knows.
    """
    size = config.spec.parallelism.group_size
    with named_failures(config.spec.model.module):
        prepare_process(config)
        groups = groups_of(config, Layout(size, size, "inter_host"), host)
        return train_group(GroupSession(config, groups, member))


def run_group_worker(config: WorkerConfig, group: GroupConfig, host: str) -> dict[str, float]:
    """`run_group` for a worker that Ray Train started."""
    identity = Identity(
        group=group.group,
        incarnation=group.incarnation,
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        host=host,
    )
    member = Member(identity, lambda: locate(group), config.spec.recovery.heartbeat_timeout_s)
    member.on_refusal = end_process
    try:
        return run_group(config, member, host)
    finally:
        member.close()


def locate(group: GroupConfig) -> str:
    """Address (host:port) of the coordinator, also after it was restarted.

    Raises `ConnectionError` or `ValueError` while there is none.
    """
    if group.address is not None:
        return group.address
    import ray
    from ray.exceptions import RayError

    assert group.actor_name is not None, "a group knows its coordinator by name or by address"
    coordinator = ray.get_actor(group.actor_name, namespace=NAMESPACE)
    try:
        return str(ray.get(coordinator.address.remote(), timeout=_LOCATE_S))
    except RayError as error:
        raise ConnectionError(f"the coordinator's actor is away: {error}") from error
