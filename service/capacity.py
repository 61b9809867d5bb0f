"""How much of the cluster jobs hold, and how many workers of a job it has room for.

All pure, and all from what is known: hosts as the cluster tells them, places of workers as the
groups of a job tell theirs. `service.queue` decides with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from service.backends.base import HostFacts
from service.domain import Job, JobStatus, QueueNote
from service.sizes import sizes_of_job


@dataclass(frozen=True)
class Capacity:
    """What the cluster has in all. `hosts` is None where that is not known: all fits then.

    `max_workers` counts, instead of the hosts, where the cluster grows by itself.
    """

    hosts: tuple[HostFacts, ...] | None = None
    max_workers: int | None = None

    def num_workers(self, job: Job) -> int | None:
        """How many workers of a job an empty cluster holds; None where that is not known."""
        if self.max_workers is not None:
            return self.max_workers
        return None if self.hosts is None else self._num_fitting_beside(job, Use(), self.hosts)

    def _num_fitting_beside(self, job: Job, used: Use, hosts: Sequence[HostFacts]) -> int:
        """How many workers fit on the hosts, beside those that are known to lie on each."""
        cpus, gpus = self.demand_of(job)
        taken = [used.hosts.get(host.address, (0.0, 0.0)) for host in hosts]
        fitting = [
            max(0, _num_fitting(host.num_cpus - taken_cpus, host.num_gpus - taken_gpus, cpus, gpus))
            for host, (taken_cpus, taken_gpus) in zip(hosts, taken, strict=True)
        ]
        spread = num_hosts_needed(job)
        if not spread:
            return sum(fitting)
        # Every group needs a host with room for all of it, and there must be hosts to lose.
        size = sizes_of_job(job).shard_group_size or 1
        able = [num // size * size for num in fitting if num >= size]
        return sum(able) if len(able) >= spread else 0

    def demand_of(self, job: Job) -> tuple[float, float]:
        """CPUs and GPUs of one worker: with `device: auto` a GPU where there are enough."""
        resources = job.spec.resources
        num_gpus = sum(host.num_gpus for host in self.hosts or ())
        is_enough = num_gpus >= job.spec.parallelism.min_workers
        wants_gpu = resources.device == "cuda" or (resources.device == "auto" and is_enough)
        return resources.cpus_per_worker, float(wants_gpu)

    def use_of(self, job: Job, workers: int) -> Use:
        """What so many workers of a job take, and where as far as the job has told."""
        cpus, gpus = self.demand_of(job)
        hosts = {host: (num * cpus, num * gpus) for host, num in workers_by_host(job).items()}
        return Use(workers, workers * cpus, workers * gpus, hosts)

    def num_free(self, job: Job, used: Use) -> int | None:
        """How many workers of a job fit beside what is `used`; None where that is not known."""
        limit = self.num_workers(job)
        if limit is None:
            return None
        if self.max_workers is not None or self.hosts is None:
            return max(0, limit - used.workers)
        free_cpus = sum(host.num_cpus for host in self.hosts) - used.cpus
        free_gpus = sum(host.num_gpus for host in self.hosts) - used.gpus
        # Where the others lie is known of some of them only: these bound it from both sides.
        beside = self._num_fitting_beside(job, used, self.hosts)
        return max(0, min(beside, _num_fitting(free_cpus, free_gpus, *self.demand_of(job))))


@dataclass(frozen=True)
class Use:
    """What workers take of the cluster, and of its hosts where that is known: (CPUs, GPUs)."""

    workers: int = 0
    cpus: float = 0.0
    gpus: float = 0.0
    hosts: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __add__(self, other: Use) -> Use:
        return self._with(other, 1)

    def __sub__(self, other: Use) -> Use:
        return self._with(other, -1)

    def _with(self, other: Use, sign: int) -> Use:
        hosts = dict(self.hosts)
        for host, (cpus, gpus) in other.hosts.items():
            known_cpus, known_gpus = hosts.get(host, (0.0, 0.0))
            hosts[host] = (known_cpus + sign * cpus, known_gpus + sign * gpus)
        return Use(
            self.workers + sign * other.workers,
            self.cpus + sign * other.cpus,
            self.gpus + sign * other.gpus,
            hosts,
        )


def num_hosts_needed(job: Job) -> int:
    """On how many hosts the groups of a job must lie at least; 0 where it does not say."""
    survive = job.spec.parallelism.survive
    return survive.hosts + 1 if survive else 0


def _num_fitting(free_cpus: float, free_gpus: float, cpus: float, gpus: float) -> int:
    # Ray counts in ten-thousandths: a float may lie a hair below the whole number meant.
    by_cpus = int(free_cpus / cpus + 1e-6)
    return min(by_cpus, int(free_gpus / gpus + 1e-6)) if gpus else by_cpus


def workers_held(job: Job) -> int:
    """The most workers that a job takes now; 0 where it does not run."""
    if job.status.is_terminal or job.status in (JobStatus.QUEUED, JobStatus.PAUSED):
        return 0
    membership = job.membership
    if membership is not None and membership.attempt_id == job.current_attempt_id:
        return membership.world_size or QueueNote.of(job).workers or sizes_of_job(job).world_size
    return QueueNote.of(job).workers or sizes_of_job(job).world_size


def workers_by_host(job: Job) -> Mapping[str, int]:
    """How many workers of a job lie on each host, as far as its groups have told; 0 at rest."""
    membership = job.membership
    if not workers_held(job) or membership is None:
        return {}
    if membership.attempt_id != job.current_attempt_id:
        return {}
    return Counter(host for member in membership.members for host in member.hosts)


def most_held(job: Job) -> int:
    """The most workers that a job may grow to in this attempt; 0 where it does not run."""
    held = workers_held(job)
    return max(held, QueueNote.of(job).max_workers or sizes_of_job(job).world_size) if held else 0
