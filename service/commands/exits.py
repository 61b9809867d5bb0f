"""Exit codes of the CLI.

    0    done; for `run`, `submit --wait` and `follow`: the job succeeded
    1    the job failed; `migrate --check`: the database is behind
    2    the request was refused: wrong usage, a faulty spec, no such job; or a trace never came
    3    no service could be reached, or the local stack did not start
    4    detached by Ctrl-C: the job goes on
    130  the job was cancelled

Detaching has a code of its own, so that a script never takes an unfinished job for a success.
"""

from __future__ import annotations

from service.domain import JobStatus

JOB_FAILED = 1
REFUSED = 2
UNAVAILABLE = 3
DETACHED = 4
JOB_CANCELLED = 130

_BY_STATUS = {
    JobStatus.SUCCEEDED: 0,
    JobStatus.FAILED: JOB_FAILED,
    JobStatus.CANCELLED: JOB_CANCELLED,
}


def exit_code_of(status: JobStatus) -> int:
    """Exit code that mirrors a job; one that has not ended counts as detached."""
    return _BY_STATUS.get(status, DETACHED)
