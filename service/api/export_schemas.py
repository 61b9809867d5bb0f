"""Bodies of the routes about exports, shared by the server and the client (pydantic only)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints

from service.api.schemas import ApiModel
from trainer.spec.export import Quantization

ExportStatus = Literal["queued", "running", "succeeded", "failed"]
# 18 digits: what any database and any file name can hold.
Checkpoint = Annotated[str, StringConstraints(pattern=r"^(newest|best|\d{1,18})$")]


class RequestExport(ApiModel):
    """Body of POST /v1/jobs/{job}/exports: `checkpoint` is `newest`, `best` or a step."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: Checkpoint = "newest"
    quantize: Quantization = "int8"


class ExportOut(ApiModel):
    """An export of a job, done or not.

    `message` says what is done now, or why it failed; `report` what was measured once it is done:
    how far its predictions are from the trainer's on validation rows.
    """

    id: str
    checkpoint: str
    quantize: Quantization
    status: ExportStatus
    message: str
    created: float
    step: int | None = None
    size_bytes: int | None = None
    report: Annotated[
        dict[str, Any] | None, Field(description="See `trainer/export/report.py`.")
    ] = None
