"""Logging: text lines or one JSON object a line, with the ids of the request, job and attempt.

The ids are context variables: the API's middleware and the reconciler set them, whatever logs
meanwhile carries them.
"""

from __future__ import annotations

import json
import logging
import time
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


_TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# These log every request and every check of the schema.
_CHATTY = ("httpx", "alembic.runtime.migration")


class JsonFormatter(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, the ids at hand, and any traceback."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "ids", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _escaped(char: str) -> str:
    return "\n    " if char == "\n" else repr(char)[1:-1]


class TextFormatter(logging.Formatter):
    """A line for people, with the ids at hand where there are any."""

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        """The line of a record, without its traceback; jobs and URLs begin no line of their own."""
        ids = getattr(record, "ids", {})
        line = super().formatMessage(record)
        if not line.isprintable():
            line = "".join(char if char.isprintable() else _escaped(char) for char in line)
        shown = " ".join(f"{name}={value}" for name, value in ids.items() if value not in line)
        return f"{line} [{shown}]" if shown else line


def add_ids(record: logging.LogRecord) -> bool:
    """Give a record the ids of whoever logs it; lets every record through."""
    record.ids = known_ids()
    return True


def configure(log_format: str) -> None:
    """Log to standard error as `text` or `json`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(add_ids)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
