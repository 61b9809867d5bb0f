"""Ray Data's `iter_torch_batches` over the same Parquet, in a Ray of its own on one core.

Its collate function takes Arrow tables and makes tensors of whole columns without copies where
Arrow allows, which is what Ray recommends for speed. Rows are shuffled in a buffer, of as many rows
as a window of ours has.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
import ray.data
import torch
from ray.data.collate_fn import ArrowBatchCollateFn
from torchrec import KeyedJaggedTensor

from tests.benchmarks.loader_data import BATCH_SIZE, COLUMNS, DENSE, HISTORY, IDS, KEYS, LABEL, SEED

Item = tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]
SHUFFLE_ROWS = 65_536
_OBJECT_STORE_BYTES = 2**30


class ToTensors(ArrowBatchCollateFn):
    """Arrow tables to dense [B, 13], a KeyedJaggedTensor and label [B, 1]."""

    def __call__(self, batch: pa.Table) -> Item:  # type: ignore[override]
        history = batch[HISTORY].combine_chunks()
        lengths = np.ones((len(KEYS), len(batch)), dtype=np.int32)
        lengths[-1] = history.value_lengths().to_numpy()
        ids = [batch[name].to_numpy() for name in IDS]
        sparse = KeyedJaggedTensor(
            keys=KEYS,
            values=torch.from_numpy(np.concatenate([*ids, history.flatten().to_numpy()])),
            lengths=torch.from_numpy(lengths.ravel()),
        )
        dense = np.stack([batch[name].to_numpy() for name in DENSE], axis=1)
        label = np.array(batch[LABEL].to_numpy())[:, None]
        return torch.from_numpy(dense), sparse, torch.from_numpy(label)


def epoch_over(folder: Path) -> Callable[[], Iterator[Item]]:
    """Start Ray, which ends with this process; gives what reads an epoch."""
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
    )
    atexit.register(ray.shutdown)
    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.read_parquet(str(folder), columns=COLUMNS)

    def epoch() -> Iterator[Item]:
        return iter(
            rows.iter_torch_batches(
                batch_size=BATCH_SIZE,
                collate_fn=ToTensors(),
                local_shuffle_buffer_size=SHUFFLE_ROWS,
                local_shuffle_seed=SEED,
            )
        )

    return epoch
