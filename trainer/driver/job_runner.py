"""The failure domain `job`: all workers are one TorchTrainer, which a loss or a resize restarts.

Every run takes as many workers as the bounds and the cluster allow, a multiple of L, and resumes
from the newest checkpoint, resharded. Meanwhile the driver polls whether another size, or other
hosts, would be better; if so it asks the workers to save and stop. What was trained since the
newest checkpoint is lost with the workers; goodput is computed from their events, with metrics as
in `trainer.elastic.coordinator.goodput`. Hangs are found by heartbeats: collectives that hang end
by their timeout, a stopped process or a reader on dead storage does not.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from trainer import failures
from trainer.coordination.detection import HostRecord, ReplacementPolicy, Suspicion
from trainer.coordination.messages import WATCH_SILENCE_S
from trainer.driver.attempt import (
    MIRROR_S,
    PAUSED,
    PAUSED_EARLY,
    Attempt,
    Outcome,
    Restart,
    warn,
)
from trainer.driver.autoscale import CapacityDemand, CapacityRequest
from trainer.driver.cluster import Host, fill_hosts, kill_on
from trainer.driver.ray_train import TrainRun
from trainer.elastic.coordinator.goodput import GoodputMeter
from trainer.elastic.coordinator.interface import CoordinatorStatus, MembershipPolicy
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.elastic.coordinator.server import Coordinator, CoordinatorConfig
from trainer.errors import StorageError
from trainer.failures import EndReason, Failure
from trainer.protocol import requests
from trainer.protocol.events import (
    CheckpointCommitted,
    Event,
    Metrics,
    Progress,
    StragglerFound,
    WorkersStarted,
)
from trainer.protocol.mirror import PATIENCE_S
from trainer.protocol.outbox import read_batch
from trainer.protocol.requests import ResizeRequest, ResizeRequests, StopRequest

logger = logging.getLogger(__name__)
_ALL = 0  # the one group
_REPORT_EVERY_S = 10.0
_HANGS = frozenset(get_args(Suspicion))
_MAX_STARTS_WITHOUT_ROOM = 3
_POLL_S = 0.5
# Workers that were given up log what their threads do, and end by themselves if they can.
_KILL_AFTER_S = 2.0
# A restart costs seconds of training, so growing waits until room has stayed for this long, and the
# workers have run for so long.
_STEADY_S, _MIN_RUN_S = 10.0, 60.0
# After a loss room is awaited for so long.
_SETTLE_S = 5.0
# With an autoscaler, excluded hosts are used again when no others came for so long.
_OTHERS_S = 180.0


@dataclass
class JobGoodput:
    """Goodput over all runs of an attempt's workers; `now` never runs backwards.

    `ahead_s` says how many seconds it is ahead of Unix time, which the workers' records have.
    """

    write: Callable[[Event], None]
    ahead_s: Callable[[float], float] = lambda now: now - time.time()
    step: int = 0
    durable_step: int = 0
    _meter: GoodputMeter = field(default_factory=GoodputMeter)
    _stream: Path = Path()
    _offset: int = 0
    _seen_until: float = 0.0
    _reported_at: float = 0.0

    def begin(self, stream: Path, now: float) -> None:
        """Workers that write to `stream` are started."""
        self._meter.start(_ALL, now)
        self._stream, self._offset = stream, 0
        self._seen_until = self._reported_at = now

    def poll(self, now: float) -> None:
        """Apply new events of the workers, and report every `_REPORT_EVERY_S` seconds."""
        with suppress(OSError):  # storage is away
            while (found := read_batch(self._stream, self._offset))[0]:
                records, self._offset = found
                for record in records:
                    # The clock of the workers' host may be another.
                    at = record.time + self.ahead_s(now)
                    self._seen_until = min(max(at, self._seen_until), now)
                    self._apply(record, self._seen_until)
        if now - self._reported_at >= _REPORT_EVERY_S:
            self._report(now)

    def end(self, now: float, *, is_lost: bool, is_hung: bool = False) -> None:
        """The workers ended: with a checkpoint, or lost with what they trained since.

        Those that hung did so since their last word.
        """
        self.poll(now)
        if is_hung:
            self._meter.spend(_ALL, "hang", now - self._seen_until)
        if is_lost:
            self._meter.lose(_ALL, now)
            self.step = self.durable_step
        else:
            self._meter.commit({_ALL}, now)
            self._meter.start(_ALL, now)
        self._report(now)

    def _apply(self, record: Event, at: float) -> None:
        if isinstance(record, WorkersStarted):
            self.step = self.durable_step = record.resumed_step
            self._meter.train(_ALL, at)
        elif isinstance(record, Progress):
            self.step = record.step
        elif isinstance(record, CheckpointCommitted):
            self.durable_step = record.step
            self.step = max(self.step, record.step)
            # It holds what they had trained when the save began.
            self._meter.commit({_ALL}, at - record.duration_s)
        elif isinstance(record, Metrics):
            self._meter.spend(_ALL, "checkpoint", record.values.get("checkpoint/stall_s", 0.0))

    def _report(self, now: float) -> None:
        self._reported_at = now
        values = self._meter.metrics(now, self.step, self.durable_step)
        self.write(Metrics(time=now - self.ahead_s(now), step=self.step, values=values))


class HangMonitor:
    """Receives the heartbeats of the workers, in a coordinator that only watches."""

    def __init__(self, attempt: Attempt, host: str) -> None:
        """Listen at `host`, under which the workers reach the driver. Raises OSError."""
        recovery = attempt.spec.recovery
        silence_s = max(WATCH_SILENCE_S, recovery.heartbeat_timeout_s)
        recovery = recovery.model_copy(update={"heartbeat_timeout_s": silence_s})
        self._config = CoordinatorConfig(
            policy=MembershipPolicy(1, recovery=recovery, holds_suspicions=False),
            book=LeaseBook(num_rows=1, epochs=1, rows_per_lease=1),
            host=host,
            attempt_dir=attempt.context.files.root,
            token=attempt.token,
            only_watches=True,
        )
        self._coordinator = Coordinator(self._config)
        self._run_index = -1
        self.processes: dict[str, set[int]] = {}
        """Process ids of the run that was checked last, by host."""
        self.is_nobody_there = False
        """Whether the last check knows that none of the workers of its run has come yet."""
        self.stragglers: tuple[StragglerFound, ...] = ()
        """The newest stragglers of that run."""
        self.address = self._coordinator.address
        """Where workers send their heartbeats (host:port)."""

    def check(self, run_index: int) -> Failure | None:
        """Why run `run_index` is lost although its processes may still be there, if it is."""
        if run_index != self._run_index:
            self._run_index, self.processes = run_index, {}
        self.is_nobody_there = False
        try:
            status = self._status()
        except (RuntimeError, OSError) as error:  # a job needs no watch to go on
            logger.warning("nobody watches for hangs until the next try: %s", error)
            return None
        for group in status.groups:
            if group.incarnation == run_index:
                for host, pid in group.processes:
                    self.processes.setdefault(host, set()).add(pid)
        self.is_nobody_there = not self.processes
        self.stragglers = status.stragglers if self.processes else ()
        for each in reversed(status.departures):
            if each.incarnation == run_index and each.reason in _HANGS:
                return Failure(EndReason.HANG, each.message, blamed_host=each.host)
        return None

    def _status(self) -> CoordinatorStatus:
        if self._coordinator.is_over:  # what it knew comes back with the workers
            port = int(self.address.rpartition(":")[2])
            self._coordinator = Coordinator(replace(self._config, port=port))
        return self._coordinator.status()


@dataclass(frozen=True)
class Bounds:
    """Legal numbers of workers: multiples of `group_size` from `least` to `most`."""

    group_size: int
    least: int
    most: int

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most

    def best(self, room: int, wanted: int | None = None) -> int | None:
        """The most workers that fit into `room` and are `wanted`; None where too few fit."""
        limit = self.most if wanted is None else min(max(wanted, self.least), self.most)
        size = min(limit, room) // self.group_size * self.group_size
        return size if size >= self.least else None


@dataclass(frozen=True)
class Plan:
    """How many workers to start, and the host of each; Ray places them where that is empty."""

    num_workers: int
    hosts: tuple[Host, ...] = ()

    @property
    def addresses(self) -> frozenset[str]:
        """The hosts in use, as far as they are known."""
        return frozenset(host.address for host in self.hosts)


def plan(
    bounds: Bounds, hosts: Sequence[Host], wanted: int | None, avoided: Collection[str]
) -> Plan:
    """The largest size that fits outside the `avoided` hosts, else the least, for Ray to place.

    A fixed size that nothing constrains is left to Ray, too, which waits for room.
    """
    usable = _usable(hosts, avoided)
    size = bounds.best(sum(host.num_free for host in usable), wanted)
    if size is None:
        return Plan(bounds.least)
    if not bounds.is_elastic and len(usable) == len(hosts):
        return Plan(size)
    return Plan(size, fill_hosts(usable, size))


def _usable(hosts: Sequence[Host], avoided: Collection[str]) -> list[Host]:
    return [host for host in hosts if not host.is_draining and host.address not in avoided]


def need_of(
    bounds: Bounds,
    now: Plan,
    hosts: Sequence[Host],
    wanted: int | None,
    avoided: Collection[str] = (),
) -> CapacityDemand:
    """What workers that run as `now` says (0: none) lack, for an autoscaler.

    `hosts` have no room that it holds already.
    """
    size = bounds.group_size
    kept_away = frozenset(h.address for h in hosts if h.is_draining or h.address in avoided)
    least = -(-bounds.least // size) * size
    target = max(bounds.best(bounds.most, wanted) or 0, least)
    has = min(_room_beside(now, hosts, kept_away) // size * size, target)
    missing = CapacityRequest(size, avoided=kept_away)
    return CapacityDemand(has, target, least, (missing,) * ((target - has) // size))


def _room_beside(now: Plan, hosts: Sequence[Host], avoided: Collection[str]) -> int:
    """How many workers fit outside the `avoided` hosts, those that run as `now` says included."""
    staying = [each for each in now.hosts if each.address not in avoided]
    num_staying = len(staying) if now.hosts else now.num_workers
    return num_staying + sum(host.num_free for host in hosts if host.address not in avoided)


def cause_to_stop(
    bounds: Bounds,
    now: Plan,
    hosts: Sequence[Host],
    request: ResizeRequest,
    excluded: frozenset[str] = frozenset(),
) -> str | None:
    """Why the running workers should start again, one of `Resized.cause`; None to let them run.

    They leave a host that Ray drains in any case, as they would lose it, and one that people drain
    where there is room elsewhere. They stay on `excluded` hosts, which they took as others lacked,
    until they can be more without.
    """
    leaving = {host.address for host in hosts if host.is_draining}
    avoided = leaving | request.drain_hosts
    wanted = request.wanted_beside(now.num_workers)
    best = bounds.best(_room_beside(now, hosts, avoided | excluded), wanted)
    if leaving & now.addresses or (avoided & now.addresses and best is not None):
        return "drain"
    kept = bounds.best(now.num_workers, wanted)
    if (best or 0) <= now.num_workers == kept:
        return None
    return "request" if request.workers is not None else "room"


@dataclass
class JobRunner:
    """All runs of one attempt's workers. `read_hosts` and `launch` are the cluster."""

    attempt: Attempt
    read_hosts: Callable[[], list[Host]]
    launch: Callable[[TrainRun], Future[Failure | None]]
    hang_monitor: HangMonitor
    record: HostRecord
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep
    kill_on: Callable[[Host, Collection[int]], None] = kill_on

    def __post_init__(self) -> None:
        parallelism = self.attempt.spec.parallelism
        self._bounds = Bounds(
            parallelism.group_size, parallelism.min_workers, parallelism.world_size
        )
        self._requests = ResizeRequests(self.attempt.context.files)
        self._goodput = JobGoodput(self.attempt.writer.write)
        # Time that never runs backwards, near to Unix time.
        self._epoch_s = time.time() - self.clock()
        self._replacements = ReplacementPolicy(self.attempt.spec.recovery.replace_stragglers)
        self._size: int | None = None
        self._cause = ""
        self._num_without_room = 0

    def run_once(self, run_index: int) -> Outcome:
        current = None if self.attempt.context.is_pause_wanted else self._plan()
        if current is None:
            return PAUSED_EARLY
        before, self._size = self._size, current.num_workers
        request = self._requests.poll()
        has_trained = self._cause != EndReason.NO_ROOM
        self.attempt.report_size(before, self._size, self._cause, request, restarted=has_trained)
        run = self._run(run_index, current)
        self._goodput.begin(self.attempt.context.files.stream_path(run.config.stream), self._now())
        if self.attempt.capacity:
            self.attempt.capacity.give(run.node_ids)
        future = self.launch(run)
        given_up = self._attend(run_index, current, future)
        if given_up is PAUSED_EARLY:
            self._goodput.end(self._now(), is_lost=False)
            return given_up
        failure = future.result()
        failure = given_up if failure and given_up else failure
        is_hung = failure is not None and failure.reason == EndReason.HANG
        self._goodput.end(self._now(), is_lost=failure is not None, is_hung=is_hung)
        return self._judge(run_index, failure)

    def _now(self) -> float:
        return self._epoch_s + self.clock()

    def _plan(self) -> Plan | None:
        """Decide on the size, once the room of the last run is free again or known lost.

        With an autoscaler waits until the fewest workers fit; None if the job is paused before.
        """
        began = self.clock()
        until = began + (_SETTLE_S if self._size is not None else 0.0)
        is_reported = False
        while True:
            request, hosts = self._requests.poll(), self.read_hosts()
            wanted = request.wanted_beside(self._size or 0)
            avoided = request.drain_hosts | self.record.excluded(time.time())
            found = plan(self._bounds, hosts, wanted, avoided)
            is_settled = found.num_workers >= (self._size or 0) or self.clock() >= until
            if is_settled and not self._must_wait(hosts, wanted, avoided):
                break
            if is_settled and self._fits(hosts, wanted):
                # With the excluded hosts there is room, so the autoscaler may add none.
                if not is_reported:
                    self._report_left_out(hosts, avoided)
                is_reported = True
                may_take_all = self.clock() - began >= _OTHERS_S
                if may_take_all and self._fits(hosts, wanted, request.drain_hosts):
                    found = plan(self._bounds, hosts, wanted, request.drain_hosts)
                    break
            if self.attempt.context.is_pause_wanted:
                return None
            self.wait(_POLL_S)
        if self._num_without_room >= _MAX_STARTS_WITHOUT_ROOM:
            return Plan(self._bounds.least)
        return found

    def _must_wait(
        self, hosts: Sequence[Host], wanted: int | None, avoided: Collection[str]
    ) -> bool:
        """Request what is missing of the autoscaler; whether that must come first."""
        capacity = self.attempt.capacity
        if capacity is None:
            return False
        free_hosts = capacity.read_free_hosts()
        capacity.seek(need_of(self._bounds, Plan(0), free_hosts, wanted, avoided), free_hosts)
        return not self._fits(hosts, wanted, avoided)

    def _fits(
        self, hosts: Sequence[Host], wanted: int | None, avoided: Collection[str] = ()
    ) -> bool:
        num_free = sum(host.num_free for host in _usable(hosts, avoided))
        return self._bounds.best(num_free, wanted) is not None

    def _report_left_out(self, hosts: Sequence[Host], avoided: Collection[str]) -> None:
        left_out = ", ".join(host.address for host in hosts if host.address in avoided)
        warn(
            self.attempt.writer,
            f"the job waits for other hosts than {left_out}: drained, or excluded as failing or "
            f"slow; the latter are taken again if none has come in {_OTHERS_S:.0f} s",
        )

    def _run(self, run_index: int, current: Plan) -> TrainRun:
        config = replace(self.attempt.config(run_index), watch_address=self.hang_monitor.address)
        if self._bounds.is_elastic:
            config = replace(config, spec=config.spec.with_workers(current.num_workers))
        return TrainRun(
            config,
            current.num_workers,
            use_gpu=self.attempt.use_gpu,
            node_ids=tuple(host.node_id for host in current.hosts),
        )

    def _attend(
        self, run_index: int, current: Plan, future: Future[Failure | None]
    ) -> Failure | None:
        """Wait for the end of a run; ask the workers to stop when that is better.

        Returns why they were given up, if they were: also `PAUSED_EARLY`, while Ray waits for room.
        """
        given_up: Failure | None = None
        began, kill_at = self.clock(), math.inf
        better_since: float | None = None
        is_asked = leaves_straggler = False
        while not future.done():
            self.wait(_POLL_S)
            self._goodput.poll(self._now())
            if given_up is None and (given_up := self.hang_monitor.check(run_index)):
                kill_at = self.clock() + _KILL_AFTER_S
            if self.clock() >= kill_at:
                self._kill()
                kill_at = math.inf
            is_pausing = self.attempt.context.is_pause_wanted
            if is_pausing and self.attempt.capacity:
                # The job that preempts this one may need that room; saving takes time.
                self.attempt.capacity.close()
            if is_pausing and self.hang_monitor.is_nobody_there and not future.done():
                return PAUSED_EARLY
            if is_asked or future.done():
                continue
            if is_pausing:
                is_asked = self._stop(run_index, EndReason.PAUSED)
                continue
            current = self._placed(current)
            self._seek_capacity(current, is_new=self.clock() - began < _MIN_RUN_S)
            request, hosts = self._requests.poll(), self.read_hosts()
            leaves_straggler |= self._leaves_straggler(request, hosts)
            if leaves_straggler:
                is_asked = self._stop(run_index, "straggler")
                continue
            excluded, cause = self.record.excluded(time.time()), None
            if current.hosts:  # else Ray has not placed them yet, and nothing is free beside them
                cause = cause_to_stop(self._bounds, current, hosts, request, excluded)
            if cause is None:
                better_since = None
                continue
            now = self.clock()
            better_since = now if better_since is None else better_since
            is_worth_it = now - better_since >= _STEADY_S and now - began >= _MIN_RUN_S
            if cause != "room" or is_worth_it:
                is_asked = self._stop(run_index, cause)
        return given_up

    def _placed(self, current: Plan) -> Plan:
        """With the host of each worker where Ray chose it, once all have connected from theirs."""
        processes = self.hang_monitor.processes
        if current.hosts or sum(map(len, processes.values())) != current.num_workers:
            return current
        hosts = {host.address: host for host in self.read_hosts()}
        if not hosts.keys() >= processes.keys():
            return current
        places = tuple(hosts[address] for address, pids in processes.items() for _ in pids)
        return replace(current, hosts=places)

    def _leaves_straggler(self, request: ResizeRequest, hosts: Sequence[Host]) -> bool:
        """Report new stragglers; whether to start again without the host of one, now excluded."""
        must_leave = False
        for found in self._replacements.new(self.hang_monitor.stragglers):
            num_there = len(self.hang_monitor.processes.get(found.host, ()))
            excluded = self.record.excluded(time.time())
            elsewhere = _usable(hosts, {found.host, *request.drain_hosts, *excluded})
            has_room = 0 < num_there <= sum(host.num_free for host in elsewhere)
            is_replaced = not must_leave and self._replacements.replaces(
                found.host, has_room=has_room, place=found.rank
            )
            self.attempt.report_straggler(found, self.record, time.time(), is_replaced=is_replaced)
            must_leave = must_leave or is_replaced
        return must_leave

    def _seek_capacity(self, current: Plan, *, is_new: bool) -> None:
        """Request the room that the running workers would grow into."""
        capacity = self.attempt.capacity
        if capacity is None:
            return
        request = self._requests.poll()
        hosts, excluded = capacity.read_free_hosts(), self.record.excluded(time.time())
        # New workers may not have taken their room yet, and left none there.
        full = excluded | (current.addresses if is_new else frozenset())
        hosts = [replace(h, num_free=0) if h.address in full else h for h in hosts]
        wanted = request.wanted_beside(current.num_workers)
        # Excluded hosts in use were taken as there were no others.
        avoided = request.drain_hosts | (excluded - current.addresses)
        capacity.seek(need_of(self._bounds, current, hosts, wanted, avoided), hosts)

    def _kill(self) -> None:
        processes = self.hang_monitor.processes
        for host in self.read_hosts():
            if host.address in processes:
                self.kill_on(host, processes[host.address])

    def _stop(self, run_index: int, cause: str) -> bool:
        """Ask the workers to save and stop; False where storage fails."""
        logger.info("asking the workers to save and stop: %s", cause)
        request = StopRequest(run_index=run_index, cause=cause)
        is_asked = requests.ask(self.attempt.context.files, request)
        self._cause = cause if is_asked else self._cause
        return is_asked

    def _judge(self, run_index: int, failure: Failure | None) -> Outcome:
        if failure is None:
            self._num_without_room = 0
            if not self._has_stopped(run_index):
                return None
            return PAUSED if self._cause == EndReason.PAUSED else Restart()
        if failure.reason == EndReason.NO_ROOM:
            self._cause = failure.reason
            self._num_without_room += 1
            if self._num_without_room == 1:
                warn(self.attempt.writer, f"{failure.message}; trying again")
            return Restart()
        self._num_without_room = 0
        failure = self._await_lost_host(failure)
        self._cause = failure.reason
        for exclusion in self.record.blame(failure, (), time.time()):
            self.attempt.writer.write(exclusion)
        return failure

    def _has_stopped(self, run_index: int) -> bool:
        """Whether workers that ended well did so as they were asked to.

        Waits for storage that fails, and where hosts share none for the mark of their end; raises
        OSError or `StorageError` where it does not come.
        """
        files, until = self.attempt.context.files, self.clock() + PATIENCE_S
        is_mirrored = self.attempt.context.is_mirrored
        while True:
            try:
                has_stopped = files.stopping_path(run_index).exists()
                if has_stopped or not is_mirrored or files.completed_path(run_index).exists():
                    break
                message = "the workers ended, and how has not been told: is the service away?"
                problem: Exception = StorageError(message)
            except OSError as error:
                problem = error
            if self.clock() >= until:
                raise problem
            self.wait(_POLL_S)
        # Their last records may come after the mark.
        self.wait(MIRROR_S if is_mirrored else 0.0)
        return has_stopped

    def _await_lost_host(self, failure: Failure) -> Failure:
        """The failure, as a lost host if the cluster reports that within `settle_s`."""
        until = self.clock() + _SETTLE_S
        while failure.is_death and failure.reason == EndReason.WORKERS_LOST:
            failure = failures.with_lost_host(failure, {h.address for h in self.read_hosts()})
            if self.clock() >= until:
                break
            self.wait(_POLL_S)
        return failure
