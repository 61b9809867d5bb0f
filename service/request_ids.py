"""Ids of requests: what a client may choose, and what we choose for it."""

from __future__ import annotations

import re
import secrets

_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{7,63}")


def request_id_from(header: str | None) -> str:
    """The id that a client chose, if it is fit for a log, else a new one."""
    if header is not None and _SANE.fullmatch(header):
        return header
    return f"req-{secrets.token_hex(8)}"
