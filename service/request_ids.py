"""The id of the request being answered, for logs, problems and whatever else wants to name it."""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar

current_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that this task or thread works for; None outside of requests."""

_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{7,63}")


def request_id_from(header: str | None) -> str:
    """The id that a client chose, if it is fit for a log, else a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header
    return f"req-{secrets.token_hex(8)}"
