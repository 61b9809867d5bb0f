"""Normalized entropy of training whose groups come and go, against the same without faults.

python -m tests.benchmarks.ne_resize --json FILE [--seeds N] [--steps N]

A DCN v2 learns from a known teacher (that of `ne_parity`) in four groups that are failure domains:
L = 1, dense part averaged at syncs. Ten times the number of groups that train changes, from 4 to 1
and back. All runs of a seed train every row once, in the same order, from the same weights: what a
group that is away does not train, the others do.

Groups are simulated: each is a rank of one gloo world, and one that is away trains nothing and
takes part in syncs with weight 0, as a listener does; how groups are lost and found is not what is
measured. Model, optimizers, their rates and the weighted means are those of jobs. With fewer groups
each takes more steps for the same rows: without `Optimizers.set_share` weights move further and
moments grow faster than with all, which the second gap shows.

A *gap* is relative: |NE - NE without faults| / NE without faults, from means over seeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from tests.benchmarks.ne_parity import final_ne, measure, ratio_of_gap, runs_of, table_of
from tests.benchmarks.ne_parity_case import Settings, batches, rows_of_rank, set_start
from tests.benchmarks.ne_parity_ranks import (
    Curve,
    SeedResult,
    Variant,
    held_out_ne,
    meter_of,
    silence_libraries,
    spec_of,
    teacher_ne_of,
)
from tests.benchmarks.report import measure_and_tell, parser_of
from trainer.datasets.criteo.synthetic import ClickRows, Teacher
from trainer.layout.layout import Layout
from trainer.parallel.collectives import Block, ReplicaCollectives, WorldReplicaGroup
from trainer.parallel.mesh import build_groups
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.sharding import build_parallel_model
from trainer.parallel.sync import blocks_of, moments_of, weight_of, whole
from trainer.parallel.touched_rows import RowNumbers
from trainer.spec.job import JobSpec
from trainer.training.metrics import TaskMeter

NAME = "ne_resize"
NUM_GROUPS = 4
WALK = (4, 3, 2, 1, 2, 3, 4, 2, 1, 3, 4)
"""Groups that train, by phase of the run."""
FAULT_FREE, RESIZED, UNSCALED = "fault-free", "resized", "resized, not rescaled"
GOAL = 5e-4
_SEED_TIMEOUT_S = 3600.0
_ROWS = 3  # apart from the rows that ne_parity trains and holds out


def measure_seed(settings: Settings, seed: int) -> SeedResult:
    """NE of each variant after each phase. Runs on every rank of a gloo world."""
    silence_libraries()
    held_out, meter = rows_of_rank(settings, seed, dist.get_rank()).held_out, meter_of(settings)
    curves = {
        variant: _train(settings, variant, seed, held_out, meter)
        for variant in (FAULT_FREE, RESIZED, UNSCALED)
    }
    return SeedResult(curves, teacher_ne_of(meter, held_out))


def _train(
    settings: Settings, variant: str, seed: int, held_out: ClickRows, meter: TaskMeter
) -> Curve:
    group = SimulatedGroup(settings, seed)
    teacher = Teacher(list(settings.tables.values()), settings.zipf_exponent, settings.teacher_seed)
    curve = Curve()
    for turn in turns_of(settings, [NUM_GROUPS] * len(WALK) if variant == FAULT_FREE else WALK):
        if variant != UNSCALED:
            group.optimizers.set_share(turn.num_live / NUM_GROUPS)
        for number in turn.of_group(dist.get_rank()):
            group.train(teacher.draw(settings.batch_size, [_ROWS, seed, number]), number)
        group.sync([float(len(turn.of_group(each))) for each in range(NUM_GROUPS)])
        if turn.ends_phase:
            curve.rows.append(turn.stop * settings.batch_size)
            curve.ne.append(held_out_ne(group.model, meter, held_out))
    return curve


@dataclass(frozen=True)
class Turn:
    """Batches [start, stop) between two syncs, which the first `num_live` groups train."""

    num_live: int
    start: int
    stop: int
    ends_phase: bool

    def of_group(self, group: int) -> range:
        """The batches of `group`: a lease, or none."""
        size = -(-(self.stop - self.start) // self.num_live)
        first = min(self.start + group * size, self.stop)
        return range(first, min(first + size, self.stop))


def turns_of(settings: Settings, walk: Sequence[int]) -> Iterator[Turn]:
    """All batches of the run, in phases of equally many rows."""
    num_batches = settings.num_steps * NUM_GROUPS
    for phase, num_live in enumerate(walk):
        start, end = (num_batches * (phase + i) // len(walk) for i in (0, 1))
        while start < end:
            stop = min(start + num_live * settings.sync_every, end)
            yield Turn(num_live, start, stop, ends_phase=stop == end)
            start = stop


class SimulatedGroup:
    """One group, L = 1, of a job in the failure domain `replica_group`. Collective over all."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self._settings = settings
        spec = _spec(settings)
        device = torch.device("cpu")
        groups = build_groups(Layout(NUM_GROUPS, 1, "inter_host"), device, _SEED_TIMEOUT_S)
        self.model, _ = build_parallel_model(spec, groups)
        set_start(self.model, settings, seed)
        self.optimizers = Optimizers(self.model, spec)
        self._numbers = RowNumbers(self.model.table_shards(), device)
        self._group = WorldReplicaGroup(groups.replica_group)

    def train(self, rows: ClickRows, number: int) -> None:
        """One step on batch `number` of the run, at the rate of its nominal step."""
        (batch,) = batches(rows, len(rows))
        self.optimizers.begin_step(number // NUM_GROUPS + 1, self._settings.num_steps)
        loss, _ = self.model(batch)
        loss.backward()
        self.optimizers.step()

    def sync(self, weights: list[float]) -> None:
        """Average all that the groups hold, by `weights`."""
        replicas = ReplicaCollectives([self._group], torch.device("cpu"), weights)
        tensors, states = self.optimizers.synced_whole(dense=True)
        of_rows = [
            block
            for stores_of in (weight_of, moments_of)
            for block in blocks_of(self._numbers, None, stores_of, Block)
        ]
        replicas.average_in_place([*of_rows, *whole(tensors), *whole(states)])


def _spec(settings: Settings) -> JobSpec:
    spec = spec_of(settings, Variant(FAULT_FREE, 1, float(NUM_GROUPS)))
    parallelism = spec.parallelism.model_copy(update={"dense": "at_sync"})
    return spec.model_copy(update={"parallelism": parallelism})


def document_of(
    settings: Settings, results: list[SeedResult], machine: dict[str, Any]
) -> dict[str, Any]:
    ne = final_ne(results)
    peer = ne[FAULT_FREE]
    name = "the same training without faults"
    return {
        "benchmark": NAME,
        "machine": machine,
        "settings": {**asdict(settings), "walk": WALK, "num_seeds": len(results)},
        "ratios": {
            "ne_gap": ratio_of_gap(ne[RESIZED], peer, GOAL, "lower", name),
            "ne_gap_without_rescale": ratio_of_gap(ne[UNSCALED], peer, GOAL, "higher", name),
        },
        "runs": runs_of(results),
    }


def run(options: argparse.Namespace, machine: dict[str, Any]) -> tuple[dict[str, Any], list[Table]]:
    settings = Settings(num_steps=options.steps, num_held_out_rows=65_536, sync_every=4)
    results = measure(options.seeds, measure_seed, settings)
    title = f"{NAME}: held-out NE; groups that train by phase: {', '.join(map(str, WALK))}"
    return document_of(settings, results, machine), [table_of(title, results, FAULT_FREE)]


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each variant (default 2)")
    parser.add_argument("--steps", type=int, default=600, help="nominal steps (default 600)")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.steps < len(WALK):
        parser.error(f"--seeds must be at least 1 and --steps at least {len(WALK)}")
    return measure_and_tell(options.json, lambda machine: run(options, machine))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
