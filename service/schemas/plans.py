"""REST bodies of plans: layouts of a job on a cluster side by side."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from service.schemas.common import ApiModel, RequestModel
from trainer.layout.cost import Cluster, MemoryUse
from trainer.layout.plans import Calibration, Candidate, Change
from trainer.layout.workload import TablePlacement

_MOST_MISFITS = 5


class PlanRequest(RequestModel):
    """A spec, and the cluster to plan it for: by default the service's own."""

    spec: dict[str, Any]
    cluster: str | None = Field(
        default=None,
        max_length=1000,
        description="GPUs of a host, their type, hosts, and what differs from what is known of "
        "them; links in one direction.",
        examples=["8xH100-80GB x 128, inter_host_bytes_per_s=25e9"],
    )
    time_limit_s: float = Field(default=60.0, gt=0, le=600)


class RecommendedLayout(ApiModel):
    """The recommended candidate with its groups, and TorchRec's plan of one of them.

    `sharding_groups[g][s]` is the position of shard s of copy g, `hosts[g][s]` its host, an index
    into `room`. `ranks` has the memory of each position of a group.
    """

    candidate: Candidate
    sharding_groups: list[list[int]]
    hosts: list[list[int]]
    tables: list[TablePlacement]
    ranks: list[MemoryUse]


class PlansOut(ApiModel):
    """Layouts of a job on a cluster: those that fit first, by estimated speed.

    `recommended` is null where nothing fits; `changes` then each would do,
    the smallest first.
    """

    name: str
    table_bytes: int
    batch_size: int
    cluster: Cluster = Field(description="A worker on CPUs stands for a GPU.")
    room: list[int] = Field(description="Workers that fit on each host.")
    reason: str
    recommended: RecommendedLayout | None
    candidates: list[Candidate]
    changes: list[Change]
    calibration: Calibration | None = Field(
        default=None, description="Of the rates of `cluster`, by jobs that trained there."
    )

    @property
    def shown(self) -> list[Candidate]:
        """What no other beats in speed, memory and what survives, and what the spec and `auto`
        take; where nothing fits, those that need least."""
        if self.recommended is None:
            return sorted(self.candidates, key=lambda each: each.memory_share)[:_MOST_MISFITS]
        return [
            each
            for each in self.candidates
            if each.is_on_front or each.is_chosen or each.is_recommended
        ]
