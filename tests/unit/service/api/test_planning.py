"""Plans: what a job would look like on the cluster, why, and what the loss of a host would cost."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from rich.console import Console

from service.api.planning import plan_of
from service.backends.ray_jobs import RayJobsBackend
from service.cli.submit import plan_page
from service.jobs.submit import with_table_sizes
from service.schemas.jobs import JobPlan
from tests.conftest import EXAMPLE_SPEC
from tests.harness.builders import hosts, spec
from trainer.driver.cluster import num_gpus
from trainer.driver.main import look_at_cluster
from trainer.layout.choice import Choice
from trainer.layout.hosts import choose_on, wants_gpu
from trainer.layout.layout import LayoutError
from trainer.spec import load_spec
from trainer.spec.base import SpecError
from trainer.spec.job import JobSpec

EXAMPLES = sorted(EXAMPLE_SPEC.parent.glob("*.yaml"))


def job(workers: Any = 4, size: Any = 2, **changes: Any) -> JobSpec:
    """A spec with one table of 100 x 8, 3600 bytes with its state."""
    resources = changes.pop("resources", {})
    sizes = {"workers": workers, "shard_group_size": size, **changes}
    return spec(parallelism=sizes, resources=resources)


def printed(plan: JobPlan) -> str:
    """The plan as a terminal shows it."""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_page(plan))
    return console.export_text()


def test_a_group_on_each_host_lets_the_others_train_on() -> None:
    plan = plan_of(job({"min": 2, "max": 6}, survive={"hosts": 1}), hosts(2, 2, 2))
    assert (plan.min_workers, plan.world_size, plan.num_replicas) == (4, 6, 3)
    assert plan.placement == "inter_host"
    assert plan.sharding_groups == ((0, 1), (2, 3), (4, 5))
    assert plan.after_loss == "a lost host takes down one of 3 groups; the others train on"
    assert plan.num_hosts_needed == 2
    assert plan.obstacle == ""
    assert plan.layout.failure_domain == "replica_group"
    assert (plan.layout.num_hosts_survived, plan.layout.num_hosts_per_shard) == (2, 3)
    # S (M - 1) / T = 3600 * 2 / 6, and a sync moves it twice.
    assert (plan.layout.memory_overhead_bytes, plan.layout.sync_bytes) == (1200, 2400)


def test_what_a_loss_takes_down_is_counted_on_the_real_hosts() -> None:
    for cpus, words in (
        ((4, 4), "up to 2 of 4 groups; the others train on"),
        ((6, 2), "up to 3 of 4 groups; the other trains on"),
        ((8,), "all 4 groups: they are on one host"),
    ):
        assert words in plan_of(job(8, 2, placement="inter_host"), hosts(*cpus)).after_loss
    plan = plan_of(job(placement="intra_host"), hosts(4))
    assert (plan.layout.failure_domain, plan.layout.num_hosts_survived) == ("job", 0)
    words = "a lost host stops all workers, which restart from the newest checkpoint"
    assert plan.after_loss == words


def test_a_cluster_that_is_too_small_is_an_obstacle_and_not_a_refusal() -> None:
    plan = plan_of(job({"min": 2, "max": 6}, survive={"hosts": 2}), hosts(2, 2))
    assert "needs 3 hosts" in plan.obstacle
    assert "add 1 host, or lower survive.hosts to 1" in plan.obstacle
    # What it would be, were there enough.
    assert plan.layout.num_hosts == 3
    assert plan.reason.startswith("given a host for each group")


def test_without_a_cluster_the_numbers_of_the_spec_are_planned() -> None:
    plan = plan_of(job(6, placement="inter_host"))
    assert plan.cluster == "hosts not known"
    assert plan.reason.startswith("given a host for each group, 3 groups of 2 workers")
    assert plan_of(job()).reason.startswith("given a host with room for all, 2 groups of 2")
    assert (plan.layout.num_hosts, plan.layout.num_hosts_survived) == (3, 2)


def test_auto_stays_open_until_the_hosts_are_known() -> None:
    automatic = job({"min": 2, "max": 6}, "auto", placement="auto")
    open_plan = plan_of(automatic)
    assert (open_plan.shard_group_size, open_plan.num_replicas, open_plan.layout) == (None,) * 3
    assert open_plan.reason.startswith("decided when an attempt starts")
    chosen = plan_of(automatic, hosts(4, memory_bytes=2**30))
    assert (chosen.world_size, chosen.shard_group_size, chosen.num_replicas) == (6, 1, 6)
    assert chosen.layout.world_size == 4


def test_a_plan_has_the_workers_of_spares() -> None:
    spared = job(3, 1, placement="inter_host", spares=3)
    assert plan_of(spared, hosts(4, 4, 4)).spare_workers == 3
    with pytest.raises(SpecError, match=r"parallelism\.spares: the cluster has 2 hosts"):
        plan_of(spared, hosts(4, 4))


def test_the_data_tells_how_large_its_tables_are(tmp_path: Path) -> None:
    table = {"name": "users", "embedding_dim": 8}
    document = {"path": str(tmp_path), "label": {"column": "rating"}}
    wanted = spec(data=document, embedding_tables=[table])
    assert plan_of(with_table_sizes(wanted)).table_bytes is None
    (tmp_path / "manifest.json").write_text(json.dumps({"vocab_sizes": {"user_id": 50}}))
    assert plan_of(with_table_sizes(wanted)).table_bytes == 1800
    (tmp_path / "manifest.json").write_text(json.dumps({"vocab_sizes": {"other": 50}}))
    assert with_table_sizes(wanted) == wanted


def test_every_shipped_example_can_start_on_two_hosts() -> None:
    assert len(EXAMPLES) >= 7
    for path in EXAMPLES:
        plan = plan_of(load_spec(path.read_text()), hosts(4, 4))
        assert plan.obstacle == "", path.name
        domain = "replica_group" if "survive" in path.name else "job"
        assert plan.layout.failure_domain == domain, path.name


def test_a_plan_is_printed_with_its_reason_price_and_loss() -> None:
    text = printed(plan_of(job({"min": 2, "max": 6}, survive={"hosts": 1}), hosts(2, 2, 2)))
    for part in (
        "4-6 workers (2-3 replicas x 2 shards), inter_host",
        "3 host(s) with room for 2 + 2 + 2 worker(s)",
        "[0 1]  [2 3]  [4 5]",
        "replica group: a lost host takes down one of 3 groups; the others train on",
        "1.2 kB of memory a worker for the other copies; a full sync moves 2.4 kB a worker",
        "users [100 x 8] (3.6 kB a copy)",
    ):
        assert part in text


def test_an_open_plan_and_one_that_cannot_start_are_printed_as_such() -> None:
    automatic = job(4, "auto", placement="auto")
    for plan, parts in (
        (plan_of(automatic), ["4 workers (auto)"]),
        (plan_of(automatic, hosts(1, 1)), ["cannot start", "room for 2"]),
        (plan_of(automatic, hosts(4)), ["4 workers (4 replicas x 1 shards), intra_host"]),
        (plan_of(job(32, 1), hosts(32)), ["32 of 1"]),
    ):
        text = printed(plan)
        assert all(part in text for part in parts)


def test_a_cluster_that_grows_is_planned_with_hosts_like_the_largest_that_is_there() -> None:
    wanted = job({"min": 2, "max": 6}, survive={"hosts": 1})
    assert plan_of(wanted, hosts(2), None).obstacle
    plan = plan_of(wanted, (*hosts(0), *hosts(2)), max_workers=7)
    assert (plan.num_replicas, plan.obstacle) == (3, "")
    assert plan.layout.num_hosts == 3
    assert plan.cluster == "4 host(s) with room for 0 + 2 + 2 + 2 worker(s), 2 of them to be added"
    assert plan_of(wanted, hosts(2, 2, 2), max_workers=6).cluster.endswith("2 + 2 + 2 worker(s)")
    # From a head alone it has hosts that nobody knows yet.
    plan = plan_of(job(6, placement="inter_host"), hosts(0), max_workers=8)
    assert (plan.cluster, plan.obstacle) == ("hosts not known", "")
    assert plan.reason.startswith("given a host for each group")


def ray_nodes(draw: random.Random) -> list[dict[str, Any]]:
    """What Ray might say of a cluster: some nodes share a host, some have GPUs, some are gone."""
    gpu = draw.choice(("H100", "A100", "T4"))
    num_gpus, has_gpus = draw.choice((1, 4, 8)), draw.random() < 0.4
    return [
        {
            "NodeID": str(number),
            "NodeManagerAddress": f"10.0.0.{draw.choice((number, 1))}",
            "Alive": draw.random() < 0.9,
            "Resources": {
                "CPU": draw.choice((0.0, 2.0, 4.5, 8.0)),
                "memory": draw.choice((4e3, 2e4, 8e9)),
            }
            | ({"GPU": num_gpus, f"accelerator_type:{gpu}": 1.0} if has_gpus else {}),
        }
        for number in range(1, draw.randint(2, 7))
    ]


OPEN_SPECS = (
    job({"min": 2, "max": 6}, "auto", placement="auto"),
    job(4, "auto", placement="intra_host", resources={"device": "cpu"}),
    job({"min": 2, "max": 4}, "auto", placement="auto", survive={"hosts": 1}),
    spec(
        parallelism={
            "workers": 2,
            "shard_group_size": "auto",
            "placement": "inter_host",
            "planner": {"compute_kernel": "auto"},
        },
        resources={"device": "cuda"},
        embedding_tables=[{"name": "users", "num_embeddings": 3 * 10**8, "embedding_dim": 8}],
    ),
)


def driver_says(wanted: JobSpec, nodes: list[dict[str, Any]], most: int | None) -> Choice | str:
    """What the driver of an attempt chooses, or why there is nothing to choose."""
    total = sum(node["Resources"].get("GPU", 0) for node in nodes if node["Alive"])
    with (
        patch("ray.nodes", return_value=nodes),
        patch("ray.cluster_resources", return_value={"GPU": total}),
        patch("ray._private.state.state.get_draining_nodes", return_value={}),
    ):
        use_gpu = wants_gpu(wanted, num_gpus(), may_grow=most is not None)
        try:
            return choose_on(wanted, look_at_cluster(wanted, use_gpu, most))
        except LayoutError as error:
            return str(error)


def test_a_dry_run_and_the_driver_choose_the_same_layout_from_what_ray_says() -> None:
    draw, chosen, refused, timed = random.Random(18), 0, 0, 0
    for wanted in OPEN_SPECS * 15:
        nodes, most = ray_nodes(draw), draw.choice((None, None, 8))
        listed = [
            {
                "node_ip": node["NodeManagerAddress"],
                "state": "ALIVE" if node["Alive"] else "DEAD",
                "resources_total": node["Resources"],
            }
            for node in reversed(nodes)
        ]
        body = {"data": {"result": {"result": listed}}}
        answer = httpx.MockTransport(lambda _, body=body: httpx.Response(200, json=body))
        backend = RayJobsBackend("http://ray", transport=answer)
        plan = plan_of(wanted, backend.hosts() or (), most)
        told = driver_says(wanted, nodes, most)
        if isinstance(told, str):
            refused += 1
            assert plan.obstacle == told or plan.cluster == "hosts not known"
            continue
        chosen += 1
        layout = plan.layout
        assert layout is not None and plan.reason == told.reason
        assert layout.sync_latency_s == told.sync_latency_s
        timed += bool(layout.sync_latency_s)
        assert (layout.world_size, layout.shard_group_size, layout.placement) == (
            told.layout.world_size,
            told.layout.shard_group_size,
            told.layout.placement,
        )
    assert min(chosen, refused, timed) > 5, "all were seen"
