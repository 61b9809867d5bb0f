"""The job list: a page of all jobs that fit the filters, which the address of the page holds.

The store filters and pages, so that a list of 100 000 jobs is as quick as one of ten. Rows come
first, the curves of their watched metrics right after them.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlencode
from weakref import WeakValueDictionary

from nicegui import ui
from pydantic import ValidationError
from starlette.datastructures import QueryParams

from service.dashboard import views
from service.dashboard.panels import ask, button
from service.dashboard.rest import Refused, Rest
from service.dashboard.shell import MOUNT_PATH, go_to, link_button, page_frame
from service.dashboard.snapshots import Shared
from service.db.jobs import JobStore
from service.domain.auth import Role
from service.domain.job_filter import MAX_SEARCH_CHARS, JobFilter, MetricBound
from service.domain.metrics import watched_names
from service.domain.models import Job, JobStatus
from service.domain.timeline import counted
from service.errors import StoreUnavailable

REFRESH_INTERVAL_S = 1.0
_AGE_STEP_S = 10.0
PAGE_SIZE = 50
SPARK_WIDTH, SPARK_HEIGHT, SPARK_POINTS = 88, 24, 44
_MAX_SPARKS = 5000
EXAMPLE_COMMAND = "shardloom run examples/movielens.yaml"
_CANCEL_HINT = "Their workers stop. Checkpoints that are committed stay."
_DELETE_HINT = "Their checkpoints, logs and metrics go, too. This cannot be undone."
_ALWAYS, _CHOSEN = ("status", "name"), views.COLUMNS[2:]
DEFAULT_COLUMNS = tuple(each.name for each in _CHOSEN if each.is_default)
_STATES = tuple(JobStatus)


@dataclass(frozen=True)
class JobQuery:
    """What the list shows: the parameters of the page's address, which may be shared."""

    search: str = ""
    statuses: tuple[JobStatus, ...] = ()
    project: str = ""
    labels: tuple[str, ...] = ()
    metric: str = ""
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    after: str = ""

    @classmethod
    def of(cls, params: QueryParams) -> JobQuery:
        """The query of an address; what is not known in it is left out."""
        states = {state.value.lower(): state for state in _STATES}
        chosen = params.get("columns")
        return cls(
            search=params.get("search", "")[:MAX_SEARCH_CHARS],
            statuses=tuple(states[name] for name in params.getlist("status") if name in states),
            project=params.get("project", ""),
            labels=tuple(params.getlist("label")),
            metric=params.get("metric", ""),
            columns=DEFAULT_COLUMNS if chosen is None else tuple(filter(None, chosen.split(","))),
            after=params.get("after", ""),
        )

    @property
    def address(self) -> str:
        """Path and parameters of the page that shows this."""
        pairs = [("search", self.search), *(("status", each.lower()) for each in self.statuses)]
        pairs += [("project", self.project), *(("label", each) for each in self.labels)]
        pairs += [("metric", self.metric), ("after", self.after)]
        given = [(name, value) for name, value in pairs if value]
        if self.columns != DEFAULT_COLUMNS:
            given.append(("columns", ",".join(self.columns)))
        return f"{MOUNT_PATH}/" + (f"?{urlencode(given, safe='/,:')}" if given else "")

    @property
    def is_filtered(self) -> bool:
        return replace(self, columns=DEFAULT_COLUMNS) != JobQuery()

    @property
    def wanted(self) -> JobFilter:
        """The filter of the store; raises ValidationError."""
        return JobFilter.model_validate(
            {
                "after": self.after or None,
                "statuses": self.statuses,
                "search": self.search.strip(),
                "project": self.project or None,
                "labels": [label for label in self.labels if label.find("=") > 0],
                "metrics": [self.metric] if self.metric.strip() else [],
            }
        )


@dataclass(frozen=True)
class ListSnapshot:
    """A page of jobs; `following` is the cursor of the next one."""

    jobs: Sequence[Job]
    following: str | None


class ListFeed:
    """Pages of the job list, each read once for all of its readers: reading 50 specs takes a while.

    `placed` gives a job with its position in the queue.
    """

    def __init__(self, store: JobStore, placed: Callable[[Job], Job] = lambda job: job) -> None:
        self._store = store
        self._placed = placed
        self._lock = threading.Lock()
        self._pages: WeakValueDictionary[str, Shared[ListSnapshot]] = WeakValueDictionary()
        # By job: the step that it was at, and its curve then.
        self._sparks: OrderedDict[str, tuple[int, str]] = OrderedDict()

    def page(
        self, wanted: JobFilter, projects: Collection[str] | None = None
    ) -> Shared[ListSnapshot]:
        """A page of jobs, which is remembered for as long as somebody has it."""
        read = Shared(partial(self._read, wanted, projects))
        return self._pages.setdefault(repr((wanted, projects)), read)

    def _read(self, wanted: JobFilter, projects: Collection[str] | None) -> ListSnapshot:
        jobs, following = self._store.list_jobs(wanted, projects=projects, limit=PAGE_SIZE)
        return ListSnapshot([*map(self._placed, jobs)], following)

    def spark(self, job: Job) -> str:
        """The curve of a job as it was read last; empty before that."""
        return self._sparks.get(job.id, (0, ""))[1]

    def needs_spark(self, job: Job) -> bool:
        """Whether the curve of a job is not that of its step now."""
        return self._sparks.get(job.id, (-1, ""))[0] != job.progress.step

    def read_spark(self, job: Job) -> None:
        """Read the curve of a job's watched metric: on validation, else in training, else loss."""
        for name in watched_names(job.spec.model.watched_metric):
            found = self._store.metric_sample(job.id, name, SPARK_POINTS)
            if len(found) > 1:
                break
        with self._lock:
            self._sparks[job.id] = job.progress.step, spark_path(found)
            self._sparks.move_to_end(job.id)
            while len(self._sparks) > _MAX_SPARKS:
                self._sparks.popitem(last=False)


def spark_path(points: Sequence[tuple[int, float]]) -> str:
    """Points (step, value) as the path of an SVG; what is not finite is a gap."""
    finite = [value for _, value in points if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    first, last, low, high = points[0][0], points[-1][0], min(finite), max(finite)
    across, up = max(last - first, 1), (high - low) or 1.0
    path, is_drawing = [], False
    for step, value in points:
        if math.isfinite(value):
            x = 2 + (SPARK_WIDTH - 4) * (step - first) / across
            y = 2 + (SPARK_HEIGHT - 4) * (high - value) / up
            path.append(f"{'L' if is_drawing else 'M'}{x:.1f} {y:.1f}")
        is_drawing = math.isfinite(value)
    return "".join(path)


class JobsTable(ui.table, component="static/jobs_table.js"):
    """The rows of the list. Slots given as text would be drawn anew whenever a number changes, and
    a click whose two halves fall on either side of that would be lost.
    """


class ListPage:
    """One reader's job list, refreshed every second while the browser is connected."""

    def __init__(self, rest: Rest, feed: ListFeed) -> None:
        self._rest = rest
        self._feed = feed
        self._reader = rest.reader()
        self._may_submit = self._reader.may_somewhere(Role.SUBMITTER)
        self._query = JobQuery.of(ui.context.client.request.query_params)
        self._snapshot = ListSnapshot((), None)
        self._is_reading_sparks = False
        # The one that is filtered by.
        self._metric = ""
        # Cursors of the pages before this one.
        self._before: list[str] = []

    async def build(self) -> None:
        with page_frame("Jobs", self._rest):
            with ui.element("div").classes("list-head"):
                ui.html("<h1>Jobs</h1>", sanitize=False)
                ui.element("span").classes("grow")
                if self._may_submit:
                    link_button("New job", f"{MOUNT_PATH}/new", "primary")
            self._fault = ui.label().classes("notice tone-bad").props("role=alert")
            self._build_filters()
            self._build_selection()
            self._table = _build_table()
            self._table.on_select(lambda _: self._show_selection())
            self._show_columns()
            self._build_foot()
            self._build_blanks()
        await self.refresh()
        ui.timer(REFRESH_INTERVAL_S, self.refresh, immediate=False)
        ui.timer(0.0, self._draw_sparks, once=True)

    def _build_filters(self) -> None:
        query = self._query
        with ui.element("div").classes("filters") as self._filters:
            with ui.element("div").classes("pills").props('role=group aria-label="State"'):
                self._pills: dict[JobStatus | None, ui.element] = {None: self._pill(None, "all")}
                self._pills |= {each: self._pill(each, each.lower()) for each in _STATES}
            with ui.element("div").classes("filter-fields"):
                search = _filter_input("Search name or id", query.search)
                search.props(f"maxlength={MAX_SEARCH_CHARS}")
                search.on_value_change(lambda event: self._change(search=event.value or ""))
                self._project = ui.select(
                    [query.project] if query.project else [],
                    value=query.project or None,
                    with_input=True,
                    clearable=True,
                    new_value_mode="add-unique",
                    on_change=lambda event: self._change(project=event.value or ""),
                ).props("aria-label=Project")
                self._project.props["placeholder"] = "Project"
                labels = _filter_input("Labels", " ".join(query.labels), "Labels: team=ads")
                labels.validation = _label_fault
                labels.on_value_change(
                    lambda event: self._change(labels=tuple((event.value or "").split()))
                )
                metric = _filter_input("Metric", query.metric, "Metric: validation/rmse<0.9")
                metric.validation = _metric_fault
                metric.on_value_change(lambda event: self._change(metric=event.value or ""))
                columns = button("Columns", lambda: None).props("icon-right=expand_more")
                with columns, ui.menu(), ui.element("div").classes("column-menu"):
                    for each in _CHOSEN:
                        box = ui.checkbox(each.title, value=each.name in query.columns)
                        box.on_value_change(partial(self._choose_column, each.name))

    def _pill(self, status: JobStatus | None, label: str) -> ui.element:
        with ui.element("button").classes("pill") as pill:
            ui.label(label)
        return pill.on("click", partial(self._choose_state, status))

    def _build_selection(self) -> None:
        with ui.element("div").classes("selection") as self._selection:
            self._selected = ui.label().classes("selection-text").props("role=status")
            button("Compare", self._compare)
            if self._may_submit:
                for verb, method, path, done, told in (
                    ("Cancel", "POST", "{}:cancel", "asked to stop", _CANCEL_HINT),
                    ("Delete", "DELETE", "{}", "deleted", _DELETE_HINT),
                ):
                    act = partial(self._for_each, method, path, done)
                    button(verb, partial(self._ask, verb, told, act), "cancel-button")
            button("Clear", self._clear_selection)
        self._selection.set_visibility(False)

    def _build_foot(self) -> None:
        with ui.element("nav").classes("list-foot").props('aria-label="More jobs"') as self._foot:
            self._note = ui.label().classes("list-note")
            ui.element("span").classes("grow")
            self._newer = button("Newer", self._turn_back)
            self._older = button("Older", self._turn)

    def _build_blanks(self) -> None:
        with ui.element("div").classes("blank") as self._empty:
            ui.label("No jobs yet").classes("blank-title")
            ui.label("Submit a first one from a terminal or here; it shows up at once.")
            ui.html(f"<pre class='command'>{EXAMPLE_COMMAND}</pre>", sanitize=False)
            ui.label("A job is one YAML file: data, features, tables, model, layout.")
        with ui.element("div").classes("blank") as self._unmatched:
            ui.label("No job matches").classes("blank-title")
            ui.label("Widen the filters, or clear them.")
            link_button("Clear filters", f"{MOUNT_PATH}/")

    async def refresh(self) -> None:
        query, fault = self._query, ""
        try:
            wanted = query.wanted
            self._page = self._feed.page(wanted, self._reader.projects)
            snapshot = await asyncio.to_thread(self._page.latest)
        except ValidationError:
            self._show()  # What was shown last: the field says what is wrong.
            return
        except StoreUnavailable as error:
            fault, snapshot = f"The list cannot be read: {error}", self._snapshot
        if query != self._query:
            return  # Somebody typed on while the store was read.
        self._fault.set_text(fault)
        self._snapshot = snapshot
        self._metric = next((bound.name for bound in wanted.metrics), "")
        self._show()

    async def _draw_sparks(self) -> None:
        """Read the curves that are not known yet, and show them."""
        missing = [*filter(self._feed.needs_spark, self._snapshot.jobs)]
        if "spark" not in self._query.columns or not missing or self._is_reading_sparks:
            return
        self._is_reading_sparks = True
        try:
            with suppress(StoreUnavailable):  # The list says so.
                await asyncio.to_thread(lambda: [*map(self._feed.read_spark, missing)])
        finally:
            self._is_reading_sparks = False
        self._show()

    def _show(self) -> None:
        # Rows are sent together whenever one has changed, so ages do not change each second.
        now, jobs = time.time() // _AGE_STEP_S * _AGE_STEP_S, self._snapshot.jobs
        rows = [
            views.job_row(job, now, self._metric) | {"spark": self._feed.spark(job)} for job in jobs
        ]
        if rows != self._table.rows:
            self._table.rows = rows
            if any(map(self._feed.needs_spark, jobs)):
                ui.timer(0.0, self._draw_sparks, once=True)
        is_filtered = self._query.is_filtered
        self._table.set_visibility(bool(jobs))
        is_known = not self._fault.text
        self._empty.set_visibility(not jobs and not is_filtered and is_known)
        self._unmatched.set_visibility(not jobs and is_filtered and is_known)
        self._filters.set_visibility(bool(jobs) or is_filtered)
        self._foot.set_visibility(bool(jobs))
        self._note.set_text(counted(len(jobs), "job") + (", newest first" if len(jobs) > 1 else ""))
        self._newer.set_visibility(bool(self._query.after))
        self._older.set_visibility(self._snapshot.following is not None)
        for status, pill in self._pills.items():
            is_on = status in self._query.statuses if status else not self._query.statuses
            pill.classes(add="active" if is_on else "", remove="" if is_on else "active")
            pill.props(f"aria-pressed={'true' if is_on else 'false'}")
        known = {job.project for job in jobs} | {*self._project.options}
        if known != {*self._project.options}:
            self._project.set_options(sorted(known))
        self._show_selection()

    # ---- what is shown

    async def _change(self, **fields: object) -> None:
        changed = replace(self._query, **{"after": "", **fields})  # type: ignore[arg-type]
        if changed == self._query:
            return
        self._query = changed
        if not fields.keys() <= {"after", "columns"}:
            self._clear_selection()  # What is not seen any more must not be deleted.
        ui.navigate.history.replace(changed.address)
        await self.refresh()

    async def _choose_state(self, status: JobStatus | None) -> None:
        chosen = {*self._query.statuses} ^ {status} if status else set()
        await self._change(statuses=tuple(each for each in _STATES if each in chosen))

    async def _choose_column(self, name: str) -> None:
        chosen = {*self._query.columns} ^ {name}
        columns = tuple(each.name for each in _CHOSEN if each.name in chosen)
        await self._change(columns=columns, after=self._query.after)
        self._show_columns()

    def _show_columns(self) -> None:
        self._table.props["visible-columns"] = [*_ALWAYS, *self._query.columns]
        self._table.update()

    async def _turn(self) -> None:
        following = self._snapshot.following
        if following and following != self._query.after:  # Else the page is being read already.
            self._before.append(self._query.after)
            await self._change(after=following)

    async def _turn_back(self) -> None:
        await self._change(after=self._before.pop() if self._before else "")

    # ---- several jobs

    def _show_selection(self) -> None:
        number = len(self._table.selected)
        self._selection.set_visibility(number > 0)
        self._selected.set_text(f"{number} selected")

    def _ask(self, verb: str, told: str, act: Callable[[], Awaitable[None]]) -> None:
        names = [row["name"] for row in self._table.selected]
        title = f"{verb} {counted(len(names), 'job')}: {', '.join(names[:3])}"
        title += f" and {len(names) - 3} more?" if len(names) > 3 else "?"
        ask(title, told, f"{verb} jobs", act, home=self._selection)

    def _clear_selection(self) -> None:
        self._table.selected = []
        self._show_selection()

    def _compare(self) -> None:
        ids = ",".join(row["id"] for row in self._table.selected)
        go_to(f"{MOUNT_PATH}/compare?jobs={ids}")

    async def _for_each(self, method: str, path: str, done: str) -> None:
        refusals, chosen = [], [*self._table.selected]
        for row in chosen:
            try:
                await self._rest.send(method, "/v1/jobs/" + path.format(row["id"]))
            except Refused as refused:
                refusals.append(f"{row['name']}: {refused}")
        num_done = len(chosen) - len(refusals)
        if num_done:
            ui.notify(f"{counted(num_done, 'job')} {done}.")
        for refusal in refusals[:3]:
            ui.notify(refusal, type="warning", multi_line=True)
        self._clear_selection()
        await self.refresh()


def _filter_input(label: str, value: str, hint: str = "") -> ui.input:
    field = ui.input(value=value, placeholder=hint or label)
    field.props("clearable debounce=200 hide-bottom-space")
    field.props["aria-label"] = label
    return field


def _label_fault(text: str | None) -> str | None:
    try:
        JobFilter.model_validate({"labels": (text or "").split()})
    except ValidationError:
        return "KEY=VALUE, several with a space"
    return None


def _metric_fault(text: str | None) -> str | None:
    try:
        MetricBound.parse(text) if text else None
    except ValueError:
        return "as in validation/rmse<0.9"
    return None


def _build_table() -> JobsTable:
    columns = [
        {
            "name": each.name,
            "label": each.title,
            "field": each.name,
            "align": "right" if each.is_number else "left",
        }
        for each in views.COLUMNS
    ]
    table = JobsTable(columns=columns, rows=[], row_key="id", selection="multiple")
    table.classes("jobs-table")
    table.props('flat hide-pagination :rows-per-page-options="[0]" hide-no-data')
    table.props("hide-selected-banner")
    table.props["mount"] = MOUNT_PATH
    table.props["spark"] = f"0 0 {SPARK_WIDTH} {SPARK_HEIGHT}"
    return table
