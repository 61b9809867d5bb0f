"""The page of a new job: text, form, checks while one types, plan, submission.

The text is the truth; the form changes it in place. What is submitted goes through `POST /v1/jobs`,
or `:clone` for a copy of a job, whose problems are shown at their fields.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlencode

from nicegui import events, ui

from service.dashboard import fragments, spec_text
from service.dashboard.panels import asking, button
from service.dashboard.rest import Refused, Rest, path_of
from service.dashboard.shell import MOUNT_PATH, blank_page, go_to, page_frame, panel
from service.dashboard.sweeps import SearchForm
from service.domain.auth import Role
from service.domain.job_filter import ALL_JOBS
from service.domain.timeline import counted
from service.errors import StoreUnavailable
from service.jobs.actions import spec_of_clone
from service.schemas.jobs import JobDetail, JobPlan
from service.schemas.plans import PlansOut
from trainer.layout.plans import Candidate
from trainer.protocol.code_archive import CodeError, pack_upload
from trainer.spec.base import FieldProblem, SpecError
from trainer.spec.parse import parse_document

_CHECK_AFTER_S = 0.35
_PLAN_AFTER_S = 0.9
_DEFAULT_TEMPLATE = "movielens.yaml"
# What the service takes in a body that is not for /v1/code, and this one has a frame.
_MAX_CODE_BYTES = 8_000_000
_BEING_ESTIMATED = "Memory and speed are being estimated ..."
_EMPTY = "name: my-job\n\ndata:\n  path: /data/prepared\n"
# The fields that people change, by section.
FORM = {
    "Job": ("name", "project", "priority", "preemptible", "retry.max_failures"),
    "Data and model": ("data.path", "data.batch_size", "model.arch"),
    "Training": ("training.epochs", "training.max_steps", "training.seed"),
    "Optimizer": (
        *("optimizer.sparse.name", "optimizer.sparse.lr"),
        *("optimizer.dense.name", "optimizer.dense.lr"),
    ),
    "Parallelism": (
        *("parallelism.workers", "parallelism.shard_group_size", "parallelism.placement"),
        *("parallelism.sync.every_steps", "parallelism.sync.dtype", "parallelism.survive.hosts"),
    ),
    "Checkpoints and resources": (
        *("checkpoint.every_steps", "checkpoint.keep_last"),
        *("resources.device", "resources.cpus_per_worker"),
    ),
}
# Where a tab keeps the fields of a sweep; the text is at the address alone.
_KEPT_SEARCH = "`sweep of ${location.href}`"
# CodeMirror asks for the options at the cursor: of the value behind `key: `, else of the section
# whose braces are open on the line, else of the nearest one above that is indented less.
_COMPLETE = """
const { EditorState, EditorView, StateEffect } = await import("nicegui-codemirror");
const table = %s, element = getElement(%d), editor = await element.editorPromise;
if (document.body.classList.contains("body--dark")) element.setTheme("githubDark");
const optionsAt = (state, pos) => {
  const line = state.doc.lineAt(pos), text = line.text.slice(0, pos - line.from);
  const value = text.match(/(\\w+):\\s+[\\w.]*$/), open = text.match(/(\\w+):\\s*\\{[^{}]*$/);
  let section = open ? open[1] : "", indent = text.search(/[^\\s-]|$/);
  for (let n = line.number - 1; !section && n > 0 && indent > 0; n--) {
    const head = state.doc.line(n).text.match(/^(\\s*)(\\w+):\\s*(#.*)?$/);
    if (head && head[1].length < indent) section = head[2];
  }
  return [{ autocomplete: table[value ? `${section}.${value[1]}=` : section] || [] }];
};
const text = sessionStorage.getItem(location.href), to = editor.state.doc.length;
const search = sessionStorage.getItem(%s);
if (search !== null) emitEvent("search_kept", JSON.parse(search));
if (text !== null) editor.dispatch({ changes: { from: 0, to, insert: text } });
const keep = ({ docChanged, state }) =>
  docChanged && sessionStorage.setItem(location.href, state.doc.toString());
const added = [EditorState.languageData.of(optionsAt), EditorView.updateListener.of(keep)];
editor.dispatch({ effects: StateEffect.appendConfig.of(added) });
editor.contentDOM.setAttribute("aria-label", "Spec");
editor.contentDOM.setAttribute("aria-description", "Escape, then Tab, leaves it");
editor.scrollDOM.tabIndex = 0;
"""


class NewJobPage:
    """One reader's draft of a job; the address has the job or template to begin with, if any."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        query = ui.context.client.request.query_params
        self._source, wanted = query.get("source", ""), query.get("template", _DEFAULT_TEMPLATE)
        self._templates = spec_text.templates()
        self._template = wanted if wanted in self._templates and not self._source else ""
        self._key = str(uuid.uuid4())
        self._is_syncing = False
        self._shown: tuple[FieldProblem, ...] = ()
        self._pending: ui.timer | None = None
        self._planning: ui.timer | None = None
        self._recommended: Candidate | None = None
        self._inputs: dict[str, ui.input | ui.select] = {}

    async def build(self) -> None:
        if not self._rest.reader().may_somewhere(Role.SUBMITTER):
            why = "It needs the role submitter in a project."
            blank_page(self._rest, "You may not submit jobs", why)
            return
        text = await self._first_text()
        with page_frame("New job", self._rest):
            with ui.element("div").classes("page-head"):
                ui.html("<h1>New job</h1>", sanitize=False)
                ui.element("span").classes("grow")
                names = {name: f"examples/{name}" for name in self._templates}
                names[""] = f"copy of {self._source}" if self._source else "an empty spec"
                self._choice = ui.select(
                    names, value=self._template, on_change=self._use_template
                ).props('aria-label="Begin with"')
                self._submit = ui.button("Submit", on_click=self._submit_now, color=None)
                self._submit.props("unelevated no-caps").classes("button primary submit-button")
            force = partial(self._submit_now, force=True)
            title, leave = "It does not fit", "Change the spec"
            with asking(title, "Submit all the same", force, leave=leave) as self._misfit_dialog:
                self._misfit_text = ui.label()
            with ui.element("div").classes("draft"):
                with ui.element("div").classes("draft-main"):
                    self._build_editor(text)
                    self._build_form()
                    self._search = SearchForm(self._search_changed)
                    ui.on("search_kept", lambda kept: self._search.fill(kept.args))
                with ui.element("div").classes("draft-side"):
                    with panel("Plan"):
                        self._cluster = ui.input(
                            label="for the cluster",
                            placeholder="the service's own; or as in 8xH100-80GB x 16",
                            on_change=self._text_changed,
                        ).props("stack-label hide-bottom-space debounce=800")
                        self._cluster.classes("plan-cluster")
                        self._plan = ui.html(sanitize=False)
                        self._plan.props("aria-live=polite")
                        self._take = button("Take the recommended layout", self._take_layout)
                        self._take.set_visibility(False)
                    with panel("Code"):
                        self._build_upload()
        await self._check()

    async def _first_text(self) -> str:
        self._templates[""] = _EMPTY
        if self._source:
            told = await self._rest.get(path_of("jobs", self._source))
            job = JobDetail.model_validate(told, context={"stored": True})
            self._source = job.id
            document = spec_of_clone(job.spec).model_dump(mode="json", exclude_defaults=True)
            self._templates[""] = spec_text.written(document)
        return await self._template_text()

    async def _template_text(self) -> str:
        """The chosen text to begin with; an example has data that is known, if any."""
        text = self._templates[self._template]
        if self._template:
            known = partial(self._with_known_data, text, self._rest.reader().projects)
            with suppress(StoreUnavailable):
                text = await asyncio.to_thread(known)
        return text

    def _with_known_data(self, text: str, projects: Collection[str] | None) -> str:
        """A text with the data of the newest job that started with the same features, if any."""
        spec = spec_text.check(text).spec
        for job in self._rest.context.store.list_jobs(ALL_JOBS, projects=projects, limit=20)[0]:
            if spec and job.started_at and job.spec.features == spec.features:
                return spec_text.with_value(text, "data.path", job.spec.data.path)
        return text

    def _build_editor(self, text: str) -> None:
        with panel("Spec", "editor-panel"):
            self._editor = ui.codemirror(
                text,
                language="YAML",
                indent="  ",
                line_wrapping=True,
                theme="githubLight",
                on_change=self._text_changed,
            ).classes("editor")
            self._editor.disable()  # What is typed before it is dressed would be lost.
            table = json.dumps(spec_text.completions())
            complete = _COMPLETE % (table, self._editor.id, _KEPT_SEARCH)
            ui.timer(0.0, partial(self._dress_editor, complete), once=True)
            with ui.element("div").classes("problems").props("role=status") as self._problems:
                pass

    def _dress_editor(self, complete: str) -> None:
        """Complete from the schema, in the colours of the page, which only the browser knows, and
        go on with a draft that the tab has kept of this address.
        """
        self._editor.enable()
        ui.run_javascript(complete)

    def _build_form(self) -> None:
        known = spec_text.schema_fields()
        with panel("Fields that people change", "form-panel"):
            for section, paths in FORM.items():
                with ui.element("fieldset").classes("form-section"):
                    with ui.element("legend"):
                        ui.label(section)
                    for path in paths:
                        self._inputs[path] = self._field(path, known[path])

    def _field(self, path: str, field: spec_text.FieldSchema) -> ui.input | ui.select:
        label = path.removeprefix("parallelism.")
        is_choice = bool(field.choices) and field.kind in ("string", "boolean")
        made: ui.input | ui.select
        if is_choice:
            made = ui.select([*field.choices], label=label, clearable=True)
        else:
            default = "" if field.default is None else str(field.default)
            made = ui.input(label=label, placeholder=default).props("debounce=400")
        # What is wrong with it is told by what reads the text.
        made.props("stack-label hide-bottom-space").without_auto_validation()
        made.on_value_change(partial(self._field_changed, path))
        with made:
            if field.description:
                ui.tooltip(field.description.partition("\n\n")[0])
        return made

    def _build_upload(self) -> None:
        hint = "A .py file, or a zip of a folder, for model.module; it travels with the job."
        ui.label(hint).classes("muted")
        upload = ui.upload(
            auto_upload=True, max_file_size=_MAX_CODE_BYTES, on_upload=self._upload_code
        )
        upload.props('accept=".py,.zip"').classes("hidden")
        refusal = "It takes a .py or .zip file of at most 8 MB; `submit --code DIR` takes more."
        for event in ("rejected", "failed"):
            upload.on(event, partial(ui.notify, refusal, type="warning"), [])
        # In the browser itself, which lets only a click open its file dialog.
        pick = f"() => getElement({upload.id}).$refs.qRef.pickFiles()"
        button("Upload code", lambda: None).on("click", js_handler=pick)

    # ---- text and form

    async def _use_template(self) -> None:
        chosen = self._template = str(self._choice.value)
        query = {"template": self._template} if self._template else {"source": self._source}
        ui.run_javascript(f"sessionStorage.removeItem({_KEPT_SEARCH})")
        # The draft is kept by its address, and is no copy of the job any more.
        ui.navigate.history.replace(f"{MOUNT_PATH}/new?{urlencode(query)}")
        self._keep_search()
        text = await self._template_text()
        if chosen == self._template:  # or another was chosen meanwhile
            self._editor.set_value(text)

    def _text_changed(self) -> None:
        self._key = str(uuid.uuid4())
        if self._pending is not None:
            # A check under way would put its older values into the fields.
            self._pending.cancel(with_current_invocation=True)
        self._pending = ui.timer(_CHECK_AFTER_S, self._check, once=True)

    def _search_changed(self) -> None:
        self._keep_search()
        self._text_changed()

    def _keep_search(self) -> None:
        kept = json.dumps(json.dumps(self._search.values))
        ui.run_javascript(f"sessionStorage.setItem({_KEPT_SEARCH}, {kept})")

    def _field_changed(self, path: str) -> None:
        if self._is_syncing:
            return
        raw = self._inputs[path].value
        try:
            value = parse_document(str(raw)) if raw not in (None, "") else None
            text = spec_text.with_value(self._editor.value, path, value)
        except SpecError as error:
            for timer in (self._pending, self._planning):
                if timer is not None:
                    # The text that it reads has nothing of this value: it would find no fault.
                    timer.cancel(with_current_invocation=True)
            others = (each for each in self._shown if each.path != path)
            self._show_problems((*others, FieldProblem(path, "syntax", str(error))))
            self._submit.disable()
            self._draw_plan()
            return
        self._editor.set_value(text)
        self._text_changed()  # Also where it was that before, and only the field was wrong.

    async def _check(self) -> tuple[spec_text.Checked, dict[str, Any] | None]:
        """Check the text and the search, and show their problems and the text's values."""
        checked = await asyncio.to_thread(spec_text.check, self._editor.value)
        self._show_problems(checked.problems, "Checking ...")
        self._show_values(checked.document)
        search = self._search.check(checked.spec)
        self._submit.set_text("Start the sweep" if search else "Submit")
        self._submit.set_enabled(checked.spec is not None and search is not None)
        if self._planning is not None:
            # Of a plan that is being made nobody waits for the answer any more.
            self._planning.cancel(with_current_invocation=True)
        if checked.spec is None:
            self._draw_plan()
        else:
            self._planning = ui.timer(
                _PLAN_AFTER_S, partial(self._show_plan, checked.document), once=True
            )
        return checked, search

    async def _show_plan(self, document: Any) -> None:
        """The layout at once, with what the service finds wrong; then what it costs."""
        body = {"spec": document}
        try:
            answer = await self._rest.send(
                "POST", "/v1/jobs", params={"dry_run": "true"}, json=body
            )
        except Refused as refused:
            self._show_problems(tuple(refused.problem.fields))
            # What is wrong with a field is told there.
            self._draw_plan(why="" if refused.problem.fields else str(refused))
            return
        if not self._shown:  # a submission may have been refused meanwhile
            self._show_problems(())
        plan = JobPlan.model_validate(answer.json())
        self._draw_plan(plan, why=_BEING_ESTIMATED)
        body |= {"cluster": str(self._cluster.value or "").strip() or None}
        try:
            answer = await self._rest.send("POST", "/v1/plans", json=body)
        except Refused as refused:
            self._draw_plan(plan, why=f"Not estimated: {refused}")
        else:
            self._draw_plan(plan, PlansOut.model_validate(answer.json()))

    def _draw_plan(
        self, plan: JobPlan | None = None, plans: PlansOut | None = None, why: str = ""
    ) -> None:
        html = fragments.render("plan.html", plan=plan, plans=plans, why=why)
        self._plan.set_content(html)
        best = plans.recommended.candidate if plans and plans.recommended else None
        self._recommended = best if best and not best.is_chosen else None
        self._take.set_visibility(self._recommended is not None)

    async def _take_layout(self) -> None:
        """Write the recommended layout into the text."""
        best, text = self._recommended, self._editor.value
        if best is None:
            return
        changed = await asyncio.to_thread(_with_layout, text, best)
        if text == self._editor.value:  # or somebody typed on meanwhile
            self._editor.set_value(changed)

    def _show_problems(self, problems: tuple[FieldProblem, ...], none: str = "Valid") -> None:
        """At their lines in the text, in a list below it (`none` where that is empty), and at their
        fields of the form.
        """
        self._shown, text = problems, self._editor.value
        in_text = self._search.show_faults(problems)
        places = spec_text.lines_of(text, [each.path for each in problems])
        lines: dict[int, str] = {}
        for at, each in zip(places, problems, strict=True):
            if each in in_text:
                lines[at] = f"{lines[at]}\n" if at in lines else ""
                lines[at] += f"{each.path}: {each.message}"
        faulty = [{"kind": "line", "line": line, "class": "faulty-line"} for line in lines]
        # Not by its properties: with those its text is sent, without what is typed meanwhile.
        self._editor.run_method("setDecorations", faulty)
        self._editor.run_method("setLineTooltips", lines)
        self._problems.clear()
        with self._problems:
            if not problems:
                ui.label(none).classes("problems-none")
            for at, each in zip(places[:8], problems, strict=False):
                with ui.element("button").classes("problem") as row:
                    ui.label(f"{each.path}").classes("problem-path")
                    ui.label(each.message)
                row.on("click", partial(self._editor.reveal_line, at))
            if len(problems) > 8:
                ui.label(f"and {counted(len(problems) - 8, 'more problem')}")
        faults = {each.path: each.message for each in problems}
        for path, field in self._inputs.items():
            field.error = faults.get(path)

    def _show_values(self, document: Any) -> None:
        self._is_syncing = True
        try:
            for path, field in self._inputs.items():
                value = spec_text.value_at(document, path)
                shown = None if value is None else spec_text.flow(value)
                if isinstance(field, ui.select) and shown not in field.options:
                    shown = None
                if field.value != shown and not (field.value in (None, "") and shown is None):
                    field.set_value(shown if isinstance(field, ui.select) else shown or "")
        finally:
            self._is_syncing = False

    # ---- code and submission

    async def _upload_code(self, event: events.UploadEventArguments) -> None:
        try:
            archive = pack_upload(event.file.name, await event.file.read())
            kept = (await self._rest.send("POST", "/v1/code", content=archive)).json()
            text = spec_text.with_value(self._editor.value, "model.code", kept["id"])
        except (Refused, SpecError, CodeError) as error:
            ui.notify(str(error), type="warning", multi_line=True)
            return
        self._editor.set_value(text)
        ui.notify(f"{counted(kept['num_files'], 'file')} uploaded; model.code names them.")

    async def _submit_now(self, *, force: bool = False) -> None:
        key = self._key
        options: dict[str, Any] = {"headers": {"Idempotency-Key": key}}
        if self._pending is not None:  # Its result would stand in the place of a refusal.
            self._pending.cancel(with_current_invocation=True)
        checked, search = await self._check()
        if checked.spec is None or search is None:
            return
        if force:
            options["params"] = {"force": "true"}
        path, body = "/v1/jobs", {"spec": checked.document}
        if search:
            path, body = "/v1/sweeps", body | search
        elif self._source and not self._template:
            path = f"/v1/jobs/{self._source}:clone"
            body = {"set": checked.spec.model_dump(mode="json")}
        try:
            answer = await self._rest.send("POST", path, json=body, **options)
        except Refused as refused:
            if key == self._key:  # or somebody typed on meanwhile
                self._show_problems(tuple(refused.problem.fields))
            if refused.problem.code == "does_not_fit":
                self._misfit_text.set_text(str(refused))
                self._misfit_dialog.open()
                return
            ui.notify(str(refused), type="negative", multi_line=True)
            return
        kind = "sweeps" if search else "jobs"
        for kept in ("location.href", _KEPT_SEARCH):
            ui.run_javascript(f"sessionStorage.removeItem({kept})")
        go_to(f"{MOUNT_PATH}/{kind}/{answer.json()['id']}")


def _with_layout(text: str, best: Candidate) -> str:
    every_steps = "parallelism.sync.every_steps"
    is_tuned = spec_text.value_at(parse_document(text), every_steps) == "auto"
    for path, value in {
        "parallelism.shard_group_size": best.shard_group_size,
        "parallelism.placement": best.placement,
        every_steps: "auto" if is_tuned else best.sync_every_steps,
        "parallelism.sync.mode": best.sync_mode,
    }.items():
        text = spec_text.with_value(text, path, value)
    return text
