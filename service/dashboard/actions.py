"""What a reader of the dashboard can do to a job. Blocking, so pages call it in a thread."""

from __future__ import annotations

from service.errors import JobEnded, StaleVersion
from service.lifecycle import request_cancel
from service.store.base import JobStore

_MAX_TRIES = 5


def cancel_job(store: JobStore, job_id: str, now: float) -> None:
    """Ask a job to stop; the reconciler carries it out. `now` is Unix time in seconds.

    Raises `JobNotFound`, `JobEnded`, or `StaleVersion` if others kept writing the job meanwhile.
    """
    for attempt in range(_MAX_TRIES):
        job = store.get_job(job_id)
        if job.status.is_terminal:
            raise JobEnded(job_id, job.status)
        asked = request_cancel(job, now)
        try:
            store.update_job(asked.job, timeline=asked.timeline)
        except StaleVersion:
            if attempt == _MAX_TRIES - 1:
                raise
        else:
            return
