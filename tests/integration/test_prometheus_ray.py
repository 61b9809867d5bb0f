"""A real Prometheus finds and scrapes the nodes of a real Ray, as prometheus.yml says.

Here Ray itself writes the list of its nodes that deploy/machines.md has written by hand.
"""

from __future__ import annotations

from pathlib import Path

from tests.integration.prometheus import Prometheus, needs_prometheus
from tests.integration.stack import Stack
from tests.unit.observability.expressions import dashboard_queries

# GPUs and an autoscaler, which need not be here.
ABSENT = ("gram", "gpus", "cluster_pending", "cluster_failed", "cluster_idle", "cluster_active")


@needs_prometheus
def test_the_nodes_of_ray_are_found_and_fill_their_dashboard(stack: Stack, tmp_path: Path) -> None:
    listed = stack.ray_temp_dir / "prom_metrics_service_discovery.json"
    with Prometheus(tmp_path, {}, "", {}, ray_nodes=listed) as prometheus:
        prometheus.until(
            lambda: prometheus.query("last_over_time(ray_node_mem_total[2m])"),
            "Ray's nodes are scraped",
            timeout_s=150.0,
        )
        assert set(prometheus.query('up{job="ray"}').values()) == {1.0}
        queries = [query for name, query in dashboard_queries() if name == "ray.json"]
        empty = [query for query in queries if not prometheus.query(query)]
    assert [query for query in empty if not any(part in query for part in ABSENT)] == []
