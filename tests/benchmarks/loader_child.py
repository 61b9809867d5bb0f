"""One side of the loader benchmark, in a process of its own on one core; prints JSON.

python -m tests.benchmarks.loader_child SIDE FOLDER CORE

SIDE may also be a number T: the batches of T ranks, one rank after the other; or `streamed` or
`downloaded`, which make the first batch of FOLDER in an object store.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch
from torchrec import KeyedJaggedTensor

from tests.benchmarks.loader_data import BATCH_SIZE, Checksum, spec_over, write_rows
from trainer.storage import Location

if TYPE_CHECKING:
    from trainer.data.batches import Batch

_NUM_DOWNLOADS = 16
Item = tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]
Epoch = Callable[[], Iterator[Item]]


def ours(folder: Path) -> Epoch:
    """`TrainBatches`, reading window by window as with data larger than memory."""
    from trainer.data import reader
    from trainer.data.batches import TrainBatches

    spec = spec_over(folder)

    def epoch() -> Iterator[Item]:
        source = reader.open_source(spec, folder)
        with patch.object(reader, "CACHE_BYTES", 0):
            made = TrainBatches(source, spec, 0, 1)
        with made as batches:
            for batch, _ in batches:
                num_rows = int(batch.weight.sum())
                assert num_rows == batch.num_rows, "the rows fill whole batches"
                yield batch.dense, batch.sparse, batch.label

    return epoch


def measure_ranks(num_ranks: int, folder: Path) -> dict[str, float]:
    """CPU seconds and decoded rows, each for a row that is used, of an epoch of all ranks."""
    from trainer.data import reader
    from trainer.data.batches import TrainBatches

    spec = spec_over(folder)
    num_used = num_decoded = 0
    source = reader.open_source(spec, folder)
    assert source.decoded_bytes > reader.CACHE_BYTES, "it is decoded window by window"
    begun_s = time.process_time()
    with patch.object(source, "read_group", wraps=source.read_group) as read:
        for rank in range(num_ranks):
            with TrainBatches(source, spec, rank, num_ranks) as batches:
                num_used += sum(int(batch.weight.sum()) for batch, _ in batches)
    cpu_s = time.process_time() - begun_s
    num_decoded = sum(int(source.group_rows[call.args[0]]) for call in read.call_args_list)
    return {"cpu_s_per_row": cpu_s / num_used, "decoded_rows": num_decoded / num_used}


def measure_first(side: str, url: str) -> dict[str, float]:
    """Seconds from opening a stored split to its first batch, or from beginning to download it.

    What a process does once (imports inside libraries) is done before on other rows.
    """
    with TemporaryDirectory(prefix="shardloom-bench-first-") as temporary:
        other, local = Path(temporary) / "other", Path(temporary) / "local"
        write_rows(other, 1, BATCH_SIZE)
        first_batch(other)
        begun_s = time.perf_counter()
        if side == "downloaded":
            local.mkdir()
            with ThreadPoolExecutor(_NUM_DOWNLOADS) as pool:
                files = Location.parse(url).list()
                list(pool.map(lambda f: (local / f.name).write_bytes(f.read_bytes()), files))
        batch, there_s = first_batch(local if side == "downloaded" else url)
        wall_s = there_s - begun_s
    return {"first_batch_s": wall_s, "sum_of_ids": float(batch.sparse.values().sum())}


def first_batch(folder: Path | str) -> tuple[Batch, float]:
    """The first training batch of the only rank, and when it was there."""
    from trainer.data.batches import TrainBatches
    from trainer.data.reader import open_source

    spec = spec_over(folder)
    with TrainBatches(open_source(spec, Location.parse(folder)), spec, 0, 1) as batches:
        return next(batches)[0], time.perf_counter()


def side_of(name: str, folder: Path) -> Epoch:
    """Everything that a side does before its clock runs: imports, and for Ray the start."""
    if name == "ours":
        return ours(folder)
    if name == "ray_data":
        from tests.benchmarks.peers import ray_data_loader

        return ray_data_loader.epoch_over(folder)
    from tests.benchmarks.peers import pandas_loader

    return pandas_loader.epoch_over(folder)


def measure(epoch: Epoch) -> dict[str, float]:
    """Rows per second of one epoch, from the request to the last batch."""
    num_rows = num_batches = 0
    begun = time.perf_counter()
    for dense, _, _ in epoch():
        num_rows += len(dense)
        num_batches += 1
    wall_s = time.perf_counter() - begun
    return {"rows_per_s": num_rows / wall_s, "wall_s": wall_s, "num_batches": num_batches}


def checksum(epoch: Epoch) -> list[float]:
    """What an epoch holds, outside of the clock."""
    found = Checksum()
    for item in epoch():
        found.add(*item)
    return found.summary()


def main() -> None:
    """Pin to a core, warm up with a checked epoch, measure another."""
    name, folder, core = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    if name in ("streamed", "downloaded"):
        print(json.dumps(measure_first(name, sys.argv[2])))
        return
    if name.isdigit():
        print(json.dumps(measure_ranks(int(name), folder)))
        return
    epoch = side_of(name, folder)
    summary = checksum(epoch)
    print(json.dumps({"checksum": summary, **measure(epoch)}))


if __name__ == "__main__":
    main()
