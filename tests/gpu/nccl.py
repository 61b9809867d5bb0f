"""Runs a function on NCCL ranks, one process for each GPU, and hands back what they return."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.wait import free_port


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on every rank of an NCCL world; results indexed by rank.

    Raises with the rank's traceback when one fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _run_rank, (world_size, free_port(), folder, function, args), nprocs=world_size
        )
        return [
            torch.load(_result_path(folder, rank), weights_only=False) for rank in range(world_size)
        ]


def _result_path(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.pt"


def _run_rank(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
        device_id=device,
    )
    torch.save(function(*args), _result_path(folder, rank))
    dist.barrier()
    dist.destroy_process_group()
