"""What a session tells the control plane when its workers are there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainer import events
from trainer.parallel.layout import Layout

if TYPE_CHECKING:
    from trainer.session import Session


def workers_started(
    session: Session, layout: Layout, sharding_groups: Sequence[Sequence[int]], hosts: list[str]
) -> events.WorkersStarted:
    """How workers are grouped and where they start: groups in ranks, `hosts` by rank."""
    return events.WorkersStarted(
        time=time.time(),
        run_index=session.config.run_index,
        world_size=layout.world_size,
        shard_group_size=layout.shard_group_size,
        num_replicas=layout.num_replicas,
        placement=layout.placement,
        backend=dist.get_backend(),
        sharding_groups=[list(group) for group in sharding_groups],
        replica_groups=[list(group) for group in zip(*sharding_groups, strict=True)],
        hosts=hosts,
        table_shards={plan.name: plan.sharding_type for plan in session.table_plans},
        tables=session.table_plans,
        total_steps=session.total_steps,
        resumed_step=session.state.step,
    )


def progress(session: Session, rows_per_s: float) -> events.Progress:
    """How far training has come, and when it will be through at this speed.

    A run that has ended early ends at its last step.
    """
    step = session.state.step
    total_steps = step if session.is_finished else session.total_steps
    rows_left = (total_steps - step) * session.shape.rows_per_step
    return events.Progress(
        time=time.time(),
        step=step,
        total_steps=total_steps,
        epoch=session.state.position.epoch,
        rows=session.state.rows_trained,
        rows_per_s=rows_per_s,
        eta_s=rows_left / rows_per_s if rows_per_s else 0.0,
    )
