"""Measures every request, and gives what is logged meanwhile its ids. Pure ASGI: streams pass."""

from __future__ import annotations

import logging
import re
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.request_context import about
from service.telemetry import Telemetry

logger = logging.getLogger("service.access")

_NOT_FOUND = "(no route)"
_JOB = re.compile(r"/v1/jobs/(job-[0-9a-z]{12})\b")
_ATTEMPT = re.compile(r"/v1/attempts/((job-[0-9a-z]{12})-a\d{1,6})\b")


class Measuring:
    """Counts answers by route, method and status, and the time until each began."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def _note(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._note_answer(scope, message["status"], time.perf_counter() - began)
            await send(message)

        with about(**ids_in(scope["path"])):
            await self._app(scope, receive, _note)

    def _note_answer(self, scope: Scope, status: int, duration_s: float) -> None:
        # The template, not the path: one series for all jobs.
        route = getattr(scope.get("route"), "path", None) or _NOT_FOUND
        self._telemetry.answered(scope["method"], route, status, duration_s)
        level = logging.WARNING if status >= 500 else logging.DEBUG
        logger.log(
            level, "%s %s -> %d in %.1f ms", scope["method"], route, status, duration_s * 1e3
        )


def ids_in(path: str) -> dict[str, str]:
    """The job and attempt that a path names by their ids."""
    if match := _ATTEMPT.match(path):
        return {"attempt_id": match[1], "job_id": match[2]}
    if match := _JOB.match(path):
        return {"job_id": match[1]}
    return {}
