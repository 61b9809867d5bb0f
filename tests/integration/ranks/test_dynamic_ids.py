"""Dynamic tables through real sessions: evictions, exact resumes, and other numbers of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec import JaggedTensor

from tests.harness.ranks import run_ranks
from tests.harness.sessions import assemble, make_config, open_session, snapshot, told
from trainer.models.managed_collision import NO_ID
from trainer.parallel.sharding import ids_by_table, settle
from trainer.protocol.events import Metrics
from trainer.protocol.worker_config import WorkerConfig
from trainer.training.session import Session
from trainer.training.worker import train

NUM_ROWS = 64
# A table of pooled features, and one of a sequence.
DYNAMIC = (
    "parallelism.sync=null",
    f"embedding_tables[1]={{name: movies, num_embeddings: {NUM_ROWS}, embedding_dim: 16, "
    "dynamic: {eviction: distance_lfu, eviction_interval: 3, num_buckets: 4}}",
    f"embedding_tables[4]={{name: liked_movies, num_embeddings: {NUM_ROWS}, embedding_dim: 16, "
    "dynamic: {eviction: lru, eviction_interval: 5, num_buckets: 8}}",
    "features[4].type=sequence",
    "training.epochs=1",
    "training.validate_every_steps=1000",
)
STEPS = ("training.max_steps=14", "checkpoint.every_steps=7", "checkpoint.keep_last=5")


def dynamic_config(
    data: Path, run_dir: Path, size: int, *overrides: str, run_index: int = 0
) -> WorkerConfig:
    """The demo job with a dynamic table of movies, one copy over `size` workers."""
    sizes = (f"parallelism.workers={size}", f"parallelism.shard_group_size={size}")
    return make_config(data, run_dir, *sizes, *DYNAMIC, *overrides, run_index=run_index)


def train_dynamic(config: WorkerConfig, only_restores: bool = False) -> dict[str, Any]:
    """Train to the end, or only load the newest checkpoint; the model and the ids of each row."""
    session = open_session(config)
    if only_restores:
        session.restore()
    else:
        train(session)
    return {**snapshot(session), "ids": ids_of(session)}


def replace_ids(config: WorkerConfig) -> dict[str, float]:
    """Train, then let ids that are new take the place of those that have rows.

    What is left of these: the largest moment and weight of the rows that have new ids, and of those
    rows before.
    """
    session = open_session(config)
    train(session)
    ids = dict(ids_by_table(session.model))["movies"]
    (shard,) = (each for each in session.model.table_shards() if each.table == "movies")
    (moments,) = shard.states.values()
    before, weights = moments.clone(), shard.weight.clone()
    for _ in range(50):
        seen = JaggedTensor(values=torch.arange(10**6, 10**6 + 5000), lengths=torch.tensor([5000]))
        ids.profile(ids.preprocess({"movies": seen}))
    settle(session.model)
    is_new = (weights != shard.weight).any(dim=1)
    return {
        "new": int(is_new.sum()),
        "moment_before": float(before[is_new].max()),
        "moment": float(moments[is_new].max()),
        "weight": float(shard.weight[is_new].abs().max()),
    }


def ids_of(session: Session) -> dict[str, tuple[int, torch.Tensor]]:
    """By name: first place, and what this rank holds of the state of the ids."""
    found = {}
    for table, ids in ids_by_table(session.model):
        assert ids.output_size() * session.world_size == NUM_ROWS
        for name, buffer in ids.named_buffers():
            if not name.startswith("_"):
                found[f"{table}.{name}"] = (int(ids.rows.min()), buffer.clone())
    return found


def whole_ids(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The state of the ids of the whole table, out of all ranks' parts."""
    names = ranks[0]["ids"]
    return {
        name: torch.cat([part for _, part in sorted(r["ids"][name] for r in ranks)])
        for name in names
    }


@pytest.fixture(scope="module")
def trained(small_movielens: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(run folder, what both ranks hold) of a run of 14 steps on two workers."""
    run_dir = tmp_path_factory.mktemp("dynamic")
    config = dynamic_config(small_movielens, run_dir, 2, *STEPS)
    return run_dir, run_ranks(train_dynamic, 2, config)


def test_ids_have_rows_of_their_own_and_are_evicted_when_the_table_is_full(trained: Any) -> None:
    run_dir, ranks = trained
    state = whole_ids(ranks)
    for table in ("movies", "liked_movies"):
        ids, rows = state[f"{table}.ids"], state[f"{table}.rows"]
        known = ids[ids != NO_ID]
        assert len(known) == len(known.unique()), "an id has two rows"
        assert sorted(rows.tolist()) == list(range(NUM_ROWS)), "two ids have one row"
    reports = [
        each.values for each in told(run_dir, Metrics) if "dynamic/movies/fill" in each.values
    ]
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
    assert_same(ranks, run_ranks(train_dynamic, size, config, True))


@pytest.mark.slow
def test_a_checkpoint_of_another_number_of_buckets_is_refused(
    trained: Any, small_movielens: Path
) -> None:
    run_dir, _ = trained
    fewer = "embedding_tables[4].dynamic.num_buckets=4"
    config = dynamic_config(small_movielens, run_dir, 2, *STEPS, fewer, run_index=1)
    with pytest.raises(AssertionError, match=r"liked_movies were written with another dynamic"):
        run_ranks(train_dynamic, 2, config, True)


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Tables, moments and the ids of rows are bitwise the same."""
    ours, theirs = whole_ids(one) | assemble(one), whole_ids(other) | assemble(other)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
