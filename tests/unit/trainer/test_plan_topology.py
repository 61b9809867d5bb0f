"""Who measures bandwidth with whom, and what the planner is told about hosts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torchrec.distributed.planner.types import CollectiveType

from trainer.parallel.bandwidth import Bandwidths, median_bandwidths, partners
from trainer.parallel.groups import ranks_per_host
from trainer.parallel.topology import MeasuredBandwidths

HOSTS = st.lists(st.sampled_from("abc"), max_size=9)


@given(hosts=HOSTS, same_host=st.booleans())
def test_partners_are_mutual_pairs_of_the_asked_kind(hosts: list[str], same_host: bool) -> None:
    pairs = partners(hosts, same_host=same_host)
    for position, other in pairs.items():
        assert position != other and pairs[other] == position
        assert (hosts[position] == hosts[other]) == same_host


@given(hosts=HOSTS, same_host=st.booleans())
def test_no_two_positions_that_could_pair_up_are_left_over(
    hosts: list[str], same_host: bool
) -> None:
    alone = [p for p in range(len(hosts)) if p not in partners(hosts, same_host=same_host)]
    assert not any((hosts[p] == hosts[q]) == same_host for p in alone for q in alone if p < q)


def test_medians_count_only_the_workers_that_could_measure() -> None:
    measured = [Bandwidths(10.0, 4.0), Bandwidths(30.0, None), Bandwidths(20.0, 8.0)]
    assert median_bandwidths(measured) == Bandwidths(20.0, 6.0, None)


def test_ranks_per_host_is_one_number_only_when_all_groups_are_spread_alike() -> None:
    assert ranks_per_host(["aabb", "aabb"]) == 2
    assert ranks_per_host(["abcd"]) == 1
    assert ranks_per_host(["aab"]) is None
    assert ranks_per_host(["aaaa", "bbcc"]) is None


def test_a_collective_within_a_host_is_reckoned_at_its_own_speed() -> None:
    bandwidths = MeasuredBandwidths(intra_host=8.0, inter_host=2.0)
    for kind in (CollectiveType.ALL_TO_ALL, CollectiveType.ALL_REDUCE):
        assert bandwidths.get_bw(4, 4, kind) == 8.0
        assert bandwidths.get_bw(2, 4, kind) == 2.0
