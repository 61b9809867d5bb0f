"""One rank's session and training loop where each sharding group is a failure domain of its own.

The group is a torch.distributed world with M = 1; `GroupSync` connects it to the other groups. It
trains the rows that the coordinator leases it, one lease between two syncs, and continues from the
ledger, the sum of all committed syncs. Steps are *nominal*: one for as many rows as all T workers
take at once, so that schedules, reports and checkpoints do not depend on the number of live groups.
`run_group_worker` raises `WorkerFailure` with a reason that the control plane knows.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import add

import torch
import torch.distributed as dist

from trainer.checkpoint.manager import TrainState
from trainer.coordination.agent import GroupAgent
from trainer.coordination.client import (
    LOCATE_S,
    CoordinatorClient,
    Dismissed,
    Identity,
    Refused,
    end_process,
)
from trainer.coordination.messages import (
    Arrive,
    LeaderProgress,
    Lease,
    Ledger,
    Report,
    RoundResult,
    Share,
    Welcome,
)
from trainer.coordination.sync_tuner import Observation
from trainer.data.batches import Batch, LeaseBatches
from trainer.data.position import position_of
from trainer.elastic.group_sync import GroupSync, limit_nccl
from trainer.failures import NonFiniteLoss
from trainer.layout.layout import Layout
from trainer.parallel.collectives import Part, reduce_parts
from trainer.parallel.mesh import MeshGroups
from trainer.parallel.planner import plans_digest
from trainer.parallel.sync import exact_sync
from trainer.protocol.events import GroupState
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.worker_config import ACTOR_NAMESPACE, GroupConfig, WorkerConfig
from trainer.training import worker
from trainer.training.loss import NON_FINITE_ADVICE
from trainer.training.session import Session
from trainer.training.worker import groups_of, named_failures, prepare_process

logger = logging.getLogger(__name__)


@dataclass
class Interval:
    """What this rank trained between two syncs.

    `sums`, float64 [2] on the device, are 0, or NaN where a loss or a gradient was not finite, and,
    where its rows are not all alike, the weights of the whole group's rows. It took `train_s`;
    `num_quarantined` rows were left out.
    """

    sums: torch.Tensor
    leases: tuple[int, ...] = ()
    num_rows: int = 0
    num_quarantined: int = 0
    num_steps: int = 0
    train_s: float = 0.0

    def after(self, earlier: Interval) -> Interval:
        """Both as one: each field is a sum."""
        return Interval(*map(add, vars(earlier).values(), vars(self).values()))


class GroupSession(Session):
    """One rank in one incarnation of its group."""

    def __init__(self, config: WorkerConfig, groups: MeshGroups, client: CoordinatorClient) -> None:
        assert config.group, "the config of a group's worker names the group"
        self.group: GroupConfig = config.group
        self.client = client
        self.ledger = Ledger()
        self.standing: GroupState = "initial"
        self.is_leader = False
        self._leases: deque[Lease] = deque()
        self._report = Report()
        self._validation_error: float | None = None
        self._result: RoundResult | None = None
        self._before = TrainState()
        self._announced: list[tuple[int, int]] = []
        self._has_finished = False
        self._reported_step = 0
        self._measured: tuple[Share, Part] | None = None  # of the validation rows, on this commit
        self._validated: tuple[int, int] | None = None  # at so many rows agreed on, by which leader
        self._num_copies = 0
        self._urgent_step = 0  # what was committed by then shall be durable as soon as possible
        self._num_saves = 0  # that the driver has asked for
        self._is_syncing = False
        self._sync_s = 0.0  # that training waited for the sync that has begun
        self._synced: Observation | None = None
        super().__init__(config, groups, client.reporter)
        self._interval = self._new_interval()
        self._syncing = self._new_interval()  # what the sync is about that has begun
        self._loader = LeaseBatches(
            self.train_source,
            self.spec,
            rank=groups.rank,
            num_ranks=groups.layout.world_size,
            process=self._reader_process,
            on_slow_read=partial(self.heartbeat.enter, "data_wait"),
        )
        if self._reader_process:  # or the other groups would wait for this one's first batch
            self._reader_process.await_start()
        # One over all leases: as one ends, the ids of the next are under way.
        self._stream = self.pipeline.over(self._loader)
        self.group_sync = GroupSync(
            self.model,
            exact_sync(self.spec, self._warn_of_sync if self.rank == 0 else logger.debug),
            lambda: self.optimizers.synced_whole(dense=True),
            client,
            self.spec.recovery,
            lambda message: (self._warn_of_sync if self.is_leader else logger.debug)(message),
            self.spec.parallelism.divergence_check,
            self._measured_sums,
        )
        self._divergence_guard = None  # groups vote with checksums instead

    def _new_interval(self) -> Interval:
        return Interval(torch.zeros(2, dtype=torch.float64, device=self.groups.device))

    @property
    def world_size(self) -> int:
        """T, the workers of all groups."""
        return self.spec.parallelism.world_size

    @property
    def rank(self) -> int:
        return self.group.group * self.groups.layout.world_size + self.groups.rank

    @property
    def rows_agreed(self) -> int:
        """Rows of the run that are trained or left out by the last committed sync."""
        return self.ledger.rows_done

    @property
    def num_rows(self) -> int:
        """Rows that the whole run trains."""
        training, shape = self.spec.training, self.shape
        whole = shape.num_rows * training.epochs
        steps = training.max_steps
        return whole if steps is None else min(whole, steps * shape.rows_per_step)

    def planned_steps(self) -> int:
        return -(-self.num_rows // self.shape.rows_per_step)

    def begin(self) -> None:
        """Take the state from a live group, else from a checkpoint, else from the seed.

        A spare takes none before it is wanted. Collective over the group.
        """
        if self.group.is_spare:
            self.standing = "spare"
        # Whether some group holds what this one needs.
        elif self._join("listening").has_current:
            self.standing = "listening"
        else:
            self.restore()
            self.group_sync.renew()
            ledger = self.state.ledger
            self._adopt(ledger)
            # A checkpoint of another layout may count more steps, each of fewer rows.
            step = min(ledger.led.step, self.state.step)
            led = ledger.led.model_copy(update={"step": step, "saved_step": step})
            self.ledger = ledger.model_copy(update={"led": led})
        self._join(self.standing, self.origin)
        self.speed.restart()

    def _join(self, standing: GroupState, origin: str = "") -> Welcome:
        plan = plans_digest(self.table_plans)
        return self.client.join(standing, origin, self.ledger, self.group_sync.donor, plan)

    def train_lease(self) -> None:
        """Train the next lease, if the group holds one. Collective over the group.

        Raises `NonFiniteLoss` where a NaN is to end the job.
        """
        if not self._leases:
            return
        lease = self._leases.popleft()
        started_s = time.perf_counter()
        self.quarantine.begin_epoch(lease.epoch)
        for batch, step in self._stream:
            assert step.lease.id == lease.id, "leases are trained in the order of their submission"
            self._train_batch(batch, step.is_last)
            if step.is_last:
                break
        self._interval.leases += (lease.id,)
        self._interval.num_rows += lease.num_rows
        # NaN where anything was not finite; a report that comes later says nothing of it.
        self._interval.sums[:1] += 0.0 * self.loss_guard.part().sums
        loss = self._interval.sums[0].item()  # once the device has done all
        self._interval.train_s += time.perf_counter() - started_s
        if self.spec.training.on_non_finite == "fail" and not math.isfinite(loss):
            raise NonFiniteLoss(
                f"the training loss or a gradient became {loss} by step "
                f"{self.state.step + self._num_steps_ahead}; {NON_FINITE_ADVICE}"
            )

    @property
    def _num_steps_ahead(self) -> int:
        """Steps that this group took and that are not committed."""
        return self._syncing.num_steps + self._interval.num_steps

    def _train_batch(self, batch: Batch, is_last: bool) -> None:
        interval = self._interval
        # What is accumulated is used up before the groups' dense parts are averaged.
        every = self.spec.training.accumulate_steps
        is_dense_step = is_last or (interval.num_steps + 1) % every == 0
        step = min(self.state.step + self._num_steps_ahead + 1, self.total_steps)
        self.run_step(batch, step, is_dense_step)
        interval.num_steps += 1
        interval.num_quarantined += batch.quarantined.total()
        if self.loss_weighting.is_on:
            interval.sums[1] += self.loss_weighting.total
        if self._is_syncing and interval.num_steps == self.spec.parallelism.sync.overlap_steps:
            self._land_sync()
        self.tracer.end_step(step)

    def _land_sync(self) -> None:
        """Apply the averages that were formed during the first steps of this lease."""
        before_s = self._sync_s
        with self._waiting():
            self.group_sync.land()
        self._interval.train_s -= self._sync_s - before_s

    def sync_groups(self) -> None:
        """Sync what was trained with the other groups. Collective over all ranks of all groups.

        Where the sync may overlap, its averages are applied while the next lease is trained, and
        it is ended after that.
        """
        if self._is_syncing:
            self._end_sync()
        if self.is_over:
            return
        self._syncing, self._interval = self._interval, self._new_interval()
        self._sync_s = 0.0
        with self._waiting():
            self._is_syncing = self.group_sync.begin(self._arrival)
        if not self._is_syncing:
            self._end_sync()

    def _end_sync(self) -> None:
        """Apply the sync that was begun, and do what is due after it."""
        with self._waiting():
            result, cost = self.group_sync.end(self._arrival)
        self.count_sync(cost)
        self._is_syncing, self._synced = False, None
        if result.committed and self._syncing.num_steps:
            step_s = self._syncing.train_s / self._syncing.num_steps
            self._synced = Observation(step_s, self._sync_s, cost.density)
        if result.standing != "current":
            self._interval = self._new_interval()
        elif result.committed:
            self._report, self._validation_error = Report(), None
        else:
            self._interval = self._interval.after(self._syncing)
        self._syncing, self._measured = self._new_interval(), None
        self._take(result)
        if self.group_sync.measured is not None:
            self._validated = self.rows_agreed, result.leader
        # The coordinator has skipped the lease of a loss that was not finite.
        self.loss_guard.begin_at(self.state.position)
        self._follow_up()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Training waits for a sync in the block."""
        started_s = time.perf_counter()
        with self.phases.during("sync"):
            yield
        self._sync_s += time.perf_counter() - started_s

    def _follow_up(self) -> None:
        """Announce, report, and lead where the copy holds what is committed and no more."""
        if self.is_over:
            return  # What was trained behind the end is in no checkpoint.
        self.announce()
        self.checkpoints.poll()
        if self.is_report_due():
            self.report()
        if self.is_leader:
            reduce_parts([self._orders_part()], self.groups.device)
            if not self._num_steps_ahead:
                self.lead()

    def _arrival(self) -> Arrive:
        interval = self._syncing
        loss, weight = interval.sums.tolist()
        is_finite = math.isfinite(loss)
        return Arrive(
            commit=self.ledger.commit,
            leases=interval.leases,
            num_rows=interval.num_rows,
            train_s=interval.train_s,
            weight=weight if self.loss_weighting.is_on else None,
            is_poisoned=not is_finite,
            may_overlap=is_finite and self._may_overlap,
            needs_exact=self._needs_exact(interval),
            measured=self._measured[0] if self._measured else None,
            synced=self._synced,
            num_quarantined=interval.num_quarantined,
            report=self._report if self.groups.rank == 0 else None,
        )

    @property
    def _may_overlap(self) -> bool:
        """Whether the next lease may be trained before the sync of the last one has ended."""
        is_able = self.standing == "current" and bool(self._leases)
        may_lead = self.is_leader and self._may_be_due_next
        is_held = may_lead or self._is_validation_due(self._num_rows_next)
        return is_able and bool(self.spec.parallelism.sync.overlap) and not is_held

    def _needs_exact(self, interval: Interval) -> bool:
        """Whether the copies differ, or may do so after `interval`, where something may be due.

        All groups ask, as any of them may lead by then.
        """
        may_differ = bool(interval.num_rows) or not self.group_sync.is_exact
        return may_differ and not self.group_sync.is_always_exact and self._may_be_due_next

    @property
    def _may_be_due_next(self) -> bool:
        """Whether there may be something to validate or save after the next sync."""
        return self._is_leading_due(self._num_rows_next)

    @property
    def _num_rows_next(self) -> int:
        """Rows that will be agreed on after the next sync, about."""
        steps = self.spec.parallelism.sync.intervals[-1]
        return self.rows_agreed + steps * self.shape.rows_per_step

    def _is_leading_due(self, num_rows: int) -> bool:
        """Whether there is something to validate or save once so many rows are agreed on."""
        return (
            self.is_asked_to_stop
            or self.is_finished
            or num_rows >= self.num_rows
            or self._is_validation_due(num_rows)
            or self._is_save_due(num_rows)
        )

    def _take(self, result: RoundResult) -> None:
        """Continue from the ledger of a round's result."""
        is_first = self._result is None
        self._result, self._before = result, self.state
        self.standing = result.standing
        if not self.is_leader:  # whose own may be newer
            self.final_metrics = self.final_metrics | result.ledger.metrics
        self.is_leader = result.leader == self.group.group and self.standing == "current"
        self._adopt(result.ledger)
        if is_first:  # what was trained before says nothing of the speed
            self._seen_rows, self._seen_at = result.ledger.rows_trained, time.perf_counter()
        self._hold(result.leases)
        self._find_urgency(result.num_saves)
        if self.spec.parallelism.moment_scale == "auto":
            num_live = sum(each.standing != "listening" for each in self.group_sync.members)
            self.optimizers.set_share(num_live / self.spec.parallelism.num_replicas)

    def _find_urgency(self, num_saves: int) -> None:
        """Save where the driver asks for it, the `num_saves`-th time, and where one copy is left of
        several: its loss would cost all since the last save.
        """
        copies_before, saves_before = self._num_copies, self._num_saves
        self._num_copies = sum(each.standing == "current" for each in self.group_sync.members)
        self._num_saves = max(num_saves, saves_before)
        if self._num_copies == 1 < copies_before or self._num_saves > saves_before:
            self._urgent_step = self.state.step

    def _hold(self, leases: Sequence[Lease]) -> None:
        """Prefetch `leases` and no others: a lease given back is another group's now.

        Collective over the group where ids of one given back are under way.
        """
        held = {lease.id for lease in leases}
        given_back = {lease.id for lease in self._leases} - held
        self._stream.take_back(lambda step: step.lease.id in given_back)
        self._loader.forget(given_back)
        self._leases = deque(lease for lease in self._leases if lease.id in held)
        known = {lease.id for lease in self._leases} | set(self._interval.leases)
        for lease in leases:
            if lease.id not in known:
                self._loader.submit(lease)
                self._leases.append(lease)

    def _adopt(self, ledger: Ledger) -> None:
        self.ledger = ledger
        position = position_of(ledger)  # without the rows of open epochs where another group leads
        rows_done = ledger.rows_done
        is_complete = rows_done >= self.num_rows
        step = self.total_steps if is_complete else rows_done // self.shape.rows_per_step
        self.state = TrainState.at(step, position, ledger)
        self.tuner.resume(ledger.tuning)
        self.quarantine.check(num_trained=ledger.quarantined[1])

    def announce(self) -> None:
        """Emit who trains when the members change; only the leader does."""
        members = self.group_sync.members
        incarnations = [(member.group, member.incarnation) for member in members]
        if not self.is_leader or incarnations == self._announced:
            return
        self._announced = incarnations
        size = self.groups.layout.world_size
        groups = [range(index * size, (index + 1) * size) for index in range(len(members))]
        layout = Layout(size * len(members), size, "inter_host")
        hosts = [host for member in members for host in member.hosts]
        self.emit(self._workers_started(layout, groups, hosts))

    @property
    def is_over(self) -> bool:
        """Whether the run has finished, or this group is to leave."""
        return self._result is not None and (self._result.has_finished or self._result.should_leave)

    def is_report_due(self) -> bool:
        """Whether metrics go out now: a multiple of `report_every_steps` was passed."""
        every = self.spec.training.report_every_steps
        return self.state.step // every > self._before.step // every

    def is_validation_step(self) -> bool:
        """Whether validation is due: as asked, else at each epoch's end, and at the end."""
        return self._is_validation_due(self.rows_agreed)

    @property
    def must_measure(self) -> bool:
        """Whether this group, as all, measures its share of the validation rows before it trains.

        It does so on what is committed, alike on all copies. Of what a leader was lost over all is
        measured again.
        """
        is_settled = self.standing == "current" and not (self._is_syncing or self._num_steps_ahead)
        if not (is_settled and self.group_sync.is_exact and self.is_validation_step()):
            return False
        return self._result is not None and self._validated != (
            self.rows_agreed,
            self._result.leader,
        )

    def measure_share(self) -> None:
        """Measure this group's share of the validation rows. Collective over the group.

        The next round adds up what all groups measured, where each row is in one of their shares;
        where a group was lost its result gives those that are left other shares.
        """
        assert self._result, "a group that is current has heard a result"
        (place, num_groups), size = self._result.share, self.groups.layout.world_size
        self.measure(place * size + self.groups.rank, num_groups * size)
        self._measured = self._result.share, self.validation_meter.part("validation")

    def _measured_sums(self) -> torch.Tensor:
        """This rank's sums over the group's share, and its bad rows; zeros where there are none."""
        part = self._measured[1] if self._measured else self.validation_meter.part("validation")
        num_bad = self.quarantine.num_held_out if self._measured else 0
        return torch.cat([part.sums, part.sums.new_tensor([num_bad])])

    def is_checkpoint_step(self) -> bool:
        """Whether the leader saves now, whatever validation says."""
        if self.is_finished:
            return not self._has_finished
        return self._is_save_due(self.rows_agreed)

    def _is_save_due(self, num_rows: int) -> bool:
        """Whether the leader saves once so many rows are agreed on.

        A save counts for it when it is durable, as what an earlier leader began may be lost; and
        while storage is busy or failed just now it trains on, since the others wait for it.
        """
        every = self.spec.checkpoint.every_steps
        if not self.is_leader:
            return self._is_due(every, num_rows)
        step = num_rows // self.shape.rows_per_step
        saved_step = max(self._led.saved_step, self.saves.saved_step)
        is_due = step // every > saved_step // every or self._urgent_step > saved_step
        return is_due and not self.saves.is_blocked

    def _is_validation_due(self, num_rows: int) -> bool:
        """Whether validation is due once so many rows are agreed on."""
        if self.validation_source is None:
            return False
        if self.is_finished or num_rows >= self.num_rows:
            return not self._has_finished
        every = self.spec.training.validate_every_steps
        if every:
            return self._is_due(every, num_rows)
        return num_rows // self.shape.num_rows > self._led.epoch

    def _is_due(self, every_steps: int, num_rows: int) -> bool:
        """Whether a multiple of `every_steps` is passed then that no leader has begun to handle."""
        step = num_rows // self.shape.rows_per_step
        return step // every_steps > self._led.step // every_steps

    @property
    def _led(self) -> LeaderProgress:
        return self._report.led or self.ledger.led

    def lead(self) -> None:
        """Do what one group does for all: report what all have measured, save, and end the run.

        Where copies may differ it waits for a sync after which they do not: the next, as all ask
        for that; and for the measurements. Collective over the group. The others train on, and wait
        for it at the next sync.
        """
        if not self.group_sync.is_exact and self._is_leading_due(self.rows_agreed):
            return
        if self.must_measure:
            return
        self._settle_best(None if self.saves.is_blocked else self.saves.saved_step)
        is_best = self._take_measured()
        if self.is_finished and not self._has_finished and self._reported_step < self.state.step:
            self.report()  # the run ends between two reports
        is_wanted = is_best and self.spec.checkpoint.keep_best
        if self.is_checkpoint_step() or (is_wanted and not self.saves.is_blocked):
            self.save_checkpoint(is_best)
            if self.is_finished:  # it was waited for: nothing is at risk
                reduce_parts([self._orders_part()], self.groups.device)
        elif is_wanted:
            self.note(
                "warning",
                f"the best model so far, at step {self.state.step}, is not saved: storage is busy "
                "with an earlier checkpoint, or has just failed",
            )
        self._has_finished |= self.is_finished
        self._save_for_a_pause()
        self._report = Report(
            best=self.state.best,
            plateau=self.state.plateau,
            metrics=self.final_metrics,
            led=LeaderProgress(
                step=self.state.step,
                epoch=self.state.position.epoch,
                saved_step=max(self._led.saved_step, self.saves.saved_step),
            ),
            validation_error=self._validation_error,
            has_finished=self._has_finished,
        )

    def _take_measured(self) -> bool:
        """Report what all groups have measured, if anything; True when it is the best so far."""
        sums = self.group_sync.measured
        if sums is None:
            return False
        part = replace(self.validation_meter.part("validation"), sums=sums[:-1])
        bad = Part(sums[-1:], self._check_measured)
        return self.take_validation(reduce_parts([part, bad], self.groups.device))

    def _check_measured(self, sums: torch.Tensor, _: torch.Tensor) -> dict[str, float]:
        self.quarantine.check(num_held_out=int(sums.item()))
        return {}

    def _tell_error(self, error: float) -> None:
        self._validation_error = error

    def _save_for_a_pause(self) -> None:
        """Save what is committed if the driver wants to end all groups, and say when it is safe.

        Collective over the group where it is asked to stop, as of the last report.
        """
        if not self.is_asked_to_stop or self._has_finished or self.saves.is_too_early:
            return
        self.await_save()
        if self.checkpoints.newest_commit != self.state.commit:
            self.save_checkpoint(is_best=False)
        self.await_save()
        if self.checkpoints.newest_commit == self.state.commit:
            worker.leave_mark(self.config, AttemptDir.stopping_path)

    def report(self) -> None:
        """Send metrics and progress. Collective over the group, which waits for them.

        Between leases it waits for the other groups anyway.
        """
        self._reported_step = self.state.step
        super().report()
        self.land_report()

    def publish(self, values: dict[str, float], time_s: float) -> None:
        """As every session; only the leader does."""
        if self.is_leader:
            super().publish(values, time_s)

    def close(self) -> None:
        super().close()
        self._loader.close()
        self.group_sync.close()

    def read_speed(self, sync_s: float) -> dict[str, float]:
        """As every session's, but rows count where they are committed, by whichever group."""
        values = super().read_speed(sync_s)
        now, rows = time.perf_counter(), self.ledger.rows_trained
        values["speed/rows_per_s"] = (rows - self._seen_rows) / max(now - self._seen_at, 1e-9)
        values["speed/steps_per_s"] = values["speed/rows_per_s"] / self.shape.rows_per_step
        self._seen_rows, self._seen_at = rows, now
        return values


def run_group(
    config: WorkerConfig, client: CoordinatorClient, host: str | None = None
) -> dict[str, float]:
    """Train as one rank inside its group's initialised default process group; the final metrics.

    Returns at the end of the run, or when the group was asked to leave. Raises `WorkerFailure` with
    a reason that the control plane knows.
    """
    size = config.spec.parallelism.group_size
    with named_failures(config.spec.model.module):
        prepare_process(config)
        groups = groups_of(config, Layout(size, size, "inter_host"), host)
        session = GroupSession(config, groups, client)
        try:
            session.begin()
            while not session.is_over:
                if session.must_measure:
                    session.measure_share()
                else:
                    session.train_lease()
                session.sync_groups()
        except Dismissed as message:
            logger.info("this spare ends: %s", message)
        finally:
            session.close()
    return session.final_metrics


def run_group_worker(config: WorkerConfig, group: GroupConfig, host: str) -> None:
    """`run_group` for a worker that Ray Train started."""
    identity = Identity(
        group=group.group,
        incarnation=group.incarnation,
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        host=host,
    )
    recovery = config.spec.recovery
    limit_nccl(recovery.exchange_timeout_s)
    timeout_s = recovery.heartbeat_timeout_s
    with connect(identity, lambda: locate(group.actor_name), timeout_s, config.token) as client:
        client.on_refusal = end_process
        run_group(config, client, host)


@contextmanager
def connect(
    identity: Identity, locate: Callable[[], str], heartbeat_timeout_s: float, token: bytes
) -> Iterator[CoordinatorClient]:
    """A client of the group's agent, which its first rank runs: that connects to the coordinator.

    `locate` gives the address of that. Collective over the group's default process group.
    """
    agent = None
    if identity.rank == 0:
        agent = GroupAgent(identity, locate, heartbeat_timeout_s, token)
    box = [agent.address if agent else ""]
    dist.broadcast_object_list(box, src=0)
    client = CoordinatorClient(identity, lambda: box[0], heartbeat_timeout_s, token, is_agent=True)
    try:
        yield client
    finally:
        client.close()
        if agent:
            agent.close()


def locate(actor_name: str) -> str:
    """Address (host:port) of the coordinator, also after it was restarted.

    Raises `ConnectionError` while there is none, and `Refused` where it was ended with its run.
    """
    import ray
    from ray.exceptions import RayError

    try:
        coordinator = ray.get_actor(actor_name, namespace=ACTOR_NAMESPACE)
        return str(ray.get(coordinator.get_address.remote(), timeout=LOCATE_S))
    except ValueError as error:  # an actor that Ray starts again keeps its name
        raise Refused(f"the driver has ended the run that this group is of: {error}") from error
    except RayError as error:
        raise ConnectionError(f"the coordinator's actor is away: {error}") from error
