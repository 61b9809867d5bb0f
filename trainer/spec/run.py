"""`training`, `checkpoint`, `retry` and `resources`: how a run goes and what it may use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trainer.spec.base import SpecModel


class TraceSpec(SpecModel):
    """Steps to record with torch.profiler, on the given ranks.

    A trace ends early where a checkpoint or a validation begins.
    """

    first_step: PositiveInt
    num_steps: Annotated[PositiveInt, Field(le=100)] = 3
    ranks: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)


class TrainingSpec(SpecModel):
    """Length of the run and what it reports on the way."""

    epochs: PositiveInt = 1
    max_steps: PositiveInt | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    report_every_steps: PositiveInt = 10
    validate_every_steps: PositiveInt | None = None
    trace: TraceSpec | None = None


class CheckpointSpec(SpecModel):
    """A checkpoint every `every_steps` and at the end; the newest `keep_last` and the best stay."""

    every_steps: PositiveInt = 100
    keep_last: PositiveInt = 2
    keep_best: bool = True


class RetrySpec(SpecModel):
    """How many failures (lost workers or a lost driver) the job survives."""

    max_failures: Annotated[int, Field(ge=0)] = 3


class ResourcesSpec(SpecModel):
    """What each worker asks of the Ray cluster.

    `memory_bytes_per_worker` is what the planner may fill; by default the memory of the GPU, or
    an equal share of the host's.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpus_per_worker: PositiveFloat = 1.0
    threads_per_worker: PositiveInt = 1
    collective_timeout_s: PositiveFloat = 60.0
    memory_bytes_per_worker: PositiveInt | None = None
