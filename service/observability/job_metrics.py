"""Prometheus series of each live job, computed at each scrape from the jobs as last polled.

Every replica exports every live job as it last saw it in the store: aggregate by `max by (job_id)`,
not by sum. Times are Unix seconds, not ages, so that the greatest is the newest. What is counted
per attempt starts at 0 with the next attempt, as a counter does. A job's series end with the job.

A scrape has about 30 lines a job, so at most `max_jobs` are exported, the same ones on every
replica: jobs with workers before those without, then older before younger ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.domain.membership import (
    current_membership,
    failure_domain,
    membership_of,
    num_current,
    num_wanted,
    workers_held,
)
from service.domain.metrics import LOST_PREFIX, SHARE, steps_at_risk
from service.domain.models import Job, JobStatus, Membership

# Jobs not polled for so long may have ended since, as seen by another replica.
STALE_AFTER_S = 60.0
_LABELS = ("job_id", "project")
# Of lost time: a job reports what it likes, and each one is a series.
_MAX_CAUSES = 20
# By further labels.
Samples = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class _Family:
    """A metric of jobs: `read` gives the values of its series of a job by their further labels."""

    name: str
    text: str
    read: Callable[[Job], Samples]
    labels: tuple[str, ...] = ()


def _single(name: str, text: str, value_of: Callable[[Job], float | None]) -> _Family:
    """A metric with one series for each job of which `value_of` knows the value."""
    return _Family(name, text, lambda job: {} if (v := value_of(job)) is None else {(): v})


def _runs(job: Job) -> bool:
    return job.status is JobStatus.RUNNING


def _checkpoint_at(job: Job) -> float | None:
    """For jobs of earlier versions before their first checkpoint: when the job first ran."""
    saved_at, began_at = job.progress.checkpoint_at, job.started_at
    return (began_at if saved_at is None else saved_at) if _runs(job) else None


def _lost(job: Job) -> Samples:
    told = (each for each in job.latest_metrics.items() if each[0].startswith(LOST_PREFIX))
    causes = islice(told, _MAX_CAUSES)
    return {(name.removeprefix(LOST_PREFIX),): s for name, s in causes if math.isfinite(s)}


def _of_groups(name: str, text: str, value_of: Callable[[Job, Membership], float]) -> _Family:
    """A metric of running jobs whose groups are failure domains; others have no such series."""

    def _value(job: Job) -> float | None:
        membership = membership_of(job)
        return value_of(job, membership) if membership is not None and _runs(job) else None

    return _single(name, text, _value)


def _in_attempt(name: str, text: str, field_name: str) -> _Family:
    """A counter of the current attempt's membership; 0 before its first report."""

    def _value(job: Job) -> float | None:
        if job.current_attempt_id is None:
            return None
        return float(getattr(current_membership(job), field_name, 0.0))

    return _single(name, text, _value)


_FAMILIES = (
    _Family(
        "shardloom_job_info",
        "1 for each live job, with what it is called and what a lost host takes down.",
        lambda job: {(job.name, failure_domain(job)): 1.0},
        ("name", "failure_domain"),
    ),
    _Family(
        "shardloom_job_status",
        "1 for the status that a live job is in.",
        lambda job: {(job.status.value,): 1.0},
        ("status",),
    ),
    _single("shardloom_job_steps", "Steps trained so far.", lambda job: job.progress.step),
    _single(
        "shardloom_job_wanted_steps",
        "Steps that the job trains in all; 0 while that is not known.",
        lambda job: job.progress.total_steps,
    ),
    _single(
        "shardloom_job_rows",
        "Rows trained so far by all ranks, repeats left out.",
        lambda job: job.progress.rows,
    ),
    _single(
        "shardloom_job_rows_per_second",
        "Rows per second as the job last told, while it runs.",
        lambda job: job.progress.rows_per_s if _runs(job) else None,
    ),
    _single(
        "shardloom_job_advanced_timestamp_seconds",
        "When a running job last got further: an attempt began to train, or its step changed.",
        lambda job: job.progress.advanced_at if _runs(job) else None,
    ),
    _single(
        "shardloom_job_checkpoint_timestamp_seconds",
        "When a running job last committed a checkpoint, or began to train since.",
        _checkpoint_at,
    ),
    _single(
        "shardloom_job_undurable_steps",
        "Steps that are in no checkpoint yet.",
        lambda job: steps_at_risk(job.latest_metrics),
    ),
    _single(
        "shardloom_job_goodput_ratio",
        "Share of the workers' time that trained rows that count, since the attempt or its "
        "coordinator started, while it runs.",
        lambda job: job.latest_metrics.get(SHARE) if _runs(job) else None,
    ),
    _Family(
        "shardloom_job_lost_seconds",
        "Group-seconds that trained nothing that counts, by what they went to, since the attempt "
        "or its coordinator started.",
        _lost,
        ("cause",),
    ),
    _single("shardloom_job_workers", "Workers that the job holds now; 0 at rest.", workers_held),
    _of_groups(
        "shardloom_job_current_groups",
        "Sharding groups that train, where they are failure domains.",
        lambda _, membership: num_current(membership),
    ),
    _of_groups(
        "shardloom_job_wanted_groups",
        "Sharding groups that there should be, where they are failure domains.",
        lambda _, membership: num_wanted(membership),
    ),
    _of_groups(
        "shardloom_job_alive_copies",
        "Copies alive of the shard with the fewest, where groups are failure domains.",
        lambda _, membership: membership.copies_alive,
    ),
    _of_groups(
        "shardloom_job_alive_host_copies",
        "Hosts with a copy of the shard with the fewest, where groups are failure domains.",
        lambda _, membership: membership.host_copies_alive,
    ),
    _of_groups(
        "shardloom_job_needed_host_copies",
        "Hosts that must hold a copy for what `survive` asks; 0 where it asks nothing.",
        lambda job, _: job.spec.parallelism.num_hosts_needed,
    ),
    _in_attempt(
        "shardloom_job_divergences", "Copies found to differ in this attempt.", "num_divergences"
    ),
    _in_attempt("shardloom_job_lost_groups", "Groups lost in this attempt.", "num_losses"),
    _in_attempt(
        "shardloom_job_recoveries",
        "Recoveries from lost groups or failed rounds in this attempt.",
        "num_recoveries",
    ),
    _in_attempt(
        "shardloom_job_recovery_pause_seconds",
        "How much later commits came for the recoveries of this attempt, in all.",
        "recovery_pause_s",
    ),
    _single(
        "shardloom_job_attempts", "Attempts that the job has had.", lambda job: job.num_attempts
    ),
    _single(
        "shardloom_job_failures",
        "Failures that count against the budget of the job.",
        lambda job: job.num_failures,
    ),
)


def shown_of(jobs: Iterable[Job], max_jobs: int) -> Sequence[Job]:
    """The jobs that are shown where not all may be."""
    by_interest = sorted(jobs, key=lambda job: (job.status.is_at_rest, job.created_at, job.id))
    return by_interest[:max_jobs]


def oldest_wait(jobs: Iterable[Job], now: float) -> Iterator[Metric]:
    """Per project, how long the job has waited that has done so longest.

    A project with live jobs of which none waits has 0.
    """
    waits_s: dict[str, float] = {}
    for job in jobs:
        is_waiting = job.status is JobStatus.QUEUED
        wait_s = max(0.0, now - job.waits_anew_since) if is_waiting else 0.0
        waits_s[job.project] = max(wait_s, waits_s.get(job.project, 0.0))
    metric = GaugeMetricFamily(
        "shardloom_queue_oldest_wait_seconds",
        "How long the job has waited that has done so longest, by project.",
        labels=["project"],
    )
    for project, wait_s in sorted(waits_s.items()):
        metric.add_metric((project,), wait_s)
    yield metric


@dataclass(eq=False)
class JobCollector(Collector):
    """Shows the jobs that were last seen, at most `max_jobs`.

    `clock` gives Unix seconds.
    """

    clock: Callable[[], float]
    max_jobs: int
    _jobs: Sequence[Job] = field(default=(), init=False)
    _seen_at: float | None = field(default=None, init=False)

    def saw(self, jobs: Sequence[Job]) -> None:
        """Remember every live job; the series are computed at each scrape."""
        self._jobs, self._seen_at = jobs, self.clock()

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: registering must not cost a scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The series of the live jobs; none where they were not polled for a minute."""
        now, jobs = self.clock(), self._jobs
        if self._seen_at is None or now - self._seen_at > STALE_AFTER_S:
            jobs = ()
        shown = shown_of(jobs, self.max_jobs)
        for family in _FAMILIES:
            metric = GaugeMetricFamily(family.name, family.text, labels=(*_LABELS, *family.labels))
            for job in shown:
                for further, value in family.read(job).items():
                    metric.add_metric((job.id, job.project, *further), value)
            yield metric
        yield from oldest_wait(jobs, now)
        yield GaugeMetricFamily(
            "shardloom_hidden_jobs",
            "Live jobs without series of their own, beyond SHARDLOOM_METRICS_MAX_JOBS.",
            value=len(jobs) - len(shown),
        )
