"""The loader: rows per second and core from Parquet to KeyedJaggedTensor, and the wait for data.

python -m tests.benchmarks.loader --json FILE

All sides read the same generated rows (Criteo's 26 id columns and 13 dense ones, and a list of 0 to
20 ids) from the same Parquet files and make the same tensors of them, shuffled, in batches of one
size; that they are the same is checked by sums over an epoch, which also warms up. Each side runs
with all its processes on one core. Every peer is measured once; the ratio is against the faster
one, in pairs that take turns.

How the work of T ranks adds up is measured on six times as many rows: rows decoded and CPU seconds
of 8 ranks, one after the other, for a row that is used, against those of one rank.

How soon a rank begins on data in an object store is measured on a split of 1.6 GB behind a link of
1 Gbit/s: seconds from opening it to the first batch, which is streamed, against a download of the
whole split by 16 requests at a time and the first batch from there.

The wait for data is that of a real training session of one rank (DLRM, no Ray): seconds that a step
waits for its batch, over the seconds of a step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks import loader_data, loader_session
from tests.benchmarks.report import (
    BenchmarkError,
    BenchmarkReport,
    Goal,
    Run,
    log,
    main,
    run_module,
    run_pairs,
)
from tests.harness.object_store import run_object_store
from trainer.storage import Location

NAME = "loader"
NUM_FILES = 6
PAIRS = 3
OURS = "ours"
# What each peer is called in the table.
PEERS = {
    "ray_data": "Ray Data iter_torch_batches",
    "pandas_frames": "DataLoader over pandas frames",
}
NUM_RANKS = 8
# Ranks share a larger split, as they do: the same files again and again, so many that the ranks'
# parts do not end where windows do.
NUM_LINKS = 35
RANK_GOALS = [
    Goal("decoded_per_used_row", "decoded_rows", "rows", 1.1, "lower", "one rank"),
    Goal("rank_cpu", "cpu_s_per_row", "s/row", 1.15, "lower", "one rank"),
]
# A stored split is one file of all rows, so many times.
NUM_STORED = 12
LINK_BYTES_PER_S = 125e6
FIRST_GOAL = Goal(
    "first_batch", "first_batch_s", "s", 0.05, "lower", "download of the split, then a batch"
)
WAIT_GOAL = Goal("data_wait", "seconds", "s/step", 0.03, "lower", "the whole step")
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def speed_goal(peer: str) -> Goal:
    """The ratio of speeds, against `peer`."""
    return Goal("rows_per_s", "rows_per_s", "rows/s", 3.0, "higher", PEERS[peer])


def run(num_pairs: int) -> BenchmarkReport:
    with TemporaryDirectory(prefix="shardloom-bench-loader-") as temporary:
        folder = Path(temporary)
        num_rows = loader_data.write_rows(folder, NUM_FILES)
        log(f"wrote {num_rows} rows")
        survey = {side: measure_side(side, folder) for side in (OURS, *PEERS)}
        check_sums(survey, num_rows)
        peer = best_peer(survey)
        log(f"pairs: ours against {PEERS[peer]}")
        speeds = run_pairs(num_pairs, lambda: speed(OURS, folder), lambda: speed(peer, folder))
        waits = [measure_wait(folder) for _ in range(num_pairs)]
        linked = with_links(folder)
        ranks = run_pairs(
            num_pairs, lambda: in_child(NUM_RANKS, linked), lambda: in_child(1, linked)
        )
        firsts = first_batches(num_pairs, folder)
    return BenchmarkReport(
        NAME,
        _settings(num_rows),
        [speed_goal(peer), WAIT_GOAL, *RANK_GOALS, FIRST_GOAL],
        [
            Run(each.pair, each.side, {**each.values, **rank.values, **first.values})
            for each, rank, first in zip(with_waits(speeds, waits), ranks, firsts, strict=True)
        ],
        rows_of(survey),
    )


def with_links(folder: Path) -> Path:
    """A folder with `NUM_LINKS` links to the files of rows."""
    linked, files = folder / "linked", sorted(folder.glob("*.parquet"))
    linked.mkdir()
    for number in range(NUM_LINKS):
        (linked / f"part-{number:03d}.parquet").symlink_to(files[number % len(files)])
    return linked


def in_child(side: str | int, where: str | Path) -> dict[str, Any]:
    """What `loader_child` measures of a side in a process of its own, pinned to the last core."""
    core = max(os.sched_getaffinity(0))
    return run_module("loader_child", side, where, core, environment=_ONE_THREAD)


def first_batches(num_pairs: int, folder: Path) -> list[Run]:
    """Seconds to the first batch of a stored split, of the rows in `folder` again and again."""
    with run_object_store() as store:
        split = Location.parse(store.url("split"))
        whole = folder / "whole.parquet"
        loader_data.write_joined(folder, whole)
        first, *others = (split / f"part-{number:03d}.parquet" for number in range(NUM_STORED))
        first.upload(whole)
        for other in others:
            split.fs.copy_file(first.path, other.path)
        with store.failing(bytes_per_s=LINK_BYTES_PER_S):
            runs = run_pairs(
                num_pairs,
                lambda: in_child("streamed", split.text),
                lambda: in_child("downloaded", split.text),
            )
    if len({run.values["sum_of_ids"] for run in runs}) > 1:
        raise BenchmarkError("the first batch of the stored split is not that of its download")
    return runs


def measure_side(side: str, folder: Path) -> dict[str, Any]:
    found = in_child(side, folder)
    log(f"{side}: {found['rows_per_s']:,.0f} rows/s")
    return found


def speed(side: str, folder: Path) -> dict[str, float]:
    found = measure_side(side, folder)
    return {name: value for name, value in found.items() if name != "checksum"}


def measure_wait(folder: Path) -> dict[str, float]:
    """Seconds per step, and of them waiting, of a training session in a process of its own."""
    found = run_module("loader_session", folder, environment=_ONE_THREAD)
    share = found["wait_s"] / found["step_s"]
    log(f"session: {found['step_s']:.3f} s a step, {share:.2%} of it waiting for data")
    return found


def check_sums(survey: Mapping[str, Mapping[str, Any]], num_rows: int) -> None:
    """Raise `BenchmarkError` where sides made other tensors of the rows."""
    wanted = survey[OURS]["checksum"]
    if wanted[0] != num_rows:
        raise BenchmarkError(f"ours made batches of {wanted[0]} rows, not {num_rows}")
    for side, found in survey.items():
        if found["checksum"] != wanted:
            raise BenchmarkError(f"{side} made other tensors than ours: sums {found['checksum']}")


def best_peer(survey: Mapping[str, Mapping[str, Any]]) -> str:
    return max(PEERS, key=lambda side: survey[side]["rows_per_s"])


def with_waits(speeds: Sequence[Run], waits: Sequence[Mapping[str, float]]) -> list[Run]:
    """The runs of the pairs, ours with the wait of a step as `seconds`, the peer's with a step."""
    seconds = {"ours": "wait_s", "peer": "step_s"}
    return [
        Run(each.pair, each.side, {**each.values, "seconds": waits[each.pair][seconds[each.side]]})
        for each in speeds
    ]


def rows_of(survey: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = {OURS: "ours"} | PEERS
    ours = survey[OURS]["rows_per_s"]
    return [
        {
            "side": names[side],
            "rows_per_s": round(found["rows_per_s"]),
            "ours is faster": f"{ours / found['rows_per_s']:.2f} times",
        }
        for side, found in survey.items()
    ]


def _settings(num_rows: int) -> dict[str, Any]:
    return {
        "num_rows": num_rows,
        "columns": f"{loader_data.NUM_IDS} ids, {loader_data.NUM_DENSE} dense, a list of ids",
        "batch_size": loader_data.BATCH_SIZE,
        "rows_per_row_group": loader_data.ROWS_PER_GROUP,
        "ranks": {"num_ranks": NUM_RANKS, "num_files": NUM_LINKS},
        "stored": {"num_files": NUM_STORED, "link_bytes_per_s": LINK_BYTES_PER_S},
        "cores": "all processes of a side on one core",
        "ours": "TrainBatches, shuffled, windows decoded again in each epoch",
        "session": {
            "dense_layers": loader_session.DENSE_LAYERS,
            "over_layers": loader_session.OVER_LAYERS,
            "embedding_dim": loader_session.EMBEDDING_DIM,
            "measured_steps": [loader_session.WARMUP_STEPS, loader_session.NUM_STEPS],
        },
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))
