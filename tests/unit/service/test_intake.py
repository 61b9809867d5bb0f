"""How a driver's records read in a timeline, and what is stored beside the sentence."""

from __future__ import annotations

import pytest

from service.store.intake import describe, fold
from tests.unit.service.builders import (
    NOW,
    attempt_of,
    divergence,
    queued_job,
    row_wise_plan,
    trace_written,
    workers_lost,
    workers_started,
)


@pytest.mark.parametrize(
    ("action", "follows"), [("fail", "resume from a checkpoint"), ("rebroadcast", "replaces it")]
)
def test_a_divergence_names_table_shard_ranks_and_what_follows(action: str, follows: str) -> None:
    text = describe(divergence(ranks=[3, 5], action=action))
    for part in ("'users'", "step 48", "shard 1", "3, 5", follows):
        assert part in text


def test_a_dense_parameter_that_diverged_is_not_called_a_table() -> None:
    text = describe(divergence(table="network.over_arch.0.weight", shard=0, ranks=[3]))
    assert text.startswith(
        "copies of dense parameter 'network.over_arch.0.weight' diverged by step 48: that of "
        "rank(s) 3 differs from its replicas"
    )
    assert "shard" not in text


def test_a_trace_says_what_it_covers_and_how_large_it_is() -> None:
    text = describe(trace_written(rank=2))
    assert text == "trace of 3 step(s) up to step 12 on rank 2 written (1.2 MB)"


def test_workers_that_diverged_were_stopped_and_not_lost() -> None:
    lost = workers_lost()
    assert describe(lost).startswith("workers lost")
    assert describe(lost.model_copy(update={"reason": "diverged"})).startswith("workers stopped")


def test_only_a_divergence_is_an_error_line() -> None:
    job = queued_job()
    records = [divergence(), trace_written(), workers_started()]
    lines = fold(job, attempt_of(job), records, NOW).timeline
    assert [line.data.get("level") for line in lines] == ["error", None, None]


def test_the_plan_of_the_tables_is_kept_with_the_workers_start() -> None:
    job, plan = queued_job(), row_wise_plan()
    (line,) = fold(job, attempt_of(job), [workers_started(tables=[plan])], NOW).timeline
    assert line.data["tables"] == [plan.model_dump()]
