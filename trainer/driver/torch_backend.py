"""torch's process group for Ray Train's workers; driver and controller load no torch for it.

Ray's own `TorchConfig` imports torch wherever it is named, which takes seconds in the driver and in
the controller of every TorchTrainer, while the workers wait for both. This one leaves what it does
in a worker to Ray's functions, and imports them there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError
from ray.train._internal.base_worker_group import BaseWorkerGroup
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.util import TrainingFramework

# As Ray's TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S.
_LEAVE_TIMEOUT_S = 30


@dataclass
class ProcessGroupConfig(BackendConfig):
    """The default process group of the workers: `backend` is nccl or gloo."""

    backend: str
    timeout_s: int

    @property
    def backend_cls(self) -> type[Backend]:
        return _ProcessGroup

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[None]]:
        return _own_device

    @property
    def framework(self) -> TrainingFramework:
        return TrainingFramework.TORCH


def _own_device() -> AbstractContextManager[None]:
    """The GPU of a worker is torch's current one."""
    from ray.train.torch.config import TorchConfigContextManager

    return TorchConfigContextManager()


def let_gloo_use_address(address: str) -> None:
    """Let gloo use the interface that has `address`, unless the environment names one.

    It would take the one that the host's name resolves to, on many machines loopback. NCCL leaves
    loopback out by itself, and may use several interfaces.
    """
    import psutil  # Ray's own copy, which is on the path once Ray is imported

    for interface, own in psutil.net_if_addrs().items():
        if any(each.address == address for each in own):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


class _ProcessGroup(Backend):
    """Runs in the controller."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        assert isinstance(backend_config, ProcessGroupConfig)
        address, port = worker_group.execute_single(0, get_address_and_port)
        size = len(worker_group)
        joins = [
            worker_group.execute_single_async(
                rank, _join, backend_config, rank, size, address, port
            )
            for rank in range(size)
        ]
        ray.get(joins)  # type: ignore[arg-type]

    def on_shutdown(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        leaves = worker_group.execute_async(_leave, destroy_process_group=len(worker_group) > 1)
        with suppress(GetTimeoutError):  # who does not leave in time is ended all the same
            ray.get(leaves, timeout=_LEAVE_TIMEOUT_S)  # type: ignore[arg-type]


def _join(config: ProcessGroupConfig, rank: int, size: int, address: str, port: int) -> None:
    from ray.train.torch.config import (
        _set_torch_distributed_env_vars,
        _setup_torch_process_group,
    )

    let_gloo_use_address(ray.util.get_node_ip_address())
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    # When a peer between the groups is lost, torch would dump what it remembers and end this
    # process minutes later. Whoever gives up logs it (`CoordinatorClient`).
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    _set_torch_distributed_env_vars()
    _setup_torch_process_group(config.backend, rank, size, "env://", config.timeout_s)


def _leave(destroy_process_group: bool) -> None:
    from ray.train.torch.config import _shutdown_torch

    _shutdown_torch(destroy_process_group=destroy_process_group)
