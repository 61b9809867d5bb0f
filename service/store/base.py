"""The JobStore protocol: everything the control plane keeps, and the rules of keeping it.

*Compare-and-set*: `update_job` writes only when the stored version is the one that was read,
and raises `StaleVersion` otherwise; the caller reads again. *Exactly once*: `append_events` takes
a batch only where the stream left off, so a batch sent twice is stored once. No method makes a
network call, and each is one transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from service.domain import (
    DEFAULT_PROJECT,
    Attempt,
    Checkpoint,
    Job,
    JobStatus,
    MetricPoint,
    TimelineEvent,
)
from trainer.events import EventAck, EventBatch

if TYPE_CHECKING:
    # Imports SQLAlchemy, which the command line does without.
    from service.store.retention import Retention


class JobStore(Protocol):
    """Durable jobs, attempts, timelines, metrics and checkpoints."""

    def create_job(
        self, job: Job, *, idempotency_key: str | None, request_hash: str, actor: str = "user"
    ) -> Job:
        """Store a new job, or return the one that this key made before; `actor` submitted it.

        Raises `IdempotencyConflict` if the key was used with another request.
        """

    def find_submitted(
        self, idempotency_key: str, request_hash: str, project: str = DEFAULT_PROJECT
    ) -> Job | None:
        """The job that a key made in a project, if any; raises `IdempotencyConflict`."""

    def get_job(self, job_id: str) -> Job:
        """Read a job; raises `JobNotFound` or `JobUnreadable`."""

    def list_jobs(
        self,
        *,
        after: str | None = None,
        limit: int = 50,
        statuses: Sequence[JobStatus] = (),
        name: str | None = None,
        project: str | None = None,
        projects: Collection[str] | None = None,
        labels: Mapping[str, str] | None = None,
        created_after: float | None = None,
        created_before: float | None = None,
    ) -> tuple[list[Job], str | None]:
        """Newest first; the second value is the cursor of the next page, or None.

        `project` is the wanted one; `projects` are those whose jobs may be seen, None for all.
        A job must have all of `labels`. `created_after` (inclusive) and `created_before`
        (exclusive) are Unix seconds. Jobs that this version cannot read are left out.
        """

    def list_live_jobs(self) -> list[Job]:
        """Every job whose status is not terminal, oldest first; unreadable ones are left out."""

    def has_queued_jobs(self) -> bool:
        """Whether any job is in QUEUED."""

    def list_queued_jobs(self) -> list[Job]:
        """Every job in QUEUED: highest priority first, then by when it entered the queue."""

    def count_jobs_by_status(self, project: str | None = None) -> dict[JobStatus, int]:
        """How many jobs there are in each status that any is in, of one project or of all."""

    def claim_live_jobs(self, owner: str, *, lease_s: float, now: float, limit: int) -> list[str]:
        """Take live jobs for `owner` until `now + lease_s`; returns the ids of all that it holds.

        What `owner` holds is renewed in time; up to `limit` jobs are added whose lease is free or
        has run out at `now` (Unix seconds).
        """

    def release_leases(self, owner: str) -> None:
        """Give back what `owner` holds."""

    def delete_job(self, job_id: str) -> None:
        """Delete a job and all its rows; raises `JobNotFound`, or `JobNotEnded` while it lives."""

    def update_job(
        self, job: Job, *, attempt: Attempt | None = None, timeline: Sequence[TimelineEvent] = ()
    ) -> Job:
        """Write `job` (as read, with changes), its attempt and timeline lines in one transaction.

        Returns the job with its new version; raises `StaleVersion` if somebody wrote meanwhile.
        """

    def get_attempt(self, attempt_id: str) -> Attempt:
        """Read an attempt; raises `AttemptNotFound`."""

    def list_attempts(self, job_id: str) -> list[Attempt]:
        """Attempts of a job in order."""

    def append_events(self, attempt_id: str, batch: EventBatch, now: float) -> EventAck:
        """Take what is new in a batch and apply it to job, attempt, metrics and checkpoints.

        Raises `SequenceGap` (with the wanted `next_seq`) if records before the batch are missing,
        and `RecordRefused` if the database cannot hold one of them.
        """

    def stream_positions(self, attempt_id: str) -> dict[str, int]:
        """`next_seq` of every stream of an attempt."""

    def list_timeline(
        self, job_id: str, *, after: int = 0, limit: int = 200, kinds: Sequence[str] = ()
    ) -> list[TimelineEvent]:
        """Timeline lines with an id above `after`, in order: of some kinds, or of all."""

    def metric_names(self, job_id: str) -> list[str]:
        """Names of every metric the job has."""

    def metric_points(
        self,
        job_id: str,
        name: str,
        *,
        from_step: int | None = None,
        to_step: int | None = None,
        max_points: int = 500,
    ) -> list[MetricPoint]:
        """Points in step order, at most `max_points`: min, max and mean per bucket of steps.

        Where a step was repeated after a restart, the newest value stands.
        """

    def prune_metrics(self, retention: Retention, now: float) -> int:
        """Delete the metric points that `retention` does not keep; returns how many.

        Done in small transactions, a bounded part of the work at a time: call it now and then.
        """

    def list_checkpoints(self, job_id: str) -> list[Checkpoint]:
        """Committed checkpoints that still exist, in step order."""

    def ping(self) -> dict[str, Any]:
        """Check that the store answers and is at the newest migration."""

    def close(self) -> None:
        """Release connections."""
