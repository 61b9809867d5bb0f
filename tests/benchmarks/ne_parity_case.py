"""What one run of the NE parity benchmark trains: its settings, its rows and its starting weights.

Nothing here depends on how tables are sharded, so that every variant of a seed gets the same rows
in the same order and starts from the same weights, bit by bit. There are two models: DCN v2 on rows
shaped as Criteo's, whose peer's network is TorchRec's own, and our MovieLens transformer, which
reads what a user watched before next to the candidate, on rows of a teacher that does so, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM_DCN

from tests.benchmarks.workload import clicks_batch
from tests.harness.small_model import local_shards, plain_batch
from trainer.data.batches import Batch
from trainer.datasets.criteo.reader import NUM_CATEGORICAL, NUM_DENSE
from trainer.datasets.criteo.synthetic import ClickRows, Teacher, table_sizes
from trainer.models.networks import Network
from trainer.spec import validate_spec

TABLES = [f"table_{column}" for column in range(NUM_CATEGORICAL)]
FEATURES = [f"category_{column}" for column in range(NUM_CATEGORICAL)]
MODELS = ("dcn_v2", "movielens")
HISTORY_LENGTH, NUM_RATING_NUMBERS = 8, 2
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

    model: str = MODELS[0]
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
    def tables(self) -> dict[str, int]:
        """Rows of each table."""
        if self.model == "movielens":
            return dict.fromkeys(("users", "movies"), self.max_table_rows)
        return dict(zip(TABLES, table_sizes(self.max_table_rows), strict=True))

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
        if self.model not in MODELS:
            return f"the model must be one of {', '.join(MODELS)}"
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
    kind = SequenceTeacher if settings.model == "movielens" else Teacher
    sizes = list(settings.tables.values())
    teacher = kind(sizes, settings.zipf_exponent, settings.teacher_seed)
    num_held_out = settings.num_held_out_rows // settings.world_size
    return RankRows(
        teacher.draw(settings.batch_size * settings.num_steps, [_TRAIN, seed, rank]),
        teacher.draw(num_held_out, [_HELD_OUT, 0, rank]),
    )


def batches(rows: ClickRows, batch_size: int) -> Iterator[Batch]:
    """`rows` in batches of `batch_size`; the last one may be smaller."""
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        if part.dense.shape[1] == NUM_DENSE:
            yield clicks_batch(FEATURES, part.dense, part.ids.T, part.label)
        else:
            yield _sequence_batch(part)


class SequenceTeacher:
    """Decides whether a user likes a movie: by both of them, and by how much the movie is like
    those of the user's history that are most like it."""

    def __init__(self, sizes: Sequence[int], zipf_exponent: float, seed: int) -> None:
        rng = np.random.default_rng([seed, 2])
        num_users, num_movies = sizes
        self._user_effects, self._movie_effects = (rng.normal(0, 0.3, size) for size in sizes)
        self._factors = rng.normal(0, 1.0, (num_movies, 4))
        self._slopes = rng.normal(0, 0.3, NUM_RATING_NUMBERS)
        weights = [np.arange(1, size + 1.0) ** -zipf_exponent for size in (num_users, num_movies)]
        self._shares = [each / each.sum() for each in weights]

    def draw(self, num_rows: int, seed: Sequence[int]) -> ClickRows:
        """`num_rows` independent rows, always the same ones for the same `seed`; ids are the user,
        the movie, and the history."""
        rng = np.random.default_rng(seed)
        users, movies = (len(each) for each in self._shares)
        ids = np.empty((num_rows, 2 + HISTORY_LENGTH), dtype=np.int64)
        ids[:, 0] = rng.choice(users, num_rows, p=self._shares[0])
        ids[:, 1:] = rng.choice(movies, (num_rows, 1 + HISTORY_LENGTH), p=self._shares[1])
        dense = rng.normal(0, 1, (num_rows, NUM_RATING_NUMBERS)).astype(np.float32)
        probability = self.probability(dense, ids)
        label = (rng.random(num_rows) < probability).astype(np.float32)
        return ClickRows(dense, ids, label, probability)

    def probability(self, dense: NDArray[np.float32], ids: NDArray[Any]) -> NDArray[np.float32]:
        """Probability [N] of a like."""
        users, movies, history = ids[:, 0], ids[:, 1], ids[:, 2:]
        alike = np.einsum("nhk,nk->nh", self._factors[history], self._factors[movies]) / 2
        attention = np.exp(alike - alike.max(axis=1, keepdims=True))
        attention /= attention.sum(axis=1, keepdims=True)
        logit = dense @ self._slopes + self._user_effects[users] + self._movie_effects[movies]
        logit += (attention * alike).sum(axis=1) - 1.5
        return (1 / (1 + np.exp(-logit))).astype(np.float32)


def _sequence_batch(rows: ClickRows) -> Batch:
    users, movies, history = rows.ids[:, 0], rows.ids[:, 1], rows.ids[:, 2:]
    num_rows = len(rows)
    return plain_batch(
        dense=torch.from_numpy(rows.dense),
        sparse=KeyedJaggedTensor(
            keys=["user_id"],
            values=torch.from_numpy(users.copy()),
            lengths=torch.ones(num_rows, dtype=torch.int32),
        ),
        label=torch.from_numpy(rows.label)[:, None],
        sequences=KeyedJaggedTensor(
            keys=["movie_id", "history"],
            values=torch.from_numpy(np.concatenate([movies, history.ravel()])),
            lengths=torch.tensor([1, HISTORY_LENGTH]).int().repeat_interleave(num_rows),
        ),
    )


def model_sections(
    settings: Settings, sharding_of: Callable[[int], str] = lambda num_rows: "table_wise"
) -> dict[str, Any]:
    """The sections of a spec about the model; `sharding_of` says how a table of N rows lies."""
    is_sequence = settings.model == "movielens"
    num_numbers = NUM_RATING_NUMBERS if is_sequence else NUM_DENSE
    looked_up = dict(zip(FEATURES, TABLES, strict=True))
    if is_sequence:
        looked_up = {"user_id": "users", "movie_id": "movies"}
    features: list[dict[str, Any]] = [
        *({"name": f"count_{i}", "type": "dense"} for i in range(num_numbers)),
        *({"name": name, "type": "id", "table": table} for name, table in looked_up.items()),
    ]
    model: dict[str, Any] = {
        "arch": settings.model,
        "dense_arch": {"layer_sizes": settings.dense_layers},
        "over_arch": {"layer_sizes": settings.over_layers},
        "interaction_arch": {
            "num_layers": settings.num_cross_layers,
            "low_rank_dim": settings.cross_rank,
        },
        "tasks": [{"name": "click", "loss": "bce", "metrics": ["ne"]}],
    }
    if is_sequence:
        history = {"type": "sequence", "max_length": HISTORY_LENGTH, "table": "movies"}
        features.append({"name": "history"} | history)
        # Dropout would be drawn anew in each variant.
        sizes = {"num_layers": 1, "num_heads": 2, "feedforward_dim": 32, "dropout": 0.0}
        model["transformer"] = {"sequence": "history", "candidate": "movie_id"} | sizes
    tables = [
        {
            "name": table,
            "num_embeddings": size,
            "embedding_dim": settings.embedding_dim,
            "constraints": {"sharding_types": [sharding_of(size)]},
        }
        for table, size in settings.tables.items()
    ]
    return {"features": features, "embedding_tables": tables, "model": model}


def stock_network(settings: Settings) -> DLRM_DCN | Network:
    """TorchRec's DLRM with cross layers (DCN v2), or our transformer, which it has none of; tables
    on the meta device."""
    if settings.model == "movielens":
        alone = {"name": "ne", "parallelism": {"workers": 1, "shard_group_size": 1}}
        data = {"path": "none", "label": {"column": "click"}}
        spec = validate_spec({**alone, "data": data, **model_sections(settings)})
        return Network(spec, torch.device("cpu"))
    tables = [
        EmbeddingBagConfig(
            name=table,
            embedding_dim=settings.embedding_dim,
            num_embeddings=size,
            feature_names=[feature],
        )
        for table, feature, size in zip(TABLES, FEATURES, settings.tables.values(), strict=True)
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
    dense = {n: p for n, p in reference.named_parameters() if not _is_table(n)}
    for name, parameter in model.named_parameters():
        if not _is_table(name):
            parameter.copy_(dense.pop(name.rpartition("network.")[2]))
    assert not dense, f"the model lacks {sorted(dense)}"
    for key, value in model.state_dict().items():
        if _is_table(key):
            table = _initial_table(key.split(".")[-2], settings, seed)
            for shard, (row, column) in local_shards(value):
                rows, columns = shard.shape
                shard.copy_(table[row : row + rows, column : column + columns])


def _is_table(name: str) -> bool:
    return ".embedding_bags." in name or ".embeddings." in name


def _initial_table(name: str, settings: Settings, seed: int) -> torch.Tensor:
    """Uniform in +-1 / sqrt(rows), which is TorchRec's own default."""
    index, size = list(settings.tables).index(name), settings.tables[name]
    generator = torch.Generator().manual_seed(1000 * seed + index)
    uniform = torch.rand(size, settings.embedding_dim, generator=generator)
    return (2 * uniform - 1) / size**0.5
