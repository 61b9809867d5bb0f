"""`parallelism`: workers, sharding groups, and how their copies of the tables are kept together."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from trainer.spec.base import NotYet, SpecModel, only
from trainer.spec.problems import problem
from trainer.spec.tables import Precision


class SyncSpec(SpecModel):
    """How often, and with what, the matching shards of the sharding groups are averaged.

    `touched_rows` moves only rows looked up since the last sync, which gives the same result as
    `full`; in fp32 it moves everything when more than `full_above` of the rows were touched.
    `dtype` is the precision of the change since the last sync on its way. With `overlap` the
    averages are formed during the next step and applied as a difference. `delayed` optimizer
    state of tables lags one sync behind their weights.
    """

    every_steps: PositiveInt = 1
    mode: Literal["full", "touched_rows"] = "touched_rows"
    dtype: Precision = "fp32"
    overlap: bool = False
    optimizer_state: Literal["every", "delayed", "never"] = "every"
    full_above: Annotated[float, Field(ge=0, le=1)] = 0.5


class AllToAllSpec(SpecModel):
    """Precision in which embeddings (forward) and their gradients (backward) travel."""

    forward: Precision = "fp32"
    backward: Precision = "fp32"


class DivergenceCheckSpec(SpecModel):
    """Compare checksums of the copies every `every_syncs` syncs.

    A mismatch fails the attempt, which then resumes from a checkpoint, or gives every rank of the
    replica group the copy that most of them hold.
    """

    every_syncs: PositiveInt
    action: Literal["fail", "rebroadcast"] = "fail"


class PlannerSpec(SpecModel):
    """What TorchRec's planner reckons with.

    `storage_reservation` is the share of each worker's memory kept for the dense part,
    activations and collectives. `measured` bandwidths are taken between the workers at start.
    """

    storage_reservation: Annotated[float, Field(ge=0, lt=1)] = 0.15
    bandwidths: Literal["measured", "default"] = "measured"


class WorkersSpec(SpecModel):
    """Bounds of the world size T. Equal bounds mean a fixed size."""

    min: PositiveInt
    max: PositiveInt

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.min > self.max:
            raise problem("bounds", f"min ({self.min}) is above max ({self.max})")
        if self.min != self.max:
            raise problem(
                "not_supported_yet", "elastic bounds (min below max) are not supported yet"
            )
        return self


def _refuse_auto(value: int | str) -> int | str:
    if value == "auto":
        raise problem("not_supported_yet", "'auto' is not supported yet; give a number")
    return value


def _unset(value: Any) -> Any:
    # `--set parallelism.sync=null` takes back what a file sets.
    return SyncSpec() if value is None else value


class ParallelismSpec(SpecModel):
    """T workers, in sharding groups of L = `shard_group_size`; M = T / L replicas.

    `dense: at_sync` averages the dense part at syncs too, instead of at every step, so that the
    sharding groups are independent of each other in between.
    """

    workers: PositiveInt | WorkersSpec = 1
    shard_group_size: Annotated[PositiveInt | Literal["auto"], AfterValidator(_refuse_auto)]
    placement: Annotated[
        Literal["intra_host", "inter_host", "auto"], only("intra_host", "inter_host")
    ] = "intra_host"
    sync: Annotated[SyncSpec, BeforeValidator(_unset)] = SyncSpec()
    dense: Literal["every_step", "at_sync"] = "every_step"
    moment_scale: PositiveFloat | Literal["auto"] = "auto"
    all_to_all: AllToAllSpec = AllToAllSpec()
    divergence_check: DivergenceCheckSpec | None = None
    planner: PlannerSpec = PlannerSpec()
    survive: NotYet = None

    @property
    def world_size(self) -> int:
        """T, the number of workers."""
        return self.workers if isinstance(self.workers, int) else self.workers.max

    @property
    def num_replicas(self) -> int:
        """M, the number of sharding groups."""
        assert isinstance(self.shard_group_size, int)
        return self.world_size // self.shard_group_size

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        assert isinstance(self.shard_group_size, int)
        if self.world_size % self.shard_group_size:
            raise problem(
                "not_divisible",
                f"workers ({self.world_size}) must be a multiple of shard_group_size "
                f"({self.shard_group_size}); nearest that fit: {self._nearest_sizes()}",
                "workers",
            )
        if self.moment_scale != "auto" and self.moment_scale > self.num_replicas:
            raise problem(
                "moment_scale",
                f"must be above 0 and at most {self.num_replicas}, the number of replicas M",
                "moment_scale",
            )
        return self

    @model_validator(mode="after")
    def _check_single_copy(self) -> Self:
        if self.num_replicas > 1:
            return self
        # A stored spec holds every default, so only another value says that a user asked for it.
        asked = {
            "sync": self.sync != SyncSpec(),
            "dense": self.dense == "at_sync",
            "divergence_check": self.divergence_check is not None,
        }
        for field in (name for name, is_asked in asked.items() if is_asked):
            raise problem(
                "single_replica",
                f"workers / shard_group_size is 1, so there is one copy of the tables and nothing "
                f"to sync or compare; remove '{field}' or lower shard_group_size",
                field,
            )
        return self

    def _nearest_sizes(self) -> str:
        group = self.shard_group_size
        assert isinstance(group, int)
        below = self.world_size // group * group
        return " or ".join(str(size) for size in (below, below + group) if size)

    @property
    def moment_scale_value(self) -> float:
        """c of the paper's algorithm 1; `auto` is M."""
        return float(self.num_replicas) if self.moment_scale == "auto" else self.moment_scale
