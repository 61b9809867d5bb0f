"""Signing in and out with a browser: an API key becomes a session, kept in a cookie.

The page is plain HTML without scripts, so that it works before anything else is allowed to load.
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, select_autoescape

from service.api.context import Context, ContextDep
from service.api.gate import CSRF_COOKIE, LOGIN_PATH, SESSION_COOKIE
from service.dashboard.shell import MOUNT_PATH, STATIC_DIR
from service.security.authenticator import Credentials
from service.security.errors import CsrfRefused, NotSignedIn
from service.security.keys import Session, hash_of

router = APIRouter(include_in_schema=False)

_HOME = f"{MOUNT_PATH}/"
_MAX_FORM_BYTES = 8192
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=select_autoescape(["html"]),
)


def add_login(app: FastAPI) -> None:
    """Serve the pages of signing in and out from `app`."""
    app.include_router(router)


@router.get(LOGIN_PATH)
def show_login(request: Request, context: ContextDep) -> Response:
    """The form; whoever needs none is sent on."""
    wanted = safe_target(request.query_params.get("next"))
    if context.settings.auth == "local" or _is_signed_in(request, context):
        return RedirectResponse(wanted, HTTPStatus.SEE_OTHER)
    return _page(wanted)


@router.post(LOGIN_PATH)
async def sign_in(request: Request, context: ContextDep) -> Response:
    """Open a session for the key in the form, and go on to where the reader wanted to go."""
    form = await _form_of(request)
    wanted = safe_target(form.get("next"))
    authenticator = context.security.authenticator
    if context.settings.auth == "local":
        return RedirectResponse(wanted, HTTPStatus.SEE_OTHER)
    try:
        token, session = await run_in_threadpool(authenticator.sign_in, form.get("key", ""))
        principal = await run_in_threadpool(authenticator.principal_of, Credentials(cookie=token))
    except NotSignedIn:
        return _page(wanted, "This key is unknown, expired or revoked.", HTTPStatus.UNAUTHORIZED)
    # For the audit log: nobody was signed in when the request came.
    request.scope["state"]["principal"] = principal
    answer = RedirectResponse(wanted, HTTPStatus.SEE_OTHER)
    _set_cookies(answer, request, context, token, session)
    return answer


@router.post("/logout")
async def sign_out(request: Request, context: ContextDep) -> Response:
    """End the session; raises `CsrfRefused` without the token that our pages send."""
    cookie = request.cookies.get(SESSION_COOKIE, "")
    form = await _form_of(request)
    authenticator = context.security.authenticator
    if cookie and form.get("csrf") != authenticator.csrf_token(cookie):
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


def _is_signed_in(request: Request, context: Context) -> bool:
    cookie = request.cookies.get(SESSION_COOKIE)
    if cookie is None or context.security.keys.find_session(hash_of(cookie)) is None:
        return False
    try:
        context.security.authenticator.principal_of(Credentials(cookie=cookie))
    except NotSignedIn:
        return False
    return True


def _set_cookies(
    answer: Response, request: Request, context: Context, token: str, session: Session
) -> None:
    max_age_s = int(session.expires_at - session.created_at)
    is_tls = request.url.scheme == "https"
    answer.set_cookie(
        SESSION_COOKIE, token, max_age=max_age_s, httponly=True, secure=is_tls, samesite="lax"
    )
    # For scripts of our own pages, which send it back in a header.
    csrf_token = context.security.authenticator.csrf_token(token)
    answer.set_cookie(CSRF_COOKIE, csrf_token, max_age=max_age_s, secure=is_tls, samesite="strict")


async def _form_of(request: Request) -> dict[str, str]:
    body = (await request.body())[:_MAX_FORM_BYTES]
    fields = parse_qs(body.decode("utf-8", "replace"))
    return {name: values[-1].strip() for name, values in fields.items()}


def _page(wanted: str, fault: str = "", status: HTTPStatus = HTTPStatus.OK) -> HTMLResponse:
    logo = (STATIC_DIR / "logo.svg").read_text(encoding="utf-8")
    html = _TEMPLATES.get_template("login.html").render(logo=logo, next=wanted, fault=fault)
    return HTMLResponse(html, status, headers={"Cache-Control": "no-store"})
