"""What is read out of a sharding plan and of the policy of a spec."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.ingest import apply_events
from service.domain.metrics import phase_shares
from service.domain.models import TimelineEvent
from service.domain.sharding import (
    imbalance,
    loads_of,
    newest_workers,
    policy_facts,
    shard_text,
    sync_text,
)
from tests.harness.builders import (
    NOW,
    attempt_of,
    queued_job,
    row_wise_plan,
    spec,
    table_wise_plan,
    workers_started,
)
from trainer.protocol.events import Event, TablePlan
from trainer.spec.training import DenseOptimizerName, SparseOptimizerName


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
    assert sum(sum(load.values()) for load in loads) == pytest.approx(total_bytes)
    ratio = imbalance(loads)
    assert ratio is not None
    assert 1.0 <= ratio <= 4.0 or ratio == pytest.approx(1.0)


def test_a_data_parallel_table_weighs_on_every_position() -> None:
    plan = row_wise_plan().model_copy(update={"sharding_type": "data_parallel", "shards": []})
    loads = loads_of([plan, table_wise_plan("movies", 1)], 2)
    assert [sum(load.values()) for load in loads] == [3600.0, 7200.0]
    assert imbalance(loads) == pytest.approx(7200 / 5400)
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
    return apply_events(job, attempt_of(job), records, NOW).timeline


def test_the_newest_workers_are_read_back_whole() -> None:
    first, second = workers_started(), workers_started(tables=[row_wise_plan()])
    assert newest_workers(_lines(first, second)) == second
    assert newest_workers([]) is None


def test_workers_of_an_older_or_newer_version_are_read_as_far_as_known() -> None:
    (line,) = _lines(workers_started(tables=[row_wise_plan()]))
    del line.data["tables"]
    line.data["mood"] = "good"
    found = newest_workers([line])
    assert found.tables == []


# ---- the policy in words


def facts_of(optimizer: Any = None, **parallelism: Any) -> dict[str, str]:
    """Facts of a job with 2 replicas."""
    sizes = {"workers": 4, "shard_group_size": 2, **parallelism}
    return dict(policy_facts(spec(parallelism=sizes, optimizer=optimizer or {})))


def test_a_sync_says_when_what_and_how() -> None:
    for sync, text in (
        ({"every_steps": 16, "mode": "full"}, "every 16 steps: every row, in fp32"),
        ({"full_above": 1}, "every step: the rows touched since the last sync, in fp32"),
        (
            {"every_steps": 1600, "dtype": "bf16", "overlap": True, "full_above": 0.2},
            "every 1,600 steps: the changes of the rows touched since the last sync, in bf16, "
            "overlapped with the next step",
        ),
        (
            {"every_steps": 16, "mode": "full", "overlap": 8},
            "every 16 steps: every row, in fp32, overlapped with the next 8 steps",
        ),
        (
            {"every_steps": "auto", "mode": "full", "tuner": {"max_steps": 20}},
            "every 1 to 16 steps, as 5% of the time allows: every row, in fp32",
        ),
    ):
        assert facts_of(sync=sync)["Sync"] == text
    # Weight decay moves every row, whatever the mode.
    assert "every row" in facts_of({"sparse": {"weight_decay": 0.1}})["Sync"]


def test_one_copy_has_nothing_to_sync_and_no_policy_about_copies() -> None:
    single = spec(parallelism={"workers": 2, "shard_group_size": 2})
    assert sync_text(single) == "none: there is one copy of the tables"
    names = [name for name, _ in policy_facts(single)]
    assert names == ["Failure domain", "Sync", "All-to-all", "Learning rates"]


def test_groups_that_survive_are_failure_domains_and_averaged_at_syncs() -> None:
    facts = facts_of(survive={"hosts": 1})
    assert facts["Failure domain"].endswith("the others train on when any host is lost")
    assert facts["Dense part"] == "averaged at syncs, with the tables"
    two = facts_of(workers=6, survive={"hosts": 2})
    assert two["Failure domain"].endswith("when any 2 hosts are lost")
    assert facts_of(placement="inter_host")["Failure domain"].endswith("when one is lost")


def test_what_a_choice_will_decide_is_said_to_be_open() -> None:
    facts = facts_of(shard_group_size="auto", placement="auto")
    assert facts["Failure domain"] == "decided with the layout"
    assert facts["Optimizer state"] == "averaged at each sync, moments scaled by M"
    assert facts["Dense part"] == "at every step, or at syncs if each group is a failure domain"
    given = facts_of(shard_group_size="auto", moment_scale=2, dense="every_step")
    assert given["Optimizer state"].endswith("scaled by 2")
    assert given["Dense part"] == "gradients averaged over all ranks at every step"


def test_the_rest_of_the_policy() -> None:
    facts = facts_of(
        {"schedule": {"warmup_steps": 1000, "decay": "cosine", "min_ratio": 0.05}},
        sync={"optimizer_state": "delayed"},
        moment_scale=1.5,
        divergence_check={"every_syncs": 4, "action": "rebroadcast"},
        all_to_all={"forward": "bf16"},
    )
    assert facts["Optimizer state"].endswith("one sync behind the weights, moments scaled by 1.5")
    assert facts["Divergence check"].startswith("every 4 syncs; a mismatch is repaired")
    assert facts["All-to-all"] == "bf16 forward, fp32 backward"
    assert facts["Learning rates"].endswith("warm-up over 1,000 steps, then cosine to 5%")
    assert facts_of({"sparse": {"name": "sgd"}})["Optimizer state"] == "none (SGD)"
    pairs = itertools.product(get_args(SparseOptimizerName), get_args(DenseOptimizerName))
    assert all(facts_of({"sparse": {"name": s}, "dense": {"name": d}}) for s, d in pairs)
