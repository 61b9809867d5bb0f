"""Dynamic tables through real sessions: evictions, exact resumes, and other numbers of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.harness.sessions import assemble
from tests.integration.ranks.dynamic_cases import (
    NUM_ROWS,
    dynamic_config,
    load_dynamic,
    replace_ids,
    train_dynamic,
    whole_ids,
)
from trainer.models.managed_collision import NO_ID

STEPS = ("training.max_steps=14", "checkpoint.every_steps=7", "checkpoint.keep_last=5")


@pytest.fixture(scope="module")
def trained(small_movielens: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(run folder, what both ranks hold) of a run of 14 steps on two workers."""
    run_dir = tmp_path_factory.mktemp("dynamic")
    config = dynamic_config(small_movielens, run_dir, 2, *STEPS)
    return run_dir, run_ranks(train_dynamic, 2, config)


def test_ids_have_rows_of_their_own_and_are_evicted_when_the_table_is_full(trained: Any) -> None:
    _, ranks = trained
    state = whole_ids(ranks)
    for table in ("movies", "liked_movies"):
        ids, rows = state[f"{table}.ids"], state[f"{table}.rows"]
        known = ids[ids != NO_ID]
        assert len(known) == len(known.unique()), "an id has two rows"
        assert sorted(rows.tolist()) == list(range(NUM_ROWS)), "two ids have one row"
    reports = ranks[0]["reports"]
    for table in ("movies", "liked_movies"):
        assert reports[-1][f"dynamic/{table}/fill"] > 0.8
        assert sum(each[f"dynamic/{table}/evicted"] for each in reports) > 10
        assert reports[-1][f"dynamic/{table}/shared"] < reports[0][f"dynamic/{table}/shared"]


@pytest.mark.slow
def test_a_row_that_has_a_new_id_starts_anew(small_movielens: Path, tmp_path: Path) -> None:
    config = dynamic_config(small_movielens, tmp_path, 2, *STEPS)
    for found in run_ranks(replace_ids, 2, config):
        assert found["new"] > 10
        assert found["moment_before"] > 0
        assert found["moment"] == 0
        assert 0 < found["weight"] <= NUM_ROWS**-0.5


def test_a_run_that_was_interrupted_goes_on_bitwise(
    trained: Any, small_movielens: Path, tmp_path: Path
) -> None:
    _, straight = trained
    half = (*STEPS[1:], "training.max_steps=7")
    run_ranks(train_dynamic, 2, dynamic_config(small_movielens, tmp_path, 2, *half))
    again = dynamic_config(small_movielens, tmp_path, 2, *STEPS, run_index=1)
    resumed = run_ranks(train_dynamic, 2, again)
    assert_same(straight, resumed)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.slow
def test_a_checkpoint_fits_any_number_of_shards_that_divides_the_buckets(
    trained: Any, small_movielens: Path, size: int
) -> None:
    run_dir, ranks = trained
    config = dynamic_config(small_movielens, run_dir, size, *STEPS, run_index=1)
    assert_same(ranks, run_ranks(load_dynamic, size, config))


@pytest.mark.slow
def test_a_checkpoint_of_another_number_of_buckets_is_refused(
    trained: Any, small_movielens: Path
) -> None:
    run_dir, _ = trained
    fewer = "embedding_tables[4].dynamic.num_buckets=4"
    config = dynamic_config(small_movielens, run_dir, 2, *STEPS, fewer, run_index=1)
    with pytest.raises(AssertionError, match=r"liked_movies were written with another dynamic"):
        run_ranks(load_dynamic, 2, config)


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Tables, moments and the ids of rows are bitwise the same."""
    ours, theirs = whole_ids(one) | assemble(one), whole_ids(other) | assemble(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
