"""What the 2D benchmark trains: Criteo-shaped batches and a small DLRM, the same for both sides.

26 tables of 64 columns, one id a row and table drawn by Zipf's law, and 13 dense columns. The
dense layers are small because eight ranks share the cores of one machine, while the link between
the hosts is not shared: large ones would measure the cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import KeyedJaggedTensor

from trainer.data.batches import Batch
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

NUM_TABLES = 26
NUM_DENSE = 13
EMBEDDING_DIM = 64
TABLE_ROWS = 50_000
BATCH_SIZE = 2048  # rows per rank
ZIPF_EXPONENT = 1.05
DATA_SEED = 2026
NEVER = 10**6  # steps
TABLES = tuple(f"table_{index:02d}" for index in range(NUM_TABLES))
FEATURES = tuple(f"feature_{index:02d}" for index in range(NUM_TABLES))
DENSE_LAYERS = (64, EMBEDDING_DIM)
OVER_LAYERS = (64, 1)


@dataclass(frozen=True)
class TwoDLayout:
    """How our side lays the model over the ranks, and how it syncs the copies.

    `wire` is the precision in which embeddings, their gradients and the syncs travel. Mode
    "none" never syncs: no way to train, but the most that any sync could reach.
    """

    num_replicas: int
    placement: str
    mode: str
    every_steps: int
    overlap: bool = False
    dense: str = "every_step"
    wire: str = "fp32"

    @property
    def label(self) -> str:
        """Name of its row in the table."""
        sync = "no sync" if self.mode == "none" else f"{self.mode} N={self.every_steps}"
        parts = [f"2D M={self.num_replicas} {self.placement}, {sync}"]
        if self.overlap:
            parts.append("overlap")
        if self.dense != "every_step":
            parts.append(f"dense {self.dense}")
        if self.wire != "fp32":
            parts.append(f"{self.wire} on the wire")
        return ", ".join(parts)

    @property
    def is_comparable(self) -> bool:
        """Whether it counts for the ratio: 1D rounds nothing and averages gradients always."""
        return self.mode != "none" and self.dense == "every_step" and self.wire == "fp32"

    @property
    def sync(self) -> dict[str, Any]:
        """The job's `parallelism.sync`."""
        common = {
            "overlap": self.overlap,
            "dtype": self.wire,
            "full_above": 1.0,  # a row named touched_rows shall not turn into full
        }
        if self.mode == "none":
            return common | {"mode": "touched_rows", "every_steps": NEVER}
        return common | {"mode": self.mode, "every_steps": self.every_steps}


def spec_of(world_size: int, layout: TwoDLayout) -> JobSpec:
    """The job that trains `layout` on `world_size` ranks."""
    return validate_spec(
        {
            "name": "two-d",
            "data": {"path": "unused", "label": {"column": "click"}, "batch_size": BATCH_SIZE},
            "features": _features(),
            "embedding_tables": [
                {
                    "name": table,
                    "num_embeddings": TABLE_ROWS,
                    "embedding_dim": EMBEDDING_DIM,
                    "constraints": {"sharding_types": ["table_wise"]},
                }
                for table in TABLES
            ],
            "model": {
                "arch": "dlrm",
                "dense_arch": {"layer_sizes": list(DENSE_LAYERS)},
                "over_arch": {"layer_sizes": list(OVER_LAYERS)},
                "tasks": [{"name": "click", "loss": "bce"}],
            },
            "parallelism": {
                "workers": world_size,
                "shard_group_size": world_size // layout.num_replicas,
                "placement": layout.placement,
                "sync": layout.sync,
                "all_to_all": {"forward": layout.wire, "backward": layout.wire},
                "dense": layout.dense,
            },
        }
    )


def _features() -> list[dict[str, Any]]:
    dense = [{"name": f"dense_{index:02d}", "type": "dense"} for index in range(NUM_DENSE)]
    sparse = [
        {"name": feature, "type": "id", "table": table}
        for feature, table in zip(FEATURES, TABLES, strict=True)
    ]
    return [*dense, *sparse]


def make_batches(rank: int, num_batches: int) -> list[Batch]:
    """The batches of one rank, whatever the layout: `BATCH_SIZE` rows each."""
    draw = np.random.default_rng([DATA_SEED, rank])
    # [tables, batches, rows]; a KeyedJaggedTensor holds the ids of a batch table by table.
    ids = np.stack(
        [zipf_ids(table, draw, (num_batches, BATCH_SIZE)) for table in range(NUM_TABLES)]
    )
    return [_batch(torch.from_numpy(ids[:, index]), draw) for index in range(num_batches)]


def zipf_ids(table: int, draw: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """int64 ids of `table`: the k-th most frequent has a probability like k ** -ZIPF_EXPONENT.

    Which ids are the frequent ones is random, as after hashing, and the same on every rank.
    """
    weights = np.arange(1, TABLE_ROWS + 1, dtype=np.float64) ** -ZIPF_EXPONENT
    bounds = np.cumsum(weights / weights.sum())
    places = np.searchsorted(bounds, draw.random(shape)).clip(max=TABLE_ROWS - 1)
    return np.random.default_rng([DATA_SEED, 1, table]).permutation(TABLE_ROWS)[places]


def _batch(ids: torch.Tensor, draw: np.random.Generator) -> Batch:
    """One batch; `ids` is int64 [tables, B]."""
    num_rows = ids.shape[1]
    return Batch(
        dense=torch.from_numpy(draw.standard_normal((num_rows, NUM_DENSE), dtype=np.float32)),
        sparse=KeyedJaggedTensor(
            keys=list(FEATURES),
            values=ids.flatten(),
            lengths=torch.ones(ids.numel(), dtype=torch.int32),
        ),
        label=torch.from_numpy((draw.random((num_rows, 1)) < 0.25).astype(np.float32)),
        label_offset=torch.zeros(num_rows, 1),
        label_scale=torch.ones(num_rows, 1),
        weight=torch.ones(num_rows),
    )
