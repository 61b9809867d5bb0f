"""One life of workers: a TorchTrainer from its start to its end, and why it ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from trainer import failures
from trainer.cluster import cluster_answers, demand_per_worker
from trainer.failures import Failure
from trainer.ray_errors import classify, first_line
from trainer.ray_worker import WorkerConfig, ray_train_loop

logger = logging.getLogger(__name__)

CLUSTER_LOSS_GRACE_S = 3.0
_NODE_ID_LABEL = "ray.io/node-id"

TrainLoop = Callable[[dict[str, Any]], Any]


class Evicted(Exception):
    """Driver or cluster is being shut down, which nobody asked of the job.

    It ends without a report, so that the control plane counts it as lost and starts another.
    """


@dataclass(frozen=True)
class TrainRun:
    """Workers to start: `num_workers` of them, one on each of `node_ids` where that is given.

    With `waits_for_room` Ray waits for room as long as it takes (and asks an autoscaler for it),
    else the run ends with `no_room`. `loop` is what each worker runs.
    """

    config: WorkerConfig
    num_workers: int
    use_gpu: bool = False
    node_ids: tuple[str, ...] = ()
    waits_for_room: bool = True
    loop: TrainLoop = ray_train_loop

    @property
    def name(self) -> str:
        """Name of the run in Ray, unique within the attempt."""
        config = self.config
        return f"{config.attempt_id}-{config.run_label.partition('-')[2]}"


def launch(run: TrainRun) -> Future[Failure | None]:
    """`train` in a daemon thread, which a driver that is stopped leaves behind."""
    future: Future[Failure | None] = Future()

    def _run() -> None:
        try:
            future.set_result(train(run))
        except BaseException as error:  # handed to whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=_run, name=run.name, daemon=True).start()
    return future


def train(run: TrainRun) -> Failure | None:
    """Run the workers to their end; None when they ended well. Raises `Evicted`."""
    from ray.exceptions import RayError
    from ray.train.v2.api.exceptions import TrainingFailedError

    try:
        _trainer(run).fit()
    except TrainingFailedError as error:
        logger.error("%s: %s", run.name, error)
        return classify(error)
    except RayError as error:  # the controller itself is gone, alone or with the cluster
        # When the whole cluster goes, its parts go one by one, and this driver is among them.
        time.sleep(CLUSTER_LOSS_GRACE_S)
        if not cluster_answers():
            raise Evicted(f"the cluster is gone: {first_line(error)}") from error
        return Failure(failures.WORKERS_LOST, f"Ray Train was lost: {first_line(error)}")
    return None


def _trainer(run: TrainRun) -> Any:
    from ray.train import RunConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.config import FailureConfig, ScalingConfig

    spec = run.config.spec
    return TorchTrainer(
        run.loop,
        train_loop_config={"worker": run.config},
        torch_config=TorchConfig(
            backend="nccl" if run.use_gpu else "gloo",
            timeout_s=int(max(spec.resources.collective_timeout_s, 1)),
        ),
        scaling_config=ScalingConfig(
            num_workers=run.num_workers,
            use_gpu=run.use_gpu,
            resources_per_worker=demand_per_worker(spec, run.use_gpu),
            label_selector=_pinned(run.node_ids),
        ),
        run_config=RunConfig(
            name=run.name,
            storage_path=str(run.config.run_dir / "ray"),
            # Restarts are ours to count, preempted workers' too.
            failure_config=FailureConfig(
                max_failures=0,
                max_preemption_failures=0,
                controller_failure_limit=-1 if run.waits_for_room else 0,
            ),
        ),
    )


def _pinned(node_ids: Sequence[str]) -> list[dict[str, str]] | None:
    """A label selector for each worker."""
    return [{_NODE_ID_LABEL: each} for each in node_ids] or None
