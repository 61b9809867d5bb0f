"""Bodies of the requests that change the course of a job (pydantic only)."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from service.secret_types import Secrets


class CloneJob(BaseModel):
    """What of the spec the clone has otherwise: a merge patch, then values by dotted path."""

    model_config = ConfigDict(extra="forbid")

    name: str | None = Field(default=None, examples=["movielens-larger"])
    set: dict[str, Any] = Field(
        default_factory=dict,
        max_length=200,
        description="Values by path, as `shardloom submit --set` takes them.",
        examples=[{"training.epochs": 3, "parallelism.workers": 8}],
    )
    patch: dict[str, Any] | None = Field(
        default=None, description="JSON merge patch (RFC 7396) of the spec."
    )
    secrets: Secrets = Field(
        default={}, repr=False, description="Those of the clone: the job's own do not come along."
    )


class LeftBehind(BaseModel):
    """What a deletion left, and why."""

    path: str = Field(examples=["s3://bucket/runs/job-0123456789ab"])
    why: str


class DeletedJob(BaseModel):
    """A job that is deleted; `left` has what of its checkpoints is not, with folder or URL."""

    id: str
    left: list[LeftBehind] = Field(default_factory=list)


class RestartJob(BaseModel):
    """The checkpoint to go on from, by step or by path; the newest where neither is given."""

    model_config = ConfigDict(extra="forbid")

    step: int | None = Field(default=None, ge=0, le=2**63 - 1, examples=[500])
    path: str | None = Field(default=None, min_length=1, max_length=1024)
