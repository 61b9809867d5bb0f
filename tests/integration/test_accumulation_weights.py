"""Accumulated gradients are those of one large batch, however rows weigh; in both domains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.elastic_house import ElasticHouse
from tests.integration.gloo import run_ranks
from tests.integration.session_cases import load_session, train_session
from tests.integration.test_weights_over_ranks import NUM_ROWS, STEP_ROWS, job, write_rows
from trainer.ray_worker import WorkerConfig
from trainer.spec import validate_spec


def frozen(config: WorkerConfig, **sections: Any) -> WorkerConfig:
    """The job with tables that never change, as those learn from each batch by itself."""
    document = config.spec.model_dump(mode="json", exclude_unset=True)
    document["optimizer"]["sparse"]["lr"] = 1e-30
    for name, changes in sections.items():
        document[name] = document.get(name, {}) | changes
    return replace(config, spec=validate_spec(document))


def assert_same_dense(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["dense"].keys() == wanted["dense"].keys()
    for name, value in wanted["dense"].items():
        torch.testing.assert_close(found["dense"][name], value, atol=1e-6, rtol=1e-5, msg=name)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "data")


def large_batches(data: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """One rank that takes 32 rows a step; it moves the dense part by more than rounding."""
    config = frozen(job(data, run_dir, 1, **changes))
    (trained,) = run_ranks(train_session, 1, config)
    return trained


@pytest.mark.parametrize("weights", [{"weight_column": "w"}, {}], ids=["weighted", "equal"])
def test_ranks_that_accumulate_train_as_on_one_large_batch(
    data: Path, tmp_path: Path, weights: dict[str, str]
) -> None:
    whole = large_batches(data, tmp_path / "whole", **weights)
    # Two ranks of 4 rows, four steps to a window. Two heavy rows are in the first of each.
    parts = frozen(
        job(data, tmp_path / "parts", 2, batch_size=4, **weights),
        training={"max_steps": 8, "accumulate_steps": 4, "report_every_steps": 4},
        checkpoint={"every_steps": 4},
    )
    for rank in run_ranks(train_session, 2, parts):
        assert_same_dense(rank, whole)


def test_the_short_last_step_of_an_epoch_counts_for_its_rows_alone(
    data: Path, tmp_path: Path
) -> None:
    whole = large_batches(data, tmp_path / "whole", batch_size=NUM_ROWS)
    # Steps of 48 and 16 rows, of which the second rank has none in the last.
    parts = frozen(
        job(data, tmp_path / "parts", 2, batch_size=24),
        training={"max_steps": 2, "accumulate_steps": 2},
        checkpoint={"every_steps": 2},
    )
    assert whole["state"].step == 1
    for rank in run_ranks(train_session, 2, parts):
        assert_same_dense(rank, whole)


def test_groups_that_accumulate_train_as_on_one_large_batch(data: Path, tmp_path: Path) -> None:
    whole = large_batches(data, tmp_path / "whole", weight_column="w")
    assert whole["state"].step == NUM_ROWS // STEP_ROWS
    config = frozen(
        job(data, tmp_path / "run", 2, batch_size=4, weight_column="w"),
        # A lease is 16 rows of a group: its four steps are a window.
        parallelism={"placement": "inter_host", "sync": {"every_steps": 4}},
        training={"max_steps": 8, "accumulate_steps": 4, "report_every_steps": 4},
        checkpoint={"every_steps": 4},
        recovery={"start_grace_s": 30, "heartbeat_timeout_s": 4, "exchange_timeout_s": 4},
    )
    with ElasticHouse(config, tmp_path / "house", 2) as house:
        house.wait_to_end()
    (saved,) = run_ranks(load_session, 1, frozen(job(data, tmp_path / "run", 1)))
    assert_same_dense(saved, whole)
