"""Preloading of the engine in Ray's processes (`RAY_preload_python_modules`).

Importing torch, TorchRec and the engine takes most of the time between a worker's start and its
first step, so processes that are to be workers do it before they are needed. The driver removes
what belongs to one attempt from their environment, so that any of them can be used, and when its
job has ended it has as many started for the next one.
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
from collections.abc import MutableMapping
from typing import Any

from trainer.protocol.versions import versions_here

# In the environment of workers only: Ray's other processes must not import the engine.
_MARK = "TRAINER_WORKER"
WORKER_ENVIRONMENT = {"env_vars": {_MARK: "1"}}
_PRELOADED = "RAY_preload_python_modules"
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# Of ours, workers read this one alone; the rest they get with their configuration.
_OF_ALL_JOBS = "SHARDLOOM_LOG_MAX_BYTES"
# How long a worker that is not used waits for a job, with about 300 MB of memory.
WARM_S = 600
_REQUEST_TIMEOUT_S = 5.0
_ENGINE = ("trainer.training.worker", "trainer.elastic.group_session")


def import_engine() -> None:
    """Import the engine, and leave all that is there out of garbage collections.

    These would take a third of the time here. Later a full one would look at a million objects
    for 0.3 s: each rank at another time, while the others wait for it.
    """
    versions_here()  # of what is imported: files may be replaced before there is a job to check it
    gc.disable()
    for name in _ENGINE:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()


def preload() -> None:
    """Import the engine if this process is to be a worker."""
    if os.environ.get(_MARK):
        import_engine()


def is_preloading() -> bool:
    """Whether the workers of this cluster preload the engine."""
    return __name__ in os.environ.get(_PRELOADED, "").split(",")


def share_environment(environment: MutableMapping[str, str]) -> None:
    """Give the workers of this driver's job what all jobs have in common, before `ray.init`."""
    config = json.loads(environment.get(_JOB_CONFIG, "{}"))
    variables = (config.get("runtime_env") or {}).get("env_vars")
    if variables:
        config["runtime_env"]["env_vars"] = {
            name: value
            for name, value in variables.items()
            if name == _OF_ALL_JOBS or not name.startswith("SHARDLOOM_")
        }
        environment[_JOB_CONFIG] = json.dumps(config)


def start_warm_workers(num_workers: int) -> None:
    """Start workers for the next job, evenly over the cluster's nodes, without waiting for them.

    A worker serves a job whose runtime environment is the same, character by character, as that
    which Ray Train gives the workers of this driver's job. Ray has no public call for this.
    Raises `grpc.RpcError`.
    """
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.node_manager_pb2 import (  # type: ignore[attr-defined]
        PrestartWorkersRequest,
    )
    from ray.core.generated.node_manager_pb2_grpc import NodeManagerServiceStub

    nodes = [node for node in ray.nodes() if node["Alive"]]
    request = PrestartWorkersRequest(
        num_workers=math.ceil(num_workers / max(1, len(nodes))), keep_alive_duration_secs=WARM_S
    )
    inherited = json.loads(ray.get_runtime_context().get_runtime_env_string())
    request.runtime_env_info.serialized_runtime_env = serialized_worker_environment(inherited)
    for node in nodes:
        address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
        with init_grpc_channel(address) as channel:
            NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_REQUEST_TIMEOUT_S)


def serialized_worker_environment(inherited: dict[str, Any]) -> str:
    """Runtime environment of Ray Train's workers in a job with `inherited`, as Ray writes it."""
    from ray.train.v2._internal.constants import get_env_vars_to_propagate

    variables = inherited.get("env_vars", {}) | get_env_vars_to_propagate()
    # Ray Train sets the first in its controller.
    variables |= {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"} | WORKER_ENVIRONMENT["env_vars"]
    whole = inherited | {"env_vars": variables}
    return json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


preload()
