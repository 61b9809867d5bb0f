"""Scaling a spec: where one copy dies, whole and split tables, what `auto` takes, faulty sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from tests.conftest import REPO
from tests.harness.builders import spec_document
from trainer.layout.choice import choose, need_of
from trainer.layout.cost import ClusterError, cluster_of
from trainer.layout.layout import Layout
from trainer.layout.scaling import (
    ScalingRow,
    scaling_of,
    scaling_sizes,
    ways_of,
)
from trainer.layout.workload import SyncSums, Workload, whole_loads
from trainer.models.networks import build_model
from trainer.spec import validate_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec

CLUSTER = cluster_of("8xH100-80GB")


def spec_of(
    num_tables: int,
    constraints: dict[str, Any] | None = None,
    batch_size: int = 4096,
    **changes: Any,
) -> JobSpec:
    """Tables of 1.5 GB that are looked up by a list each; L = 256 unless `parallelism` differs."""
    names = [f"table_{index}" for index in range(num_tables)]
    limits = {"pooling_factor": 20.0} | (constraints or {})
    size = {"num_embeddings": 3_000_000, "embedding_dim": 128, "constraints": limits}
    lists = [{"name": name, "type": "id_list", "table": name} for name in names]
    document = spec_document(
        features=[*lists, {"name": "age", "type": "dense"}],
        embedding_tables=[{"name": name, **size} for name in names],
        model={
            "dense_arch": {"layer_sizes": [128]},
            "over_arch": {"layer_sizes": [64, 1]},
            "tasks": [{"loss": "mse"}],
        },
        **{"parallelism": {"workers": 512, "shard_group_size": 256}} | changes,
    )
    document["data"]["batch_size"] = batch_size
    return validate_spec(document)


def with_copies(rows: tuple[ScalingRow, ...]) -> list[ScalingRow]:
    return [row for row in rows if row.num_replicas > 1]


def test_one_copy_runs_out_of_memory_where_groups_go_on_almost_linearly() -> None:
    rows = scaling_of(spec_of(400, batch_size=16_384), CLUSTER, scaling_sizes("256..4096"))
    one_copy = {row.world_size: row for row in rows if row.num_replicas == 1}
    groups = {row.world_size: row for row in with_copies(rows)}
    assert list(one_copy) == [256, 512, 1024, 2048, 4096]
    assert list(groups) == [512, 1024, 2048, 4096]
    assert one_copy[256].fits and not one_copy[4096].fits
    assert (one_copy[4096].samples_per_s, one_copy[4096].scaling_factor) == (None, None)
    assert one_copy[256].scaling_factor == groups[512].scaling_factor == 1
    assert 7 < (groups[4096].scaling_factor or 0) <= 8
    assert all(row.fits and row.shard_group_size == 256 for row in groups.values())


def _ways(spec: JobSpec, layout: Layout) -> list[Workload]:
    """Without syncs, from all tables whole to all split."""
    return ways_of(spec, layout, whole_loads(spec))


def test_whole_tables_leave_ranks_idle_and_split_ones_send_for_the_whole_group() -> None:
    spec, layout = spec_of(64), Layout(256, 256, "intra_host")
    whole, _, split = _ways(spec, layout)
    assert (whole.lookup_imbalance, split.lookup_imbalance) == pytest.approx((256 / 64, 1.0))
    assert split.output_bytes == 256 * whole.output_bytes
    assert split.table_bytes == whole.table_bytes == 64 * 3_000_000 * 128 * 4
    assert split.lookup_bytes == whole.lookup_bytes


def test_only_tables_that_are_too_large_for_a_rank_are_split() -> None:
    document = spec_of(64).model_dump(mode="json", exclude_defaults=True)
    document["embedding_tables"][0]["num_embeddings"] *= 200
    rows = scaling_of(validate_spec(document), CLUSTER, (64,))
    assert rows[0].fits, "all whole one rank has 300 GB, all split all ranks have partial sums"
    assert rows[0].lookup_imbalance < 1.1


def test_the_constraints_of_a_table_say_how_it_may_be_laid_out() -> None:
    layout = Layout(256, 256, "intra_host")
    row_wise = spec_of(64, {"sharding_types": ["row_wise"]})
    table_wise = spec_of(64, {"sharding_types": ["table_wise"]})
    everywhere = spec_of(2, {"sharding_types": ["data_parallel"]})
    assert _ways(row_wise, layout)[0].lookup_imbalance == 1
    assert _ways(table_wise, layout)[-1].lookup_imbalance == pytest.approx(4)
    found = _ways(everywhere, layout)[0]
    assert (found.input_bytes, found.output_bytes) == (0, 0)
    assert found.table_bytes / 256 == 2 * 3_000_000 * 128 * 4


def test_auto_is_scaled_with_the_layout_that_the_driver_would_take() -> None:
    spec = spec_of(400, parallelism={"workers": 64, "shard_group_size": "auto"})
    for row in with_copies(scaling_of(spec, CLUSTER, (64, 128))):
        num_hosts = row.world_size // 8
        sized = spec.with_workers(row.world_size)
        layout = choose(need_of(sized, (8,) * num_hosts, CLUSTER.hbm_bytes)).layout
        assert (row.shard_group_size, row.placement) == (layout.shard_group_size, layout.placement)


AUTO = {"workers": 64, "shard_group_size": "auto", "placement": "auto"}


def test_only_touched_rows_are_synced() -> None:
    parallelism = {"workers": 512, "shard_group_size": 256, "placement": "intra_host"}
    full, touched = (
        SyncSums.of(spec_of(64, parallelism=parallelism | {"sync": {"mode": mode}})).synced_bytes
        for mode in ("full", "touched_rows")
    )
    row_bytes = 128 * 4 + 4
    assert full == 64 * 3_000_000 * row_bytes
    # 42 million lookups a step would be more than all rows.
    assert touched == full
    sparse = spec_of(64, {"pooling_factor": 0.1}, parallelism=parallelism)
    touched = SyncSums.of(sparse).synced_bytes
    assert touched == pytest.approx(64 * 0.1 * 4096 * 512 * row_bytes, rel=1e-3)


DCN = {"arch": "dcn_v2", "interaction_arch": {"num_layers": 2, "low_rank_dim": 32}}


@pytest.mark.parametrize(
    ("example", "model"), [("criteo-dlrm", {}), ("criteo-dlrm", DCN), ("movielens-transformer", {})]
)
def test_the_network_is_counted_as_it_is_built(example: str, model: dict[str, Any]) -> None:
    document = yaml.safe_load((REPO / f"examples/{example}.yaml").read_text())
    document["model"] |= model
    for table in document["embedding_tables"]:
        table["num_embeddings"] = 100
    spec = validate_spec(document)
    tables = {table.name for table in spec.embedding_tables}
    num_weights = sum(
        parameter.numel()
        for name, parameter in build_model(spec, torch.device("cpu")).named_parameters()
        if tables.isdisjoint(name.split("."))
    )
    workload = _ways(spec, Layout(2, 2, "intra_host"))[0]
    # Biases and norms are left out.
    assert workload.dense_gradient_bytes == pytest.approx(4 * num_weights, rel=0.05)


@pytest.mark.parametrize("text", ["", "256", "4096..256", "0..8", "a..b", "1..999999999", "2...4"])
def test_a_faulty_range_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(ClusterError, match=r"range of GPUs|the first number"):
        scaling_sizes(text)


def test_sizes_that_the_spec_or_the_cluster_does_not_allow_are_refused() -> None:
    with pytest.raises(SpecError, match="must be a multiple of shard_group_size"):
        scaling_of(spec_of(8), CLUSTER, (264,))
    with pytest.raises(ClusterError, match="at most 128 ranks"):
        scaling_of(spec_of(8), cluster_of("8xH100-80GB x 16"), (256,))
