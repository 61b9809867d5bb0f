"""What a Ray user would do against lost hosts: an elastic TorchTrainer with durable checkpoints.

python -m tests.benchmarks.peers.ray_elastic CONFIG.json

It starts a local cluster of emulated nodes at distinct loopback addresses, trains stock TorchRec in
1D over all workers there, and does to the nodes what the actions say, one after the other, each
once training is under way: `kill` (SIGKILL of a node's raylet and workers), `leave` (a node is shut
down) and `join` (a node comes). CONFIG holds `spec` (as in `raw_ray_train`), `folder` (for
everything written), `num_nodes`, `workers_per_node`, `actions` and `checkpoint_every_steps`; the
variables of the environment tune Ray. RESULT.json in the folder gets, for each action, the seconds
between the last step before it and the first one after, beyond a usual step, the steps that were
trained again, and the bytes that were read from checkpoints.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer

from tests.benchmarks.peers.raw_ray_train import build_model, dense_optimizer, endless_batches

OBJECT_STORE_BYTES = 80 * 2**20
STEPS_UNDER_WAY = 12
TIMEOUT_S = 600.0
RESIZE_MONITOR_INTERVAL_S = 2.0
Event = dict[str, Any]


# --- a worker


def train_loop(config: dict[str, Any]) -> None:
    """One life of one worker: restore, then step and save, without end."""
    torch.set_num_threads(1)
    folder, spec = Path(config["folder"]), config["spec"]
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    model = build_model(spec)
    dense = dense_optimizer(model, spec)
    optimizer = CombinedOptimizer([("sparse", model.fused_optimizer), ("dense", dense)])
    step, read_bytes = _restore(model, optimizer, dense)
    log = _log_of(folder, rank)
    address = ray.util.get_node_ip_address()
    log(event="start", pid=os.getpid(), node=address, step=step, read_bytes=read_bytes)
    for batch in endless_batches(spec, rank, world_size):
        optimizer.zero_grad()
        model(batch)[0].backward()
        optimizer.step()
        step += 1
        if rank == 0:
            log(event="step", step=step, world_size=world_size)
        if step % config["checkpoint_every_steps"] == 0:
            _save(model, optimizer, step, folder, rank)


def _save(model: nn.Module, optimizer: Any, step: int, folder: Path, rank: int) -> None:
    """A durable checkpoint: shards by torch.distributed.checkpoint, and Ray's word for it."""
    path = folder / "checkpoints" / f"step-{step:08d}-{dist.get_world_size()}"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=path)
    if rank:
        ray.train.report({"step": step})
        return
    with TemporaryDirectory() as pointer:
        Path(pointer, "where.json").write_text(json.dumps({"path": str(path), "step": step}))
        checkpoint = ray.train.Checkpoint.from_directory(pointer)
        name = f"{path.name}-{time.time_ns()}"
        ray.train.report({"step": step}, checkpoint=checkpoint, checkpoint_dir_name=name)


def _restore(model: nn.Module, optimizer: Any, dense: Any) -> tuple[int, int]:
    """Load Ray's newest checkpoint; its step, and the bytes that it has."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0, 0
    with checkpoint.as_directory() as pointer:
        found = json.loads(Path(pointer, "where.json").read_text())
    dense.init_state()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=found["path"])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return found["step"], sum(f.stat().st_size for f in Path(found["path"]).iterdir())


def _log_of(folder: Path, rank: int) -> Callable[..., None]:
    file = (folder / f"events-{os.getpid()}.jsonl").open("a", buffering=1)

    def log(**values: Any) -> None:
        file.write(json.dumps({"time": time.time(), "rank": rank, **values}) + "\n")

    return log


# --- the cluster and what befalls it


class Lab:
    """The cluster, the trainer in a thread, and the events of the workers."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.folder = Path(config["folder"])
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
            },
        )
        self.nodes = [self._add_node(index) for index in range(config["num_nodes"])]
        self.cluster.wait_for_nodes()
        ray.init(address=self.cluster.address, logging_level="WARNING", log_to_driver=False)
        self._trainer = threading.Thread(target=self._fit, daemon=True)
        self._trainer.start()

    def _add_node(self, index: int) -> Any:
        # Ray tells nodes apart by their address.
        return self.cluster.add_node(
            num_cpus=self.config["workers_per_node"],
            object_store_memory=OBJECT_STORE_BYTES,
            node_ip_address=_address(index),
        )

    def _fit(self) -> None:
        most = self.config["num_nodes"] * self.config["workers_per_node"]
        TorchTrainer(
            train_loop,
            train_loop_config=self.config,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(
                num_workers=(self.config["workers_per_node"], most),
                elastic_resize_monitor_interval_s=RESIZE_MONITOR_INTERVAL_S,
            ),
            run_config=RunConfig(
                name="elastic",
                storage_path=str(self.folder / "storage"),
                failure_config=FailureConfig(max_failures=100),
            ),
        ).fit()

    def do(self, action: str) -> Event:
        """Do one thing to the nodes; what it cost."""
        self._wait_until_under_way()
        began = time.time()
        steps_before = self._steps()
        world_before = steps_before[-1]["world_size"]
        getattr(self, f"_{action}")()
        after = self._wait_for(
            lambda: [
                step
                for step in self._steps()
                if step["time"] > began and step["world_size"] != world_before
            ],
            f"a step after {action}",
        )[0]
        last = [step for step in self._steps() if step["time"] < after["time"]][-1]
        starts = [s for s in self._events("start") if last["time"] < s["time"] <= after["time"]]
        return {
            "action": action,
            "pause_s": after["time"] - last["time"] - _usual_step_s(steps_before),
            "steps_again": last["step"] + 1 - after["step"],
            "read_bytes": max(start["read_bytes"] for start in starts),
            "world_size": after["world_size"],
        }

    def _wait_until_under_way(self) -> None:
        """Some steps in the newest life of the workers, and a checkpoint to come back to."""

        def is_under_way() -> bool:
            starts, steps = self._events("start"), self._steps()
            since = max((start["time"] for start in starts), default=0.0)
            recent = [step for step in steps if step["time"] > since]
            return len(recent) >= STEPS_UNDER_WAY and any(self.folder.glob("checkpoints/*"))

        self._wait_for(is_under_way, "training under way")
        every = self.config["checkpoint_every_steps"]
        at = self._steps()[-1]["step"]
        # Midway between two checkpoints, as on average.
        self._wait_for(
            lambda: self._steps()[-1]["step"] - at // every * every >= every * 3 // 2,
            "the next checkpoint",
        )

    def _kill(self) -> None:
        """A node's end, as when its power fails."""
        node, address = self.nodes.pop(), _address(len(self.nodes))
        for start in self._events("start"):
            if start["node"] == address:
                with suppress(ProcessLookupError):
                    os.kill(start["pid"], signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)

    def _leave(self) -> None:
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=True)

    def _join(self) -> None:
        self.nodes.append(self._add_node(len(self.nodes)))

    def _events(self, kind: str) -> list[Event]:
        lines = [line for path in self.folder.glob("events-*.jsonl") for line in _whole_lines(path)]
        events = [json.loads(line) for line in lines]
        return sorted((e for e in events if e["event"] == kind), key=lambda event: event["time"])

    def _steps(self) -> list[Event]:
        return self._events("step")

    def _wait_for(self, find: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := find()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not in {TIMEOUT_S:.0f} s")
            if not self._trainer.is_alive():
                raise RuntimeError(f"the trainer ended while waiting for {what}")
            time.sleep(0.05)
        return found

    def close(self) -> None:
        """End everything; the trainer sees its cluster go away."""
        ray.shutdown()
        self.cluster.shutdown()


def _usual_step_s(steps: list[Event]) -> float:
    times = [step["time"] for step in steps[-20:]]
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def _address(index: int) -> str:
    return f"127.0.0.{index + 2}"


def _whole_lines(path: Path) -> list[str]:
    return path.read_text().rpartition("\n")[0].splitlines()


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    lab = Lab(config)
    # After the traceback of what fails: Ray ends this process when its cluster goes away.
    atexit.register(lab.close)
    results = [lab.do(action) for action in config["actions"]]
    Path(config["folder"], "RESULT.json").write_text(json.dumps(results))
    lab.close()
    os._exit(0)  # the trainer's thread would wait for workers that are gone


if __name__ == "__main__":
    main()
