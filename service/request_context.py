"""What the work at hand is about: ids that logs carry, each for one thread or one request.

The API's middleware names the request, the reconciler the job; whoever logs meanwhile need not
know either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
job_id: ContextVar[str] = ContextVar("job_id", default="")
attempt_id: ContextVar[str] = ContextVar("attempt_id", default="")

_FIELDS = {"request_id": request_id, "job_id": job_id, "attempt_id": attempt_id}


def known_ids() -> dict[str, str]:
    """The ids that are known here, by the name of their field in a log line."""
    found = {name: variable.get() for name, variable in _FIELDS.items()}
    return {name: value for name, value in found.items() if value}


@contextmanager
def about(**ids: str) -> Iterator[None]:
    """Let logs inside carry these ids: `request_id`, `job_id`, `attempt_id`."""
    tokens = {name: _FIELDS[name].set(value) for name, value in ids.items()}
    try:
        yield
    finally:
        for name, token in tokens.items():
            _FIELDS[name].reset(token)
