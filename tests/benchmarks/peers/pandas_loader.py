"""A torch DataLoader over pandas frames, as one writes it for tabular data.

Two variants. `pandas_rows` is a map-style Dataset over a frame: `__getitem__` gives a row, a
`collate_fn` makes tensors of rows. `pandas_frames` is pandas used carefully: an IterableDataset
that reads a Parquet file into a frame, shuffles the frame, cuts it into batches and makes tensors
of whole columns. Both run in the DataLoader's own process, as there is one core.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchrec import KeyedJaggedTensor

from tests.benchmarks.loader_data import BATCH_SIZE, COLUMNS, DENSE, HISTORY, IDS, KEYS, LABEL, SEED

# Frames of pandas 3 are views that cannot be written to; nobody writes to batches here.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

Item = tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]
# Reading row by row takes minutes for all rows; so many tell the speed as well.
_ROWS_OF_ROW_WISE = 32_768


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


class FrameRows(Dataset[pd.Series]):
    """Single rows of one frame."""

    def __init__(self, frame: pd.DataFrame) -> None:
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    def __getitem__(self, row: int) -> pd.Series:
        return self._frame.iloc[row]


def _collate(rows: Sequence[pd.Series]) -> Item:
    return tensors_of(pd.DataFrame(list(rows)).infer_objects())


def epochs_over(folder: Path) -> dict[str, partial[Iterator[Item]]]:
    """An epoch of each variant, by its name; it reads the files anew."""
    return {"pandas_frames": partial(_frames, folder), "pandas_rows": partial(_rows, folder)}


def _frames(folder: Path) -> Iterator[Item]:
    return iter(DataLoader(FrameBatches(folder), batch_size=None))


def _rows(folder: Path) -> Iterator[Item]:
    frame = pd.read_parquet(min(folder.glob("*.parquet")), columns=COLUMNS)[:_ROWS_OF_ROW_WISE]
    generator = torch.Generator().manual_seed(SEED)
    loader = DataLoader(
        FrameRows(frame), BATCH_SIZE, shuffle=True, collate_fn=_collate, generator=generator
    )
    return iter(loader)
