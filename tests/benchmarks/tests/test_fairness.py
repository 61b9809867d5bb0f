"""Both sides of a benchmark do the same work on the same rows, in turns."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks import (
    coordinator_scale,
    ne_parity,
    ne_resize,
    paper_tables,
    prepare_pandas,
    two_d,
)
from tests.benchmarks.elastic_jobs import pause_s
from tests.benchmarks.loader_child import checksum, measure, ours
from tests.benchmarks.loader_data import BATCH_SIZE, spec_over, write_rows
from tests.benchmarks.loader_session import model_spec
from tests.benchmarks.ne_parity import BF16, NOISE, PEER, name_of_scale, variants_of
from tests.benchmarks.ne_parity_case import Settings
from tests.benchmarks.ne_parity_ranks import SeedResult, measure_seed
from tests.benchmarks.peers.pandas_loader import epoch_over
from tests.benchmarks.quality_data import (
    Fold,
    held_out_rows,
    hide_from_each_other,
    make_fold,
    read_ratings,
)
from tests.benchmarks.report import BenchmarkError, is_met, order_of_pair, run_pairs
from tests.benchmarks.two_d import layouts, schedule_of
from tests.benchmarks.two_d_workload import IN_1D, TwoDLayout
from tests.benchmarks.workload import zipf_batches
from tests.harness.ranks import run_ranks
from trainer.datasets.movielens.prepare import MovieLensOptions, prepare_movielens
from trainer.datasets.movielens.synthetic import generate_movielens


def ratings_of(rows: list[tuple[int, int]]) -> pl.DataFrame:
    """Sorted ratings of (user, timestamp) pairs, each of a movie of its own."""
    users, times = zip(*rows, strict=True)
    frame = pl.DataFrame({"userId": users, "movieId": range(len(rows)), "timestamp": times})
    return frame.with_columns(pl.lit(3.0).alias("rating")).sort("userId", "timestamp", "movieId")


@pytest.fixture(scope="module")
def rated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "csv"
    generate_movielens(folder, num_ratings=3000, seed=3)
    return folder


@pytest.fixture(scope="module")
def fold(rated, tmp_path_factory) -> Fold:
    folder = tmp_path_factory.mktemp("quality-fold") / "fold"
    return make_fold(rated, read_ratings(rated), folder, MovieLensOptions())


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=60))
def test_held_out_rows_of_a_user_share_a_moment_after_the_others(rows):
    ratings = ratings_of(rows)
    held_out = held_out_rows(ratings)
    hidden = hide_from_each_other(ratings, held_out)
    assert hidden.drop("timestamp").equals(ratings.drop("timestamp"))
    times, users = hidden["timestamp"].to_numpy(), hidden["userId"].to_numpy()
    assert (times[~held_out] == ratings["timestamp"].to_numpy()[~held_out]).all()
    for user in set(users[held_out]):
        moments = set(times[held_out & (users == user)])
        assert len(moments) == 1
        assert moments.pop() > times[~held_out & (users == user)].max()


def test_histories_of_held_out_rows_hold_fitted_movies_only(fold):
    files = sorted((fold.prepared / "validation").glob("*.parquet"))
    rows = pl.from_arrow(pq.ParquetDataset(files).read(["user_id", "history_movies"]))
    # What is equal for all held-out rows of a user holds none of them, as each lacks itself.
    histories = rows.group_by("user_id").agg(pl.col("history_movies").n_unique())
    assert len(rows) == len(fold.held_out)
    assert (histories["history_movies"] == 1).all()


@pytest.fixture(scope="module")
def rows_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    assert write_rows(folder, 2, 2 * BATCH_SIZE) == 4 * BATCH_SIZE
    return folder


def test_ours_and_pandas_make_the_same_tensors(rows_folder):
    wanted = checksum(ours(rows_folder))
    assert wanted[0] == 4 * BATCH_SIZE
    assert checksum(epoch_over(rows_folder)) == wanted
    assert measure(ours(rows_folder))["num_batches"] == 4
    assert model_spec(rows_folder).features == spec_over(rows_folder).features


SMALL = Settings(num_steps=6, global_batch_size=16, num_held_out_rows=8, num_evaluations=3)


@pytest.mark.parametrize("num_steps", [11, 50, 600])
def test_groups_that_come_and_go_train_every_batch_once_and_end_with_all(num_steps):
    settings = replace(SMALL, num_steps=num_steps, sync_every=4)
    turns = list(ne_resize.turns_of(settings, ne_resize.WALK))
    trained = [number for turn in turns for group in range(4) for number in turn.of_group(group)]
    assert trained == list(range(4 * num_steps))
    assert [turn.num_live for turn in turns if turn.ends_phase] == list(ne_resize.WALK)
    assert all(not turn.of_group(group) for turn in turns for group in range(turn.num_live, 4))
    changes = [a != b for a, b in itertools.pairwise(ne_resize.WALK)]
    assert sum(changes) == 10 and ne_resize.WALK[0] == ne_resize.WALK[-1] == 4


LISTS = ["genres", "tokens", "history_movies", "history_liked", "history_disliked"]
NUMBERS = ["year", "movie_age", "movie_popularity", "movie_past_mean", "user_activity"]
NUMBERS += ["movie_others_mean", "movie_others_count", "user_past_mean", "user_genre_past_mean"]
NUMBERS += ["rating", "user_mean", "user_scale"]


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare") / "csv"
    generate_movielens(folder, num_ratings=3000, seed=4)
    # One rating at a time: at equal times pandas takes rows in order, and ours do not see another.
    path = folder / "ratings.csv"
    ratings = pl.read_csv(path).sort("timestamp")
    times = ratings["timestamp"].to_numpy() + np.arange(len(ratings))
    ratings.with_columns(timestamp=pl.Series(times)).write_csv(path)
    return folder


@pytest.fixture(scope="module")
def prepared_rows(one_at_a_time, tmp_path_factory) -> pd.DataFrame:
    out = tmp_path_factory.mktemp("prepare") / "ours"
    prepare_movielens(one_at_a_time, out)
    return comparable(out / "train" / "*.parquet", out / "validation" / "*.parquet")


def comparable(*patterns: Path) -> pd.DataFrame:
    parts = [pl.read_parquet(path).with_columns(part=n) for n, path in enumerate(patterns)]
    return pl.concat([f.select(parts[0].columns) for f in parts]).sort("timestamp").to_pandas()


@pytest.mark.parametrize("style", ["published", "careful"])
def test_pandas_makes_the_columns_that_ours_makes(one_at_a_time, prepared_rows, tmp_path, style):
    prepare_pandas.prepare(one_at_a_time, tmp_path / "out", style=style)
    peer = comparable(tmp_path / "out" / "train.parquet", tmp_path / "out" / "validation.parquet")
    for column in ["part", "user_id", "movie_id", "timestamp"]:
        assert (peer[column] == prepared_rows[column]).all(), column
    for column in LISTS:
        assert [*map(list, peer[column])] == [*map(list, prepared_rows[column])], column
    for column in NUMBERS:
        np.testing.assert_allclose(peer[column], prepared_rows[column], atol=2e-4, err_msg=column)
    for mine, theirs in zip(prepared_rows["history_ratings"], peer["history_ratings"], strict=True):
        np.testing.assert_allclose(theirs, mine, atol=1e-5)


CONFIGURATIONS = [*two_d.VARIANTS, *layouts()]


def test_every_window_holds_whole_sync_intervals():
    for side in CONFIGURATIONS:
        every_steps = side.every_steps if isinstance(side, TwoDLayout) else 1
        assert schedule_of(side).steps_per_window % every_steps == 0


def test_a_rank_reads_the_same_batches_in_every_layout_and_others_read_others():
    first, again, other = (zipf_batches(IN_1D, rank, 2) for rank in (0, 0, 1))
    for one, same in zip(first, again, strict=True):
        assert torch.equal(one.sparse.values(), same.sparse.values())
        assert torch.equal(one.dense, same.dense)
        assert torch.equal(one.label, same.label)
    assert not torch.equal(first[0].sparse.values(), other[0].sparse.values())
    assert not torch.equal(first[0].sparse.values(), first[1].sparse.values())


ON_RANKS = replace(
    SMALL,
    world_size=2,
    global_batch_size=256,
    num_steps=4,
    num_held_out_rows=4096,
    num_evaluations=2,
    max_table_rows=100,
)


@pytest.fixture(scope="module")
def trained() -> SeedResult:
    variants = variants_of(ON_RANKS.world_size, shard_group_size=1)
    return run_ranks(measure_seed, ON_RANKS.world_size, ON_RANKS, variants, 0)[0]


def test_our_engine_in_1d_learns_what_stock_torchrec_learns(trained):
    assert trained.curves[NOISE].ne == pytest.approx(trained.curves[PEER].ne, rel=1e-6)
    assert trained.curves[PEER].rows == [512, 1024]


def test_every_variant_learns_and_none_beats_the_teacher(trained):
    for curve in trained.curves.values():
        assert curve.ne[1] < curve.ne[0]
        assert curve.ne[1] > trained.teacher_ne


def test_the_dense_part_of_the_variant_in_bf16_is_computed_in_bf16(trained):
    half, full = (trained.curves[name].ne for name in (BF16, name_of_scale(2)))
    assert half != full
    assert half == pytest.approx(full, rel=2e-3)


def test_the_moment_scale_makes_a_difference_and_the_smaller_one_learns_slower(trained):
    unscaled, scaled = (trained.curves[name_of_scale(c)].ne[-1] for c in (1, 2))
    assert unscaled > scaled


def test_the_transformer_learns_what_it_learns_under_stock_torchrec():
    settings = replace(ON_RANKS, model="movielens")
    variants = variants_of(settings.world_size, shard_group_size=1)
    found = run_ranks(measure_seed, settings.world_size, settings, variants, 0)[0]
    assert found.curves[NOISE].ne == pytest.approx(found.curves[PEER].ne, rel=1e-6)
    assert found.teacher_ne < found.curves[PEER].ne[1] < found.curves[PEER].ne[0]
    unscaled, scaled = (found.curves[name_of_scale(c)].ne for c in (1, 2))
    assert unscaled != scaled
    along = ne_parity.curves_of([found])
    assert list(along.columns[0].cells) == ["512", "1,024"]


def test_simulated_groups_sync_with_the_real_coordinator_and_hear_of_a_loss():
    scale = coordinator_scale.measure(num_groups=3, num_syncs=2)
    assert scale.cpu_s > 0 and scale.commit_s > 0 and scale.loss_s > 0
    assert scale.sent_bytes > 3 * 1000, "a round and a result for each"


def test_both_sides_run_in_every_pair_and_take_turns_to_go_first():
    calls: list[str] = []

    def measure(side: str):
        return lambda: calls.append(side) or {"rows_per_s": 1.0}

    runs = run_pairs(3, measure("ours"), measure("peer"))
    assert calls == ["ours", "peer", "peer", "ours", "ours", "peer"]
    assert [(run.pair, run.side) for run in runs] == [
        (pair, side) for pair in range(3) for side in order_of_pair(pair)
    ]


STEADY = [float(second) for second in range(30)]


def test_a_pause_is_what_a_wait_is_longer_than_usual() -> None:
    assert pause_s([*STEADY, 33.5, 34.5, 35.5], began=29.5, ended=35.0) == pytest.approx(3.5)
    # Waits outside the time looked at do not count.
    assert pause_s([*STEADY, 30.0, 31.0, 41.0], began=29.5, ended=32.0) == 0.0
    with pytest.raises(BenchmarkError, match="before and after"):
        pause_s(STEADY, began=29.5, ended=99.0)


def test_the_paper_is_predicted_from_at_most_a_third_of_its_cells():
    document = paper_tables.report().document({})
    missed = {key for key, ratio in document["ratios"].items() if not is_met(ratio)}
    assert missed == set()
    used = [row for row in document["rows"] if row["used"]]
    assert len(used) == 15
    assert not [row for row in used if row["table"] == 2 and row["cell"] == "qps"]
