"""What one run of the NE parity benchmark trains: its settings, its rows and its starting weights.

Nothing here depends on how tables are sharded, so that every variant of a seed gets the same rows
in the same order and starts from the same weights, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM_DCN

from tests.benchmarks.workload import clicks_batch
from tests.harness.small_model import local_shards
from trainer.data.batches import Batch
from trainer.datasets.criteo.reader import NUM_CATEGORICAL, NUM_DENSE
from trainer.datasets.criteo.synthetic import ClickRows, Teacher, table_sizes

TABLES = [f"table_{column}" for column in range(NUM_CATEGORICAL)]
FEATURES = [f"category_{column}" for column in range(NUM_CATEGORICAL)]
_TRAIN, _HELD_OUT = 1, 2


@dataclass(frozen=True)
class Settings:
    """Everything that all variants share. Batch sizes and rows are counted over all ranks.

    Learning rates and eps are where 1D reaches its lowest NE on the generated rows, and the
    network starts out predicting `start_click_rate`, as calibrated models do.
    """

    over_layers: ClassVar = (64, 32, 1)
    num_cross_layers: ClassVar = 2
    cross_rank: ClassVar = 16

    world_size: int = 4
    global_batch_size: int = 1024
    num_steps: int = 600
    num_held_out_rows: int = 131_072
    num_evaluations: int = 10
    max_table_rows: int = 2000
    embedding_dim: int = 8
    zipf_exponent: float = 1.05
    sparse_lr: float = 0.08
    sparse_eps: float = 5e-4
    dense_lr: float = 2e-3
    start_click_rate: float = 0.25
    sync_every: int = 1
    sync_overlap: int = 0
    teacher_seed: int = 0

    @property
    def batch_size(self) -> int:
        """Rows per rank and step."""
        return self.global_batch_size // self.world_size

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Rows of each table."""
        return table_sizes(self.max_table_rows)

    @property
    def dense_layers(self) -> list[int]:
        """Layer sizes of the dense arch."""
        return [32, self.embedding_dim]

    @property
    def evaluation_steps(self) -> set[int]:
        """Steps (from 1) after which the held-out rows are measured; the last one is among them."""
        count = self.num_evaluations
        return {self.num_steps * i // count for i in range(1, count + 1)}

    def problem(self) -> str | None:
        """What is wrong with the numbers, or None."""
        if self.global_batch_size % self.world_size or self.num_held_out_rows % self.world_size:
            return "the global batch and the held-out rows must be multiples of the world size"
        if not 1 <= self.num_evaluations <= self.num_steps:
            return "there must be at least one evaluation and one step for each"
        if self.sync_overlap > self.sync_every:
            return "a sync overlaps with at most the steps until the next one"
        if not 0 < self.start_click_rate < 1:
            return "the click rate to start from must be between 0 and 1"
        return None


@dataclass(frozen=True)
class RankRows:
    """What one rank trains on, in order, and its share of the held-out rows."""

    train: ClickRows
    held_out: ClickRows


def rows_of_rank(settings: Settings, seed: int, rank: int) -> RankRows:
    """The rows of `rank` for `seed`; held-out rows are the same for all seeds."""
    teacher = Teacher(settings.table_sizes, settings.zipf_exponent, settings.teacher_seed)
    num_held_out = settings.num_held_out_rows // settings.world_size
    return RankRows(
        teacher.draw(settings.batch_size * settings.num_steps, [_TRAIN, seed, rank]),
        teacher.draw(num_held_out, [_HELD_OUT, 0, rank]),
    )


def batches(rows: ClickRows, batch_size: int) -> Iterator[Batch]:
    """`rows` in batches of `batch_size`; the last one may be smaller."""
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        yield clicks_batch(FEATURES, part.dense, part.ids.T, part.label)


def stock_network(settings: Settings) -> DLRM_DCN:
    """TorchRec's DLRM with cross layers (DCN v2), tables on the meta device."""
    tables = [
        EmbeddingBagConfig(
            name=table,
            embedding_dim=settings.embedding_dim,
            num_embeddings=size,
            feature_names=[feature],
        )
        for table, feature, size in zip(TABLES, FEATURES, settings.table_sizes, strict=True)
    ]
    return DLRM_DCN(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=NUM_DENSE,
        dense_arch_layer_sizes=settings.dense_layers,
        over_arch_layer_sizes=list(settings.over_layers),
        dcn_num_layers=settings.num_cross_layers,
        dcn_low_rank_dim=settings.cross_rank,
    )


@torch.no_grad()
def set_start(model: nn.Module, settings: Settings, seed: int) -> None:
    """Give a sharded `model` the starting weights of `seed`, whatever its sharding."""
    torch.manual_seed(seed)
    reference = stock_network(settings)
    rate = settings.start_click_rate
    reference.over_arch.model[-1].bias.fill_(math.log(rate / (1 - rate)))
    dense = {n: p for n, p in reference.named_parameters() if ".embedding_bags." not in n}
    for name, parameter in model.named_parameters():
        if ".embedding_bags." not in name:
            parameter.copy_(dense.pop(name.rpartition("network.")[2]))
    assert not dense, f"the model lacks {sorted(dense)}"
    for key, value in model.state_dict().items():
        if ".embedding_bags." in key:
            table = _initial_table(key.split(".")[-2], settings, seed)
            for shard, (row, column) in local_shards(value):
                rows, columns = shard.shape
                shard.copy_(table[row : row + rows, column : column + columns])


def _initial_table(name: str, settings: Settings, seed: int) -> torch.Tensor:
    """Uniform in +-1 / sqrt(rows), which is TorchRec's own default."""
    index = TABLES.index(name)
    size = settings.table_sizes[index]
    generator = torch.Generator().manual_seed(1000 * seed + index)
    uniform = torch.rand(size, settings.embedding_dim, generator=generator)
    return (2 * uniform - 1) / size**0.5
