"""The coordinator as a Ray actor on the driver's node, and the driver's handle of it."""

from __future__ import annotations

import hmac
import logging
import os
import time
from contextlib import suppress
from typing import Any, Literal

import ray
import ray.util
from ray.exceptions import GetTimeoutError, RayError

from trainer import failures
from trainer.driver.attempt import Attempt, AttemptFailed, warn
from trainer.driver.cluster import NODE_ID_LABEL
from trainer.driver.process_log import start_log
from trainer.driver.ray_train import leave_with_cluster
from trainer.elastic.coordinator.interface import CoordinatorStatus, MembershipPolicy
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.elastic.coordinator.server import Coordinator, CoordinatorConfig, prepare_process
from trainer.failures import EndReason, Failure
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.worker_config import ACTOR_NAMESPACE

logger = logging.getLogger(__name__)
_ANSWER_S = 2.0
_START_S = 300.0  # as long as Ray waits for a process on a busy machine (`service.local.ray_node`)
_SILENT_S = 60.0  # at least: a host may stand still for a while


class CoordinatorActor:
    """The coordinator of an actor process, whose log lies with those of the ranks.

    Every job of the cluster can call it: without the attempt's token one learns its address alone.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        start_log(AttemptDir(config.attempt_dir).log_path("coordinator"))
        prepare_process()
        # Ray restarts the process, and what it knew comes back with the ranks; but not where this
        # raises.
        try:
            self._coordinator = Coordinator(config, on_crash=lambda: os._exit(1))
        except OSError:
            logger.exception("the coordinator could not start; is run storage away?")
            os._exit(1)
        self._token = config.token
        logger.info("the coordinator listens at %s", self.get_address())

    def get_address(self) -> str:
        return self._coordinator.address

    def call(self, token: bytes, method: str, *args: Any) -> Any:
        """Call a method of the coordinator; raises PermissionError without the attempt's token."""
        if not hmac.compare_digest(token, self._token):
            raise PermissionError(
                f"{method} was refused: this token is of another attempt, and only the driver of "
                "the coordinator's own may steer it"
            )
        return getattr(self._coordinator, method)(*args)


class RayCoordinator:
    """The coordinator of one run of the job's groups, which ends with the driver.

    Once it is started no call raises or waits for long.
    """

    def __init__(self, attempt: Attempt, run_index: int) -> None:
        """Start it and wait until it listens; raises `AttemptFailed` when it does not.

        Raises `Evicted` where the cluster is gone.
        """
        self._token, self._writer = attempt.token, attempt.writer
        self._silent_s = max(_SILENT_S, 2 * attempt.spec.recovery.heartbeat_timeout_s)
        self.actor_name = f"coordinator-{attempt.context.attempt_id}-{run_index}"
        config = CoordinatorConfig(
            policy=MembershipPolicy.of(attempt.spec, attempt.spec.parallelism.num_replicas),
            book=LeaseBook.of(attempt.spec, ray.get(attempt.data) if attempt.data else None),
            host=ray.util.get_node_ip_address(),
            attempt_dir=attempt.context.files.root,
            token=self._token,
        )
        actor_class: Any = ray.remote(CoordinatorActor)
        self._actor = actor_class.options(
            name=self.actor_name,
            namespace=ACTOR_NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=8,
            label_selector={NODE_ID_LABEL: ray.get_runtime_context().get_node_id()},
        ).remote(config)
        try:
            ray.get(self._actor.get_address.remote(), timeout=_START_S)
        except RayError as error:
            in_time = ""
            if isinstance(error, GetTimeoutError):
                in_time = f" within {_START_S:.0f} s"
            else:  # it has died, which it does with the head node alone
                leave_with_cluster(error)
            message = (
                f"the coordinator of the groups did not start{in_time} "
                f"({failures.described(error)}): is the head node short of CPUs or memory, or run "
                "storage away? The log `coordinator` and Ray's own say more"
            )
            raise AttemptFailed(Failure(EndReason.DRIVER_LOST, message)) from error
        self._heard_at = time.monotonic()

    def status(self) -> CoordinatorStatus | None:
        """Everything it knows; None, which means nothing, when it did not answer.

        One that has not for long is killed, and Ray starts it again: groups wait for it until then.
        """
        try:
            status: CoordinatorStatus = ray.get(self._call("status"), timeout=_ANSWER_S)
        except RayError as error:
            logger.warning("the coordinator does not answer: %s", error)
            if time.monotonic() - self._heard_at > self._silent_s:
                self._start_again()
            return None
        self._heard_at = time.monotonic()
        return status

    def _start_again(self) -> None:
        message = (
            f"the coordinator of the groups has not answered for {self._silent_s:.0f} s and is "
            "started again: does its process hang (see the log `coordinator`), or the head node?"
        )
        warn(self._writer, message)
        ray.kill(self._actor, no_restart=False)
        self._heard_at = time.monotonic()

    def request(self, step: Literal["want", "drop"], *args: Any) -> None:
        """Let it take a step of this name in `Membership`."""
        self._call("request", step, *args)

    def _call(self, method: str, *args: Any) -> Any:
        """A reference to what the coordinator will answer."""
        return self._actor.call.remote(self._token, method, *args)

    def stop(self) -> None:
        """End it, once it has written what it has to tell."""
        with suppress(RayError):
            ray.get(self._call("stop"), timeout=_ANSWER_S)
        ray.kill(self._actor, no_restart=True)
