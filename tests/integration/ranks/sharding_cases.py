"""Runs with every sharding type, on a model with pooled, weighted and sequence features."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.types import DataType

from tests.harness.small_model import dlrm_spec, form_groups, random_ids
from tests.harness.wait import scaled
from trainer.layout.cost import cpu_cluster
from trainer.layout.layout import Layout, MeshLayout, WorkerSite
from trainer.parallel import planner
from trainer.parallel.mesh import build_groups
from trainer.parallel.model import TwoDParallel
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.planner import (
    PlanError,
    make_plan,
    measure_bandwidths,
    plan_group,
    table_plans,
)
from trainer.parallel.sharding import sharders
from trainer.parallel.sync import build_sync
from trainer.protocol import events
from trainer.spec.job import JobSpec

DIM = 16
POOLED_TABLES = {"users": 37, "movies": 53, "genres": 11}
SEQUENCE_TABLES = {"goods": 41, "pages": 19}
TABLES = POOLED_TABLES | SEQUENCE_TABLES
# Two features share a table, pooled and in sequence.
POOLED = {"user": "users", "movie": "movies", "liked": "movies", "genre": "genres"}
SEQUENCES = {"bought": "goods", "seen": "goods", "visited": "pages"}
LR, EPS, DENSE_LR = 0.1, 0.01, 0.05
BATCH_SIZE = 6


@dataclass(frozen=True)
class ShardingCase:
    """One training run; `hosts[r]` is where rank r runs.

    With `num_worlds` this is one of so many groups, each a world of its own, on hosts of two.
    """

    world_size: int
    shard_group_size: int
    pooled: str = "row_wise"
    sequence: str = "row_wise"
    placement: str = "intra_host"
    hosts: str = "abab"
    optimizer: str = "row_wise_adagrad"
    weighted: bool = False
    data_type: str = "fp32"
    all_to_all: str = "fp32"
    min_partition: int = 8
    memory_bytes: int | None = None
    sync_every: int = 2
    num_steps: int = 4
    optimizer_state: str = "every"
    moment_scale: float | str = "auto"
    dense: str = "every_step"
    dense_optimizer: str = "sgd"
    num_worlds: int = 1

    @property
    def sites(self) -> list[WorkerSite]:
        return [
            WorkerSite(r, host, self.hosts[:r].count(host)) for r, host in enumerate(self.hosts)
        ]

    @property
    def mesh(self) -> MeshLayout:
        layout = Layout(self.world_size, self.shard_group_size, self.placement)
        return MeshLayout.build(layout, self.sites)

    @property
    def spec(self) -> JobSpec:
        optimizer = {
            "sparse": {"name": self.optimizer, "lr": LR, "eps": EPS},
            "dense": {"name": self.dense_optimizer, "lr": DENSE_LR},
        }
        sync = {"every_steps": self.sync_every, "optimizer_state": self.optimizer_state}
        parallelism = {
            "workers": self.world_size * self.num_worlds,
            "shard_group_size": self.shard_group_size,
            "placement": self.placement,
            "planner": {"bandwidths": "default"},
            "moment_scale": self.moment_scale,
            "dense": self.dense,
            "sync": sync if self.world_size * self.num_worlds > self.shard_group_size else None,
            "all_to_all": {"forward": self.all_to_all, "backward": self.all_to_all},
        }
        features = [self._pooled_feature(name) for name in POOLED]
        features += [{"name": n, "type": "sequence", "table": t} for n, t in SEQUENCES.items()]
        return dlrm_spec(
            [self._table(name) for name in TABLES],
            features,
            optimizer,
            parallelism,
            batch_size=BATCH_SIZE,
            over_arch=(1,),
            resources={"memory_bytes_per_worker": self.memory_bytes},
        )

    def _pooled_feature(self, name: str) -> dict[str, Any]:
        weights = {"weights_column": f"{name}_weights"} if self.weighted else {}
        return {"name": name, "type": "id_list", "table": POOLED[name], **weights}

    def _table(self, name: str) -> dict[str, Any]:
        sharding_type = self.pooled if name in POOLED_TABLES else self.sequence
        return {
            "name": name,
            "num_embeddings": TABLES[name],
            "embedding_dim": DIM,
            "data_type": self.data_type,
            "constraints": {
                "sharding_types": [sharding_type],
                "min_partition": self.min_partition,
            },
        }


class Head(nn.Module):
    """What follows the lookups, in the sharded model and in the reference alike."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        width = DIM * (len(POOLED) + len(SEQUENCES))
        self.weight = nn.Parameter(torch.randn(width, generator=generator) / width**0.5)

    def forward(
        self, pooled: list[torch.Tensor], sequences: list[JaggedTensor], label: torch.Tensor
    ) -> torch.Tensor:
        """Mean squared error; an id of a sequence counts less the further on it stands."""
        reduced = [_reduce(sequence, len(label)) for sequence in sequences]
        outputs = torch.cat([*pooled, *reduced], dim=1) @ self.weight
        return nn.functional.mse_loss(outputs, label)


def _reduce(sequence: JaggedTensor, num_rows: int) -> torch.Tensor:
    lengths = sequence.lengths().long()
    rows = torch.repeat_interleave(torch.arange(num_rows, device=lengths.device), lengths)
    places = torch.arange(len(rows), device=rows.device) - sequence.offsets().long()[rows]
    shares = sequence.values() / (1 + places)[:, None]
    return shares.new_zeros(num_rows, DIM).index_add(0, rows, shares)


def _configs(
    kind: Callable[..., Any], tables: dict[str, int], features: dict[str, str], data_type: str
) -> list[Any]:
    return [
        kind(
            num_embeddings=rows,
            embedding_dim=DIM,
            name=name,
            data_type=DataType[data_type.upper()],
            feature_names=[feature for feature, table in features.items() if table == name],
        )
        for name, rows in tables.items()
    ]


class Lookups(nn.Module):
    """An EmbeddingBagCollection and an EmbeddingCollection side by side."""

    def __init__(self, case: ShardingCase) -> None:
        super().__init__()
        meta = torch.device("meta")
        self.pooled = EmbeddingBagCollection(
            _configs(EmbeddingBagConfig, POOLED_TABLES, POOLED, case.data_type),
            is_weighted=case.weighted,
            device=meta,
        )
        self.sequences = EmbeddingCollection(
            _configs(EmbeddingConfig, SEQUENCE_TABLES, SEQUENCES, case.data_type),
            device=meta,
        )
        self.head = Head()

    def forward(
        self, pooled: KeyedJaggedTensor, sequences: KeyedJaggedTensor, label: torch.Tensor
    ) -> torch.Tensor:
        by_feature, jagged = self.pooled(pooled), self.sequences(sequences)
        return self.head([by_feature[f] for f in POOLED], [jagged[f] for f in SEQUENCES], label)


def make_rows(
    case: ShardingCase, step: int, rank: int
) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor, torch.Tensor]:
    """(pooled, sequences, label) of one rank at one step: with duplicates and empty rows."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    pooled, sequences = (
        random_ids(
            {feature: TABLES[table] for feature, table in features.items()},
            BATCH_SIZE,
            generator,
            is_weighted=case.weighted and features is POOLED,
        )
        for features in (POOLED, SEQUENCES)
    )
    return pooled, sequences, torch.randn(BATCH_SIZE, generator=generator)


def initial_table(name: str) -> torch.Tensor:
    """Starting weights of a table [rows, DIM], the same in every layout."""
    generator = torch.Generator().manual_seed(TABLES[name])
    return torch.randn(TABLES[name], DIM, generator=generator)


def train_sharded(cases: list[ShardingCase]) -> list[dict[str, Any]]:
    """Train each case on this rank; its own copy of the tables and moments, and the plans."""
    return [_train(case) for case in cases]


def refusals(cases: list[ShardingCase]) -> list[str]:
    """What each case is refused with on this rank."""
    messages = []
    for case in cases:
        try:
            _build(case)
        except PlanError as error:
            messages.append(str(error))
    return messages


def plan_slowly(case: ShardingCase) -> int:
    """How many tables the plan has of a planner that takes longer than a collective may."""

    def slow(*args: Any) -> ShardingPlan:
        time.sleep(scaled(3))
        return plan_group(*args)

    groups = build_groups(case.mesh.layout, torch.device("cpu"), scaled(30))
    _set_pg_timeout(timedelta(seconds=scaled(1)), groups.global_group)
    with patch.object(planner, "plan_group", slow):
        plan = make_plan(Lookups(case), case.spec, groups, sharders(case.spec))
    return len(table_plans(plan, case.spec))


def start(case: ShardingCase) -> dict[str, Any]:
    """What this rank holds and measures before the first step, and how long it waits for others."""
    torch.manual_seed(dist.get_rank())  # ranks must start equal even when their generators differ
    model, _ = _build(case)
    groups = model.groups
    return {
        "tables": _gather(model, "weight"),
        "bandwidths": measure_bandwidths(groups),
        "timeouts_s": [
            group._get_backend(groups.device).options._timeout.total_seconds()
            for group in (groups.sharding_group, groups.replica_group, groups.global_group)
        ],
    }


def _build(case: ShardingCase) -> tuple[TwoDParallel, ShardingPlan]:
    spec, groups = case.spec, form_groups(case)
    table_sharders = sharders(spec)
    module = Lookups(case)
    cluster = cpu_cluster(2, 2**30) if case.num_worlds > 1 else None
    plan = make_plan(module, spec, groups, table_sharders, cluster)
    return TwoDParallel(module, groups, plan, table_sharders, spec), plan


def _train(case: ShardingCase) -> dict[str, Any]:
    spec = case.spec
    model, plan = _build(case)
    _set_tables(model)
    optimizers = Optimizers(model, spec)
    with_dense = case.dense == "at_sync"
    sync = build_sync(model, spec, extra=lambda: optimizers.synced_whole(dense=with_dense))
    for step in range(1, case.num_steps + 1):
        optimizers.begin_step(step, case.num_steps)
        model(*make_rows(case, step, model.groups.rank)).backward()
        optimizers.step()
        if step % spec.parallelism.sync.every_steps == 0:
            sync()
    sync.close()
    return {
        "plans": table_plans(plan, spec),
        "tables": _gather(model, "weight"),
        "moments": _gather(model, "moment"),
        "head": model.module.head.weight.detach().clone(),
        "sharding_ranks": model.groups.sharding_ranks,
    }


@torch.no_grad()
def _set_tables(model: TwoDParallel) -> None:
    for name, table in model.data_parallel_tables().items():
        table.copy_(initial_table(name))
    for shard in model.table_shards():
        rows, columns = shard.weight.shape
        whole = initial_table(shard.table)[shard.row_offset :, shard.column_offset :]
        shard.weight.copy_(whole[:rows, :columns])


def _gather(model: TwoDParallel, what: Literal["weight", "moment"]) -> dict[str, torch.Tensor]:
    """Whole tables of this rank's copy, or their moments, put together over its sharding group.

    A row-wise moment stands in every column of its shard; what no shard covers is NaN.
    """
    mine = [
        (shard.table, shard.row_offset, shard.column_offset, shard.weight.shape[1], tensor.clone())
        for shard in model.table_shards()
        for tensor in ([shard.weight] if what == "weight" else shard.states.values())
    ]
    shards: list[Any] = [None] * model.groups.layout.shard_group_size
    dist.all_gather_object(shards, mine, group=model.groups.sharding_group)
    tables = {name: torch.full((rows, DIM), torch.nan) for name, rows in TABLES.items()}
    for name, row, column, width, tensor in (item for items in shards for item in items):
        block = tensor if tensor.dim() == 2 else tensor[:, None]
        tables[name][row : row + len(block), column : column + width] = block
    if what == "weight":
        for name, table in model.data_parallel_tables().items():
            tables[name] = table.detach().clone()
    return tables


class Reference:
    """Trains `case` in one process as M whole copies of plain tensors, by the formulas.

    From the `plans` it takes where column shards begin and end, and nothing else: a row-wise
    moment is a mean over the columns of its shard.
    """

    def __init__(self, case: ShardingCase, plans: list[events.TablePlan]) -> None:
        self.case = case
        self.groups = case.mesh.sharding_groups
        self.scale = len(self.groups) if case.moment_scale == "auto" else float(case.moment_scale)
        self.columns = {
            plan.name: sorted({(s.column_offset, s.num_columns) for s in plan.shards})
            or [(0, plan.embedding_dim)]
            for plan in plans
        }
        self.heads = [Head() for _ in self.groups]
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[case.dense_optimizer]
        self.optimizers = [kind(head.parameters(), lr=DENSE_LR) for head in self.heads]
        self.tables = [{name: initial_table(name) for name in TABLES} for _ in self.groups]
        self.moments = [
            {name: torch.zeros_like(table) for name, table in copy.items()} for copy in self.tables
        ]

    def run(self) -> None:
        """Train all copies, averaging them at each sync as the case says."""
        for step in range(1, self.case.num_steps + 1):
            self._step(step)
            if step % self.case.sync_every == 0:
                _average(copy.values() for copy in self.tables)
                if self.case.optimizer_state == "every":
                    _average(copy.values() for copy in self.moments)
                _average(self._dense_tensors(copy) for copy in range(len(self.groups)))

    def _step(self, step: int) -> None:
        to_heads = [self._train_copy(copy, step) for copy in range(len(self.groups))]
        if self.case.dense == "every_step":
            to_heads = [torch.stack(to_heads).mean(dim=0)] * len(to_heads)
        for head, optimizer, gradient in zip(self.heads, self.optimizers, to_heads, strict=True):
            head.weight.grad = gradient
            optimizer.step()

    def _train_copy(self, copy: int, step: int) -> torch.Tensor:
        """Update the tables of a copy; the gradient of its head, which is a mean over its ranks."""
        ranks, head = self.groups[copy], self.heads[copy]
        leaves = {n: t.clone().requires_grad_() for n, t in self.tables[copy].items()}
        losses = [self._loss(head, leaves, *make_rows(self.case, step, rank)) for rank in ranks]
        *grads, to_head = torch.autograd.grad(
            torch.stack(losses).mean(), [*leaves.values(), head.weight]
        )
        for name, grad in zip(leaves, grads, strict=True):
            self._update(copy, name, grad)
        return to_head

    def _dense_tensors(self, copy: int) -> Iterator[torch.Tensor]:
        """The head of a copy and its optimizer state."""
        parameter = self.heads[copy].weight
        yield parameter
        yield from (
            value for value in self.optimizers[copy].state[parameter].values() if value.dim()
        )

    def _loss(
        self,
        head: Head,
        tables: dict[str, torch.Tensor],
        pooled: KeyedJaggedTensor,
        sequences: KeyedJaggedTensor,
        label: torch.Tensor,
    ) -> torch.Tensor:
        bags = [
            nn.functional.embedding_bag(
                pooled[feature].values(),
                tables[table],
                pooled[feature].offsets().long()[:-1],
                mode="sum",
                per_sample_weights=pooled[feature].weights() if self.case.weighted else None,
            )
            for feature, table in POOLED.items()
        ]
        vectors = [
            JaggedTensor(tables[table][sequences[f].values()], lengths=sequences[f].lengths())
            for f, table in SEQUENCES.items()
        ]
        return head(bags, vectors, label)

    @torch.no_grad()
    def _update(self, copy: int, name: str, grad: torch.Tensor) -> None:
        """Algorithm 1 of the paper: w -= lr / (sqrt(v / c) + eps) * g."""
        table, moment = self.tables[copy][name], self.moments[copy][name]
        if self.case.optimizer == "sgd":
            table -= LR * grad
            return
        if self.case.optimizer == "adagrad":
            moment += grad.square()
        else:
            for start, width in self.columns[name]:
                shard = slice(start, start + width)
                moment[:, shard] += grad[:, shard].square().mean(dim=1, keepdim=True)
        table -= LR / ((moment / self.scale).sqrt() + EPS) * grad


@torch.no_grad()
def _average(copies: Iterable[Iterable[torch.Tensor]]) -> None:
    """Let each copy of a tensor hold the mean of all of them."""
    for tensors in zip(*copies, strict=True):
        mean = torch.stack(tensors).mean(dim=0)
        for tensor in tensors:
            tensor.copy_(mean)
