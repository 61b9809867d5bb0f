"""The quality benchmark: a fair cut of the rows, honest peers, the gain, the search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.quality import OUR_NAME, document_of, gain_of, main
from tests.benchmarks.quality_bootstrap import gain_interval, rmse_of, squares_by_user
from tests.benchmarks.quality_data import (
    Fold,
    Stars,
    held_out_rows,
    hide_from_each_other,
    make_fold,
    read_ratings,
    tuning_ratings,
)
from tests.benchmarks.quality_peers import (
    BiasSettings,
    FactorSettings,
    bias_rmse,
    factor_rmse_by_epoch,
    mean_rmse,
)
from tests.benchmarks.quality_search import SIDES, Search, Side, draw, header_of, read_log
from tests.benchmarks.report import BenchmarkError, is_met
from trainer.data.prepare.generate import generate_movielens
from trainer.data.prepare.movielens import MovieLensOptions


def ratings_of(rows: list[tuple[int, int]]) -> pl.DataFrame:
    """Sorted ratings of (user, timestamp) pairs, each of a movie of its own."""
    users, times = zip(*rows, strict=True)
    frame = pl.DataFrame({"userId": users, "movieId": range(len(rows)), "timestamp": times})
    return frame.with_columns(pl.lit(3.0).alias("rating")).sort("userId", "timestamp", "movieId")


@pytest.fixture(scope="module")
def csv_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "csv"
    generate_movielens(folder, num_ratings=3000, seed=3)
    return folder


@pytest.fixture(scope="module")
def fold(csv_folder, tmp_path_factory) -> Fold:
    folder = tmp_path_factory.mktemp("quality-fold") / "fold"
    return make_fold(csv_folder, read_ratings(csv_folder), folder, MovieLensOptions())


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


def test_the_tuning_fold_has_none_of_the_test_part(csv_folder):
    ratings = read_ratings(csv_folder)
    test_part = ratings.filter(pl.Series(held_out_rows(ratings)))
    tuning = tuning_ratings(ratings)
    assert len(tuning) + len(test_part) == len(ratings)
    assert tuning.join(test_part, on=["userId", "movieId"]).is_empty()
    last_seen = tuning.group_by("userId").agg(pl.col("timestamp").max().alias("last"))
    assert (
        test_part.join(last_seen, on="userId")
        .select((pl.col("timestamp") >= pl.col("last")).all())
        .item()
    )


def test_histories_of_held_out_rows_hold_fitted_movies_only(fold):
    files = sorted((fold.prepared / "validation").glob("*.parquet"))
    rows = pl.from_arrow(pq.ParquetDataset(files).read(["user_id", "history_movies"]))
    # What is equal for all held-out rows of a user holds none of them, as each lacks itself.
    histories = rows.group_by("user_id").agg(pl.col("history_movies").n_unique())
    assert len(rows) == len(fold.held_out)
    assert (histories["history_movies"] == 1).all()


def test_peers_and_session_hold_out_the_same_ratings(fold):
    files = sorted((fold.prepared / "validation").glob("*.parquet"))
    ours = pq.ParquetDataset(files).read(["rating"])["rating"].to_numpy()
    assert sorted(ours) == sorted(fold.held_out.stars)


def made_up_fold(rank: int = 2) -> Fold:
    """Ratings of 60 users and 40 movies by biases and `rank` factors, with little noise."""
    rng = np.random.default_rng(0)
    user, movie = (each.ravel() for each in np.indices((60, 40)))
    taste = (rng.normal(size=(60, rank))[user] * rng.normal(size=(40, rank))[movie]).sum(1)
    biases = 0.3 * rng.normal(size=60)[user] + 0.3 * rng.normal(size=40)[movie]
    stars = np.clip(3 + biases + 0.5 * taste + 0.1 * rng.normal(size=len(user)), 0.5, 5)
    fit = rng.random(len(user)) < 0.7
    fitted = Stars(user[fit], movie[fit], stars[fit])
    held_out = Stars(user[~fit], movie[~fit], stars[~fit])
    return Fold(fitted, held_out, 60, 40, Path("none"))


def test_biases_beat_the_mean_and_factors_beat_both():
    fold = made_up_fold()
    bias = bias_rmse(fold, BiasSettings())
    settings = FactorSettings(num_factors=4, lr=0.02, factor_l2=0.01, init_std=0.1, num_epochs=60)
    factors = [*factor_rmse_by_epoch(fold, settings, seed=0)]
    assert bias < 0.98 * mean_rmse(fold)
    assert factors[-1] < 0.7 * bias
    assert factors == [*factor_rmse_by_epoch(fold, settings, seed=0)]
    assert factors != [*factor_rmse_by_epoch(fold, settings, seed=1)]


def test_a_movie_nobody_rated_gets_the_users_mean():
    fitted = Stars(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.array([4.0, 4, 2, 2]))
    held_out = Stars(np.array([0]), np.array([2]), np.array([4.0]))
    fold = Fold(fitted, held_out, 2, 3, Path("none"))
    assert bias_rmse(fold, BiasSettings(user_prior=0, movie_prior=1)) == pytest.approx(0, abs=1e-6)
    settings = FactorSettings(lr=0.1, factor_l2=0.5, bias_l2=0, num_epochs=200, batch_size=4)
    assert [*factor_rmse_by_epoch(fold, settings, seed=0)][-1] < 0.1


def test_the_gain_is_over_the_best_peer_and_keeps_its_sign():
    results = {"mean": [1.0, 1.0], "factors": [0.90, 0.92], OUR_NAME: [0.89, 0.90]}
    gain = gain_of(results)
    assert gain["peer_name"] == "factors"
    assert gain["value"] == pytest.approx(0.015)
    assert gain["spread"] == pytest.approx([0.01, 0.02])
    assert is_met(gain)
    worse = gain_of({"factors": [0.88], OUR_NAME: [0.89]})
    assert worse["value"] == pytest.approx(-0.01)
    assert not is_met(worse)
    document = document_of(results, [0.01, 0.02], {}, {})
    assert len(document["runs"]) == 6
    assert document["user_bootstrap"]["rmse_gain"] == [0.01, 0.02]


def errors_of_users(num_users: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Squared errors by user of a peer and of ours, which is better by 0.1 but for `spread`."""
    rng = np.random.default_rng(1)
    ours = 1 + spread * rng.random(num_users)
    return (ours.mean() + 0.1) ** 2 * np.full(num_users, 4.0), ours**2 * 4


def test_the_interval_holds_the_gain_and_narrows_with_more_users():
    widths = []
    for num_users in (50, 5000):
        peer, ours = errors_of_users(num_users, spread=1.0)
        num_rows = np.full(num_users, 4)
        low, high = gain_interval([peer], [ours], num_rows)
        gain = rmse_of(peer, num_rows) - rmse_of(ours, num_rows)
        assert low < gain < high
        widths.append(high - low)
    assert 5 < widths[0] / widths[1] < 20


def test_the_interval_is_paired_what_is_hard_for_both_sides_cancels():
    hard = np.random.default_rng(2).random(200) * 3 + 0.5
    num_rows = np.full(200, 4)
    low, high = gain_interval([4 * (1.1 * hard) ** 2], [4 * hard**2], num_rows)
    alone, other = gain_interval([4 * (1.1 * hard) ** 2], [4 * hard[::-1] ** 2], num_rows)
    assert high - low < (other - alone) / 5
    assert low > 0


def test_errors_are_summed_by_user():
    squares = squares_by_user(np.array([0, 2, 2]), np.array([1.0, -2.0, 1.0]), 3)
    assert squares.tolist() == [1, 0, 5]
    assert rmse_of(squares, np.array([1, 0, 2])) == pytest.approx(np.sqrt(2))


def test_a_search_draws_the_same_settings_each_time():
    space = SIDES["peer"].space
    assert [*draw(space, 5)] == [*draw(space, 5)]
    assert len({str(each) for each in draw(space, 20)}) > 15
    FactorSettings(**next(draw(space, 1)))


def test_ours_must_train_to_the_end_of_its_schedule():
    curve = [0.9, 0.8, 0.85]
    assert SIDES["peer"].best(curve) == (0.8, 2)
    assert SIDES["ours"].best(curve) == (0.85, 3)


def test_without_the_data_it_says_what_is_missing(tmp_path, capsys):
    with pytest.raises(BenchmarkError, match=r"lacks ratings\.csv, movies\.csv, tags\.csv"):
        read_ratings(tmp_path)
    assert main(["--source", str(tmp_path)]) == 1
    assert "ml-latest-small" in capsys.readouterr().err


def test_a_search_goes_on_where_its_log_ends(tmp_path):
    asked: list[int] = []

    def measure(fold: Fold, settings: dict[str, Any], seed: int) -> list[float]:
        asked.append(seed)
        return [0.9, 0.8 + settings["lr"] + 0.01 * seed]

    side = Side("peer", {"lr": (0.01, 0.02, 0.03)}, measure, stops_anywhere=False)
    log_path = tmp_path / "log.jsonl"
    chosen = Search(side, made_up_fold(), log_path).run(num_trials=4)
    trials = [json.loads(line) for line in log_path.read_text().splitlines()[1:]]
    assert chosen[0]["lr"] == min(trial["settings"]["lr"] for trial in trials)
    assert chosen[1:] == (pytest.approx(0.81 + chosen[0]["lr"]), 2)
    assert set(asked) == {0, 1, 2}
    asked.clear()
    assert Search(side, made_up_fold(), log_path).run(num_trials=4) == chosen
    assert asked == []


def test_a_log_of_another_search_is_refused(tmp_path):
    log_path = tmp_path / "log.jsonl"
    header = header_of("ours")
    assert read_log(log_path, header) == []
    assert read_log(log_path, header) == []
    others = [header_of("peer"), header | {"spec_sha256": "0"}, header | {"prepare_version": 0}]
    for other in others:
        with pytest.raises(BenchmarkError, match="another side, spec, data"):
            read_log(log_path, other)


def test_the_record_of_the_past_is_not_gone_on_from():
    record = Path(__file__).parents[1] / "benchmarks" / "quality_search_log.jsonl"
    for side in SIDES:
        with pytest.raises(BenchmarkError, match="another side, spec, data"):
            read_log(record, header_of(side))
