"""The pages *Cluster* (hosts, who uses them, the queue) and *Settings* (projects, keys, webhooks,
audit log), from what the REST API tells and lets the reader change.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from nicegui import ui

from service.dashboard import fragments
from service.dashboard.panels import ask, asking, button
from service.dashboard.rest import Refused, Rest, path_of
from service.dashboard.shell import page_frame, panel
from service.domain.auth import ALL_PROJECTS, Role
from service.errors import StoreUnavailable
from service.schemas import wording
from trainer.protocol.versions import versions_here

_REFRESH_S = 3.0
_AUDIT_PAGE = 50
# What fills a section of the settings.
Show = Callable[[], Awaitable[None]]
_DAYS = {0: "never", 30: "in 30 days", 90: "in 90 days", 365: "in a year"}


@contextmanager
def _table(*head: str, numbers: Sequence[int] = ()) -> Iterator[None]:
    """A table with titles; the columns at the places `numbers` are aligned right."""
    scroll = ui.element("div").classes("table-scroll").props("tabindex=0")
    with scroll, ui.element("table").classes("data"):
        with ui.element("thead"), ui.element("tr"):
            for place, title in enumerate(head):
                with ui.element("th").classes("number" if place in numbers else ""):
                    ui.label(title or "Actions").classes("" if title else "sr-only")
        with ui.element("tbody"):
            yield


def _cells(*texts: str, style: str = "") -> None:
    for text in texts:
        with ui.element("td").classes(style):
            ui.label(text)


def _chip(text: str, tone: str) -> None:
    ui.label(text).classes(f"status tone-{tone}")


class ClusterPage:
    """One reader's view of the cluster, read again every few seconds."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._visible = rest.reader().projects

    async def build(self) -> None:
        with page_frame("Cluster", self._rest):
            ui.html("<h1>Cluster</h1>", sanitize=False)
            self._body = ui.html(sanitize=False).classes("stack")
        self._versions = await asyncio.to_thread(versions_here)
        await self.refresh()
        ui.timer(_REFRESH_S, self.refresh, immediate=False)

    async def refresh(self) -> None:
        # One after another: a task of its own would not know whose page this is.
        paths = ("/v1/cluster", "/v1/queue", "/readyz")
        cluster, queue, ready = [await _or_problem(self._rest.get(path)) for path in paths]
        html = fragments.render(
            "cluster.html",
            cluster=cluster,
            queue=queue,
            ready=ready,
            users=await asyncio.to_thread(self._users_of_hosts),
            versions=self._versions,
            now=time.time(),
        )
        self._body.set_content(html)

    def _users_of_hosts(self) -> dict[str, list[tuple[str, str]]]:
        """(id, name) of the jobs on each host, as far as jobs tell their hosts."""
        visible, found = self._visible, defaultdict(set)
        try:
            jobs = self._rest.context.store.list_live_jobs()
        except StoreUnavailable:
            return {}  # The page says so of the service.
        for job in jobs:
            is_visible = visible is None or job.project in visible
            if is_visible and job.membership is not None:
                for member in job.membership.members:
                    for host in member.hosts:
                        found[host].add((job.id, job.name))
        return {host: sorted(jobs) for host, jobs in found.items()}


async def _or_problem(read: Awaitable[Any]) -> Any:
    """What a read answers, or its problem as one, so that a page shows the rest."""
    try:
        return await read
    except Refused as refused:
        return refused.problem.model_dump()


class SettingsPage:
    """Projects for everybody; keys, webhooks and the audit log for those who administer them."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        self._reader = rest.reader()
        self._is_admin = self._reader.may(Role.ADMIN, ALL_PROJECTS)
        self._bodies: dict[Show, ui.element] = {}
        self._audit_after: str | None = None
        self._turn = asyncio.Lock()

    async def build(self) -> None:
        with page_frame("Settings", self._rest):
            ui.html("<h1>Settings</h1>", sanitize=False)
            self._dialogs = ui.element("div").classes("hidden")
            with panel("You"):
                roles = ", ".join(
                    f"{role.label} in {'all projects' if project == ALL_PROJECTS else project}"
                    for project, role in sorted(self._reader.roles.items())
                )
                ui.label(f"{self._reader.name}: {roles or 'no role'}")
            await self._section("Projects and quotas", self._show_projects, self._build_quotas)
            if self._is_admin:
                await self._section("API keys", self._show_keys, self._build_keys)
            if self._reader.may_somewhere(Role.ADMIN):
                await self._section("Webhooks", self._show_webhooks, self._build_webhooks)
            if self._is_admin:
                await self._section("Audit log", self._show_audit, self._build_audit_filters)

    async def _section(self, title: str, show: Show, build_head: Callable[[], None]) -> None:
        """A section with a head that stays, and a body that is filled anew."""
        with panel(title):
            build_head()
            self._bodies[show] = ui.element("div").classes("stack")
        await self._refresh(show)

    async def _refresh(self, show: Show) -> None:
        """Fill the body of a section anew, by the method that shows it."""
        # Two at once would both clear it, and then both fill it.
        async with self._turn:
            self._bodies[show].clear()
            with self._bodies[show]:
                try:
                    await show()
                except Refused as refused:
                    ui.label(str(refused)).classes("notice tone-warn")

    async def _change(
        self,
        show: Show,
        method: str,
        path: str,
        done: str = "",
        from_dialog: ui.dialog | None = None,
        **options: Any,
    ) -> Any:
        """Send a request and show the section anew; what it answers, None if it was refused.

        `from_dialog` is then opened again, with what was typed.
        """
        try:
            answer = await self._rest.send(method, path, **options)
        except Refused as refused:
            ui.notify(str(refused), type="warning", multi_line=True)
            if from_dialog:
                from_dialog.open()
            return None
        if done:
            ui.notify(done)
        await self._refresh(show)
        return answer.json() if answer.content else {}

    # ---- projects

    def _build_quotas(self) -> None:
        if not self._is_admin:
            return
        with asking("Quotas of a project", "Set", self._set_quotas) as self._quota_dialog:
            ui.label("Empty is no limit. What runs already is left to run.")
            with ui.element("div").classes("dialog-fields wide"):
                self._quota_name = ui.input("Project")
                # The service says what is no number: `ui.number` would change or drop it.
                self._quota_workers = ui.input("Most workers").props("inputmode=numeric")
                self._quota_jobs = ui.input("Most running jobs").props("inputmode=numeric")
        with ui.element("div").classes("trace-head"):
            button("Set quotas", partial(self._open_quotas, {}))

    async def _show_projects(self) -> None:
        projects = (await self._rest.get("/v1/projects"))["items"]
        if not projects:
            ui.label("No project has quotas or live jobs.").classes("empty")
            return
        head = ("Project", "Workers", "Running", "Queued", *([""] if self._is_admin else []))
        with _table(*head, numbers=(1, 2, 3)):
            for each in projects:
                with ui.element("tr"):
                    _cells(each["name"])
                    workers = wording.of_limit(each["num_workers"], each["max_workers"])
                    jobs = wording.of_limit(each["num_running_jobs"], each["max_running_jobs"])
                    _cells(workers, jobs, str(each["num_queued_jobs"]), style="number")
                    if self._is_admin:
                        with ui.element("td").classes("row-actions"):
                            button("Change", partial(self._open_quotas, each))
                            if each["updated_at"] is not None:
                                path = f"/v1/projects/{each['name']}"
                                remove = partial(self._change, self._show_projects, "DELETE")
                                button("Remove quotas", partial(remove, path))

    def _open_quotas(self, project: Mapping[str, Any]) -> None:
        self._quota_name.set_value(project.get("name", ""))
        self._quota_workers.set_value(project.get("max_workers"))
        self._quota_jobs.set_value(project.get("max_running_jobs"))
        self._quota_dialog.open()

    async def _set_quotas(self) -> None:
        fields = {"max_workers": self._quota_workers, "max_running_jobs": self._quota_jobs}
        body = {name: field.value if field.value != "" else None for name, field in fields.items()}
        name = (self._quota_name.value or "").strip()
        if not name or "/" in name:
            ui.notify("Name the project, without a slash.", type="warning")
            self._quota_dialog.open()
            return
        path, opened = path_of("projects", name), self._quota_dialog
        await self._change(self._show_projects, "PUT", path, from_dialog=opened, json=body)

    # ---- API keys

    def _build_keys(self) -> None:
        with asking("Make an API key", "Make", self._make_key) as self._key_dialog:
            ui.label("Its text is shown once.")
            with ui.element("div").classes("dialog-fields wide"):
                self._key_name = ui.input("Name")
                self._key_project = ui.input("Project, or * for all", value="default")
                known = [role.label for role in Role]
                self._key_role = ui.select(known, label="Role", value="submitter")
                self._key_days = ui.select(_DAYS, label="Expires", value=90)
        with ui.element("div").classes("trace-head"):
            button("Make a key", self._key_dialog.open)

    async def _show_keys(self) -> None:
        found = await self._rest.get("/v1/keys", limit=200)
        keys = found["items"]
        if found["next"]:
            ui.label("Only 200 keys are shown; `shardloom keys list` has all.").classes("muted")
        if not keys:
            ui.label("There is no key yet.").classes("empty")
            return
        now = time.time()
        with _table("Name", "Roles", "Made by", "Last used", "State", ""):
            for each in keys:
                is_over = each["expires_at"] is not None and each["expires_at"] <= now
                with ui.element("tr"):
                    roles = ", ".join(f"{name}: {role}" for name, role in each["roles"].items())
                    used = each["last_used_at"]
                    last_used = wording.age(used, now) if used else "never"
                    _cells(each["name"], roles, each["created_by"], last_used)
                    state = "revoked" if each["revoked_at"] else "expired" if is_over else "valid"
                    with ui.element("td"):
                        _chip(state, "good" if state == "valid" else "neutral")
                    with ui.element("td").classes("row-actions"):
                        if state == "valid":
                            revoke = partial(self._ask_to_revoke, each)
                            revoking = button("Revoke", revoke, "cancel-button")
                            revoking.props["aria-label"] = f"Revoke {each['name']}"

    def _ask_to_revoke(self, key: Mapping[str, Any]) -> None:
        told = "Whoever uses it is refused from then on: this page, too, if you signed in with it."
        act = partial(self._change, self._show_keys, "DELETE", f"/v1/keys/{key['id']}")
        ask(f"Revoke the key {key['name']}?", told, "Revoke", act, home=self._dialogs)

    async def _make_key(self) -> None:
        days = int(self._key_days.value or 0)
        body = {
            "name": (self._key_name.value or "").strip(),
            "roles": {(self._key_project.value or "").strip(): self._key_role.value},
            "expires_in_s": days * 86_400 or None,
        }
        made = await self._change(
            self._show_keys, "POST", "/v1/keys", from_dialog=self._key_dialog, json=body
        )
        if made:
            _show_once("The key", made["key"])

    # ---- webhooks

    def _build_webhooks(self) -> None:
        with asking("Add a webhook", "Add", self._add_webhook) as self._webhook_dialog:
            ui.label("Lines of timelines are sent to it, signed. Its secret is shown once.")
            with ui.element("div").classes("dialog-fields wide"):
                self._hook_url = ui.input("URL")
                self._hook_project = ui.input("Project, or * for all", value="default")
                self._hook_kinds = ui.input("Kinds of lines, empty for all")
        with ui.element("div").classes("trace-head"):
            button("Add a webhook", self._webhook_dialog.open)

    async def _show_webhooks(self) -> None:
        webhooks = (await self._rest.get("/v1/webhooks"))["items"]
        if not webhooks:
            ui.label("There is no webhook yet.").classes("empty")
            return
        with _table("URL", "Project", "Kinds", "State", ""):
            for each in webhooks:
                path, is_on = f"/v1/webhooks/{each['id']}", each["is_active"]
                with ui.element("tr"):
                    _cells(each["url"], style="path")
                    _cells(each["project"], ", ".join(each["kinds"]) or "all")
                    with ui.element("td"):
                        _chip("on" if is_on else "off", "good" if is_on else "warn")
                        ui.label(each["note"]).classes("muted")
                    with ui.element("td").classes("row-actions"):
                        change = partial(self._change, self._show_webhooks)
                        switch = partial(change, "PATCH", path, json={"is_active": not is_on})
                        button("Switch off" if is_on else "Switch on", switch)
                        told = f"Queued. `shardloom webhooks deliveries {each['id']}` says more."
                        button("Test", partial(change, "POST", f"{path}:test", told))
                        asked, told = (
                            f"Delete the webhook {each['url']}?",
                            "Its secret goes with it.",
                        )
                        delete = partial(change, "DELETE", path)
                        asks = partial(ask, asked, told, "Delete", delete, home=self._dialogs)
                        button("Delete", asks, "cancel-button")

    async def _add_webhook(self) -> None:
        kinds = (self._hook_kinds.value or "").replace(",", " ").split()
        body = {
            "url": (self._hook_url.value or "").strip(),
            "project": (self._hook_project.value or "").strip(),
            "kinds": kinds,
        }
        made = await self._change(
            self._show_webhooks, "POST", "/v1/webhooks", from_dialog=self._webhook_dialog, json=body
        )
        if made:
            _show_once("The secret", made["secret"])

    # ---- audit log

    def _build_audit_filters(self) -> None:
        """Fields that stay while one types into them."""
        newest = partial(self._turn_audit, None)
        with ui.element("div").classes("trace-head"):
            self._actor = ui.input(placeholder="Actor, as in key:ci", on_change=newest)
            self._actor.props('clearable debounce=400 aria-label="Actor"')
            self._refused = ui.checkbox("Only refused", on_change=newest)

    async def _show_audit(self) -> None:
        params: dict[str, Any] = {"limit": _AUDIT_PAGE, "refused": self._refused.value}
        params |= {"actor": self._actor.value} if self._actor.value else {}
        params |= {"after": self._audit_after} if self._audit_after else {}
        found = await self._rest.get("/v1/audit", **params)
        with ui.element("div").classes("trace-head"):
            ui.element("span").classes("grow")
            if self._audit_after:
                button("Newest", partial(self._turn_audit, None))
            if found["next"]:
                button("Older", partial(self._turn_audit, found["next"]))
        if not found["items"]:
            ui.label("Nothing was changed yet.").classes("empty")
            return
        with _table("Time", "Actor", "Action", "Object", "From", "Status", numbers=(5,)):
            for each in found["items"]:
                with ui.element("tr"):
                    _cells(wording.utc(each["time"]), each["actor"])
                    _cells(each["action"], each["object"], style="path")
                    _cells(each["remote"])
                    with ui.element("td").classes("number"):
                        _chip(str(each["status"]), "bad" if each["status"] >= 400 else "neutral")

    async def _turn_audit(self, after: str | None) -> None:
        self._audit_after = after
        await self._refresh(self._show_audit)


def _show_once(what: str, text: str) -> None:
    """A secret that cannot be had again."""
    dialog = ui.dialog(value=True).props("persistent")
    with dialog, ui.element("div").classes("panel dialog secret-dialog"):
        ui.label(f"{what} is shown this once").classes("dialog-title")
        ui.label(text).classes("command-line")
        with ui.element("div").classes("dialog-actions"):
            ui.button("I have it", on_click=dialog.close).props("unelevated no-caps")
