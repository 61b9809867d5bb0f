"""How many workers a job has and how they are grouped, as far as that is decided: pure."""

from __future__ import annotations

from dataclasses import dataclass

from service.domain import Job
from service.membership import layout_of_attempt
from trainer.spec import JobSpec


@dataclass(frozen=True)
class Sizes:
    """Bounds of T, then L, M at most workers, and the placement; None while they are `auto`."""

    min_workers: int
    world_size: int
    shard_group_size: int | None
    placement: str | None

    @property
    def num_replicas(self) -> int | None:
        """M at most workers; None while L is `auto`."""
        return self.world_size // self.shard_group_size if self.shard_group_size else None


def sizes_of_spec(spec: JobSpec) -> Sizes:
    """The sizes that a spec gives."""
    parallelism = spec.parallelism
    size, placement = parallelism.shard_group_size, parallelism.placement
    return Sizes(
        min_workers=parallelism.min_workers,
        world_size=parallelism.world_size,
        shard_group_size=None if size == "auto" else size,
        placement=None if placement == "auto" else placement,
    )


def sizes_of_job(job: Job) -> Sizes:
    """The sizes that a job's newest attempt chose, else those that its spec gives."""
    given, chosen = sizes_of_spec(job.spec), layout_of_attempt(job)
    if chosen is None:
        return given
    size = chosen.shard_group_size
    return Sizes(
        # Bounds that were written without knowing L become multiples of it.
        min_workers=-(-given.min_workers // size) * size,
        world_size=given.world_size // size * size,
        shard_group_size=size,
        placement=chosen.placement,
    )


def span_text(least: int, most: int) -> str:
    """Bounds in words: `4`, or `2-6` where they differ."""
    return str(most) if least == most else f"{least}-{most}"
