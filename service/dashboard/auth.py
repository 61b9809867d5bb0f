"""Authorization in the pages: who reads a page, what they may see and change.

NiceGUI keeps one application per process, so there is one set of rules: that of the app mounted
last.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from nicegui import ui

from service.api.authentication import SESSION_COOKIE
from service.api.deps import known_principal
from service.auth.security import Security
from service.domain.auth import LOCAL, AuditRecord, Principal, Role
from service.domain.models import Job
from service.errors import Forbidden, NotSignedIn


@dataclass
class _Rules:
    is_open: bool = True
    security: Security | None = None


_rules = _Rules()


def set_rules(*, is_open: bool, security: Security | None) -> None:
    """Set the rules of the app that serves the pages from now on."""
    _rules.is_open, _rules.security = is_open, security


def reader() -> Principal:
    """The principal of the page being built or used; raises `NotSignedIn`."""
    if _rules.is_open:
        return LOCAL
    principal = known_principal(ui.context.client.request)
    if principal is None:
        raise NotSignedIn
    return principal


def may_see(job: Job) -> bool:
    return reader().role_in(job.project) is not None


def may_change(job: Job) -> bool:
    return reader().may(Role.SUBMITTER, job.project)


def check_change(job: Job, what: str) -> None:
    """Write to the audit log that the reader does `what` to a job; raises `Forbidden`."""
    principal = reader()
    is_allowed = principal.may(Role.SUBMITTER, job.project)
    if _rules.security is not None:
        client = ui.context.client.request.client
        _rules.security.audit.append(
            AuditRecord(
                id=0,
                time=time.time(),
                actor=principal.name,
                actor_kind=principal.kind,
                action=f"PAGE {what}",
                object=f"/v1/jobs/{job.id}",
                remote=client.host if client else "",
                status=202 if is_allowed else 403,
                request_id="",
            )
        )
    if not is_allowed:
        raise Forbidden(f"this needs the role submitter in '{job.project}'")


def account_menu() -> None:
    """Who is signed in, and the way out; nothing for the user whose service it is."""
    if _rules.security is None or reader().kind == "local":
        return
    cookie = ui.context.client.request.cookies.get(SESSION_COOKIE, "")
    ui.label(reader().name.removeprefix("key:")).classes("account-name")
    with ui.element("form").props('method="post" action="/logout"').classes("account-form"):
        token = _rules.security.master.csrf_token(cookie)
        ui.element("input").props(f'type="hidden" name="csrf" value="{token}"')
        with ui.element("button").props('type="submit"').classes("account-button"):
            ui.label("Sign out")
