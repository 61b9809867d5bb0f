"""Preloading of the engine in Ray's processes (`RAY_preload_python_modules`).

Importing torch, TorchRec and the engine takes most of the time between a worker's start and its
first step, so processes that are to be workers do it before they are needed. The driver removes
what belongs to one attempt from their environment, so that any of them can be used.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import MutableMapping

# In the environment of workers only: Ray's other processes must not import the engine.
_MARK = "TRAINER_WORKER"
WORKER_ENVIRONMENT = {"env_vars": {_MARK: "1"}}
_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# The driver reads them; workers get what they need with their configuration.
_OF_ONE_ATTEMPT = frozenset(
    {
        "SHARDLOOM_ATTEMPT_ID",
        "SHARDLOOM_ATTEMPT_TOKEN",
        "SHARDLOOM_AVOIDED_HOSTS",
        "SHARDLOOM_CLUSTER_MAX_WORKERS",
        "SHARDLOOM_END_ON",
        "SHARDLOOM_JOB_ID",
        "SHARDLOOM_MAX_WORKER_FAILURES",
        "SHARDLOOM_RUN_DIR",
        "SHARDLOOM_TRACEPARENT",
    }
)
_ENGINE = ("trainer.training.worker", "trainer.elastic.group_session")


def preload() -> None:
    """Import the engine if this process is to be a worker."""
    if os.environ.get(_MARK):
        for name in _ENGINE:
            importlib.import_module(name)


def share_environment(environment: MutableMapping[str, str]) -> None:
    """Give the workers of this driver's job what all jobs have in common, before `ray.init`."""
    config = json.loads(environment.get(_JOB_CONFIG, "{}"))
    variables = (config.get("runtime_env") or {}).get("env_vars")
    if variables:
        for name in _OF_ONE_ATTEMPT:
            variables.pop(name, None)
        environment[_JOB_CONFIG] = json.dumps(config)


preload()
