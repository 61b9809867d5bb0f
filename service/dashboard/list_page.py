"""The job list: counts by status that filter, a search box and a live table."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from nicegui import ui

from service.dashboard import formats, views
from service.dashboard.shell import page_frame
from service.dashboard.snapshots import MAX_LISTED_JOBS, ListFeed, ListFilter, ListSnapshot
from service.domain import JobStatus

REFRESH_INTERVAL_S = 1.0
EXAMPLE_COMMAND = "shardloom run deploy/examples/movielens.yaml"

_COLUMNS = (
    ("status", "Status", "left"),
    ("name", "Job", "left"),
    ("progress", "Progress", "left"),
    ("workers", f"Workers T = M {formats.TIMES} L", "left"),
    ("loss", "Train loss", "right"),
    ("quality", "Validation", "right"),
    ("rows_per_s", "Rows/s", "right"),
    ("duration", "Duration", "right"),
    ("age", "Age", "right"),
)

# Compiled by Vue in the browser, which escapes every value and patches rows in place: a row
# under the pointer keeps its identity while its numbers change.
_ROW_TEMPLATE = """
<q-tr :props="props" class="job-row" :title="props.row.message">
  <q-td key="status"><span :class="'status tone-' + props.row.tone">{{ props.row.status }}</span><small v-if="props.row.groups" class="degraded">{{ props.row.groups }}</small></q-td>
  <q-td key="name" class="job-name">
    <a :href="props.row.href">{{ props.row.name }}</a><small>{{ props.row.id }}</small>
  </q-td>
  <q-td key="progress" class="job-progress">
    <div :class="'bar tone-' + props.row.tone"><i :style="{width: props.row.percent + '%'}"></i></div>
    <div class="bar-text"><span>{{ props.row.percent_text }}</span><span>{{ props.row.aside }}</span></div>
  </q-td>
  <q-td key="workers" data-label="Workers">{{ props.row.workers }}</q-td>
  <q-td key="loss" class="number" data-label="Train loss">{{ props.row.loss }}</q-td>
  <q-td key="quality" class="number" data-label="Validation">
    {{ props.row.quality }}<small class="unit">{{ props.row.quality_name }}</small>
  </q-td>
  <q-td key="rows_per_s" class="number" data-label="Rows/s">{{ props.row.rows_per_s }}</q-td>
  <q-td key="duration" class="number" data-label="Duration">{{ props.row.duration }}</q-td>
  <q-td key="age" class="number" data-label="Age">{{ props.row.age }}</q-td>
</q-tr>
"""  # noqa: E501


class ListPage:
    """One reader's job list, refreshed every second while the browser is connected."""

    def __init__(self, feed: ListFeed, projects: frozenset[str] | None = None) -> None:
        self._feed = feed
        self._projects = projects
        self._filter = ListFilter()
        self._snapshot = ListSnapshot(jobs=(), has_more=False)
        self._shown_pills: tuple[object, ...] = ()

    async def build(self) -> None:
        """Draw the page with what the store holds."""
        with page_frame("Jobs"):
            with ui.element("div").classes("list-head"):
                ui.html("<h1>Jobs</h1>", sanitize=False)
                self._pills = ui.element("div").classes("pills")
                self._search = ui.input(
                    placeholder="Filter by name", on_change=self._search_changed
                )
                self._search.props('dense outlined clearable debounce=150 aria-label="Filter"')
                self._search.classes("search")
            self._table = _build_table()
            self._note = ui.label().classes("list-note")
            self._empty = ui.element("div").classes("blank")
            with self._empty:
                _build_empty_state()
        await self.refresh()
        ui.timer(REFRESH_INTERVAL_S, self.refresh, immediate=False)

    async def refresh(self) -> None:
        """Read the store in a thread and show what changed."""
        self._snapshot = await asyncio.to_thread(self._feed.latest, self._projects)
        self._show()

    def _show(self) -> None:
        now = time.time()
        shown = [job for job in self._snapshot.jobs if self._filter.admits(job)]
        rows = [views.job_row(job, now) for job in shown]
        if rows != self._table.rows:
            self._table.rows = rows
        has_jobs = bool(self._snapshot.jobs)
        self._table.set_visibility(has_jobs)
        self._empty.set_visibility(not has_jobs)
        self._pills.set_visibility(has_jobs)
        self._search.set_visibility(has_jobs)
        self._note.set_text(self._note_text(len(shown)) if has_jobs else "")
        self._show_pills()

    def _note_text(self, num_shown: int) -> str:
        if num_shown == 0:
            return "No job matches the filter."
        return f"The newest {MAX_LISTED_JOBS} jobs." if self._snapshot.has_more else ""

    def _show_pills(self) -> None:
        pills: list[tuple[JobStatus | None, str, int]] = [(None, "all", len(self._snapshot.jobs))]
        pills += [(status, status.lower(), n) for status, n in self._snapshot.counts.items()]
        state = (pills, self._filter.status)
        if state == self._shown_pills:
            return
        self._shown_pills = state
        self._pills.clear()
        with self._pills:
            for status, label, number in pills:
                self._build_pill(status, label, number)

    def _build_pill(self, status: JobStatus | None, label: str, number: int) -> None:
        active = "active" if status is self._filter.status else ""
        with ui.element("button").classes(f"pill {active}") as pill:
            ui.label(label)
            ui.label(str(number)).classes("pill-count")
        pill.on("click", partial(self._choose, status))

    def _choose(self, status: JobStatus | None) -> None:
        self._filter = ListFilter(status=status, name=self._filter.name)
        self._show()

    def _search_changed(self) -> None:
        self._filter = ListFilter(status=self._filter.status, name=self._search.value or "")
        self._show()


def _build_table() -> ui.table:
    columns = [
        {"name": name, "label": label, "field": name, "align": align}
        for name, label, align in _COLUMNS
    ]
    table = ui.table(columns=columns, rows=[], row_key="id").classes("jobs-table")
    table.props('flat hide-pagination :rows-per-page-options="[0]" hide-no-data')
    table.add_slot("body", _ROW_TEMPLATE)
    return table


def _build_empty_state() -> None:
    ui.label("No jobs yet").classes("blank-title")
    ui.label("Submit a first one from a terminal; it shows up here at once.")
    ui.html(f"<pre class='command'>{EXAMPLE_COMMAND}</pre>", sanitize=False)
    ui.label("A job is one YAML file: data, features, tables, model and how to spread them.")
