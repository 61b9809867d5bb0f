"""Bodies about the queue and the quotas of projects (pydantic only)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class QueuePlace(BaseModel):
    """Where a waiting job stands: `position` from 1, null while it is not its turn at all."""

    position: int | None = None
    reason: str = Field(default="", examples=["waiting for 4 of 8 workers; cluster max 6"])


class WaitingJob(BaseModel):
    """A job in the queue."""

    id: str
    name: str
    project: str
    priority: int
    min_workers: int
    world_size: int
    waits_since: float
    retry_at: float | None
    position: int | None
    reason: str


class RunningJob(BaseModel):
    """A job that holds workers."""

    id: str
    name: str
    project: str
    priority: int
    preemptible: bool
    num_workers: int
    is_pausing: bool
    preempted_by: str | None


class QueueOut(BaseModel):
    """Everything that waits, in the order of its turn, and everything that runs."""

    waiting: list[WaitingJob]
    running: list[RunningJob]


class Quotas(BaseModel):
    """What the jobs of a project may hold at the same time; null is no limit."""

    model_config = ConfigDict(extra="forbid")

    max_workers: int | None = Field(default=None, ge=0, le=2**31 - 1, examples=[64])
    max_running_jobs: int | None = Field(default=None, ge=0, le=2**31 - 1, examples=[8])


class ProjectOut(BaseModel):
    """A project: its quotas and what its jobs hold now."""

    name: str
    max_workers: int | None
    max_running_jobs: int | None
    updated_at: float | None = Field(description="When the quotas were set; null without any.")
    num_workers: int
    num_running_jobs: int
    num_queued_jobs: int
