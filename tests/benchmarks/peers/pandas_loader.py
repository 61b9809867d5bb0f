"""A torch DataLoader over pandas frames, as one writes it for tabular data.

It is pandas used carefully: an IterableDataset that reads a Parquet file into a frame, shuffles the
frame, cuts it into batches and makes tensors of whole columns, in the DataLoader's own process, as
there is one core.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, IterableDataset
from torchrec import KeyedJaggedTensor

from tests.benchmarks.loader_data import BATCH_SIZE, COLUMNS, DENSE, HISTORY, IDS, KEYS, LABEL

# Frames of pandas 3 are views that cannot be written to; nobody writes to batches here.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

Item = tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]


def tensors_of(frame: pd.DataFrame) -> Item:
    """Dense [B, 13], ids as a KeyedJaggedTensor, label [B, 1] of a frame of B rows."""
    histories = frame[HISTORY].to_numpy()
    lengths = np.ones((len(KEYS), len(frame)), dtype=np.int32)
    lengths[-1] = np.fromiter(map(len, histories), dtype=np.int32, count=len(frame))
    ids = frame[IDS].to_numpy().T.ravel()
    sparse = KeyedJaggedTensor(
        keys=KEYS,
        values=torch.from_numpy(np.concatenate([ids, *histories])),
        lengths=torch.from_numpy(lengths.ravel()),
    )
    dense = torch.from_numpy(frame[DENSE].to_numpy(dtype=np.float32))
    return dense, sparse, torch.from_numpy(frame[[LABEL]].to_numpy(dtype=np.float32))


class FrameBatches(IterableDataset[Item]):
    """Batches of shuffled frames, one for each file; what is left of one goes to the next."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.parquet"))

    def __iter__(self) -> Iterator[Item]:
        left = None
        for number, path in enumerate(self._paths):
            frame = pd.read_parquet(path, columns=COLUMNS).sample(frac=1, random_state=number)
            frame = frame if left is None else pd.concat([left, frame])
            whole = len(frame) - len(frame) % BATCH_SIZE
            for start in range(0, whole, BATCH_SIZE):
                yield tensors_of(frame.iloc[start : start + BATCH_SIZE])
            left = frame.iloc[whole:] if whole < len(frame) else None
        if left is not None:
            yield tensors_of(left)


def epoch_over(folder: Path) -> Callable[[], Iterator[Item]]:
    """An epoch; each reads the files anew."""
    return lambda: iter(DataLoader(FrameBatches(folder), batch_size=None))
