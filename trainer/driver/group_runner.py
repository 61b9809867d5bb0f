"""The failure domain `replica_group`: keeps the sharding groups of a job alive, each by itself.

Every group is a TorchTrainer of its own in a thread of the driver; the groups meet at a coordinator
(`trainer.elastic.coordinator.server`), which also knows who trains. The loop compares what is there
with what the job wants, starts what is missing, promotes spares and retires what is too much;
placement is decided in `trainer.driver.group_placement`. A poll without an answer means nothing.

A run of all groups ends when training is complete, when an error would only recur, or when no group
is left that holds what was trained since the newest checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from trainer import failures
from trainer.coordination.client import finding_s, starting_s
from trainer.coordination.detection import AT_ONCE_S, HostRecord, ReplacementPolicy
from trainer.driver.attempt import PAUSED, PAUSED_EARLY, Attempt, is_there, warn
from trainer.driver.cluster import Host, kill_on
from trainer.driver.coordinator_actor import RayCoordinator
from trainer.driver.group_placement import (
    Action,
    GroupPhase,
    GroupPolicy,
    PlacedGroup,
    Promote,
    Retire,
    Start,
    View,
    decide,
    need_of,
)
from trainer.driver.ray_train import TrainRun
from trainer.elastic.coordinator.interface import CoordinatorStatus, Departure, GroupStatus
from trainer.failures import EndReason, Failure
from trainer.protocol import events, requests
from trainer.protocol.requests import ResizeRequest, ResizeRequests, StopRequest
from trainer.protocol.worker_config import GroupConfig

logger = logging.getLogger(__name__)
_POLL_S = 0.5
_KILL_AFTER_S = 2.0
_LAST_WORDS_S = 10.0
_DOUBTFUL_S = 20.0  # so long Ray may take for alive what is not
_FOUND_S = 10.0  # for a restarted coordinator to be up
_WINDOW_S = 60.0


@dataclass
class FailureTracker:
    """Failures of groups: backoff, excluded hosts, and errors of the job itself.

    `max_suspicious` errors that may lie in the job itself are tolerated. `last` is the newest
    failure; no group starts before `may_start_at`.
    """

    record: HostRecord
    max_suspicious: int
    last: Failure | None = None
    may_start_at: float = 0.0
    _num_suspicious: int = 0
    _times: deque[float] = field(default_factory=deque)

    def add(
        self, failure: Failure, hosts: Collection[str], now: float, unix_s: float
    ) -> list[events.HostExcluded]:
        """Count a lost group, which ran on `hosts`; the hosts excluded from now on (`unix_s`)."""
        self.last = failure
        if not self._times or now - self._times[-1] > AT_ONCE_S:
            self._times.append(now)
        while self._times[0] < now - _WINDOW_S:
            self._times.popleft()
        delay_s = failures.restart_delay_s(len(self._times))
        self.may_start_at = max(self.may_start_at, now + delay_s)
        has_lost_others = failure.evidence.get("coordinator") == "no_donor"
        return [] if has_lost_others else self.record.blame(failure, hosts, unix_s)

    def is_fatal(self, failure: Failure) -> bool:
        """Count how a group's workers ended; whether that ends the job."""
        # Nothing of the job was run on a host that is set up wrongly.
        self._num_suspicious += failure.reason.rule.is_suspicious and not failure.blamed_host
        return not failures.should_replace(failure, self._num_suspicious, self.max_suspicious)


@dataclass
class GroupRun:
    """One incarnation of a group: `hosts` has the host of each rank, `future` how it ended.

    `pids` go by host, once the coordinator knows the group. One that `is_spare` waits to be
    promoted. `was_current` stays true when the group was current once. `leave_cause` is why it is
    to leave; `lost_at` is when it was given up, `absent_since` from when on the coordinator has not
    known it, at first since its start. Workers that are there at `kill_at` are killed. `blamed_at`
    is when (Unix time) its hosts were blamed although the cause was not known.
    """

    group: int
    incarnation: int
    hosts: tuple[str, ...]
    future: Future[Failure | None]
    is_spare: bool = False
    was_current: bool = False
    leave_cause: str | None = None
    has_left: bool = False
    lost_at: float | None = None
    absent_since: float | None = None
    kill_at: float = math.inf
    is_killed: bool = False
    blamed_at: float | None = None
    pids: dict[str, set[int]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        again = f", life {self.incarnation + 1}" if self.incarnation else ""
        kind = "spare group" if self.is_spare else "group"
        return f"{kind} {self.group} on {', '.join(sorted(set(self.hosts)))}{again}"

    @property
    def placed(self) -> PlacedGroup:
        phase: GroupPhase = "training" if self.was_current else "starting"
        if self.is_spare and self.pids:
            phase = "idle"
        phase = "leaving" if self.leave_cause else phase
        return PlacedGroup(self.group, self.hosts, phase, self.is_spare)

    def apply(self, status: GroupStatus) -> None:
        self.absent_since = None
        self.was_current |= status.standing == "current"
        for host, pid in status.processes:
            self.pids.setdefault(host, set()).add(pid)


@dataclass(frozen=True)
class Ended:
    """The end of a run; without `failure` training is complete."""

    failure: Failure | None = None


@dataclass
class GroupRunLoop:
    """One run of all groups: from the seed or a checkpoint until none is left, or all is done.

    `read_hosts` gives the live hosts by address; `launch` starts the workers of one group, and its
    result is their end. The `coordinator` is this run's own, the records last for all runs. `size`
    is the number of workers that was reported last, at first by the run before. `clock` never runs
    backwards; hosts are excluded and drained by Unix time.
    """

    attempt: Attempt
    read_hosts: Callable[[], list[Host]]
    launch: Callable[[TrainRun], Future[Failure | None]]
    coordinator: RayCoordinator
    record: HostRecord
    replacements: ReplacementPolicy
    run_index: int
    kill_on: Callable[[Host, Collection[int]], None] = kill_on
    end_grace_s: float = 60.0
    kill_grace_s: float = 5.0
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time
    wait: Callable[[float], None] = time.sleep
    runs: dict[int, GroupRun] = field(default_factory=dict)
    size: int | None = None

    def __post_init__(self) -> None:
        attempt = self.attempt
        parallelism = attempt.spec.parallelism
        size = parallelism.group_size
        self._policy = GroupPolicy(
            group_size=size,
            least=max(parallelism.min_workers // size, 1),
            most=parallelism.num_replicas,
            least_hosts=1 + (parallelism.survive.hosts if parallelism.survive else 0),
            num_spares=parallelism.spares,
        )
        self._requests = ResizeRequests(attempt.context.files)
        self._failures = FailureTracker(self.record, attempt.context.max_worker_failures)
        self._zombies: list[GroupRun] = []
        self._stragglers: list[events.StragglerFound] = []
        self._slow_hosts: set[str] = set()
        self._lost_at: dict[str, float] = {}  # when a group was lost last, by host
        # By group the (incarnation, reason, hosts) that was lost last, without a reason where the
        # coordinator told it.
        self._lost: dict[int, tuple[int, str, tuple[str, ...]]] = {}
        self._next_incarnations: dict[int, int] = defaultdict(int)
        self._has_trained = self._has_finished = self._is_pausing = False
        # When there were enough groups last, and any at all.
        self._enough_at = self._any_at = self.clock()
        self._is_shortage_told = False
        self._is_restarted = self.size is not None  # until its own size is reported
        self._resize_cause = ""
        self._leaving: frozenset[str] = frozenset()  # hosts about which a save was asked for
        self._num_saves = 0

    def run(self) -> Failure | None:
        """Run all groups once; None when training is complete."""
        try:
            while (ended := self.tick()) is None:
                self.wait(_POLL_S)
            if ended.failure is None:
                self.await_workers()
        finally:
            # First, as it would tell killed workers as lost groups, and let the others train on.
            self.coordinator.stop()
        self.kill_workers()
        return ended.failure

    def tick(self) -> Ended | None:
        """Poll once and act; how the run ended, if it did. Raises `Evicted`."""
        status = self.coordinator.status()
        if status:
            self._apply_status(status)
            if status.failure:
                return Ended(status.failure)
        failure = self._collect_ended()
        if self._has_finished:
            return Ended()
        if failure:
            return Ended(failure)
        if self._is_nobody_left():
            return self._end_without_groups()
        # A pause cannot be taken back: the leader may be saving already.
        if self._is_pausing or self.attempt.context.is_pause_wanted:
            return self._pause()
        return self._reconcile()

    def _pause(self) -> Ended | None:
        """Let the leader save for all, without new groups; the run ends when it has."""
        attempt = self.attempt
        if attempt.capacity:
            # The job that preempts this one may need that room; saving takes time.
            attempt.capacity.close()
        if not self._has_trained:
            return Ended(PAUSED_EARLY)
        if not self._is_pausing:
            request = StopRequest(run_index=self.run_index, cause=EndReason.PAUSED)
            self._is_pausing = requests.ask(attempt.context.files, request)
        mark = attempt.context.files.stopping_path(self.run_index)
        return Ended(PAUSED) if is_there(mark) else None

    def _apply_status(self, status: CoordinatorStatus) -> None:
        self._has_finished = status.has_finished
        self._stragglers = self.replacements.new(status.stragglers)
        for group in status.groups:
            run = self._run_of(group.group, group.incarnation)
            if run:
                run.apply(group)
                self._has_trained |= run.was_current
        for departure in status.departures:
            run = self._run_of(departure.group, departure.incarnation)
            if run and departure.is_lost:
                self._lose(run, failure_of(departure, run.hosts))
            elif run and not run.has_left:
                self._let_go(run, departure.reason)
                if departure.reason == "poisoned":
                    # The last copy: the coordinator goes on from a checkpoint, without its rows.
                    self._has_trained, self._failures.last = False, None
        self._lose_absent(status)

    def _lose_absent(self, status: CoordinatorStatus) -> None:
        """Give up groups that the coordinator has not, or no more, whatever it told of that.

        Those that were to leave count as having left.

        A restarted one does not have them all yet: they may take as long to find it.
        """
        now, recovery = self.clock(), self.attempt.spec.recovery
        present = {(each.group, each.incarnation) for each in status.groups}
        returning_s = finding_s(recovery.heartbeat_timeout_s) + _FOUND_S
        for run in list(self.runs.values()):
            if run.has_left or (run.group, run.incarnation) in present:
                continue
            run.absent_since = now if run.absent_since is None else run.absent_since
            grace_s = returning_s if run.pids else starting_s(recovery)
            if now - run.absent_since <= grace_s or self._has_finished:
                continue
            if run.leave_cause:
                self._let_go(run, run.leave_cause)
            else:
                failure = absence_of(run, grace_s)
                warn(self.attempt.writer, failure.message)
                self._lose(run, failure)

    def _run_of(self, group: int, incarnation: int) -> GroupRun | None:
        run = self.runs.get(group)
        return run if run and run.incarnation == incarnation else None

    def _collect_ended(self) -> Failure | None:
        """Remove groups whose workers have ended; a failure among them that ends the job."""
        fatal = None
        for run in [*self.runs.values(), *self._zombies]:
            if run.future.done():
                fatal = self._remove(run, run.future.result()) or fatal
            elif self.clock() > run.kill_at:
                self._kill(run)
        return fatal

    def _remove(self, run: GroupRun, failure: Failure | None) -> Failure | None:
        """Remove a group whose workers have ended; the failure if it ends the job."""
        # Who is not to end ends well only when all is trained, whether or not that was told.
        may_end = run.leave_cause or run.is_spare or run.lost_at
        self._has_finished |= failure is None and not may_end
        is_expected = run.has_left or self._has_finished
        if failure and run.lost_at:
            self._explain_loss(run, failure)
        elif failure and not is_expected:
            self._lose(run, failure)
        self._zombies = [zombie for zombie in self._zombies if zombie is not run]
        if self.runs.get(run.group) is run:
            del self.runs[run.group]
        if failure is None or is_expected:
            return None
        rule = failure.reason.rule
        if run.is_killed and (rule.is_suspicious or rule.restarts_workers):
            return None  # the kill may have caused it
        ended = f"{run.name} ended: {failure.reason}: {failure.message}"
        warn(self.attempt.writer, ended)
        return failure if self._failures.is_fatal(failure) else None

    def _explain_loss(self, run: GroupRun, failure: Failure) -> None:
        """The workers of a group that was given up have ended of what may be the cause."""
        self._failures.last = failures.explain([failure, self._failures.last or failure])
        is_hosts_fault = failure.blamed_host or failure.reason.rule.blames_hosts
        if run.blamed_at and not is_hosts_fault:
            self.record.forgive(run.hosts, run.blamed_at)

    def _lose(self, run: GroupRun, failure: Failure) -> None:
        """Give up a group. Workers that are still there are fenced, and killed soon."""
        run.lost_at = self.clock()
        run.kill_at = run.lost_at + _KILL_AFTER_S
        del self.runs[run.group]
        self._zombies.append(run)
        self._lost_at |= dict.fromkeys(run.hosts, run.lost_at)
        if not run.is_spare:
            self._resize_cause = failure.reason
        reason = "" if failure.evidence.get("coordinator") else failure.reason
        self._lost[run.group] = run.incarnation, reason, run.hosts
        self.coordinator.request("drop", run.group, run.incarnation, failure.reason)
        unix_s = self.wall_clock()
        if failure.reason == EndReason.WORKERS_LOST:
            run.blamed_at = unix_s
        for exclusion in self._failures.add(failure, run.hosts, run.lost_at, unix_s):
            self.attempt.writer.write(exclusion)

    def _let_go(self, run: GroupRun, cause: str) -> None:
        """A group has left. One that led ends its save under way first."""
        saving_s = self.attempt.spec.resources.collective_timeout_s
        run.leave_cause, run.has_left = cause, True
        run.kill_at = self.clock() + self.end_grace_s + saving_s

    def _kill(self, run: GroupRun) -> None:
        """SIGKILL the workers of a group that is lost or has left, once."""
        if run.is_killed:
            return
        run.is_killed = True
        for host in self.read_hosts():
            if host.address in run.pids:
                self.kill_on(host, run.pids[host.address])

    def _is_nobody_left(self) -> bool:
        """Whether no group is left to go on from.

        Either all those are gone that held what was trained, or none of the first ones came up.
        """
        if self._has_trained:
            return not any(run.was_current for run in self.runs.values())
        last = self._failures.last
        return last is not None and not self._groups and last.reason != EndReason.NO_ROOM

    @property
    def _groups(self) -> list[GroupRun]:
        """The groups that are no spares."""
        return [run for run in self.runs.values() if not run.is_spare]

    def _end_without_groups(self) -> Ended | None:
        """The end of a run without groups, once its cause is known or after `_LAST_WORDS_S`."""
        now = self.clock()
        if any(now - (run.lost_at or now) < _LAST_WORDS_S for run in self._zombies):
            return None
        last = self._failures.last
        last = last or Failure(EndReason.WORKERS_LOST, "all groups ended before the training")
        live_hosts = {host.address for host in self.read_hosts()}
        return Ended(failures.with_lost_host(last, live_hosts))

    def _reconcile(self) -> Ended | None:
        """Start and retire groups by the policy; ends a run that has room for none."""
        request, hosts = self._requests.poll(), self.read_hosts()
        self._save_before_loss(hosts)
        self._judge_stragglers(request, hosts)
        actions = decide(self._policy, self._view(request, hosts))
        num_starts = sum(isinstance(each, Start) and not each.is_spare for each in actions)
        if not self._next_incarnations and num_starts < self._policy.least:
            actions = []
        self._act(actions, request, hosts)
        view = self._view(request, hosts)
        self._tell_wanted(view)
        self._seek_capacity(request)
        self._report_size(request, is_steady=not actions)
        return self._check_shortage(view)

    def _tell_wanted(self, view: View) -> None:
        """Tell the coordinator which groups there are, if any, how many lack, who is to go, that a
        checkpoint is wanted, and who was lost, perhaps while it was restarted."""
        groups = [run.group for run in self._staying]
        if groups:
            num_missing = max(0, view.target - len(view.staying))
            leaving = {
                (run.group, run.incarnation): run.leave_cause
                for run in self.runs.values()
                if run.leave_cause
            }
            told = groups, num_missing, leaving, self._num_saves, self._lost
            self.coordinator.request("want", *told)

    def _judge_stragglers(self, request: ResizeRequest, hosts: Sequence[Host]) -> None:
        """Report new stragglers; the groups of those that are replaced move to other hosts."""
        stragglers, self._stragglers = self._stragglers, []
        for found in stragglers:
            view = self._view(request, hosts)
            without = replace(view, drained=view.drained | {found.host})
            has_room = self._num_coming(without) > self._num_coming(view)
            is_replaced = self.replacements.replaces(found.host, has_room=has_room)
            self.attempt.report_straggler(
                found, self.record, self.wall_clock(), is_replaced=is_replaced
            )
            if is_replaced:
                self._slow_hosts.add(found.host)

    def _num_coming(self, view: View) -> int:
        """How many groups would be started or promoted now, besides spares."""
        return sum(
            isinstance(each, Promote) or (isinstance(each, Start) and not each.is_spare)
            for each in decide(self._policy, view)
        )

    def _save_before_loss(self, hosts: Sequence[Host]) -> None:
        """Have the leader save where Ray drains hosts of every group that trains, as if preempted.

        Groups elsewhere may not be ready in time.
        """
        draining = {host.address: host.deadline for host in hosts if host.is_draining}
        training = [run for run in self.runs.values() if run.was_current]
        if not training or not all(draining.keys() & set(run.hosts) for run in training):
            self._leaving = frozenset()
            return
        leaving = frozenset(draining.keys() & {host for run in training for host in run.hosts})
        if leaving <= self._leaving:
            return
        self._leaving = leaving
        self._num_saves += 1
        deadlines = [each for host in leaving if (each := draining[host])]
        notice = f", in {min(deadlines) - self.wall_clock():.0f} s" if deadlines else ""
        warn(
            self.attempt.writer,
            f"all groups are about to lose hosts ({', '.join(sorted(leaving))}{notice}): a "
            "checkpoint is saved at once",
        )

    def _seek_capacity(self, request: ResizeRequest) -> None:
        """Request missing room of the autoscaler; not directly after a loss."""
        capacity = self.attempt.capacity
        if capacity and self.clock() >= self._failures.may_start_at:
            hosts = capacity.read_free_hosts()
            capacity.seek(need_of(self._policy, self._view(request, hosts)), hosts)

    @property
    def _staying(self) -> list[GroupRun]:
        """The groups that are no spares and are not about to leave."""
        return [run for run in self._groups if not run.leave_cause]

    def _view(self, request: ResizeRequest, hosts: Sequence[Host]) -> View:
        now = self.clock()
        # Room of groups that start, which the cluster may still call free.
        taken = Counter(at for run in self.runs.values() if not run.pids for at in run.hosts)
        excluded = self.record.excluded(self.wall_clock())
        wanted = request.wanted_beside(len(self._staying) * self._policy.group_size)
        return View(
            hosts=[replace(h, num_free=max(0, h.num_free - taken[h.address])) for h in hosts],
            groups=[run.placed for run in self.runs.values()],
            target=self._policy.target(wanted),
            drained=request.drain_hosts | (self._slow_hosts & excluded),
            excluded=excluded,
            may_start=now >= self._failures.may_start_at,
            doubtful=frozenset(h for h, at in self._lost_at.items() if now - at < _DOUBTFUL_S),
        )

    def _act(self, actions: list[Action], request: ResizeRequest, hosts: Sequence[Host]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._start(action, hosts)
            elif isinstance(action, Promote):
                run = self.runs[action.group]
                logger.info("%s takes the place of a missing group", run.name)
                run.is_spare = False
            elif self.runs[action.group].pids:
                self._retire(action, request)
            # A group that the coordinator does not know yet is retired later.

    def _start(self, start: Start, hosts: Sequence[Host]) -> None:
        incarnation = self._next_incarnations[start.group]
        self._next_incarnations[start.group] += 1
        attempt = self.attempt
        group = GroupConfig(
            start.group, incarnation, self.coordinator.actor_name, is_spare=start.is_spare
        )
        node_ids = {host.address: host.node_id for host in hosts}
        run = TrainRun(
            attempt.config(self.run_index, group),
            len(start.hosts),
            use_gpu=attempt.use_gpu,
            node_ids=tuple(node_ids.get(address, "") for address in start.hosts),
        )
        if attempt.capacity:
            attempt.capacity.give(run.node_ids)
        future = self.launch(run)
        started = GroupRun(
            start.group,
            incarnation,
            start.hosts,
            future,
            start.is_spare,
            absent_since=self.clock(),
        )
        self.runs[start.group] = started
        message = f"starting {started.name}"
        logger.info("%s", message)
        if incarnation or self._has_trained:
            attempt.writer.write(events.Note(time=self.wall_clock(), message=message))

    def _retire(self, action: Retire, request: ResizeRequest) -> None:
        run, cause = self.runs[action.group], action.cause
        if cause == "drain" and self._slow_hosts & set(run.hosts) - request.drain_hosts:
            cause = "straggler"
        run.leave_cause = cause
        logger.info("%s shall leave: %s", run.name, cause)
        if run.is_spare:
            return
        is_requested = cause == "resize" and request.workers is not None
        self._resize_cause = "request" if is_requested else cause

    def _report_size(self, request: ResizeRequest, *, is_steady: bool) -> None:
        """Report another number of workers once no group comes or goes."""
        runs = self._groups
        is_steady &= all(run.was_current and not run.leave_cause for run in runs)
        if not runs or not is_steady:
            return
        size = len(runs) * self._policy.group_size
        before, self.size = self.size, size
        if before is not None and size > before:
            self._resize_cause = "room" if request.workers is None else "request"
        cause, restarted = self._resize_cause, self._is_restarted
        self.attempt.report_size(before, size, cause, request, restarted=restarted)
        self._is_restarted = False

    def _check_shortage(self, view: View) -> Ended | None:
        """Tell once that there have been too few groups for a while, not counting those on hosts
        that are to be left; ends a run that had none.
        """
        now, attempt = self.clock(), self.attempt
        num_groups, has_autoscaler = len(view.staying), attempt.capacity is not None
        if num_groups >= self._policy.least:
            self._enough_at, self._is_shortage_told = now, False
        if self._groups or has_autoscaler:
            self._any_at = now
        is_empty = now > self._any_at
        since = self._any_at if is_empty else self._enough_at
        if now - since < attempt.spec.recovery.start_grace_s:
            return None
        message = (
            f"the cluster has room for {num_groups} groups of {self._policy.group_size} workers "
            "each, outside the hosts that are drained or excluded, and the job needs "
            f"{self._policy.least}"
        )
        if is_empty:
            return Ended(Failure(EndReason.NO_ROOM, f"{message}; add hosts"))
        if not self._is_shortage_told:
            if len(self._staying) > num_groups:
                then = "groups stay on hosts that are to be left until others are added"
            elif self._groups:
                then = "training goes on with fewer"
            else:
                then = "the job waits for the autoscaler"
            warn(attempt.writer, f"{message}; {then}")
        self._is_shortage_told = True
        return None

    def await_workers(self) -> None:
        """Wait for the workers to end after a complete training."""
        # Who did not train has nothing to end, and may still be starting.
        trained = [run.future for run in self.runs.values() if run.was_current]
        futures.wait(trained, self.end_grace_s)

    def kill_workers(self) -> None:
        runs = [*self.runs.values(), *self._zombies]
        for run in runs:
            if not run.future.done():
                self._kill(run)
        futures.wait([run.future for run in runs], self.kill_grace_s)


def failure_of(departure: Departure, hosts: Sequence[str]) -> Failure:
    is_hang = departure.reason == "hang"
    reason = EndReason.HANG if is_hang else EndReason.WORKERS_LOST
    # A silent rank may have lost its agent, on another host.
    blamed = departure.host if is_hang else hosts[0] if len(set(hosts)) == 1 else ""
    evidence = {"coordinator": departure.reason}
    return Failure(reason, departure.message, evidence=evidence, blamed_host=blamed)


def absence_of(run: GroupRun, absent_s: float) -> Failure:
    """The failure of a group that the coordinator has not known for so long."""
    if run.pids:
        message = f"{run.name} is given up: the coordinator has not known it for {absent_s:.0f} s"
        return Failure(EndReason.WORKERS_LOST, message)
    return Failure(
        EndReason.HANG,
        f"{run.name} hangs at its start: no word of it in {absent_s:.0f} s. Does the storage of "
        "its code, data or run folder answer on its hosts (see the logs of its ranks)? If it only "
        "takes long, raise recovery.min_hang_s: a start has ten times that",
    )
