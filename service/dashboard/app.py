"""Mounts the dashboard under `/dashboard`, and the sign-in page.

Signing in turns an API key, or a link of the service's own user, into a session, kept in a cookie;
its page is plain HTML without scripts. NiceGUI keeps one application per process: of several apps
in a process (as in tests), the one mounted last serves the dashboard.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl
from weakref import WeakValueDictionary

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse
from nicegui import app as nicegui_app
from nicegui import ui
from nicegui.nicegui import sio_app
from starlette.types import Receive, Scope, Send

from service.api.authentication import CSRF_COOKIE, LOGIN_PATH, SESSION_COOKIE
from service.api.deps import Context, ContextDep
from service.auth.authenticator import Credentials
from service.dashboard import fragments
from service.dashboard.admin import ClusterPage, SettingsPage
from service.dashboard.compare import ComparePage
from service.dashboard.job import JobPage
from service.dashboard.jobs import ListFeed, ListPage
from service.dashboard.new_job import NewJobPage
from service.dashboard.rest import Refused, Rest
from service.dashboard.shell import MOUNT_PATH, STATIC_DIR, blank_page
from service.dashboard.sweeps import SweepPage, SweepsPage
from service.domain.auth import Session
from service.errors import CsrfRefused, NotSignedIn, ServiceError

router = APIRouter(include_in_schema=False)
_HOME = f"{MOUNT_PATH}/"
_MAX_FORM_BYTES = 8192
# What engine.io raises for a session that has ended, and for a request that nobody waits for.
_HUNG_UP = ("Session is disconnected", "REQUEST_METHOD")
# After NiceGUI's own 3 s a page that a busy machine builds slowly would be an error 500.
_BUILD_TIMEOUT_S = 30.0


@router.get(LOGIN_PATH)
def show_login(request: Request, context: ContextDep) -> Response:
    """The form; whoever needs none, or comes by a link of `shardloom up`, is sent on."""
    wanted = safe_target(request.query_params.get("next"))
    authenticator = context.security.authenticator
    with suppress(NotSignedIn):
        authenticator.principal_of(Credentials(cookie=request.cookies.get(SESSION_COOKIE)))
        return RedirectResponse(wanted, HTTPStatus.SEE_OTHER)
    code = request.query_params.get("code")
    if code is None:
        return _page(context, wanted)
    try:
        token, session = authenticator.sign_in_by_link(code)
    except NotSignedIn:
        return _page(context, wanted, "This link was used before, or is too old.")
    return _entered(request, context, wanted, token, session)


@router.post(LOGIN_PATH)
async def sign_in(request: Request, context: ContextDep) -> Response:
    """Open a session for the key in the form, and go on to where the reader wanted to go."""
    form = await _form_of(request)
    wanted = safe_target(form.get("next"))
    authenticator = context.security.authenticator
    if context.settings.auth == "none":
        return RedirectResponse(wanted, HTTPStatus.SEE_OTHER)
    try:
        token, session = await run_in_threadpool(authenticator.sign_in, form.get("key", ""))
        principal = await run_in_threadpool(authenticator.principal_of, Credentials(cookie=token))
    except NotSignedIn:
        return _page(context, wanted, "This key is unknown, expired or revoked.")
    # For the audit log: nobody was signed in when the request came.
    request.scope["state"]["principal"] = principal
    return _entered(request, context, wanted, token, session)


def _entered(
    request: Request, context: Context, wanted: str, token: str, session: Session
) -> Response:
    """Give a browser its session, and send it on."""
    answer = RedirectResponse(wanted, HTTPStatus.SEE_OTHER)
    max_age_s = int(session.expires_at - session.created_at)
    is_tls = request.url.scheme == "https"
    answer.set_cookie(
        SESSION_COOKIE, token, max_age=max_age_s, httponly=True, secure=is_tls, samesite="lax"
    )
    # Scripts of our own pages send it back in a header.
    csrf_token = context.security.master.mac("csrf-tokens", token)
    answer.set_cookie(CSRF_COOKIE, csrf_token, max_age=max_age_s, secure=is_tls, samesite="strict")
    return answer


@router.post("/logout")
async def sign_out(request: Request, context: ContextDep) -> Response:
    """End the session; raises `CsrfRefused` without the token that our pages send."""
    cookie = request.cookies.get(SESSION_COOKIE, "")
    form = await _form_of(request)
    authenticator = context.security.authenticator
    if cookie and form.get("csrf") != authenticator.master.mac("csrf-tokens", cookie):
        raise CsrfRefused
    if cookie:
        await run_in_threadpool(authenticator.sign_out, cookie)
    answer = RedirectResponse(LOGIN_PATH, HTTPStatus.SEE_OTHER)
    for name in (SESSION_COOKIE, CSRF_COOKIE):
        answer.delete_cookie(name)
    return answer


def safe_target(wanted: str | None) -> str:
    """Where to go after signing in: a path of ours, whatever the address of the form said."""
    if wanted is None or not wanted.startswith("/") or wanted.startswith(("//", LOGIN_PATH)):
        return _HOME
    is_plain = wanted.isprintable() and "\\" not in wanted
    return wanted if is_plain and wanted != "/" else _HOME


async def _form_of(request: Request) -> dict[str, str]:
    body = (await request.body())[:_MAX_FORM_BYTES]
    fields = parse_qsl(body.decode("utf-8", "replace"))
    return {name: value.strip() for name, value in fields}


def _page(context: Context, wanted: str, fault: str = "") -> HTMLResponse:
    logo, auth = (STATIC_DIR / "logo.svg").read_text(encoding="utf-8"), context.settings.auth
    html = fragments.render("login.html", logo=logo, next=wanted, fault=fault, auth=auth)
    status = HTTPStatus.UNAUTHORIZED if fault else HTTPStatus.OK
    return HTMLResponse(html, status, headers={"Cache-Control": "no-store"})


def mount(app: FastAPI) -> None:
    """Serve the dashboard from `app`: the list at `/dashboard/`, a job below `jobs/`.

    Call it after the API's routes are in place, which it uses; `/` then leads to the list.
    """
    # Starlette refuses to add middleware to an app that has answered a request.
    nicegui_app.middleware_stack = None
    nicegui_app.user_middleware.clear()
    rest = Rest(app)
    feed = ListFeed(rest.context.store, rest.context.reconciler.placed)

    pages: dict[str, Callable[..., Any]] = {
        "/": partial(ListPage, rest, feed),
        "/jobs/{job_id}": partial(JobPage, rest, WeakValueDictionary()),
        "/new": partial(NewJobPage, rest),
        "/compare": partial(ComparePage, rest),
        "/sweeps": partial(SweepsPage, rest),
        "/sweeps/{sweep_id}": partial(SweepPage, rest),
        "/cluster": partial(ClusterPage, rest),
        "/settings": partial(SettingsPage, rest),
    }
    for path, page in pages.items():
        _add_page(path, page, rest)

    app.include_router(router)
    app.mount(f"{MOUNT_PATH}/_nicegui_ws", _serve_transport)

    @app.get("/", include_in_schema=False)
    def _home() -> RedirectResponse:
        return RedirectResponse(f"{MOUNT_PATH}/")

    ui.run_with(
        app,
        root=partial(_unknown_page, rest),
        mount_path=MOUNT_PATH,
        title="Shardloom",
        favicon=STATIC_DIR / "logo.svg",
        language="en-US",
        dark=None,
        tailwind=False,
        show_welcome_message=False,
        # NiceGUI takes 0.4 of it for the time in which a busy browser or service has to answer.
        reconnect_timeout=10.0,
    )


async def _serve_transport(scope: Scope, receive: Receive, send: Send) -> None:
    """NiceGUI's transport, with a scope of its own, whose path it changes."""
    try:
        await sio_app(dict(scope), receive, send)
    except KeyError as error:
        if scope["type"] != "http" or error.args[0] not in _HUNG_UP:
            raise
        await Response(status_code=HTTPStatus.BAD_REQUEST)(scope, receive, send)


def _add_page(path: str, page: Callable[..., Any], rest: Rest) -> None:
    """Serve a page, made with the parameters of its path and then built, or why it cannot be."""

    @ui.page(path, response_timeout=_BUILD_TIMEOUT_S)
    async def _build(request: Request) -> None:
        try:
            await page(**request.path_params).build()
        except (ServiceError, Refused) as error:
            # Without the request that lists what there is: a reader has links for that.
            why = str(error).rpartition("; GET ")[0] or str(error)
            blank_page(rest, error.title, why, error.status)


def _unknown_page(rest: Rest) -> None:
    why = "The address may be misspelt, or the page has moved."
    blank_page(rest, "This page does not exist", why)
