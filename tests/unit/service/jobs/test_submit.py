"""Finding a job by the beginning of its id."""

from __future__ import annotations

from typing import cast

import pytest

from service.db.jobs import JobStore
from service.domain.job_filter import ALL_JOBS, JobFilter
from service.domain.models import Job
from service.errors import JobNotFound
from service.jobs.submit import find_job
from tests.harness.builders import NOW, queued_job


class _Dictionary:
    """A store of jobs in a database that sorts signs before digits and letters, as en_US does."""

    def __init__(self, *jobs: Job) -> None:
        self._jobs = sorted(jobs, key=lambda job: _place(job.id), reverse=True)

    def get_job(self, job_id: str) -> Job:
        raise JobNotFound(job_id)

    def list_jobs(
        self, wanted: JobFilter = ALL_JOBS, *, projects: None, limit: int
    ) -> tuple[list[Job], None]:
        if wanted.after is None:
            return [], None  # No job has the name.
        end = _place(wanted.after)
        return [job for job in self._jobs if _place(job.id) < end][:limit], None


def _place(text: str) -> list[tuple[bool, str]]:
    return [(char.isalnum(), char) for char in text]


def test_an_id_is_found_by_its_beginning_however_the_database_sorts_signs() -> None:
    first, second = queued_job(now=NOW), queued_job(now=NOW + 1e6)
    store = cast(JobStore, _Dictionary(first, second))
    for job in (first, second):
        assert find_job(store, job.id[:12]) == job
        assert find_job(store, job.id[:-1]) == job
    for reference in ("job-", "job-zz", "other", ""):
        with pytest.raises(JobNotFound):
            find_job(store, reference)
