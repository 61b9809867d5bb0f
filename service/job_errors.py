"""Errors about jobs, their attempts and what they report (`service.errors` has the whole picture).

InvalidRequest      RanksUnknown, SizeRefused, HostUnknown
NotFound            JobNotFound          job_not_found
                    AttemptNotFound      attempt_not_found
Conflict            JobEnded             job_ended
                    JobNotEnded          job_not_ended
                    JobNotRunning        job_not_running
                    JobNotPaused         job_not_paused
                    JobAtWork            job_at_work
                    LayoutUnknown        layout_unknown
                    SequenceGap          sequence_gap      (`next_seq` is wanted)
                    StaleVersion         stale_version
PreconditionFailed  VersionChanged       version_changed
                    VersionUnknown       version_unknown
ServiceError        RecordRefused   422  record_refused
                    JobUnreadable   500  job_unreadable
"""

from __future__ import annotations

from collections.abc import Sequence

from service.api.schemas import FieldFault
from service.errors import Conflict, InvalidRequest, NotFound, PreconditionFailed, ServiceError


class RanksUnknown(InvalidRequest):
    """A request names ranks that the job does not have."""

    def __init__(self, ranks: Sequence[int], world_size: int) -> None:
        message = f"no such rank: workers are numbered 0 to {world_size - 1}"
        unknown = [index for index, rank in enumerate(ranks) if rank >= world_size]
        super().__init__(
            [FieldFault(path=f"ranks[{index}]", code="rank", message=message) for index in unknown]
        )


class SizeRefused(InvalidRequest):
    """A job cannot train with the number of workers that a request names."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__([FieldFault(path="workers", code=code, message=message)])


class HostUnknown(InvalidRequest):
    """A request names a host that has none of the job's workers."""

    def __init__(self, host: str, known: Sequence[str]) -> None:
        hosts = ", ".join(known) or "none yet"
        message = f"no worker of the job is on '{host}'; its hosts: {hosts}"
        super().__init__([FieldFault(path="host", code="host", message=message)])


class JobNotFound(NotFound):
    """No job has this id or name."""

    code = "job_not_found"

    def __init__(self, job: str) -> None:
        super().__init__(f"no job has the id or name '{job}'; GET /v1/jobs lists them")


class AttemptNotFound(NotFound):
    """No attempt has this id."""

    code = "attempt_not_found"

    def __init__(self, attempt_id: str) -> None:
        super().__init__(f"no attempt has the id '{attempt_id}'")


class JobEnded(Conflict):
    """The job has ended, so there is nothing left to change."""

    code = "job_ended"

    def __init__(self, job_id: str, status: str) -> None:
        super().__init__(f"job {job_id} has already ended ({status})")


class JobNotEnded(Conflict):
    """The job still lives, so what it holds cannot be deleted."""

    code = "job_not_ended"

    def __init__(self, job_id: str, status: str) -> None:
        super().__init__(
            f"job {job_id} has not ended: it is {status}; cancel it and wait for its end first"
        )


class JobNotRunning(Conflict):
    """The job has no workers at work."""

    code = "job_not_running"

    def __init__(self, job_id: str, status: str, purpose: str = "to trace") -> None:
        super().__init__(f"job {job_id} has no workers {purpose}: it is {status}, not RUNNING")


class JobNotPaused(Conflict):
    """The job is not paused, so there is nothing to resume."""

    code = "job_not_paused"

    def __init__(self, job_id: str, status: str) -> None:
        super().__init__(f"job {job_id} is not paused: it is {status}")


class JobAtWork(Conflict):
    """The job has an attempt under way, which must end first."""

    code = "job_at_work"

    def __init__(self, job_id: str, status: str, mend: str) -> None:
        super().__init__(f"job {job_id} is {status}; {mend} first")


class LayoutUnknown(Conflict):
    """The job has not chosen how many workers form a group."""

    code = "layout_unknown"

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"job {job_id} has not chosen its shard_group_size yet; ask again once its timeline "
            "tells the layout"
        )


class SequenceGap(Conflict):
    """A batch starts after records that never arrived; `next_seq` is the one to go on from."""

    code = "sequence_gap"

    def __init__(self, stream: str, first_seq: int, next_seq: int) -> None:
        self.next_seq = next_seq
        super().__init__(
            f"batch of stream '{stream}' starts at {first_seq}, but record {next_seq} has not "
            f"arrived yet; send again from {next_seq}"
        )

    @property
    def extensions(self) -> dict[str, object]:
        """The sequence number to go on from."""
        return {"next_seq": self.next_seq}


class StaleVersion(Conflict):
    """Somebody else wrote the job since it was read."""

    code = "stale_version"

    def __init__(self, job_id: str, version: int) -> None:
        super().__init__(f"job {job_id} was changed since version {version} was read; read again")


class VersionChanged(PreconditionFailed):
    """The job is not as the request's sender saw it any more."""

    code = "version_changed"

    def __init__(self, job_id: str, wanted: int, version: int) -> None:
        super().__init__(
            f"job {job_id} is at version {version} now, and If-Match asks for {wanted}: read it "
            f"again, and repeat the request if it is still meant"
        )


class VersionUnknown(PreconditionFailed):
    """An If-Match that is no tag of ours."""

    code = "version_unknown"

    def __init__(self, tag: str) -> None:
        super().__init__(f'If-Match is {tag[:40]!r}; give the ETag of a job, such as "7"')


class RecordRefused(ServiceError):
    """A record of a driver holds a value that the database cannot keep."""

    status = 422
    code = "record_refused"
    title = "Record refused"

    def __init__(self, attempt_id: str, cause: str) -> None:
        super().__init__(f"a record of attempt {attempt_id} cannot be stored ({cause})")


class JobUnreadable(ServiceError):
    """A stored job that this version of the service cannot read."""

    code = "job_unreadable"
    title = "Job unreadable"

    def __init__(self, job_id: str, cause: str) -> None:
        super().__init__(
            f"job {job_id} cannot be read ({cause}); was it stored by another version of the "
            "service? Run that version, or cancel the job with it"
        )
