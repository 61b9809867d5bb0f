"""Changes of jobs that others may write at the same moment, and their timelines read whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from service.db.jobs import JobStore
from service.domain.models import TimelineEvent
from service.errors import StaleVersion

MAX_TRIES = 5
_PAGE = 1000
_Result = TypeVar("_Result")


def retry_if_stale(change: Callable[[], _Result]) -> _Result:
    """Call `change`, which reads a job and writes it, again while others write the job meanwhile.

    Raises the `StaleVersion` of the last try.
    """
    for _ in range(MAX_TRIES - 1):
        try:
            return change()
        except StaleVersion:
            continue
    return change()


def read_timeline(store: JobStore, job_id: str, kinds: tuple[str, ...]) -> list[TimelineEvent]:
    """All lines of these kinds, oldest first."""
    lines: list[TimelineEvent] = []
    while page := store.list_timeline(
        job_id, after=lines[-1].id if lines else 0, limit=_PAGE, kinds=kinds
    ):
        lines += page
    return lines
