"""The sharded model of a job, built alike on every rank."""

from __future__ import annotations

import torch

from trainer import events
from trainer.models.dlrm import build_model
from trainer.parallel.groups import MeshGroups
from trainer.parallel.optimizer import fused_optimizer_params
from trainer.parallel.plan import make_plan, table_plans
from trainer.parallel.sharders import sharders
from trainer.parallel.two_d import TwoDParallel
from trainer.spec import JobSpec


def build_parallel_model(
    spec: JobSpec, groups: MeshGroups
) -> tuple[TwoDParallel, list[events.TablePlan]]:
    """The sharded model and how each table is sharded. Collective over all ranks.

    Dense parameters start from the seed alone; each shard from the seed and its own index, and
    the copies of a shard are made equal.
    """
    torch.manual_seed(spec.training.seed)
    model = build_model(spec, groups.device)
    table_sharders = sharders(
        spec, fused_optimizer_params(spec.optimizer.sparse, spec.moment_scale)
    )
    plan = make_plan(model, spec, groups, table_sharders)
    torch.manual_seed(spec.training.seed + 1 + groups.shard_index)
    parallel = TwoDParallel(model, groups, plan, table_sharders, spec.parallelism.dense_policy)
    return parallel, table_plans(plan, spec)
