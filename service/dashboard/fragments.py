"""Read-only parts of the pages as HTML, from Jinja templates.

Jinja escapes every value, so no job name or message becomes markup; the pages need not sanitise
these fragments again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import isfunction
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from service.api.views import compared_view, progress_of, summary_of
from service.backends.base import cluster_text, has_own_cluster
from service.dashboard import spec_text, views
from service.dashboard.groups import grid_then, member_grid
from service.dashboard.shell import MOUNT_PATH
from service.dashboard.snapshots import JobSnapshot
from service.domain.models import Attempt, Job, JobStatus, TimelineEvent
from service.domain.retries import advice_of
from service.domain.sharding import (
    DIVERGENCE,
    imbalance,
    loads_of,
    memory_peaks,
    newest_workers,
    policy_facts,
    shard_text,
    table_uses,
)
from service.domain.timeline import counted
from service.schemas import wording

_templates = Environment(
    loader=PackageLoader("service.dashboard"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
# Draws a snapshot of a job, at a Unix time in seconds.
Drawn = Callable[[JobSnapshot, float], str]
# Templates call what these modules define, also as a filter: `{{ job.created_at | age(now) }}`.
_WORDS = {
    name: each
    for module in (wording, views)
    for name, each in vars(module).items()
    if isfunction(each) and each.__module__ == module.__name__
}
_templates.filters |= _WORDS | {"grouped": "{:,}".format}
_templates.globals |= _WORDS | {
    "counted": counted,
    "home": MOUNT_PATH,
    "num_colours": views.NUM_HOST_COLOURS,
    "progress_of": progress_of,
    "shard_text": shard_text,
}


def render(template: str, **values: object) -> str:
    return _templates.get_template(template).render(**values)


def drawn(template: str) -> Drawn:
    """Draws a snapshot by a template, which has its fields and `now`."""
    return lambda snapshot, now: render(template, **vars(snapshot), now=now)


def heading(job: Job, now: float, attempts: Sequence[Attempt] = ()) -> str:
    """Name, status, reason, message and times of a job, and what to change if it failed.

    `now` is Unix time in seconds.
    """
    last_end = attempts[-1].end_reason if attempts else None
    shown = summary_of(job)
    return render(
        "heading.html",
        job=job,
        now=now,
        groups=wording.groups_text(shown),
        layout=wording.layout_text(shown),
        advice=advice_of(job.reason, last_end) if job.status is JobStatus.FAILED else "",
        cluster=cluster_text(job.spec) if has_own_cluster(job) else "",
    )


def groups(job: Job, timeline: Sequence[TimelineEvent], moment: TimelineEvent | None = None) -> str:
    """Diagram of the 2D layout: the groups as they are now, or were after one of `moments_of`.

    Those that are no failure domains are shown as the workers began.
    """
    members, lines = (
        grid_then(job, timeline, moment) if moment else (member_grid(job, timeline), timeline)
    )
    if members is not None:
        return render("member_grid.html", grid=members)
    is_lost = moment is not None and moment.kind == "workers_lost"
    return render("groups.html", workers=newest_workers(lines), is_lost=is_lost)


def differences(names: Sequence[str], documents: Sequence[Any], title: str = "") -> str:
    """Table of the fields in which specs differ; `names` say whose they are."""
    found = spec_text.differences(documents)
    rows = [(path, map(spec_text.shown, values)) for path, values in found.items()]
    return render("differences.html", names=names, rows=rows, title=title)


def sharding(job: Job, timeline: Sequence[TimelineEvent]) -> str:
    """The plan of the tables, what each position holds, and how copies are kept together."""
    workers = newest_workers(timeline)
    tables, size = (workers.tables, workers.shard_group_size) if workers else ([], 0)
    loads, peaks = loads_of(tables, size), memory_peaks(job.latest_metrics, size)
    held = [sum(load.values()) for load in loads]
    prediction = workers.prediction if workers else None
    predicted = wording.memory_by_position(prediction) if prediction else []
    return render(
        "sharding.html",
        workers=workers,
        loads=loads,
        peaks=peaks,
        largest_bytes=max([*held, *(peak.with_tables_bytes for peak in peaks)], default=0.0),
        predicted=predicted,
        most_predicted_bytes=max((sum(size for _, size in each) for each in predicted), default=0),
        uses=table_uses(job.spec, tables, job.latest_metrics),
        imbalance=imbalance(loads),
        facts=policy_facts(job.spec),
        compared=compared_view(job),
        alarms=[line.message for line in reversed(timeline) if line.kind == DIVERGENCE],
    )
