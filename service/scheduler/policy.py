"""The scheduling policy: which queued jobs start, and which running ones are preempted. Pure.

`admit` goes through queued jobs by priority, then fair share (the project that holds the fewest
workers first), then waiting time. A job starts when its minimum of workers fits at once (gang
scheduling) into the free capacity, within its project's quotas.

A job that does not fit blocks those behind it (no starvation). Backfill is limited to jobs that
cannot delay it for long: preemptible ones of a lower priority, and any job while the blocked one
has waited less than `PASS_WINDOW_S`. A job that would not fit into an empty cluster, or that a
quota holds back, blocks nobody outside its project. Where pausing preemptible jobs of a lower
priority makes enough room, they are preempted, the lowest priority and the latest start first;
until they have stopped nothing else starts.

Capacity is computed from the hosts of the cluster and the reported places of workers. Jobs with a
cluster of their own are subject to quotas only.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from service.backends.base import has_own_cluster
from service.domain.membership import current_membership, sizes_of_job, workers_held
from service.domain.models import Job, JobStatus, Project
from service.domain.retries import MAX_BACKOFF_S
from service.domain.timeline import counted
from trainer.layout.hosts import HostFacts, wants_gpu


@dataclass(frozen=True)
class Capacity:
    """Total capacity of the cluster; with `hosts` None it is unknown, and everything fits.

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
        spread = job.spec.parallelism.num_hosts_needed
        if not spread:
            return sum(fitting)
        # Every group needs a host with room for all of it, and there must be hosts to lose.
        size = sizes_of_job(job).shard_group_size or 1
        able = [num // size * size for num in fitting if num >= size]
        return sum(able) if len(able) >= spread else 0

    @cached_property
    def _num_gpus(self) -> float:
        return sum(host.num_gpus for host in self.hosts or ())

    def demand_of(self, job: Job) -> tuple[float, float]:
        """CPUs and GPUs of one worker: with `device: auto` a GPU where there are enough."""
        return job.spec.resources.cpus_per_worker, float(wants_gpu(job.spec, self._num_gpus))

    def use_of(self, job: Job, workers: int) -> Use:
        """What so many workers of a job take, and on which hosts as far as reported."""
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
        # Places are known of some workers only: two upper bounds.
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


def _num_fitting(free_cpus: float, free_gpus: float, cpus: float, gpus: float) -> int:
    # Ray counts in ten-thousandths, so a quotient may lie just below a whole number.
    by_cpus = int(free_cpus / cpus + 1e-6)
    return min(by_cpus, int(free_gpus / gpus + 1e-6)) if gpus else by_cpus


def workers_by_host(job: Job) -> Mapping[str, int]:
    """How many workers of a job are on each host, as far as its groups have reported."""
    membership, held = current_membership(job), workers_held(job)
    if membership is None:
        return {}
    found = Counter(host for member in membership.members for host in member.hosts)
    # A job cannot be in the way of others with more workers than it has.
    return found if found.total() <= held else {}


def is_starting(job: Job) -> bool:
    """Whether a job was given capacity of the shared cluster that its workers may not hold yet."""
    is_new = job.status in (JobStatus.QUEUED, JobStatus.STARTING)
    return is_new and not has_own_cluster(job)


def most_held(job: Job) -> int:
    """The most workers that a job may grow to in this attempt; 0 where it does not run."""
    held, sizes = workers_held(job), sizes_of_job(job)
    most = (job.queue_note.max_workers or sizes.world_size) + sizes.spare_workers
    return max(held, most) if held else 0


# A blocked job at the head of the queue may be passed this long; then the cluster drains for it.
PASS_WINDOW_S = 300.0
# Further back in the queue an estimate would tell little.
_MAX_EXPECTED = 100


@dataclass(frozen=True)
class Held:
    """How many workers a job has, and the `most` that it may grow to by itself, with spares."""

    job: Job
    workers: int
    most: int


@dataclass(frozen=True)
class Start:
    """A job that starts, counted with `workers`; `max_workers` is what its quota allows, if less.

    The driver takes what it finds within its bounds, at most `workers`.
    """

    job: Job
    workers: int
    max_workers: int | None = None


@dataclass(frozen=True)
class Preemption:
    """A running job that pauses, and the queued one that it is preempted for."""

    job: Job
    by: Job


@dataclass(frozen=True)
class QueuePosition:
    """A queued job: its position from 1 (None where it is not eligible yet), and why it waits.

    `expected_start_at` is an estimate (Unix seconds), None where there is nothing to go by.
    """

    job: Job
    position: int | None
    reason: str
    expected_start_at: float | None = None


@dataclass
class Admission:
    """The result of a scheduling pass.

    `growth_limits` has, by job id, the most workers that it may grow to: others wait for the rest.
    `faults` has, by job id too, what kept it from being looked at.
    """

    starts: list[Start] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    places: list[QueuePosition] = field(default_factory=list)
    growth_limits: dict[str, int] = field(default_factory=dict)
    faults: dict[str, Exception] = field(default_factory=dict)


def admit(
    queued: Sequence[Job],
    running: Sequence[Job],
    projects: Mapping[str, Project],
    capacity: Capacity,
    now: float,
) -> Admission:
    """One scheduling pass over all queued and running jobs. `now` is Unix seconds.

    A job that cannot be looked at, whatever is wrong with it, holds up no other, but for the
    workers that it was started with.
    """
    turn = _SchedulingPass(projects, capacity, now)
    for job in running:
        if not turn.guarded(turn.count_running, job):
            turn.guarded(turn.count_as_started, job)
    waiting = [job for job in queued if not _backs_off(job, now)]
    for job in _in_order(waiting, turn):
        turn.guarded(turn.consider, job)
    late = [job for job in queued if _backs_off(job, now)]
    reason = "waits before the next attempt"
    turn.expect_starts()
    turn.result.places += [QueuePosition(job, None, reason) for job in late]
    turn.limit_growth()
    return turn.result


def _backs_off(job: Job, now: float) -> bool:
    """Whether a job waits before its next attempt; not for a clock that was set back since."""
    return 0.0 < (job.retry_at or now) - now <= 2 * MAX_BACKOFF_S


def _in_order(waiting: Iterable[Job], turn: _SchedulingPass) -> Iterable[Job]:
    """The queued jobs in order; a project that is given workers moves back at once."""
    by_priority: dict[int, dict[str, list[tuple[float, str, Job]]]] = {}
    for job in waiting:
        of_priority = by_priority.setdefault(job.priority, {})
        heapq.heappush(of_priority.setdefault(job.project, []), (job.waits_since, job.id, job))
    for priority in sorted(by_priority, reverse=True):
        heaps = by_priority[priority]
        while heaps:
            project = min(heaps, key=lambda name: (turn.shares[name], *heaps[name][0][:2]))
            yield heapq.heappop(heaps[project])[2]
            if not heaps[project]:
                del heaps[project]


@dataclass
class _SchedulingPass:
    """One pass over the queue; what it allocates counts at once."""

    projects: Mapping[str, Project]
    capacity: Capacity
    now: float

    def __post_init__(self) -> None:
        self.result = Admission()
        self.held: list[Held] = []
        self._num_running: dict[str, int] = defaultdict(int)
        self.shares: dict[str, int] = defaultdict(int)  # Workers that the project's jobs hold.
        self._claims: dict[str, int] = defaultdict(int)
        self._blocked: Job | None = None
        self._blocked_of: dict[str, Job] = {}
        self._is_making_room = False
        self._num_waiting = 0
        self._for_room: list[int] = []  # Places of those that wait for workers only.
        self._used = Use()
        # By what they depend on, for as long as the use is the same: all hosts are looked at.
        self._rooms: dict[object, tuple[int | None, int | None]] = {}
        self._in_vain: set[object] = set()  # Those for whom preempting gives too little room.

    def guarded(self, act: Callable[[Job], None], job: Job) -> bool:
        """Act on a job, and note what is raised; whether nothing was."""
        try:
            act(job)
            return True
        except Exception as error:
            self.result.faults[job.id] = error
            if job.status is JobStatus.QUEUED:
                reason = f"cannot be scheduled ({error!r:.200}); cancel it, and lower its resources"
                self.result.places.append(QueuePosition(job, None, reason))
            return False

    def count_running(self, job: Job) -> None:
        self._count(Held(job, workers_held(job), most_held(job)))

    def count_as_started(self, job: Job) -> None:
        """Count a job that says nothing usable with the workers that it was started with."""
        workers = job.queue_note.workers or 0
        self._num_running[job.project] += 1
        self.shares[job.project] += workers
        self._claims[job.project] += workers
        if not has_own_cluster(job):
            cpus, gpus = self.capacity.demand_of(job)
            self._take(Use(workers, workers * cpus, workers * gpus))

    def _count(self, held: Held) -> None:
        self._take(self._use_of(held))
        self._num_running[held.job.project] += 1
        self.shares[held.job.project] += held.workers
        self._claims[held.job.project] += held.most
        self.held.append(held)

    def _take(self, use: Use) -> None:
        self._used += use
        self._rooms.clear()
        self._in_vain.clear()

    def _shape_of(self, job: Job) -> object:
        """What the room for so many workers of a job depends on."""
        num_hosts, group = job.spec.parallelism.num_hosts_needed, sizes_of_job(job).shard_group_size
        return self.capacity.demand_of(job), num_hosts, group

    def _room_of(self, job: Job) -> tuple[int | None, int | None]:
        """How many workers of a job an empty cluster holds, and how many fit now."""
        of = self._shape_of(job)
        if of not in self._rooms:
            capacity = self.capacity
            self._rooms[of] = capacity.num_workers(job), capacity.num_free(job, self._used)
        return self._rooms[of]

    def _use_of(self, held: Held) -> Use:
        if has_own_cluster(held.job):
            return Use()
        return self.capacity.use_of(held.job, held.workers)

    def limit_growth(self) -> None:
        """Keep jobs from growing into capacity that others wait for, or were just given."""
        # Workers that start, or their hosts, may not be in their places yet.
        is_given = self.capacity.max_workers is not None or any(
            is_starting(each.job) for each in self.held
        )
        for each in self.held:
            is_free_to = each.job.spec.parallelism.is_elastic and not has_own_cluster(each.job)
            if is_free_to and each.job.status is not JobStatus.QUEUED:
                self.guarded(partial(self._limit_one, each, is_given), each.job)

    def _limit_one(self, held: Held, is_given: bool, job: Job) -> None:
        is_waited_for = self._blocked is not None and job.priority <= self._blocked.priority
        room = self._room_to_grow(held) if is_given else None
        most = min(
            held.most if room is None else room, held.workers if is_waited_for else held.most
        )
        if most < held.most:
            without_spares = held.workers - sizes_of_job(job).spare_workers
            given = min(job.queue_note.workers or held.workers, without_spares)
            self.result.growth_limits[job.id] = max(most - held.workers + without_spares, given)

    def _room_to_grow(self, held: Held) -> int | None:
        """How many workers a job may have beside all others; None where that is not known."""
        num_placed = sum(workers_by_host(held.job).values())
        given = held.job.queue_note.workers or held.workers
        if held.job.status is JobStatus.STARTING or max(num_placed, given) < held.workers:
            # Its layout may have more workers than it was given, and has places for.
            return self.capacity.num_free(held.job, self._used - self._use_of(held))
        _, free = self._room_of(held.job)
        return None if free is None else held.workers + free

    def consider(self, job: Job) -> None:
        """Start a job, or say why not."""
        quota = self._quota_reason(job)
        reason = quota or self._room_reason(job) or self._order_reason(job)
        if reason:
            places = self.result.places
            if not quota and job.project not in self._blocked_of and self._is_possible(job):
                self._for_room.append(len(places))
            self._num_waiting += 1
            places.append(QueuePosition(job, self._num_waiting, reason))
        else:
            self._start(job)

    def _is_possible(self, job: Job) -> bool:
        total, _ = self._room_of(job)
        return total is not None and sizes_of_job(job).min_workers <= total

    def expect_starts(self) -> None:
        """Estimate when jobs that wait for room start: as running ones end when they expect to.

        How long a waiting job will run is not known: those behind it do not count on its end.
        """
        if not self._for_room:
            return
        leaving = {each.job.id for each in self.result.preemptions}
        ends = [
            (self._end_of(each.job, leaving), each.job.id, self._use_of(each)) for each in self.held
        ]
        known = sorted(((at, of, use) for at, of, use in ends if at is not None), reverse=True)
        used, at = self._used, self.now
        for place in self._for_room[:_MAX_EXPECTED]:
            waiting = self.result.places[place]
            least = sizes_of_job(waiting.job).min_workers
            while not self._fits(waiting.job, least, used):
                if not known:
                    return
                at, _, freed = known.pop()
                used -= freed
            self.result.places[place] = replace(waiting, expected_start_at=at)
            used += self.capacity.use_of(waiting.job, least)

    def _end_of(self, job: Job, leaving: Collection[str]) -> float | None:
        if job.id in leaving or job.cancel_requested or job.pause_requested:
            return self.now
        eta_s = job.progress.eta_s
        return self.now + eta_s if job.status is JobStatus.RUNNING and eta_s is not None else None

    def _start(self, job: Job) -> None:
        sizes, limit = sizes_of_job(job), self._quota_left(job)
        most = sizes.world_size if limit is None else min(sizes.world_size, limit)
        free = None if has_own_cluster(job) else self.capacity.num_free(job, self._used)
        workers = most if free is None else min(most, free)
        step = sizes.shard_group_size or 1
        workers = max(sizes.min_workers, workers // step * step)
        capped = most // step * step if most < sizes.world_size else None
        spares = sizes.spare_workers
        self._count(Held(job, workers + spares, (capped or sizes.world_size) + spares))
        self.result.starts.append(Start(job, workers, capped))

    # ---- quotas

    def _quota_left(self, job: Job) -> int | None:
        project = self.projects.get(job.project)
        if project is None or project.max_workers is None:
            return None
        # An elastic job grows by itself: it counts with all that it may take.
        spares = sizes_of_job(job).spare_workers
        return project.max_workers - self._claims[job.project] - spares

    def _quota_reason(self, job: Job) -> str:
        """Why a quota keeps a job waiting; empty where none does."""
        project, sizes = self.projects.get(job.project), sizes_of_job(job)
        least = sizes.min_workers + sizes.spare_workers
        if project is None:
            return ""
        most, most_jobs = project.max_workers, project.max_running_jobs
        used, num_running = self._claims[job.project], self._num_running[job.project]
        reason = ""
        if most is not None and least > most:
            may = counted(most, "worker")
            return f"project {project.name} may use {may}, and the job needs {least}"
        if most_jobs is not None and num_running >= most_jobs:
            reason = f"project {project.name}: {num_running} of {most_jobs} jobs running"
        elif most is not None and used + least > most:
            reason = f"project {project.name}: {used} of {most} workers in use"
            if used > self.shares[job.project]:
                reason += ", with what elastic jobs may grow to"
        if reason:
            self._blocked_of.setdefault(job.project, job)
        return reason

    # ---- room

    def _room_reason(self, job: Job) -> str:
        """Why a job does not fit now; empty where it does."""
        if has_own_cluster(job):
            return ""
        least = sizes_of_job(job).min_workers
        total, free = self._room_of(job)
        if total is None or free is None:
            return ""
        if least > total:
            return _impossible(job, least, total)
        if free >= least:
            return ""
        reason = f"waiting for {least - free} of {least} workers; cluster max {total}"
        if self._blocked is None or self._may_pass(self._blocked, job):
            of = (job.priority, least, self._shape_of(job))
            made = "" if of in self._in_vain else self._make_room(job, least)
            if not made:
                self._in_vain.add(of)
            reason += made
        self._blocked = self._blocked or job
        return reason

    def _make_room(self, job: Job, least: int) -> str:
        """Preempt jobs of a lower priority where that is enough; the words that say so."""
        if self._is_making_room:
            return ""
        here = [each for each in self.held if not has_own_cluster(each.job)]
        staying = [
            each for each in here if not (each.job.cancel_requested or each.job.pause_requested)
        ]
        num_leaving = len(here) - len(staying)
        lower = [held for held in staying if held.job.priority < job.priority]
        preemptible = [held for held in lower if held.job.spec.preemptible]
        if not (preemptible or num_leaving):
            return ""
        used = sum((self._use_of(each) for each in staying), Use())
        victims: list[Held] = []
        # The lowest priority first, and of these the latest start.
        preemptible.sort(key=lambda held: -_started_at(held.job))
        for each in sorted(preemptible, key=lambda held: held.job.priority):
            if self._fits(job, least, used):
                break
            victims.append(each)
            used -= self._use_of(each)
        if not self._fits(job, least, used):
            return ""
        needed: list[Held] = []
        for each in reversed(victims):
            # With those that came after it there may be room for it to stay.
            if self._fits(job, least, used + self._use_of(each)):
                used += self._use_of(each)
            else:
                needed.insert(0, each)
        self.result.preemptions += [Preemption(each.job, job) for each in needed]
        num_leaving += len(needed)
        self._is_making_room = num_leaving > 0
        return f"; {num_leaving} job(s) make way"

    def _fits(self, job: Job, least: int, used: Use) -> bool:
        return (self.capacity.num_free(job, used) or 0) >= least

    # ---- order

    def _order_reason(self, job: Job) -> str:
        """Why a job that fits waits behind another one; empty where it may start."""
        ahead = self._blocked_of.get(job.project)
        if ahead is not None and not self._may_pass(ahead, job):
            return f"behind {ahead.named_for(job)}"
        if self._blocked is None or has_own_cluster(job):
            return ""
        if self._is_making_room or not self._may_pass(self._blocked, job):
            return f"behind {self._blocked.named_for(job)}, which waits for workers"
        return ""

    def _may_pass(self, ahead: Job, job: Job) -> bool:
        """Whether a job may start before the one ahead of it (backfill)."""
        makes_way = job.spec.preemptible and job.priority < ahead.priority
        return makes_way or self.now - ahead.waits_anew_since < PASS_WINDOW_S


def _started_at(job: Job) -> float:
    """When the newest attempt of a job started."""
    return job.queue_note.since or job.started_at or job.waits_since


def _impossible(job: Job, least: int, total: int) -> str:
    """Why a job does not fit even into an empty cluster."""
    spread, size = job.spec.parallelism.num_hosts_needed, sizes_of_job(job).shard_group_size or 1
    if spread and not total:
        return f"needs {spread} hosts with room for {size} workers each, to survive a lost one"
    return f"needs {least} workers; cluster max {total}"
