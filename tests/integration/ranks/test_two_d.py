"""2D training on real gloo ranks against a dense single-process reference of M averaged copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.harness.ranks import run_ranks
from tests.harness.small_model import Case, DenseReference, initial_copy, train_2d
from tests.harness.wait import scaled

TOLERANCE = 1e-6


def _check_against_reference(case: Case) -> list[dict]:
    ranks = run_ranks(train_2d, case.world_size, case)
    reference = DenseReference(case, ranks[0]["dense_start"])
    reference.run()
    for rank, result in enumerate(ranks):
        copy = next(i for i, group in enumerate(reference.groups) if rank in group)
        assert result["sharding_ranks"] == reference.groups[copy]
        for name, table in reference.tables[copy].items():
            torch.testing.assert_close(
                result["tables"][name], table, atol=TOLERANCE, rtol=0, msg=f"rank {rank}, {name}"
            )
        for name, parameter in result["dense"].items():
            expected = dict(reference.network.named_parameters())[name].detach()
            torch.testing.assert_close(parameter, expected, atol=TOLERANCE, rtol=0)
    return ranks


@pytest.mark.parametrize(
    ("placement", "optimizer_state", "first_group"),
    [("intra_host", "every", (0, 1)), ("inter_host", "never", (0, 2))],
)
def test_groups_follow_hosts_numbered_in_turn_and_their_copies_differ_between_syncs(
    placement: str, optimizer_state: str, first_group: tuple[int, int]
) -> None:
    case = Case(4, 2, placement, sync_every=3, optimizer_state=optimizer_state, interleaved=True)
    ranks = _check_against_reference(replace(case, sharding=("row_wise", "table_wise")))
    assert ranks[0]["sharding_ranks"] == first_group


def test_a_sharding_group_across_hosts_numbered_in_turn_keeps_its_shards_apart() -> None:
    case = Case(4, 4, placement="inter_host", sharding=("row_wise",), interleaved=True)
    ranks = _check_against_reference(case)
    assert ranks[0]["sharding_ranks"] == (0, 2, 1, 3)


def test_all_copies_start_equal_and_no_group_waits_half_an_hour() -> None:
    ranks = run_ranks(initial_copy, 4, Case(4, 2))
    for result in ranks:
        assert result["timeouts_s"] == pytest.approx([scaled(30)] * 3, abs=0.01)
        for name, table in result["tables"].items():
            assert torch.equal(table, ranks[0]["tables"][name])
        for name, parameter in result["dense"].items():
            assert torch.equal(parameter, ranks[0]["dense"][name])


def test_a_moment_scale_other_than_m_follows_the_formula() -> None:
    _check_against_reference(Case(4, 2, moment_scale=1.0))
