"""What Ray imports in each process that it starts (`RAY_preload_python_modules`).

To import torch, TorchRec and the engine takes a worker most of the time between its start and its
first step. Only processes that are to be workers import them; so that Ray may give a worker any of
these, the driver leaves out of their environment what belongs to one attempt.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)
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


# What Ray imports in each process that it starts (`RAY_preload_python_modules`).

preload()
