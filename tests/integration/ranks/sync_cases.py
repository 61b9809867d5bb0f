"""What the sync tests run on every rank: random training runs, and what a sync must do to them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from tests.harness.small_model import (
    build_trained,
    dlrm_spec,
    pairwise_mean,
    plain_batch,
    random_ids,
    rank_device,
    take_step,
    with_sync,
)
from tests.harness.wait import scaled
from trainer.checkpoint import save_load
from trainer.checkpoint.state_dict import load_state, state_to_save
from trainer.data.batches import Batch
from trainer.layout.layout import Layout
from trainer.parallel.mesh import build_groups
from trainer.parallel.sync import Sync, build_sync
from trainer.spec.job import JobSpec
from trainer.spec.training import SparseOptimizerName

NUM_STEPS = 100  # what schedules would reckon with


@dataclass(frozen=True)
class Table:
    """A table and the features that look it up: pooled ones, or sequences."""

    num_rows: int
    sharding: str = "row_wise"
    num_features: int = 1
    data_type: str = "fp32"
    is_sequence: bool = False


@dataclass(frozen=True)
class SyncCase:
    """A model laid over T ranks, and random batches for it."""

    world_size: int
    shard_group_size: int
    tables: tuple[Table, ...] = (Table(40), Table(9, num_features=2))
    placement: str = "intra_host"
    ranks_per_host: int = 8
    embedding_dim: int = 8
    optimizer: str = "row_wise_adagrad"
    lr: float = 0.1
    weight_decay: float = 0.0
    batch_size: int = 4
    max_bag: int = 3
    share_idle: float = 0.0  # how often a sharding group looks nothing up at all
    steps_between_syncs: int = 1
    num_syncs: int = 2
    seed: int = 0
    sync: dict[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> dict[str, int]:
        """Table number of each feature."""
        return self.pooled | self.sequences

    @property
    def pooled(self) -> dict[str, int]:
        """Table number of each pooled feature."""
        return self._features(is_sequence=False)

    @property
    def sequences(self) -> dict[str, int]:
        """Table number of each sequence feature."""
        return self._features(is_sequence=True)

    def _features(self, is_sequence: bool) -> dict[str, int]:
        return {
            f"feature_{number}_{index}": number
            for number, table in enumerate(self.tables)
            for index in range(table.num_features)
            if table.is_sequence == is_sequence
        }


def random_case(seed: int, world_size: int) -> SyncCase:
    """A case drawn from `seed`, with at least two copies of the tables."""
    draw = random.Random(seed)
    sizes = [size for size in (1, 2) if world_size % size == 0 and world_size // size > 1]
    size = draw.choice(sizes)
    others = [draw.random() < 0.3 for _ in range(draw.randint(0, 3))]
    tables = tuple(_random_table(draw, is_sequence) for is_sequence in (False, *others))
    return SyncCase(
        world_size=world_size,
        shard_group_size=size,
        tables=tables,
        placement=draw.choice(["intra_host", "inter_host"]),
        embedding_dim=draw.choice([4, 8, 16]),
        optimizer=draw.choice(get_args(SparseOptimizerName)),
        batch_size=draw.randint(1, 6),
        max_bag=draw.choice([1, 4]),
        share_idle=draw.choice([0.0, 0.5]),
        steps_between_syncs=draw.randint(1, 3),
        num_syncs=draw.randint(1, 3),
        seed=seed,
        sync={"full_above": draw.choice([0.5, 1.0])},
    )


def _random_table(draw: random.Random, is_sequence: bool) -> Table:
    sharding = ["row_wise", "table_wise", "column_wise"]
    if not is_sequence:
        sharding += ["table_row_wise", "grid_shard", "data_parallel"]
    return Table(
        num_rows=draw.choice([2, 7, 33, 200]),
        sharding=draw.choice(sharding),
        num_features=draw.choice([1, 1, 2]),
        data_type=draw.choice(["fp32", "fp32", "fp16"]),
        is_sequence=is_sequence,
    )


def spec_of(case: SyncCase) -> JobSpec:
    tables = [
        {
            "name": f"table_{number}",
            "num_embeddings": table.num_rows,
            "embedding_dim": case.embedding_dim,
            "data_type": table.data_type,
            "constraints": {"sharding_types": [table.sharding]}
            | ({"min_partition": 4} if table.sharding in ("column_wise", "grid_shard") else {}),
        }
        for number, table in enumerate(case.tables)
    ]
    features = [
        {
            "name": name,
            "type": "sequence" if case.tables[number].is_sequence else "id_list",
            "table": f"table_{number}",
        }
        for name, number in case.features.items()
    ]
    sparse = {"name": case.optimizer, "lr": case.lr, "eps": 0.01, "weight_decay": case.weight_decay}
    parallelism = {
        "workers": case.world_size,
        "shard_group_size": case.shard_group_size,
        "placement": case.placement,
        "planner": {"bandwidths": "default"},
        "dense": "every_step",
        "sync": case.sync,
    }
    return dlrm_spec(
        tables,
        features,
        {"sparse": sparse, "dense": {"name": "sgd", "lr": 0.01}},
        parallelism,
        batch_size=case.batch_size,
        over_arch=(1,),
        loss="bce",  # its gradients are bounded, so that SGD on the smallest tables stays finite
    )


def make_batch(case: SyncCase, step: int, rank: int, copy: int) -> Batch:
    """Random rows of one rank, with empty bags and duplicates; all empty in an idle group."""
    idle = random.Random(f"{case.seed}/{step}/{copy}").random() < case.share_idle
    generator = torch.Generator().manual_seed(case.seed * 7919 + step * 101 + rank)
    count = case.batch_size
    max_bag = 0 if idle else case.max_bag
    return plain_batch(
        dense=torch.randn(count, 1, generator=generator),
        sparse=_ids(case, case.pooled, max_bag, generator),
        label=torch.rand(count, 1, generator=generator),
        sequences=_ids(case, case.sequences, max_bag, generator) if case.sequences else None,
    )


def _ids(
    case: SyncCase, features: dict[str, int], max_bag: int, generator: torch.Generator
) -> KeyedJaggedTensor:
    num_rows = {name: case.tables[number].num_rows for name, number in features.items()}
    return random_ids(num_rows, case.batch_size, generator, max_bag=max_bag)


class Training:
    """A case being trained on this rank."""

    def __init__(self, case: SyncCase) -> None:
        self.case = case
        self.spec = spec_of(case)
        layout = Layout(case.world_size, case.shard_group_size, case.placement)
        os.environ["LOCAL_RANK"] = str(dist.get_rank())
        host = f"host-{dist.get_rank() // case.ranks_per_host}"
        self.groups = build_groups(layout, rank_device(), timeout_s=scaled(30), host=host)
        self.model, self.optimizers = build_trained(self.spec, self.groups)
        self.copy = next(
            copy
            for copy, ranks in enumerate(self.groups.mesh.sharding_groups)
            if self.groups.rank in ranks
        )
        self.warnings: list[str] = []
        self.step = 0

    def build_sync(self, **changes: Any) -> Sync:
        """The case's sync, with `changes` to its spec."""
        spec = with_sync(self.spec, **changes)
        return build_sync(self.model, spec, extra=self.extra, warn=self.warnings.append)

    def train(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.step += 1
            batch = make_batch(self.case, self.step, self.groups.rank, self.copy)
            take_step(self.model, self.optimizers, batch, min(self.step, NUM_STEPS), NUM_STEPS)

    def weights(self) -> list[torch.Tensor]:
        """Everything that a sync averages but optimizer state, as it lies in memory."""
        whole, _ = self.extra()
        return [*(shard.weight for shard in self.model.table_shards()), *whole]

    def moments(self) -> list[torch.Tensor]:
        """The optimizer state that a sync averages."""
        return [*self.shard_moments(), *self.whole_states()]

    def shard_moments(self) -> list[torch.Tensor]:
        """The optimizer state of the shards."""
        shards = self.model.table_shards()
        return [state for shard in shards for state in shard.states.values()]

    def whole_states(self) -> list[torch.Tensor]:
        """The optimizer state of what is averaged whole."""
        return self.extra()[1]

    def extra(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is averaged whole: the data-parallel tables."""
        return self.optimizers.synced_whole(dense=False)

    def copies_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """[M, ...]: the tensor of every rank of the replica group."""
        gathered = [torch.empty_like(tensor) for _ in range(self.groups.layout.num_replicas)]
        dist.all_gather(gathered, tensor.contiguous(), group=self.groups.replica_group)
        return torch.stack(gathered)

    def mean_of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The mean of the copies of each tensor, pair by pair, in the tensor's dtype."""
        means = []
        for tensor in tensors:
            copies = self.copies_of(tensor)
            flat = pairwise_mean(copies.view(copies.shape[0], -1))
            means.append(flat.view_as(tensor).to(tensor.dtype))
        return means

    def assert_copies_equal(self, tensors: list[torch.Tensor]) -> None:
        """All copies of the tensors are bitwise equal."""
        for tensor in tensors:
            copies = self.copies_of(tensor)
            assert torch.equal(copies, copies[:1].expand_as(copies))


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def assert_bitwise(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def check_cases(cases: list[SyncCase]) -> list[float]:
    """Check every sync of every case against full syncs of the same rows; the densities seen."""
    return [density for case in cases for density in _check_case(case)]


def _check_case(case: SyncCase) -> Iterator[float]:
    training = Training(case)
    touched = training.build_sync(mode="touched_rows")
    full = training.build_sync(mode="full")
    for _ in range(case.num_syncs):
        training.train(case.steps_between_syncs)
        yield _check_sync(training, touched, full)
    touched.close()


def _check_sync(training: Training, touched: Sync, full: Sync) -> float:
    tensors = [*training.weights(), *training.moments()]
    before = clones(tensors)
    report = touched()
    after_touched = clones(tensors)
    restore(tensors, before)
    full()
    after_full = clones(tensors)
    _check_against_stock(training, before, after_full)
    if training.groups.layout.num_replicas in (2, 4):
        assert_bitwise(after_touched, after_full)
    else:
        for ours, theirs in zip(after_touched, after_full, strict=True):
            assert_within_one_rounding(ours, theirs)
    restore(tensors, after_touched)
    training.assert_copies_equal(tensors)
    return report.density


def check_resharded(before: SyncCase, after: SyncCase, folder: Path) -> tuple[float, float]:
    """Train `before`, save, load as `after`: densities of a sync at once and of one after steps.

    The second is checked against a full sync.
    """
    training = Training(before)
    sync = training.build_sync()
    training.train(3)
    sync.flush()
    state = state_to_save(training.model, training.optimizers.combined)
    save_load.save(folder, state, save_load.SharePlanner(training.groups))
    sync.close()
    resumed = Training(after)
    touched, full = resumed.build_sync(full_above=1.0), resumed.build_sync(mode="full")
    resumed.train()  # what was touched before the load is forgotten
    load_state(folder, resumed.model, resumed.optimizers.combined)
    touched.reset()
    resumed.assert_copies_equal([*resumed.weights(), *resumed.moments()])
    clean = touched().density
    resumed.train(2)
    density = _check_sync(resumed, touched, full)
    touched.close()
    return clean, density


def restore(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def assert_within_one_rounding(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """No element differs by more than the distance to its neighbour in its dtype."""
    spacing = theirs.abs() * torch.finfo(theirs.dtype).eps
    tiny = torch.finfo(theirs.dtype).smallest_normal
    assert bool(((ours - theirs).abs() <= spacing + tiny).all())


def _check_against_stock(
    training: Training, before: list[torch.Tensor], after: list[torch.Tensor]
) -> None:
    """TorchRec's own sync, an all-reduce AVG, has the same result: to the bit for two copies."""
    for start, ours in zip(before, after, strict=True):
        if start.dtype != torch.float32:
            continue  # the stock one sums in half precision
        stock = start.clone()
        dist.all_reduce(stock, dist.ReduceOp.AVG, group=training.groups.replica_group)
        if training.groups.layout.num_replicas == 2:
            assert torch.equal(ours, stock)
        else:
            torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-7)


def untouched_rows(case: SyncCase) -> dict[str, float]:
    """Shares of the rows that no copy trained which a touched-rows and a full sync changed."""
    training = Training(case)
    touched = training.build_sync(mode="touched_rows", full_above=1.0)
    full = training.build_sync(mode="full")
    weights = [shard.weight for shard in training.model.table_shards()]
    start = clones(weights)
    training.train()
    trained = [
        (training.copies_of(weight) != before).any(dim=(0, 2))
        for weight, before in zip(weights, start, strict=True)
    ]
    shares = {}
    for name, sync in (("touched_rows", touched), ("full", full)):
        before = clones(weights)
        sync()
        changed = [
            (weight != start).any(dim=1) & ~rows
            for weight, start, rows in zip(weights, before, trained, strict=True)
        ]
        shares[name] = torch.cat(changed).float().mean().item()
    return shares
