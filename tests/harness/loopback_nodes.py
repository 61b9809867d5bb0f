"""A cloud for Ray's autoscaler on this machine: each node has a loopback address of its own.

Ray's own `FakeMultiNodeProvider` starts all nodes under one address, by which Shardloom tells hosts
apart. Ray loads this class by name into its monitor process (`provider.module` of the config).
"""

from __future__ import annotations

import json
from ipaddress import IPv4Address
from typing import Any

from ray._private import ray_constants
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider
from ray.autoscaler.tags import (
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from tests.harness.wait import free_port

FIRST_ADDRESS = IPv4Address("127.0.1.1")


class LoopbackNodes(FakeMultiNodeProvider):  # type: ignore[misc]
    """Starts nodes at 127.0.1.1, 127.0.1.2, ...; no address is given twice."""

    def _create_node_with_resources_and_labels(
        self,
        node_config: dict[str, Any],
        tags: dict[str, str],
        count: int,
        resources: dict[str, float],
        labels: dict[str, str],
    ) -> None:
        given = dict(resources)
        with self.lock:
            node_id = self._next_hex_node_id()
            params = RayParams(
                node_ip_address=str(FIRST_ADDRESS + self._next_node_id - 1),
                min_worker_port=0,
                max_worker_port=0,
                dashboard_port=None,
                # A raylet that is given its agents' ports need not wait for them, for 15 s at most.
                dashboard_agent_listen_port=free_port(),
                metrics_agent_port=free_port(),
                metrics_export_port=free_port(),
                runtime_env_agent_port=free_port(),
                num_cpus=given.pop("CPU", 0),
                num_gpus=given.pop("GPU", 0),
                object_store_memory=given.pop("object_store_memory", None),
                resources=given,
                labels=labels,
                redis_address=self._gcs_address,
                gcs_address=self._gcs_address,
                env_vars={
                    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": node_id,
                    "RAY_CLOUD_INSTANCE_ID": node_id,
                    "RAY_NODE_TYPE_NAME": tags[TAG_RAY_USER_NODE_TYPE],
                    ray_constants.RESOURCES_ENVIRONMENT_VARIABLE: json.dumps(given),
                    ray_constants.LABELS_ENVIRONMENT_VARIABLE: json.dumps(labels),
                },
            )
            own_tags = {
                TAG_RAY_NODE_KIND: NODE_KIND_WORKER,
                TAG_RAY_NODE_NAME: node_id,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            }
            node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
            self._nodes[node_id] = {"tags": own_tags | tags, "node": node}
