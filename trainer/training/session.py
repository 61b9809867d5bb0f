"""One rank's training session: model, optimizers, data, sync, metrics and checkpoints of one run.

`trainer.training.worker` has the loop; each method here is one step of it and names its
collectives. What a step draws at random is seeded from (seed, rows done at the last sync of groups,
step, rank of the job): a resumed run draws what an uninterrupted one does, and no two ranks drop
the same units.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from trainer.checkpoint.files import RowOrder
from trainer.checkpoint.manager import CheckpointManager, SaveStanding, TrainState, await_end
from trainer.checkpoint.resume import restore
from trainer.checkpoint.save_load import of_first
from trainer.checkpoint.state_dict import METERS, pack, state_to_save
from trainer.coordination.client import HeartbeatReporter
from trainer.coordination.sync_tuner import Observation, SyncTuner
from trainer.data.batches import Batch, TrainBatches, ValidationBatches
from trainer.data.position import (
    BatchShape,
    SkippedRows,
    Step,
    remaining_steps,
    without,
)
from trainer.data.process import ReaderProcess
from trainer.data.reader import encodings_digest, open_source, order_digest
from trainer.errors import StorageError
from trainer.failures import DivergenceError, NonFiniteLoss
from trainer.layout.cost import Cluster, MemoryUse
from trainer.layout.layout import Layout, placement_warning
from trainer.layout.plans import predict
from trainer.layout.workload import GroupPlan
from trainer.parallel import sharding
from trainer.parallel.collectives import Part, PendingParts, in_background, reduce_parts
from trainer.parallel.divergence import DivergenceGuard
from trainer.parallel.mesh import LONG_TIMEOUT, MeshGroups
from trainer.parallel.model import share_buffers
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.planner import group_plan_of
from trainer.parallel.sharding import build_parallel_model
from trainer.parallel.sync import SyncReport, build_sync
from trainer.protocol import events, requests
from trainer.protocol.outbox import EventWriter
from trainer.protocol.run_dir import RunDir
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec.job import JobSpec
from trainer.storage import Location
from trainer.training.loss import LossWeighting, NonFiniteLossGuard
from trainer.training.metrics import (
    LookupCounter,
    QuarantineReporter,
    TaskMeter,
    after_validation,
    distance,
    is_better,
    is_over,
    memory_part,
    phase_part,
)
from trainer.training.pipeline import StepPipeline
from trainer.training.profiling import (
    ForwardPhases,
    PhaseTimes,
    Speedometer,
    Tracer,
    clock_of,
    local_s,
)

logger = logging.getLogger(__name__)
_LAST_REPORT_S = 5.0
_OF_ONE_OF_MANY = re.compile(r"(table|dynamic)/|(phase|memory)/.*/\d+$")


def step_seed(seed: int, rows_agreed: int, step: int, rank: int) -> int:
    """Seed of one step of one rank, from 0 to 2^64 - 1: unlike for any two of them.

    `rows_agreed` tells steps of one number apart where groups train between committed syncs; the
    number of the commit would not do, as a run that goes on begins with one that trains nothing.
    """
    sequence = np.random.SeedSequence((seed, rows_agreed, step, rank))
    return int(sequence.generate_state(1, np.uint64)[0])


def draws_at_random(spec: JobSpec, device: torch.device) -> bool:
    """Whether steps draw from torch's generators: in dropout, perhaps in a user's module, and on
    GPUs where FBGEMM rounds what it writes to a table in half precision up or down.
    """
    transformer = spec.model.transformer
    has_dropout = transformer is not None and transformer.dropout > 0
    is_half = any(table.data_type != "fp32" for table in spec.embedding_tables)
    return has_dropout or spec.model.module is not None or (is_half and device.type == "cuda")


class Session:
    """Everything that one rank trains with, built once; collective over all ranks."""

    def __init__(
        self, config: WorkerConfig, groups: MeshGroups, heartbeat: HeartbeatReporter | None = None
    ) -> None:
        spec = config.spec
        self.spec = spec
        self.config = config
        self.groups = groups
        self.heartbeat = heartbeat or HeartbeatReporter()
        self.state = TrainState()
        self.origin = f"seed-{spec.training.seed}"  # what the state came from
        self.has_skipped = False  # rows behind what was restored
        # First, as it takes seconds to start. On CPUs its work would only be in the way.
        self._reader_process = ReaderProcess(pin=True) if groups.device.type == "cuda" else None
        self._cluster = Cluster(**config.cluster) if config.cluster is not None else None
        self.model, self.table_plans = build_parallel_model(spec, groups, self._cluster)
        self.optimizers = Optimizers(self.model, spec)
        self._open_data()
        files = RunDir(config.run_dir).attempt(config.attempt_id)
        is_first = groups.rank == 0
        self._writer = EventWriter(files.stream_path(config.stream)) if is_first else None
        # What only one rank knows: its traces, its replica group's sync.
        self._rank_writer = self._writer or EventWriter(
            files.stream_path(config.rank_stream(groups.rank))
        )
        self._open_meters()
        # Every rank forms the group, in the same order.
        self._report_group = dist.new_group(backend="gloo", timeout=groups.timeout)
        # Metrics on their way: when, those of all ranks, and those that need no other rank.
        self._pending: tuple[float, PendingParts, dict[str, float]] | None = None
        self.final_metrics: dict[str, float] = {}
        self.rows_per_s = 0.0  # as last reported
        self.is_asked_to_stop = False  # as of the last report that has landed
        self.saves = SaveStanding()  # likewise
        self._validated_step = -1
        self._best_found = math.nan  # by the last validation that found a better model
        # (step, value) of the newest save of a best model, until its end is known.
        self._best_save: tuple[int, float] | None = None
        self.tracer = Tracer(files, self.rank, self.speed, self._rank_writer.write)
        self.checkpoints = CheckpointManager(config, groups, self.emit, self.row_order)
        self.loss_guard = NonFiniteLossGuard(
            spec, RunDir(config.run_dir), self.shape.num_rows, groups.device, self.emit
        )
        self.loss_guard.watch(self.model)
        self.sync = build_sync(
            self.model,
            spec,
            extra=lambda: self.optimizers.synced_whole(
                dense=spec.parallelism.dense_policy == "at_sync"
            ),
            warn=self._warn_of_sync,
        )
        self.tuner = SyncTuner(spec.parallelism.sync)
        self._tunes_sync = is_first and groups.layout.num_replicas > 1
        self._synced_step = -1
        self._divergence_guard: DivergenceGuard | None = None
        if spec.parallelism.divergence_check is not None:
            self._divergence_guard = DivergenceGuard(
                self.model,
                spec.parallelism.divergence_check,
                self.optimizers.combined,
                compare_state=spec.parallelism.sync.optimizer_state == "every",
            )
        self.loss_weighting = LossWeighting(spec, groups.global_group)
        # `torch.manual_seed` seeds the same, and takes 0.1 ms where CUDA is not in use.
        generators = (torch.default_generator, *torch.cuda.default_generators)
        self._generators = generators if draws_at_random(spec, groups.device) else ()

    def _warn_of_sync(self, message: str) -> None:
        logger.warning("%s", message)
        self._rank_writer.write(events.Note(time=time.time(), level="warning", message=message))

    def _open_data(self) -> None:
        """Raises `StorageError` where vocabularies or hashes are not what the driver found."""
        data, found = self.spec.data, self.config.data
        root, contents = Location.parse(data.path), found.contents if found else {}
        train, validation = data.split.train, data.split.validation
        self.train_source = source = open_source(
            self.spec, root / train, contents=contents.get(train)
        )
        self.validation_source = None
        if validation:
            self.validation_source = open_source(
                self.spec, root / validation, source, contents.get(validation)
            )
        self.shape = BatchShape(self.train_source.num_rows, self.world_size, data.batch_size)
        self.shape.check(self.train_source.folder)
        order, encodings = order_digest(self.train_source, self.spec), encodings_digest(self.spec)
        self.row_order = RowOrder(self.shape.num_rows, order, encodings)
        if found and encodings != found.encodings:
            raise StorageError(
                f"vocabularies or sizes of hashes in {data.path} are not what the driver found, "
                f"so ids would stand for other values on {self.groups.sites[self.rank].host}: is "
                "another folder mounted there, or was the data prepared anew? Put it back as it "
                "was; what is prepared later belongs in another folder"
            )
        self.total_steps = self.planned_steps()
        self.schedule_shift = 0  # of decay after a resize: see `factor`

    def planned_steps(self) -> int:
        """Steps of the whole run, those already done included."""
        training = self.spec.training
        left = remaining_steps(self.state.position, self.shape, training.epochs)
        planned = self.state.step + left
        return min(planned, training.max_steps or planned)

    def _open_meters(self) -> None:
        tasks, batch_size = self.spec.model.tasks, self.spec.data.batch_size
        device = self.groups.device
        self.train_meter = TaskMeter(tasks, batch_size, device)
        self.validation_meter = TaskMeter(tasks, batch_size, device)
        held_out = self.validation_source.num_rows if self.validation_source else 0
        self.quarantine = QuarantineReporter(
            self.spec, (self.shape.num_rows, held_out), self._rank_writer.write
        )
        dims = {table.name: table.embedding_dim for table in self.spec.embedding_tables}
        self.lookups = LookupCounter(self.model, dims)
        self.phases = PhaseTimes(clock_of(device))
        ForwardPhases(self.model, self.phases)
        self.pipeline = StepPipeline(self.model, self.phases)
        self.speed = Speedometer(self.shape.rows_per_step, self.phases)

    @property
    def world_size(self) -> int:
        """T, the number of workers that share the rows."""
        return self.groups.layout.world_size

    @property
    def rank(self) -> int:
        """Number of this rank among all workers of the job."""
        return self.groups.rank

    @property
    def rows_agreed(self) -> int:
        """Rows that the last sync between independent groups covers."""
        return 0

    @property
    def is_finished(self) -> bool:
        """Whether every planned step is done, or early stopping has ended the run."""
        stopped_early = is_over(self.state.plateau, self.spec.training.early_stopping)
        return self.state.step >= self.total_steps or stopped_early

    def emit(self, event: events.Event) -> None:
        """Write an event record; only rank 0 writes."""
        if self._writer:
            self._writer.write(event)

    def note(self, level: Literal["info", "warning", "error"], message: str) -> None:
        """Add a message to the job's timeline and to this rank's log."""
        logger.log(logging.getLevelNamesMapping()[level.upper()], "%s", message)
        self.emit(events.Note(time=time.time(), level=level, message=message))

    def announce(self) -> None:
        """Report how the workers are grouped and where they start."""
        mesh = self.groups.mesh
        if warning := placement_warning(mesh, self.groups.sites):
            self.note("warning", warning)
        hosts = [site.host for site in self.groups.sites]
        self.emit(self._workers_started(self.groups.layout, mesh.sharding_groups, hosts))

    def _workers_started(
        self, layout: Layout, sharding_groups: Sequence[Sequence[int]], hosts: list[str]
    ) -> events.WorkersStarted:
        """How workers are grouped and where they start: groups in ranks, `hosts` by rank."""
        return events.WorkersStarted(
            time=time.time(),
            run_index=self.config.run_index,
            **vars(layout),
            num_replicas=layout.num_replicas,
            backend=dist.get_backend(),
            sharding_groups=[list(group) for group in sharding_groups],
            replica_groups=[list(group) for group in zip(*sharding_groups, strict=True)],
            hosts=hosts,
            table_shards={plan.name: plan.sharding_type for plan in self.table_plans},
            tables=self.table_plans,
            total_steps=self.total_steps,
            resumed_step=self.state.step,
            prediction=self._prediction(layout),
        )

    @cached_property
    def _group_plan(self) -> GroupPlan:
        """Of thousands of tables it takes a second, and groups that come and go keep it."""
        size = self.groups.layout.shard_group_size
        return group_plan_of(self.model.group_plan, self.spec, size)

    def _prediction(self, layout: Layout) -> events.Prediction | None:
        """What the planner says of these workers with the tables as they lie."""
        cluster = self._cluster
        if cluster is None:
            return None
        found = predict(self.spec, layout, self._group_plan, cluster)
        return events.Prediction(
            cluster=cluster.fingerprint,
            samples_per_s=found.samples_per_s,
            lookup_imbalance=found.lookup_imbalance,
            step_s={name.removesuffix("_s"): value for name, value in vars(found.step).items()},
            memory_bytes={
                name.removesuffix("_bytes"): [round(getattr(rank, name)) for rank in found.ranks]
                for name in MemoryUse.__dataclass_fields__
            },
            sync_every_steps=found.sync_every_steps,
        )

    def batches(self) -> Iterator[tuple[Batch, Step]]:
        """(batch on the device, its place in the data), equally many on each rank."""
        with TrainBatches(
            self.train_source,
            self.spec,
            rank=self.groups.rank,
            world_size=self.groups.layout.world_size,
            position=self.state.position,
            process=self._reader_process,
            # Which is no hang for as long as training may stand still outside of steps.
            on_slow_read=partial(self.heartbeat.enter, "data_wait"),
        ) as loader:
            yield from self.pipeline.over(loader)

    def train_step(self, batch: Batch, place: Step) -> None:
        """Forward, backward (tables updated inside), dense step. Collective (TorchRec, DDP)."""
        step = self.state.step + 1
        self.quarantine.begin_epoch(place.epoch)
        self.run_step(batch, step, self._is_dense_step(step, place))
        self.state.rows_trained += place.num_rows
        self.state.step = step
        self.state.reached = place

    def _is_dense_step(self, step: int, place: Step) -> bool:
        """Whether accumulated gradients are used up at `step`: when due, and as an epoch ends."""
        every = self.spec.training.accumulate_steps
        return step % every == 0 or step == self.total_steps or place.is_last

    def run_step(self, batch: Batch, step: int, is_dense_step: bool) -> None:
        """What step number `step` does to the model. Collective."""
        self.heartbeat.begin_step()
        self.tracer.begin_step(step)
        self.lookups.sampling = not self.speed.num_steps  # since the last report
        self.optimizers.begin_step(step, self.total_steps, self.schedule_shift)
        if self._generators:
            seed = step_seed(self.spec.training.seed, self.rows_agreed, step, self.rank)
            for generator in self._generators:
                generator.manual_seed(seed)
        self.loss_weighting.begin(batch)
        with self.model.averaging(is_dense_step):
            with self.phases.begun("dense"):
                loss, outputs = self.pipeline.forward(batch)
            with self.phases.begun("backward"):
                self.loss_weighting.scaled(loss, self.optimizers.weigh).backward()
        with self.phases.begun("optimizer"):
            self.optimizers.step(is_dense_step)
        with self.phases.begun("sync"):
            self.sync.tick()  # nothing where M = 1, as in each `GroupSession`
        self.phases.enter("other")
        self.train_meter.update(batch, loss, outputs)
        self.loss_guard.add(loss.detach())
        self.quarantine.add(batch.quarantined)
        self.speed.step()
        self.land_report()
        self.heartbeat.end_step()

    def is_sync_step(self) -> bool:
        """Whether the replicas are averaged after the current step."""
        return self.state.step % self.tuner.every_steps == 0

    def synchronise(self) -> None:
        """Average the replicas, then compare them if that is due.

        Does nothing where that was done after this step already. Collective over the replica group;
        a comparison over all ranks, where it raises `DivergenceError` on each.
        """
        if self._synced_step == self.state.step:
            return
        self._synced_step = self.state.step
        with self.phases.during("sync"):
            self.count_sync(self.sync())
        self._move_interval()
        if self._divergence_guard and self._divergence_guard.is_due_after_sync():
            with self.speed.paused():
                if self.spec.parallelism.sync.overlap:
                    self.sync.flush()
                self._check_divergence()

    def _move_interval(self) -> None:
        """After a sync: take the interval that all ranks have agreed on."""
        if moved := self.tuner.take_effect(time.time(), self.state.step):
            self.emit(moved)

    def _check_divergence(self) -> None:
        """Compare what a sync has made equal, if the job asks for that. Collective over all ranks.

        Raises `DivergenceError` where replicas differ and the job is to fail then.
        """
        guard = self._divergence_guard
        found = guard.check() if guard else []
        if not guard or not found:
            return
        for each in found:
            step, action = self.state.step, guard.action
            self.emit(events.Divergence(time=time.time(), step=step, action=action, **vars(each)))
        if guard.action == "fail":
            raise DivergenceError(found)
        self.sync.renew()

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Leave the block out of speed, phases and traces, which are about training steps."""
        self.tracer.stop()
        with self.speed.paused():
            yield

    def close(self) -> None:
        """End what runs beside the training, and send the metrics that a failure left on their way.

        Those that the other ranks have not answered are lost, as they may never do.
        """
        if self._pending is not None:
            time_s, found, own = self._pending
            with suppress(Exception):
                self.publish(found.read(_LAST_REPORT_S) | own, time_s)
        if self._reader_process:
            self._reader_process.close()
        self.tracer.stop()
        self.checkpoints.close()
        self.sync.close()

    def is_report_step(self) -> bool:
        """Whether metrics go out after the current step."""
        step = self.state.step
        return step % self.spec.training.report_every_steps == 0 or step == self.total_steps

    def report(self) -> None:
        """Begin to collect metrics, for `land_report`: no rank waits here. Collective over all."""
        self.land_report()
        phases = self.phases.read(self.speed.num_steps)
        self.heartbeat.local_s = local_s(phases)
        parts = [
            self.train_meter.part("train"),
            *self.lookups.parts(),
            *self.quarantine.parts(),
            *sharding.report_parts(self.model),
            *self.optimizers.parts(),
            phase_part(phases, self.groups),
            memory_part(self.groups),
            self.loss_guard.part(),
            self._orders_part(),
        ]
        found = PendingParts(parts, self.groups.device, self._report_group)
        own = self.optimizers.rates() | self.read_speed(phases["sync"])
        if self.spec.parallelism.sync.is_tuned:
            own["sync/every_steps"] = self.tuner.every_steps
        self._pending = time.time(), found, own
        self.tracer.poll()

    def count_sync(self, found: SyncReport) -> None:
        self.speed.sync(found)
        self.lookups.add_sync(found.num_rows)

    def read_speed(self, sync_s: float) -> dict[str, float]:
        """Speeds since the last report, in which a step spent `sync_s` in syncs on average."""
        return self.speed.read(sync_s)

    def land_report(self) -> None:
        """Send the metrics of the last report, if they are not yet, and act on them.

        All ranks do so at the same place: as the next step ends, which does not count yet, or
        before whatever looks at the values (saves, validations, the end), so that they belong to
        the current step. Raises `NonFiniteLoss`: no later step recovers from a NaN.
        """
        report, self._pending = self._pending, None
        if report is None:
            return
        time_s, found, own = report
        values = found.read() | own
        self.publish(values, time_s)
        if self._tunes_sync:
            self.tuner.reported(Observation.of(values))
        self.loss_guard.check(self.state.position, self.state.step, self.groups.rank == 0)

    def _orders_part(self) -> Part:
        """What rank 0 says to all: whether to stop, the sync interval, how the saves stand."""
        orders = [0.0] * 5
        if self.groups.rank == 0:
            files = RunDir(self.config.run_dir).attempt(self.config.attempt_id)
            is_stop_wanted = requests.is_stop_wanted(files, self.config.run_index)
            standing = vars(self.checkpoints.standing).values()
            orders = [is_stop_wanted, self.tuner.wanted, *standing]
        return Part(torch.tensor(orders, dtype=torch.float64), self._take_orders)

    def _take_orders(self, sums: torch.Tensor, _: torch.Tensor) -> dict[str, float]:
        is_stop_wanted, every_steps, saved_step, has_failed, is_blocked = map(int, sums.tolist())
        self.is_asked_to_stop = bool(is_stop_wanted)
        self.tuner.agree(every_steps)
        self.saves = SaveStanding(saved_step, bool(has_failed), bool(is_blocked))
        return {}

    def publish(self, values: dict[str, float], time_s: float) -> None:
        """Send `values` as the metrics of the current step, and how far training has come."""
        step = self.state.step
        is_whole = step % self.spec.training.report_every_steps == 0 and self.config.group is None
        if self.is_finished and self.rows_per_s and not is_whole:
            # Fewer steps, and the wait for the last average, are not the speed of the job.
            values = {k: v for k, v in values.items() if not k.startswith(("speed/", "phase/"))}
        self.rows_per_s = values.get("speed/rows_per_s", self.rows_per_s)
        self.emit(events.Metrics(time=time_s, step=step, values=values))
        self.emit(self._progress())
        self.final_metrics |= {k: v for k, v in values.items() if k.startswith("train/")}
        if self.groups.rank == 0:
            logger.info("step %d/%d %s", step, self.total_steps, _format(values))

    def _progress(self) -> events.Progress:
        """How far training has come, and when it will be through at the speed last reported.

        A run that has ended early ends at its last step.
        """
        step = self.state.step
        total_steps = step if self.is_finished else self.total_steps
        rows_left = (total_steps - step) * self.shape.rows_per_step
        return events.Progress(
            time=time.time(),
            step=step,
            total_steps=total_steps,
            epoch=self.state.reached.epoch,
            rows=self.state.rows_trained,
            rows_per_s=self.rows_per_s,
            eta_s=rows_left / self.rows_per_s if self.rows_per_s else math.nan,
        )

    def is_validation_step(self) -> bool:
        """Whether a validation follows the current step: as asked, else at each epoch's end."""
        if self.validation_source is None:
            return False
        every = self.spec.training.validate_every_steps
        if self.state.step == self.total_steps:
            return True
        if every:
            return self.state.step % every == 0
        return isinstance(self.state.reached, Step) and self.state.reached.is_last

    @torch.no_grad()
    def validate(self) -> bool:
        """Measure all validation rows; True when the result is the best so far. Collective.

        Sharding groups measure apart: that one is through long before another is no hang.
        """
        self.measure(self.groups.rank, self.groups.layout.world_size)
        options = dist.BarrierOptions()
        options.timeout = LONG_TIMEOUT
        # In the group of the reports: no report is under way, but a save may be.
        with self.off_the_clock():
            end = in_background(self._report_group.barrier(options).wait, "validation")
            await_end(end, partial(self.heartbeat.enter, "validation"))
            end.result()
        return self.take_validation(self.validation_meter.compute("validation"))

    def take_validation(self, values: dict[str, float]) -> bool:
        """Report what a validation has found; True when it is the best so far. Collective."""
        metric = self.spec.model.watched_metric
        self.emit(events.Metrics(time=time.time(), step=self.state.step, values=values))
        logger.info("validation at step %d %s", self.state.step, _format(values))
        self.final_metrics |= values
        self._validated_step = self.state.step
        found = values.get(f"validation/{metric}", math.nan)
        # So that all ranks decide alike.
        value, saved_step = of_first(
            lambda: (found, self.checkpoints.settled_step), self.groups.global_group
        )
        self._update_early_stopping(metric, value)
        self._tell_error(distance(metric, value))
        self._settle_best(saved_step)
        best = self._best_save[1] if self._best_save else self.state.best
        if not is_better(metric, value, best):
            return False
        self._best_found = value
        return True

    def _settle_best(self, saved_step: int | None) -> None:
        """Note whether the newest best model is in a checkpoint: only then its value is the best.

        `saved_step` is that of the newest checkpoint, None while a save is under way.
        """
        if self._best_save is None or saved_step is None:
            return
        (step, value), self._best_save = self._best_save, None
        # Another leader may have found a better one meanwhile.
        if saved_step == step and is_better(self.spec.model.watched_metric, value, self.state.best):
            self.state.best = value

    def _tell_error(self, error: float) -> None:
        """A validation has found `error` in the watched metric, 0 being perfect."""
        if self._tunes_sync:
            self.tuner.validated(error)

    @torch.no_grad()
    def measure(self, rank: int, num_ranks: int) -> None:
        """Measure this rank's part of the validation rows, as `rank` of `num_ranks`.

        The replicas are averaged first, as at any sync, so that all ranks measure one model.
        Collective over all ranks.
        """
        assert self.validation_source is not None
        self.land_report()
        rows = ValidationBatches(
            self.validation_source, self.spec, rank, num_ranks, process=self._reader_process
        )
        self.quarantine.begin_validation()
        with self.off_the_clock(), rows as held_out:
            self.synchronise()
            self.sync.finish()
            share_buffers(self.model.module, self.groups.global_group)
            self.model.eval()
            for batch, _ in self.pipeline.over(held_out):
                self.heartbeat.enter("validation")
                self.quarantine.add_held_out(batch.quarantined)
                self.validation_meter.update(batch, *self.pipeline.forward(batch))
        self.model.train()

    def _update_early_stopping(self, metric: str, value: float) -> None:
        """Count a validation that found `value`; report it where it ends the run."""
        spec = self.spec.training.early_stopping
        if spec is None:
            return
        plateau = after_validation(self.state.plateau, metric, value, spec)
        self.state.plateau = plateau
        if is_over(plateau, spec) and self.state.step < self.total_steps:
            best = "any number" if plateau.best is None else f"{plateau.best:.5g}"
            by = f" by more than {spec.min_delta:g}" if spec.min_delta else ""
            self.note(
                "info",
                f"early stopping at step {self.state.step}: {plateau.num_validations} validations "
                f"in a row without a better validation/{metric} than {best}{by}",
            )
            self.emit(self._progress())

    def is_checkpoint_step(self) -> bool:
        """Whether the current step is followed by a checkpoint whatever validation says."""
        step = self.state.step
        is_owed = self.saves.is_due_again and self.is_sync_step() and self.may_save
        return step % self.spec.checkpoint.every_steps == 0 or self.is_finished or is_owed

    @property
    def may_save(self) -> bool:
        """Whether a checkpoint would hold all that was trained: none has accumulated gradients."""
        return not self.optimizers.is_accumulating

    def await_save(self) -> None:
        """Wait for the save under way, if any, as long as storage takes."""
        self.checkpoints.wait(partial(self.heartbeat.enter, "checkpoint"))

    def save_checkpoint(self, is_best: bool) -> None:
        """Save model and optimizers. Collective over all ranks.

        Replicas are averaged first, as an unsynced save would mix the groups; and compared, where
        the job asks for that, so that no checkpoint holds diverged ones. A failed save in the
        middle of a run is an error in the timeline, because training can go on and the next may
        succeed; at the end it raises `CheckpointError`, as the result itself would be lost.
        """
        started_s = time.perf_counter()
        self.heartbeat.enter("checkpoint")
        self.land_report()
        self.saves = replace(self.saves, is_blocked=True)
        with self.off_the_clock():
            reduce_parts([self.loss_guard.part()], self.groups.device)
            self.loss_guard.check(self.state.position, self.state.step, self.groups.rank == 0)
            if not (self.sync.is_exact and self._synced_step == self.state.step):
                self.sync.flush()
            share_buffers(self.model.module, self.groups.global_group)
            self._move_interval()
            self._check_divergence()
            if self.spec.parallelism.sync.is_tuned:
                self.state.tuning = self.tuner.state
            self.await_save()
            self._settle_best(self.checkpoints.settled_step)
            if is_best:
                self._best_save = self.state.step, self._best_found
            metrics = self.final_metrics
            if self._validated_step != self.state.step:  # by these checkpoints are chosen
                metrics = {k: v for k, v in metrics.items() if not k.startswith("validation/")}
            self.checkpoints.save(
                state_to_save(self.model, self.optimizers.combined)
                | {METERS: pack(self.train_meter.state())},
                replace(self.state, best=self._best_found) if is_best else self.state,
                metrics,
                is_best=is_best,
                is_last=self.is_finished,
                started_s=started_s,
                beat=partial(self.heartbeat.enter, "checkpoint"),
            )
            if self.is_finished:
                self._settle_best(self.checkpoints.settled_step)

    def restore(self) -> None:
        """Start from the newest checkpoint, else from another job's, else from the seed.

        Collective over all ranks. Rows that made the loss non-finite before count as done; raises
        `NonFiniteLoss` where these are all.
        """
        parts = self.spec, self.checkpoints, self.row_order, self.model, self.optimizers
        end = in_background(partial(restore, *parts), "restore", self.groups.device)
        began = time.monotonic()

        def beat() -> None:
            if time.monotonic() - began < LONG_TIMEOUT.total_seconds():
                self.heartbeat.advance()

        await_end(end, beat)
        found = end.result()
        if found is not None:
            self.train_meter.load_state(found.meters)
            self.sync.reset()
            self.state, self.origin = found.state, found.origin
            self.tuner.resume(self.state.tuning)
            self.final_metrics = found.metrics
            if found.level:
                self.note(found.level, found.message)
            else:
                logger.info("%s", found.message)
        path = RunDir(self.config.run_dir).skipped_rows_path
        skipped = of_first(lambda: SkippedRows.read(path), self.checkpoints.group)
        before, num_rows = self.state.position, self.shape.num_rows
        after = without(before, skipped)
        self.state.rows_skipped += after.rows_done(num_rows) - before.rows_done(num_rows)
        self.state.reached = after
        self.loss_guard.begin_at(after)
        self.has_skipped = after != before
        planned_anew, self.total_steps = self.total_steps, self.planned_steps()
        if self.spec.training.max_steps is None:
            self.schedule_shift = planned_anew - self.total_steps
        if self.has_skipped and self.is_finished and not self.state.rows_trained:
            raise NonFiniteLoss("every row was left out: the loss was not finite from the first on")


def _format(values: dict[str, float]) -> str:
    """For a log, which has no metrics of single tables and positions: there may be thousands."""
    return " ".join(
        f"{name}={value:.5g}"
        for name, value in sorted(values.items())
        if not _OF_ONE_OF_MANY.match(name)
    )
