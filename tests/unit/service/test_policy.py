"""The sync policy of a spec in words."""

from __future__ import annotations

from typing import Any

import pytest

from service.policy import policy_facts, sync_text
from tests.unit.service.builders import spec


def facts_of(optimizer: Any = None, **parallelism: Any) -> dict[str, str]:
    """Facts of a job with 2 replicas."""
    sizes = {"workers": 4, "shard_group_size": 2, **parallelism}
    return dict(policy_facts(spec(parallelism=sizes, optimizer=optimizer or {})))


def test_the_default_policy() -> None:
    assert facts_of() == {
        "Failure domain": "the job: a lost host restarts all workers from the newest checkpoint",
        "Sync": "every step: the rows touched since the last sync (all rows above 50%), in fp32",
        "Optimizer state": "averaged at each sync, moments scaled by 2",
        "Dense part": "gradients averaged over all ranks at every step",
        "Divergence check": "off",
        "All-to-all": "fp32",
        "Learning rates": "tables 0.05 (row-wise AdaGrad), dense 0.001 (Adam)",
    }


@pytest.mark.parametrize(
    ("sync", "text"),
    [
        ({"every_steps": 16, "mode": "full"}, "every 16 steps: every row, in fp32"),
        (
            {"every_steps": 4, "mode": "full", "dtype": "fp16"},
            "every 4 steps: the changes of every row, in fp16",
        ),
        ({"full_above": 1}, "every step: the rows touched since the last sync, in fp32"),
        (
            {"every_steps": 1600, "dtype": "bf16", "overlap": True, "full_above": 0.2},
            "every 1,600 steps: the changes of the rows touched since the last sync, in bf16, "
            "overlapped with the next step",
        ),
    ],
)
def test_a_sync_says_when_what_and_how(sync: dict[str, Any], text: str) -> None:
    assert facts_of(sync=sync)["Sync"] == text


def test_weight_decay_moves_every_row_whatever_the_mode() -> None:
    assert "every row" in facts_of({"sparse": {"weight_decay": 0.1}})["Sync"]


def test_one_copy_has_nothing_to_sync_and_no_policy_about_copies() -> None:
    single = spec(parallelism={"workers": 2, "shard_group_size": 2})
    assert sync_text(single) == "none: there is one copy of the tables"
    assert [name for name, _ in policy_facts(single)] == [
        "Failure domain",
        "Sync",
        "All-to-all",
        "Learning rates",
    ]


def test_groups_that_survive_are_failure_domains_and_averaged_at_syncs() -> None:
    facts = facts_of(survive={"hosts": 1})
    assert facts["Failure domain"] == (
        "a sharding group: the others train on when any host is lost"
    )
    assert facts["Dense part"] == "averaged at syncs, with the tables"
    two = facts_of(workers=6, survive={"hosts": 2})
    assert two["Failure domain"].endswith("when any 2 hosts are lost")
    independent = facts_of(placement="inter_host")
    assert independent["Failure domain"].endswith("when one is lost")


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
        dense="at_sync",
        sync={"optimizer_state": "delayed"},
        moment_scale=1.5,
        divergence_check={"every_syncs": 4, "action": "rebroadcast"},
        all_to_all={"forward": "bf16"},
    )
    assert facts["Dense part"] == "averaged at syncs, with the tables"
    assert facts["Optimizer state"].endswith("one sync behind the weights, moments scaled by 1.5")
    assert facts["Divergence check"].startswith("every 4 syncs; a mismatch is repaired")
    assert facts["All-to-all"] == "bf16 forward, fp32 backward"
    assert facts["Learning rates"].endswith("warm-up over 1,000 steps, then cosine to 5%")


def test_sgd_has_no_state_to_average() -> None:
    assert facts_of({"sparse": {"name": "sgd"}})["Optimizer state"] == "none (SGD)"
