"""Read-only parts of the pages as HTML, from Jinja templates.

Jinja escapes every value, so no job name or message becomes markup; the pages need not sanitise
these fragments again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from heapq import nlargest
from inspect import isfunction
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from service.api.views import compared_view, membership_view, summary_of
from service.backends.base import cluster_text, has_own_cluster
from service.dashboard import spec_text, views
from service.dashboard.groups import MOMENTS, grid_then, lanes_of, member_grid, moments_of
from service.dashboard.shell import MOUNT_PATH
from service.dashboard.snapshots import JobSnapshot
from service.domain.metrics import goodput_of
from service.domain.models import Attempt, Checkpoint, Job, JobStatus, TimelineEvent
from service.domain.retries import advice_of
from service.domain.sharding import (
    DIVERGENCE,
    STARTED,
    imbalance,
    loads_of,
    memory_peaks,
    newest_workers,
    policy_facts,
    shard_text,
    table_uses,
)
from service.domain.timeline import counted, traces_of
from service.schemas import wording
from service.schemas.wording import group_facts

_templates = Environment(
    loader=PackageLoader("service.dashboard"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
# Of very many tables those are listed that take most of one position, and those shown that take
# most of each.
MAX_TABLES, _MAX_PIECES = 100, 40
# Texts as `5m 00s ago` are as old as this, where nothing else is new.
_MAX_AGE_S = 10.0
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
    "moments_of": moments_of,
    "num_colours": views.NUM_HOST_COLOURS,
    "shard_text": shard_text,
    "summary_of": summary_of,
    "traces_of": traces_of,
}


def render(template: str, **values: object) -> str:
    return _templates.get_template(template).render(**values)


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
        return render("member_grid.html", grid=members, place_of=_places(members.hosts))
    is_lost = moment is not None and moment.kind == "workers_lost"
    workers = newest_workers(lines)
    place_of = _places(workers.hosts if workers else ())
    return render("groups.html", workers=workers, place_of=place_of, is_lost=is_lost)


def _places(hosts: Sequence[str]) -> dict[str, int]:
    """By host: how many others come before it."""
    return {host: place for place, host in enumerate(dict.fromkeys(hosts))}


def lanes(job: Job, timeline: Sequence[TimelineEvent], now: float) -> str:
    """Who trained when; empty where the job told no groups."""
    found = lanes_of(job, timeline, now)
    return render("lanes.html", lanes=found) if found.rows else ""


def membership(
    job: Job, timeline: Sequence[TimelineEvent], checkpoints: Sequence[Checkpoint], now: float
) -> str:
    """Goodput, and what is known of the groups; empty where nothing is."""
    facts = group_facts(job, membership_view(job), timeline, now, checkpoints)
    goodput = goodput_of(job.latest_metrics)
    return render("membership.html", facts=facts, goodput=goodput) if facts or goodput else ""


def differences(names: Sequence[str], documents: Sequence[Any], title: str = "") -> str:
    """Table of the fields in which specs differ; `names` say whose they are."""
    found = spec_text.differences(documents)
    rows = [(path, map(spec_text.shown, values)) for path, values in found.items()]
    return render("differences.html", names=names, rows=rows, title=title)


def sharding(job: Job, timeline: Sequence[TimelineEvent], search: str = "") -> str:
    """The plan of the tables, what each position holds, and how copies are kept together.

    Of the tables whose names contain `search` at most `MAX_TABLES` are listed.
    """
    workers = newest_workers(timeline)
    tables, size = (workers.tables, workers.shard_group_size) if workers else ([], 0)
    loads, peaks = loads_of(tables, size), memory_peaks(job.latest_metrics, size)
    held = [sum(load.values()) for load in loads]
    fitting = [table for table in tables if search.lower() in table.name.lower()]
    most = {table.name: max(load.get(table.name, 0.0) for load in loads) for table in fitting}
    shown = nlargest(MAX_TABLES, fitting, key=lambda table: most[table.name])
    uses = table_uses(job.spec, fitting, job.latest_metrics)
    prediction = workers.prediction if workers else None
    predicted = wording.memory_by_position(prediction) if prediction else []
    return render(
        "sharding.html",
        workers=workers,
        tables=shown if len(fitting) > MAX_TABLES else fitting,
        num_fitting=len(fitting),
        loads=[*map(_largest, loads)],
        peaks=peaks,
        largest_bytes=max([*held, *(peak.with_tables_bytes for peak in peaks)], default=0.0),
        predicted=predicted,
        most_predicted_bytes=max((sum(size for _, size in each) for each in predicted), default=0),
        uses=uses[:MAX_TABLES],
        num_uses=len(uses),
        imbalance=imbalance(loads),
        facts=policy_facts(job.spec),
        compared=compared_view(job),
        alarms=[line.message for line in reversed(timeline) if line.kind == DIVERGENCE],
    )


def _largest(load: Mapping[str, float]) -> Mapping[str, float]:
    """What a position holds; of very many tables the largest, and the others together."""
    if len(load) <= _MAX_PIECES:
        return load
    kept = dict(nlargest(_MAX_PIECES, load.items(), key=lambda item: item[1]))
    others = [held for name, held in load.items() if name not in kept]
    return kept | {counted(len(others), "other table"): sum(others)}


def _newest(at: JobSnapshot, kinds: Collection[str]) -> int:
    """Id of the newest event of some kinds; 0 without one."""
    return next((line.id for line in reversed(at.timeline) if line.kind in kinds), 0)


def _source_of_lanes(at: JobSnapshot, now: float) -> object:
    until = at.job.ended_at or now // _MAX_AGE_S
    return _newest(at, MOMENTS), at.job.current_attempt_id, until


def _source_of_grid(at: JobSnapshot, now: float) -> object:
    job = at.job
    return _newest(at, MOMENTS), job.membership, job.current_attempt_id, job.status.is_terminal


def _source_of_sharding(at: JobSnapshot, now: float) -> object:
    metrics = at.job.latest_metrics.items()
    told = [each for each in metrics if each[0].startswith(("table/", "memory/"))]
    return _newest(at, {STARTED, DIVERGENCE}), told, compared_view(at.job)


class Part(NamedTuple):
    """A part of a job's page; times are Unix times in seconds.

    `draw` makes its HTML of a snapshot, anew where the `source` is another than before.
    """

    draw: Callable[[JobSnapshot, float], str]
    source: Callable[[JobSnapshot, float], object] = lambda at, now: (at, now // _MAX_AGE_S)


def _by(template: str) -> Part:
    """Drawn by a template, which has the fields of the snapshot and `now`."""
    return Part(lambda at, now: render(template, **vars(at), now=now))


# Those of a large job that take long have a source of their own.
PARTS = {
    "heading": Part(lambda at, now: heading(at.job, now, at.attempts), lambda at, now: (at, now)),
    "progress": _by("progress.html"),
    "figures": _by("figures.html"),
    "lanes": Part(lambda at, now: lanes(at.job, at.timeline, now), _source_of_lanes),
    "membership": Part(lambda at, now: membership(at.job, at.timeline, at.checkpoints, now)),
    "grid": Part(lambda at, now: groups(at.job, at.timeline), _source_of_grid),
    "moments": _by("moments.html"),
    "timeline": _by("timeline.html"),
    "checkpoints": _by("checkpoints.html")._replace(source=lambda at, now: at.checkpoints),
    "attempts": _by("attempts.html"),
    "traces": _by("traces.html"),
    "sharding": Part(lambda at, now: sharding(at.job, at.timeline), _source_of_sharding),
}
