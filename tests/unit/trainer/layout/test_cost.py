"""The cost model: its limits, which link carries what, memory that runs out, faulty clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.layout.cost import (
    RESERVE_SHARE,
    ClusterError,
    Workload,
    cluster_of,
    cost_of,
    memory_overhead_bytes,
    memory_use,
    step_time,
    sync_latency_s,
)
from trainer.layout.layout import Layout

CLUSTER = cluster_of("8xH100-80GB, step_overhead_s=0, collective_latency_s=0")
TABLE_BYTES = 10**12
WORKLOAD = Workload(
    batch_size=512,
    table_bytes=TABLE_BYTES,
    optimizer_bytes=0,
    synced_bytes=TABLE_BYTES,
    lookup_bytes=1e6,
    dense_flops=1e9,
    input_bytes=1e4,
    output_bytes=1e5,
    lookup_activation_bytes=1e6,
    dense_gradient_bytes=1e8,
    lookup_imbalance=2.0,
)


@pytest.mark.parametrize(
    ("num_copies", "placement", "link"),
    [
        (8, "intra_host", CLUSTER.intra_host_bytes_per_s),
        (4, "inter_host", CLUSTER.inter_host_bytes_per_s),
    ],
)
def test_a_sync_over_one_link_takes_as_long_as_the_paper_says(
    num_copies: int, placement: str, link: float
) -> None:
    layout = Layout(256, 256 // num_copies, placement)
    expected = sync_latency_s(TABLE_BYTES, layout, link)
    assert step_time(WORKLOAD, layout, CLUSTER).sync_s == pytest.approx(expected)


def test_copies_on_several_hosts_sync_inside_hosts_first() -> None:
    across = step_time(WORKLOAD, Layout(256, 16, "intra_host"), CLUSTER).sync_s
    shard, near, far = TABLE_BYTES / 16, *_links()
    assert across == pytest.approx(2 * shard * (7 / 8 / near + 1 / 2 / 8 / far))


def test_groups_on_single_hosts_look_up_over_the_fast_link() -> None:
    inside = step_time(WORKLOAD, Layout(64, 8, "inter_host"), CLUSTER)
    spread = step_time(WORKLOAD, Layout(64, 8, "intra_host"), CLUSTER)
    near, far = _links()
    assert spread.input_dist_s / inside.input_dist_s == pytest.approx(near / far)
    assert spread.sync_s < inside.sync_s


def test_what_leaves_a_building_goes_over_its_link_and_is_reduced_inside_first() -> None:
    far = 1e9
    buildings = replace(CLUSTER, hosts_per_building=4, inter_building_bytes_per_s=far)
    near, between = _links()
    split = Layout(64, 64, "intra_host")
    sent = WORKLOAD.batch_size * WORKLOAD.input_bytes
    assert step_time(WORKLOAD, split, buildings).input_dist_s == pytest.approx(sent / 2 / far)
    across = step_time(WORKLOAD, Layout(64, 1, "intra_host"), buildings).sync_s
    parts = 7 / 8 / near + 3 / 4 / 8 / between + 1 / 2 / 32 / far
    assert across == pytest.approx(2 * TABLE_BYTES * parts)
    inside = Layout(32, 32, "intra_host")
    assert step_time(WORKLOAD, inside, buildings) == step_time(WORKLOAD, inside, CLUSTER)


def test_collectives_and_the_host_cost_time_that_no_link_makes_up_for() -> None:
    tiny = Workload(1, 1e3, 0.0, 1e3, 1.0, 1.0, sync_every_steps=4)
    slow = replace(CLUSTER, step_overhead_s=0.01, collective_latency_s=0.001)
    step = step_time(tiny, Layout(4, 2, "intra_host"), replace(slow, device="cpu"))
    found = (step.input_dist_s, step.output_dist_s, step.dense_s, step.sync_s, step.host_s)
    assert found == pytest.approx((0.003, 0.002, 0.001, 0.0015, 0.01), rel=1e-3)
    alone = step_time(tiny, Layout(1, 1, "intra_host"), replace(slow, device="cpu"))
    assert alone.total_s == pytest.approx(0.01, rel=1e-3)
    # A GPU computes while its host launches what comes next.
    on_gpu = step_time(tiny, Layout(4, 2, "intra_host"), slow)
    assert on_gpu.total_s - on_gpu.sync_s == pytest.approx(0.01)
    large = replace(tiny, dense_flops=1e13)
    assert step_time(large, Layout(4, 2, "intra_host"), slow).host_s == 0


def _links() -> tuple[float, float]:
    return CLUSTER.intra_host_bytes_per_s, CLUSTER.inter_host_bytes_per_s


@given(
    st.sampled_from(["hbm", "intra_host", "inter_host"]),
    st.sampled_from([1, 8, 64, 512]),
    st.sampled_from(["intra_host", "inter_host"]),
    st.floats(0.01, 1),
)
def test_nothing_is_faster_where_memory_or_a_link_is_slower(
    part: str, size: int, placement: str, factor: float
) -> None:
    layout, name = Layout(512, size, placement), f"{part}_bytes_per_s"
    slower = replace(CLUSTER, **{name: factor * getattr(CLUSTER, name)})
    before, after = (cost_of(WORKLOAD, layout, each) for each in (CLUSTER, slower))
    assert after.samples_per_s <= before.samples_per_s
    assert after.peak == before.peak


def test_training_waits_for_what_an_overlapped_sync_has_left_to_do() -> None:
    layout = Layout(256, 32, "intra_host")
    blocking = step_time(WORKLOAD, layout, CLUSTER)
    rest_s = blocking.total_s - blocking.sync_s
    overlapped = replace(WORKLOAD, overlap_steps=1, sync_every_steps=4)
    waited = step_time(overlapped, layout, CLUSTER).sync_s
    assert waited == pytest.approx((blocking.sync_s - rest_s) / 4)
    hidden = replace(overlapped, overlap_steps=1000)
    assert step_time(hidden, layout, CLUSTER).sync_s == 0


def test_other_copies_take_the_memory_that_the_paper_says() -> None:
    alone, copies = Layout(1024, 1024, "intra_host"), Layout(1024, 256, "intra_host")
    extra = (
        memory_use(WORKLOAD, copies, CLUSTER).tables_bytes
        - memory_use(WORKLOAD, alone, CLUSTER).tables_bytes
    )
    assert extra == pytest.approx(memory_overhead_bytes(TABLE_BYTES, copies), abs=1)


def test_memory_runs_out_once_the_reserve_is_given_back() -> None:
    layout = Layout(64, 64, "intra_host")
    free = CLUSTER.hbm_bytes - memory_use(WORKLOAD, layout, CLUSTER).needed_bytes
    full = replace(WORKLOAD, dense_bytes=free)
    cost = cost_of(full, layout, CLUSTER)
    assert cost.fits
    assert cost.peak.total_bytes == pytest.approx((1 + RESERVE_SHARE) * CLUSTER.hbm_bytes)
    assert cost.mean.total_bytes < cost.peak.total_bytes
    assert not cost_of(replace(full, dense_bytes=free + 1e6), layout, CLUSTER).fits


def test_a_profile_names_gpus_hosts_and_what_differs() -> None:
    cluster = cluster_of("4xA100-40GB x 16, inter_host_bytes_per_s=1e9, hbm_bytes=32e9")
    assert (cluster.gpus_per_host, cluster.num_hosts) == (4, 16)
    assert (cluster.inter_host_bytes_per_s, cluster.hbm_bytes) == (1e9, 32 * 10**9)
    assert cluster.hosts_for(64) == 16
    assert cluster_of("8xH100-80GB").hosts_for(4096) == 512


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("", "as in '8xH100-80GB x 128'"),
        ("8xB52", "known types: A100-40GB"),
        ("0xH100-80GB", "gpus_per_host is 0"),
        ("8xH100-80GB x 0", "at least one host"),
        ("8xH100-80GB, hbm_bytes_per_s=nan", "a finite number above 0"),
        ("8xH100-80GB, hbm_bytes=inf", "a finite number"),
        # Steps would take for ever, or no time at all.
        ("8xH100-80GB, hbm_bytes_per_s=1e-310", r"1e-310, .* \(1 to 1e\+18\)"),
        ("8xH100-80GB, collective_latency_s=1e308", r"1e\+308, .* \(0 to 1e\+18\)"),
        ("8xH100-80GB, hbm_bytes=much", "'much'"),
        ("8xH100-80GB, nvlink=1e9", "a cluster has no 'nvlink'"),
        ("8xH100-80GB, collective_latency_s=-1", "collective_latency_s is -1"),
        ("8xH100-80GB, hosts_per_building=64", "belong together"),
        ("8xH100-80GB, hosts_per_building=0, inter_building_bytes_per_s=1e9", "is 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_with_what_to_change(profile: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        cluster_of(profile)


@pytest.mark.parametrize(
    ("world_size", "said"),
    [
        (100, "nearest that do: 96 or 104"),
        (256, "at most 128 ranks"),
        (10**9, "too many to estimate"),
        (0, "0 ranks"),
    ],
)
def test_ranks_that_the_hosts_do_not_have_are_refused(world_size: int, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        cluster_of("8xH100-80GB x 16").hosts_for(world_size)
