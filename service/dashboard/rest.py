"""The REST API as the reader of a page uses it: what a page does is a request like any other.

A request goes through the service's own app, with the session of the page, without a network: it
has the same rights, checks, limits and audit log as one from outside.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
from fastapi import FastAPI
from nicegui import ui

from service.api.authentication import CSRF_HEADER, SESSION_COOKIE
from service.api.deps import Context, known_principal
from service.domain.auth import Principal
from service.schemas.common import Problem


def path_of(kind: str, name: str) -> str:
    """Path of something, whatever a reader typed as its name."""
    # A slash is quoted twice, as routes are found by the path that has been read once.
    return f"/v1/{kind}/{quote(name.replace('/', '%2F'), safe='').replace('.', '%2E')}"


class Refused(Exception):
    """A request was refused; `problem` says why, with one field for each fault."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.status, self.title = problem.status, problem.title
        super().__init__(problem.detail)


class Rest:
    """Sends requests of the page that is being built or used."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self.context: Context = app.state.context

    def reader(self) -> Principal:
        """Who reads the page: none is public."""
        principal = known_principal(ui.context.client.request)
        assert principal is not None
        return principal

    async def get(self, path: str, **params: Any) -> Any:
        """The JSON that a GET answers; raises `Refused`."""
        return (await self.send("GET", path, params=params)).json()

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """An answer that is no error; raises `Refused`."""
        page = ui.context.client.request
        headers = {"accept-encoding": "identity", **options.pop("headers", {})}
        if cookie := page.cookies.get(SESSION_COOKIE):
            headers |= {"cookie": f"{SESSION_COOKIE}={cookie}"}
            headers |= {CSRF_HEADER: self.context.security.master.mac("csrf-tokens", cookie)}
        remote = (page.client.host, page.client.port) if page.client else ("127.0.0.1", 0)
        transport = httpx.ASGITransport(self._app, raise_app_exceptions=False, client=remote)
        origin = f"{page.url.scheme}://{page.headers['host']}"
        async with httpx.AsyncClient(transport=transport, base_url=origin, timeout=None) as http:
            try:
                request = http.build_request(method, path, headers=headers, **options)
            except (TypeError, ValueError) as error:  # of the JSON
                detail = f"leave out binary values, sets, .nan, .inf and lone surrogates ({error})"
                problem = Problem(title="Not sent", status=422, detail=detail, code="not_sent")
                raise Refused(problem) from None
            answer = await http.send(request)
        if answer.is_error:
            raise Refused(Problem.model_validate_json(answer.content))
        return answer
