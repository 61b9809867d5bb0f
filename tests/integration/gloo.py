"""Runs a function on real gloo ranks, each its own process, and hands back what they return."""

from __future__ import annotations

import io
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from queue import Empty
from typing import Any

from tests.integration.ports import free_port

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["trainer.worker"])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120):
    """Call `function(*args)` on every rank of a gloo world; results indexed by rank.

    Raises AssertionError with the rank's traceback when one fails.
    """
    results = _CONTEXT.Queue()
    port = free_port()
    ranks = [
        _CONTEXT.Process(
            target=_run_rank, args=(function, args, rank, world_size, port, results), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        return _collect(results, world_size, timeout_s)
    finally:
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()


def _collect(results: Any, world_size: int, timeout_s: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < world_size:
        try:
            rank, error, value = results.get(timeout=timeout_s)
        except Empty:
            missing = sorted(set(range(world_size)) - set(answers))
            raise AssertionError(f"ranks {missing} gave no answer in {timeout_s} s") from None
        assert error is None, f"rank {rank} failed:\n{error}"
        answers[rank] = _unpack(value)
    return [answers[rank] for rank in range(world_size)]


def _pack(value: Any) -> bytes:
    # As bytes: tensors in a queue are shared memory, which ends with the rank that made it.
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False)


def _run_rank(function, args, rank, world_size, port, results) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        GLOO_SOCKET_IFNAME="lo",
        TORCH_CPP_LOG_LEVEL="ERROR",
    )
    try:
        dist.init_process_group(
            "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        value = function(*args)
        dist.barrier()
        results.put((rank, None, _pack(value)))
        dist.destroy_process_group()
    except BaseException:  # DCP raises BaseException; whatever it is, the test must see it
        results.put((rank, traceback.format_exc(), None))
        raise
