"""REST bodies of plans: a cluster that is described, and layouts of a job on it side by side."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from service.schemas.common import ApiModel, RequestModel
from trainer.layout.cost import MemoryUse
from trainer.layout.plans import Calibration, Candidate, Change
from trainer.layout.workload import TablePlacement

_MOST_MISFITS = 5
Rate = Annotated[float, Field(description="What one GPU, or worker on CPUs, attains.")]


class DescribedCluster(RequestModel):
    """A cluster: a named profile, with what differs; bandwidths of links are in one direction."""

    profile: Annotated[str, Field(max_length=200, examples=["8xH100-80GB x 128"])]
    num_hosts: int | None = None
    gpus_per_host: int | None = None
    hbm_bytes: int | None = None
    hbm_bytes_per_s: Rate | None = None
    intra_host_bytes_per_s: Rate | None = None
    inter_host_bytes_per_s: Rate | None = None
    fp32_flops_per_s: Rate | None = None
    tf32_flops_per_s: Rate | None = None
    bf16_flops_per_s: Rate | None = None
    process_bytes: float | None = Field(
        default=None, description="What a worker takes before it has a model."
    )
    step_overhead_s: float | None = Field(
        default=None, description="What a step takes of its host: Python, launches of kernels."
    )
    collective_latency_s: float | None = None
    hosts_per_building: int | None = None
    inter_building_bytes_per_s: float | None = Field(
        default=None, description="Between hosts of different buildings, if there are several."
    )


class PlanRequest(RequestModel):
    """A spec, and the cluster to plan it for: by default the service's own."""

    spec: dict[str, Any]
    cluster: Annotated[str, Field(max_length=1000)] | DescribedCluster | None = Field(
        default=None, examples=["8xH100-80GB x 128, inter_host_bytes_per_s=25e9"]
    )
    time_limit_s: float = Field(default=60.0, gt=0, le=600)


class PlannedCluster(ApiModel):
    """The cluster that was planned for; a worker on CPUs stands for a GPU."""

    name: str
    device: str
    gpus_per_host: int
    num_hosts: int | None
    hbm_bytes: int
    hbm_bytes_per_s: float
    intra_host_bytes_per_s: float
    inter_host_bytes_per_s: float
    fp32_flops_per_s: float
    tf32_flops_per_s: float
    bf16_flops_per_s: float
    process_bytes: float
    step_overhead_s: float
    collective_latency_s: float
    hosts_per_building: int | None
    inter_building_bytes_per_s: float | None
    room: list[int] = Field(description="Workers that fit on each host.")


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
    cluster: PlannedCluster
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
