"""What is read out of a sharding plan."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain import TimelineEvent
from service.sharding import (
    imbalance,
    loads_of,
    newest_workers,
    phase_shares,
    shard_text,
)
from service.store.intake import fold
from tests.unit.service.builders import (
    NOW,
    attempt_of,
    queued_job,
    row_wise_plan,
    table_wise_plan,
    workers_started,
)
from trainer.events import Event, TablePlan


@st.composite
def grids(draw: st.DrawFn) -> TablePlan:
    """A table cut into a grid of rectangles that cover it, dealt out to four positions."""
    num_rows, num_columns = draw(st.integers(1, 500)), draw(st.integers(1, 64))
    row_cuts = sorted({0, num_rows, *draw(st.lists(st.integers(0, num_rows), max_size=3))})
    column_cuts = sorted({0, num_columns, *draw(st.lists(st.integers(0, num_columns), max_size=3))})
    shards = [
        TablePlan.Shard(
            position=draw(st.integers(0, 3)),
            row_offset=top,
            column_offset=left,
            num_rows=bottom - top,
            num_columns=right - left,
        )
        for top, bottom in itertools.pairwise(row_cuts)
        for left, right in itertools.pairwise(column_cuts)
    ]
    return TablePlan(
        name="t",
        sharding_type="grid_shard",
        data_type="fp32",
        num_embeddings=num_rows,
        embedding_dim=num_columns,
        size_bytes=num_rows * (num_columns * 4 + 4),
        shards=shards,
    )


@given(st.lists(grids(), min_size=1, max_size=4))
def test_the_loads_of_a_group_add_up_to_its_tables(plans: list[TablePlan]) -> None:
    named = [plan.model_copy(update={"name": f"t{n}"}) for n, plan in enumerate(plans)]
    loads = loads_of(named, 4)
    total_bytes = sum(plan.size_bytes for plan in named)
    assert sum(load.size_bytes for load in loads) == pytest.approx(total_bytes)
    ratio = imbalance(loads)
    assert ratio is not None
    assert 1.0 <= ratio <= 4.0 or ratio == pytest.approx(1.0)


def test_a_data_parallel_table_weighs_on_every_position() -> None:
    plan = row_wise_plan().model_copy(update={"sharding_type": "data_parallel", "shards": []})
    loads = loads_of([plan, table_wise_plan("movies", 1)], 2)
    assert [load.size_bytes for load in loads] == [3600.0, 7200.0]
    assert imbalance(loads) == pytest.approx(7200 / 5400)


def test_shards_of_a_table_on_one_position_are_one_share() -> None:
    plan = row_wise_plan()
    both = [shard.model_copy(update={"position": 1}) for shard in plan.shards]
    empty, full = loads_of([plan.model_copy(update={"shards": both})], 2)
    assert empty.shares == ()
    assert [(share.table, share.size_bytes) for share in full.shares] == [("users", 3600.0)]


def test_nothing_held_has_no_imbalance() -> None:
    assert imbalance(loads_of([], 4)) is None


def test_a_shard_says_only_what_is_not_whole() -> None:
    plan = row_wise_plan(num_embeddings=3000)
    assert shard_text(plan, plan.shards[1]) == "rows 1,500-2,999"
    whole = table_wise_plan("movies", 0)
    assert shard_text(whole, whole.shards[0]) == "all"
    half = whole.shards[0].model_copy(update={"column_offset": 4, "num_columns": 4})
    assert shard_text(whole, half) == "columns 4-7"
    none = whole.shards[0].model_copy(update={"row_offset": 100, "num_rows": 0})
    assert shard_text(whole, none) == "no rows"


def test_phases_come_longest_first_and_only_those_that_took_time() -> None:
    metrics = {"phase/dense_s": 0.01, "phase/backward_s": 0.02, "phase/sync_s": 0.0, "phase/x_s": 9}
    assert phase_shares(metrics) == [("backward", 0.02), ("dense", 0.01)]


def _lines(*records: Event) -> list[TimelineEvent]:
    job = queued_job()
    return fold(job, attempt_of(job), records, NOW).timeline


def test_the_newest_workers_are_read_back_whole() -> None:
    first, second = workers_started(), workers_started(tables=[row_wise_plan()])
    assert newest_workers(_lines(first, second)) == second
    assert newest_workers([]) is None


def test_workers_of_an_older_or_newer_version_are_read_as_far_as_known() -> None:
    (line,) = _lines(workers_started(tables=[row_wise_plan()]))
    del line.data["tables"]
    line.data["mood"] = "good"
    found = newest_workers([line])
    assert found is not None
    assert found.tables == []
