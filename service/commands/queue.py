"""The command `queue`: who waits for what, and who holds the workers."""

from __future__ import annotations

import time

from rich.table import Table

from service.api.queue_schemas import QueueOut
from service.commands import context
from service.commands.context import JsonOption, UrlOption, print_json
from service.commands.formats import human_duration
from service.sizes import span_text


def queue(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show who waits for workers, in which order and why, and who holds them."""
    with context.open_client(url) as client:
        found = client.queue()
    if as_json:
        print_json(found)
        return
    if not found.waiting and not found.running:
        context.console().print("nothing waits and nothing runs")
    if found.waiting:
        context.console().print(_waiting_table(found, time.time()))
    if found.running:
        context.console().print(_running_table(found))


def _waiting_table(found: QueueOut, now: float) -> Table:
    table = _table("#", "JOB", "NAME", "PROJECT", "PRIORITY", "WORKERS", "WAITS", "WHY")
    for job in found.waiting:
        table.add_row(
            "-" if job.position is None else str(job.position),
            job.id,
            job.name,
            job.project,
            str(job.priority),
            span_text(job.min_workers, job.world_size),
            human_duration(max(0.0, now - job.waits_since)),
            job.reason,
        )
    return table


def _running_table(found: QueueOut) -> Table:
    table = _table("RUNS", "NAME", "PROJECT", "PRIORITY", "WORKERS", "")
    for job in found.running:
        makes_way = f"makes way for {job.preempted_by}" if job.preempted_by else "pauses"
        table.add_row(
            job.id,
            job.name,
            job.project,
            str(job.priority),
            str(job.num_workers),
            makes_way if job.is_pausing else "",
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    return table
