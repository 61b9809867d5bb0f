"""TorchRec's plan of one sharding group without its ranks, for a service that loads no torch.

    python -m trainer.parallel.group_planner [--stay] < tasks > plans

An empty line when it is loaded, then a line of JSON for each, `PlanTask` and `GroupPlan`, one at a
time. It ends with its input, and, unless it is to stay, when no task comes for `_IDLE_S`. It is the
plan that the workers would make (`plan_group`), from memory and bandwidths that it is told instead
of measured ones; no user code runs.
"""

from __future__ import annotations

import select
import sys
from typing import Any

import torch
from pydantic import BaseModel
from torch.overrides import TorchFunctionMode

from trainer.layout.workload import GroupPlan, GroupTopology
from trainer.models.sparse import SparseArch
from trainer.parallel.planner import Bandwidths, PlanError, group_plan_of, plan_group
from trainer.parallel.sharding import sharders
from trainer.spec.job import JobSpec

_IDLE_S = 120.0
_META = torch.device("meta")


class PlanTask(BaseModel):
    """A spec whose layout is known, as a document, and the group to plan."""

    spec: dict[str, object]
    topology: GroupTopology


class _WithoutValues(TorchFunctionMode):
    """Draws no weights, which takes most of the time that tables without memory take."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if func is torch.nn.init.normal_ else func(*args, **kwargs)


def tables_of(spec: JobSpec) -> SparseArch:
    """The tables of a spec without memory."""
    with _WithoutValues():
        return SparseArch(spec, _META)


def group_plan(
    spec: JobSpec, topology: GroupTopology, model: SparseArch | None = None
) -> GroupPlan:
    """The plan of one sharding group, or why there is none; `model` has the tables of the spec."""
    links = Bandwidths.of(
        topology.memory_bytes_per_s,
        topology.intra_host_bytes_per_s,
        topology.inter_host_bytes_per_s,
    )
    size = topology.shard_group_size
    try:
        plan = plan_group(
            model or tables_of(spec),
            spec,
            sharders(spec),
            size,
            topology.ranks_per_host,
            topology.device,
            (topology.memory_bytes, topology.host_memory_bytes),
            links,
        )
    except PlanError as error:
        return GroupPlan(obstacle=str(error))
    return group_plan_of(plan, spec, size)


def main() -> int:
    """Answer the tasks on standard input."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no part of an answer
    tables, model = None, None
    idle_s = None if "--stay" in sys.argv[1:] else _IDLE_S
    print(file=answers, flush=True)
    while select.select([sys.stdin], [], [], idle_s)[0]:
        line = sys.stdin.buffer.readline()
        if not line:
            break
        task = PlanTask.model_validate_json(line)
        spec = JobSpec.checked(task.spec, {"stored": True})
        if tables != (spec.features, spec.embedding_tables):  # else of another layout
            tables, model = (spec.features, spec.embedding_tables), tables_of(spec)
        print(group_plan(spec, task.topology, model).model_dump_json(), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
