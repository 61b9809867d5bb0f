"""Rows of the table of exports; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.api.export_schemas import ExportOut
from service.dashboard import formats
from service.domain import Job


@dataclass(frozen=True)
class ExportLine:
    """One export. `href` downloads it, and is empty until it is done."""

    id: str
    href: str
    status: str
    checkpoint: str
    tables: str
    size: str
    age: str
    message: str


def export_lines(job: Job, exports: Sequence[ExportOut], now: float) -> list[ExportLine]:
    """A row for each export, in the order given; `now` is Unix time in seconds."""
    return [_line(job, each, now) for each in exports]


def _line(job: Job, export: ExportOut, now: float) -> ExportLine:
    is_done = export.status == "succeeded"
    at_step = "" if export.step is None else f" (step {formats.grouped(export.step)})"
    return ExportLine(
        id=export.id,
        href=f"/v1/jobs/{job.id}/exports/{export.id}/archive" if is_done else "",
        status=export.status,
        checkpoint=f"{export.checkpoint}{at_step}",
        tables=export.quantize,
        size="" if export.size_bytes is None else formats.size(export.size_bytes),
        age=f"{formats.duration(now - export.created)} ago",
        message=_errors(export) if is_done else export.message,
    )


def _errors(export: ExportOut) -> str:
    """How far predictions are from the trainer's, by task."""
    tasks = (export.report or {}).get("tasks", {})
    if not tasks:
        return "not compared with the trainer's predictions"
    return "; ".join(
        f"{name}: {each['metric']} {each['trainer_metric']:.4f} as trained, "
        f"{each['export_metric']:.4f} exported"
        for name, each in tasks.items()
    )
