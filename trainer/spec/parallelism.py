"""`parallelism`: workers, sharding groups, and how their copies of the tables are kept together."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    ValidationInfo,
    model_validator,
)

from trainer.spec.base import (
    Count,
    SpecModel,
    Workers,
    WorkersOrNone,
    is_laid_out,
    is_stored,
    problem,
)
from trainer.spec.tables import ComputeKernel, LoadFactor, Precision

FailureDomain = Literal["job", "replica_group"]


class SyncTunerSpec(SpecModel):
    """Bounds of `every_steps: auto`: min_steps, twice that, and so on up to max_steps.

    Of these the shortest with which training waits for syncs no longer than `time_share` of its
    time, and validation gets no worse.
    """

    min_steps: Count = 1
    max_steps: Count = 64
    time_share: Annotated[float, Field(gt=0, lt=1)] = 0.05

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min_steps > self.max_steps:
            message = f"min_steps ({self.min_steps}) is above max_steps ({self.max_steps})"
            raise problem("bounds", message)
        return self

    @property
    def intervals(self) -> tuple[int, ...]:
        """Numbers of steps between syncs that may be chosen, ascending."""
        num_doublings = (self.max_steps // self.min_steps).bit_length()
        return tuple(self.min_steps << power for power in range(num_doublings))


class SyncSpec(SpecModel):
    """How often, and with what, the matching shards of the sharding groups are averaged.

    `every_steps: auto` begins with the least of the `tuner`'s intervals and is moved while it
    trains, from what is measured. `touched_rows` moves only rows looked up since the last sync,
    which gives the same result as `full`; in fp32 it moves everything when more than `full_above`
    of the rows were touched. `dtype` is the precision of the change since the last sync on its way.
    With `overlap` the averages are formed during the next so many steps (`true`: one), at most
    `every_steps`, and applied as a difference after them. `delayed` optimizer state of tables lags
    one sync behind their weights; under `never` each replica goes on with its own. Before a save,
    and while a group joins independent ones, all of it is averaged, in full precision.
    """

    every_steps: Count | Literal["auto"] = 1
    tuner: SyncTunerSpec = SyncTunerSpec()
    mode: Literal["full", "touched_rows"] = "touched_rows"
    dtype: Precision = "fp32"
    overlap: bool | Count = False
    optimizer_state: Literal["every", "delayed", "never"] = "every"
    full_above: Annotated[float, Field(ge=0, le=1)] = 0.5

    @property
    def is_tuned(self) -> bool:
        return self.every_steps == "auto"

    @property
    def intervals(self) -> tuple[int, ...]:
        """Numbers of steps that there may be between syncs, ascending; the first at the start."""
        return self.tuner.intervals if self.every_steps == "auto" else (self.every_steps,)

    @property
    def overlap_steps(self) -> int:
        """Steps during which averages are formed; 0 where training waits for them."""
        return int(self.overlap)

    @property
    def is_always_exact(self) -> bool:
        """Whether what is averaged at a sync is all that differs, in full precision."""
        return (self.dtype, self.optimizer_state) == ("fp32", "every")

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        shortest, field = self.intervals[0], "tuner.min_steps" if self.is_tuned else "every_steps"
        if self.overlap_steps > shortest:
            raise problem(
                "overlap",
                f"{self.overlap_steps} steps would not be over at the next sync, which comes after "
                f"{field} ({shortest}); set at most that",
                "overlap",
            )
        return self


class AllToAllSpec(SpecModel):
    """Precision in which embeddings (forward) and their gradients (backward) travel."""

    forward: Precision = "fp32"
    backward: Precision = "fp32"


class DivergenceCheckSpec(SpecModel):
    """Compare checksums of the copies every `every_syncs` syncs.

    A mismatch fails the attempt, which then resumes from a checkpoint, or gives every rank of the
    replica group the copy that most of them hold; an independent group copies the whole of another.
    """

    every_syncs: Count
    action: Literal["fail", "rebroadcast"] = "fail"


class PlannerSpec(SpecModel):
    """What TorchRec's planner reckons with.

    `storage_reservation` is the share of each worker's memory kept for the dense part,
    activations and collectives. `measured` bandwidths are taken between the workers at start;
    groups that are failure domains take those of the kind of hosts, as each plans for itself.
    """

    storage_reservation: Annotated[float, Field(ge=0, lt=1)] = 0.15
    bandwidths: Literal["measured", "default"] = "measured"
    compute_kernel: Annotated[
        ComputeKernel,
        Field(
            description="Where the weights of tables are on GPUs. `fused`: in GPU memory. "
            "`fused_uvm_caching`: in host memory, and the rows used last in GPU memory too. "
            "`auto`: in GPU memory as far as they fit there. On CPUs `auto` is `fused`."
        ),
    ] = "fused"
    cache_load_factor: Annotated[
        LoadFactor | None,
        Field(
            description="Share of a cached table's rows that its cache has room for. By default "
            "0.2 with `fused_uvm_caching`; with `auto` what fits, most to the tables that gain "
            "most if ids follow Zipf's law."
        ),
    ] = None


class WorkersSpec(SpecModel):
    """Bounds of the world size T: the job takes as many workers as there are within them.

    Multiples of L, where L is given. Equal bounds mean a fixed size.
    """

    min: Workers
    max: Workers

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min > self.max:
            raise problem("bounds", f"min ({self.min}) is above max ({self.max})")
        return self


class SurviveSpec(SpecModel):
    """What may be lost at once while a full copy of the tables stays alive."""

    hosts: Workers


def _unset(value: Any) -> Any:
    # `--set parallelism.sync=null` takes back what a file sets.
    return SyncSpec() if value is None else value


class ParallelismSpec(SpecModel):
    """T workers, in sharding groups of L = `shard_group_size`; M = T / L replicas.

    `dense: at_sync` averages the dense part at syncs too, instead of at every step, so that the
    sharding groups are independent of each other in between; `auto` does so where each group is a
    failure domain of its own. `survive` says what may be lost at once without losing a row; with it
    placement is `auto` unless given. `auto` is decided from the tables and the cluster's hosts when
    an attempt starts.
    """

    workers: Workers | WorkersSpec = 1
    shard_group_size: Workers | Literal["auto"] = "auto"
    placement: Literal["intra_host", "inter_host", "auto"] = "intra_host"
    survive: SurviveSpec | None = None
    sync: Annotated[SyncSpec, BeforeValidator(_unset)] = SyncSpec()
    dense: Literal["auto", "every_step", "at_sync"] = "auto"
    moment_scale: PositiveFloat | Literal["auto"] = "auto"
    min_groups: Annotated[
        Workers,
        Field(
            description="Where groups are failure domains: training waits while fewer of them hold "
            "the state. It goes on when enough have copied it from those that do."
        ),
    ] = 1
    spares: Annotated[
        WorkersOrNone,
        Field(
            description="Where groups are failure domains: so many more of them are started and "
            "wait, with their model built, to copy the state when a group is lost. They take "
            "workers beside `workers`, on hosts of their own, where all groups have room."
        ),
    ] = 0
    all_to_all: AllToAllSpec = AllToAllSpec()
    divergence_check: DivergenceCheckSpec | None = None
    planner: PlannerSpec = PlannerSpec()

    @property
    def is_resolved(self) -> bool:
        """Whether L and the placement are known; `auto` is decided where the cluster is known."""
        return self.shard_group_size != "auto" and self.placement != "auto"

    @property
    def min_workers(self) -> int:
        return self.workers if isinstance(self.workers, int) else self.workers.min

    @property
    def is_elastic(self) -> bool:
        return self.min_workers < self.world_size

    @property
    def world_size(self) -> int:
        """T, the number of workers; the most, where it may change."""
        return self.workers if isinstance(self.workers, int) else self.workers.max

    @property
    def group_size(self) -> int:
        """L as a number; raises ValueError while it is `auto`."""
        if self.shard_group_size == "auto":
            raise ValueError("parallelism.shard_group_size is still 'auto'")
        return self.shard_group_size

    @property
    def num_replicas(self) -> int:
        """M, the number of sharding groups at T workers; raises ValueError while L is `auto`."""
        return self.world_size // self.group_size

    @property
    def is_single_copy(self) -> bool:
        """Whether it is known that there is one copy of the tables, and nothing to sync."""
        return self.shard_group_size != "auto" and self.num_replicas == 1

    @property
    def spare_workers(self) -> int:
        """Workers of the spare groups, at least: while L is `auto` one each. One copy has none."""
        if self.is_single_copy:
            return 0
        return self.spares * (1 if self.shard_group_size == "auto" else self.shard_group_size)

    @property
    def num_hosts_needed(self) -> int:
        """Hosts that must hold a copy of each shard for what `survive` asks, 0 if it asks nothing.

        k lost hosts are survived by copies on k + 1.
        """
        return 0 if self.survive is None else self.survive.hosts + 1

    @property
    def failure_domain(self) -> FailureDomain:
        """What a lost host takes down: the job's workers, or one sharding group of them.

        Groups are independent where nothing but the sync joins them. Raises ValueError while the
        answer depends on an `auto`.
        """
        if self.survive is not None:
            return "replica_group"
        if self.is_single_copy or self.placement == "intra_host" or self.tied_by:
            return "job"
        if self.placement == "auto":
            raise ValueError("parallelism.placement is still 'auto'")
        return "replica_group" if self.num_replicas > 1 else "job"

    @property
    def has_independent_groups(self) -> bool:
        """Whether it is known that each sharding group is a failure domain of its own."""
        is_known = self.survive is not None or self.is_resolved
        return is_known and self.failure_domain == "replica_group"

    @property
    def tied_by(self) -> str:
        """The setting that ties the sharding groups together between syncs, and why; or empty."""
        why = "dense every_step averages gradients over all groups at each step; use at_sync"
        return why if self.dense == "every_step" else ""

    @property
    def dense_policy(self) -> Literal["every_step", "at_sync"]:
        """`dense` with `auto` resolved: at syncs where the groups are failure domains."""
        if self.dense != "auto":
            return self.dense
        return "at_sync" if self.failure_domain == "replica_group" else "every_step"

    @model_validator(mode="before")
    @classmethod
    def _leave_placement_open(cls, data: Any) -> Any:
        # The default of `placement` rules `survive` out; who wrote only that asked for neither.
        if isinstance(data, dict) and data.get("survive") is not None:
            return {"placement": "auto"} | data
        return data

    @model_validator(mode="after")
    def _check_sizes(self, info: ValidationInfo) -> Self:
        # While L is `auto`, what no L allows is refused.
        group = 1 if self.shard_group_size == "auto" else self.group_size
        sizes = {"workers": self.world_size}
        if not isinstance(self.workers, int):
            sizes = {"workers.min": self.workers.min, "workers.max": self.workers.max}
        for field, size in sizes.items():
            if size % group:
                below = size // group * group
                nearest = " or ".join(str(each) for each in (below, below + group) if each)
                raise problem(
                    "not_divisible",
                    f"workers ({size}) must be a multiple of shard_group_size ({group}); nearest "
                    f"that fit: {nearest}",
                    field,
                )
        # A job that goes on with fewer workers keeps what it was accepted with.
        if is_stored(info) and not is_laid_out(info):
            return self
        fewest, most = self.min_workers // group, self.world_size // group
        if self.min_groups > fewest:
            message = (
                f"{self.min_groups} groups of {group} need {self.min_groups * group} workers, but "
                f"there may be {self.min_workers}, so that training could wait for ever; raise "
                f"{'workers' if isinstance(self.workers, int) else 'workers.min'}, or set at most "
                f"{fewest}"
            )
            raise problem("min_groups", message, "min_groups")
        # Nor is it refused where fewer replicas came out than were possible.
        if self.moment_scale != "auto" and self.moment_scale > most and not is_stored(info):
            message = f"must be above 0 and at most {most}, the number of replicas M"
            raise problem("moment_scale", message, "moment_scale")
        return self

    @model_validator(mode="after")
    def _check_survive(self) -> Self:
        if self.survive is None:
            return self
        if self.placement == "intra_host":
            raise problem(
                "survive",
                "placement intra_host keeps every copy of a shard on one host, so no lost host can "
                "be survived; use inter_host or auto",
                "placement",
            )
        if self.tied_by:
            raise problem("survive", f"it needs independent groups, but {self.tied_by}", "dense")
        size = 1 if self.shard_group_size == "auto" else self.group_size
        most, needed = self.world_size // size, self.num_hosts_needed
        if most < needed:
            instead = f"lower it to {most - 1}" if most > 1 else "remove survive"
            raise problem(
                "survive",
                f"needs {needed} sharding groups on as many hosts, but {self.world_size} worker(s) "
                f"make {most} of {size}; raise workers to {needed * size}, or {instead}",
                "survive.hosts",
            )
        return self

    @model_validator(mode="after")
    def _check_spares(self, info: ValidationInfo) -> Self:
        if not self.spares or is_stored(info):
            return self
        most = None if self.shard_group_size == "auto" else self.num_replicas
        why = ""
        if most == 1:
            why = (
                "workers / shard_group_size is 1: a spare copies its state from another group, and "
                "there is none; remove it, or raise workers"
            )
        elif self.tied_by or not (self.survive or self.placement == "inter_host"):
            why = (
                "only where each sharding group is a failure domain can a spare take the place of "
                f"one ({self.tied_by or f'placement is {self.placement}'}); remove it, or "
                f"{'change that' if self.tied_by else 'use placement inter_host'}"
            )
        elif most is not None and self.spares > most:
            why = (
                f"there are {most} groups, each on a host of its own at best, so that no more than "
                f"{most} can be lost at once; set at most that"
            )
        if why:
            raise problem("spares", why, "spares")
        return self

    @model_validator(mode="after")
    def _check_single_copy(self, info: ValidationInfo) -> Self:
        # What was asked of several copies does no harm where a choice, or a quota, left one.
        if not self.is_single_copy or is_stored(info):
            return self
        # A document may hold every default, so only another value says that a user asked for it.
        for field, is_asked, default in (
            ("sync", self.sync != SyncSpec(), "null"),
            ("dense", self.dense == "at_sync", "auto"),
            ("divergence_check", self.divergence_check is not None, "null"),
        ):
            if is_asked:
                raise problem(
                    "single_replica",
                    "workers / shard_group_size is 1, so there is one copy of the tables and "
                    f"nothing to sync or compare; remove '{field}' (`--set parallelism.{field}="
                    f"{default}`), raise workers or lower shard_group_size",
                    field,
                )
        return self

    def resolved(self, shard_group_size: int, placement: str) -> ParallelismSpec:
        """This section with L and the placement, unchecked; bounds become multiples of L."""
        size = shard_group_size
        most = self.world_size // size * size
        workers: int | WorkersSpec = most
        if isinstance(self.workers, WorkersSpec):
            workers = WorkersSpec(min=math.ceil(self.workers.min / size) * size, max=most)
        return self.model_copy(
            update={"shard_group_size": size, "placement": placement, "workers": workers}
        )
