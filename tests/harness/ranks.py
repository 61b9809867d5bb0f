"""Ranks as real processes, which stay: `run_ranks` calls a function on each of them.

They form a gloo world on CPUs, or with NCCL one on this machine's GPUs, which several ranks share
where there are fewer: for function only. The ranks of a call serve the next call of a world of that
size and backend too. Each call starts with new process groups, the same environment and the same
random state. A call that fails, or that leaves a thread behind, ends its world, and the next call
starts a new one; so does `fresh=True`, for functions that kill, patch or re-initialise their rank.
All ranks end with pytest.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import multiprocessing
import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Literal

from tests.harness.processes import die_with_parent, rank_environment
from tests.harness.wait import scaled

if TYPE_CHECKING:
    import torch

FORK_SERVER = multiprocessing.get_context("forkserver")
"""Starts every process of ranks and coordinators: what they import, it has imported once."""
FORK_SERVER.set_forkserver_preload(
    [
        "pandas",  # pyarrow imports it at the first array
        "torchrec",
        "trainer.training.worker",
        "trainer.elastic.group_session",
        "trainer.elastic.coordinator.server",
        "tests.harness.elastic_ranks",
        "tests.harness.sessions",
    ]
)
_COLLECTIVE_TIMEOUT_S = 60.0
Backend = Literal["gloo", "nccl"]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120,
    fresh: bool = False,
    backend: Backend = "gloo",
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `function(*args)` on every rank of a world; results indexed by rank, tensors on the CPU.

    Function, arguments and results must pickle. Raises AssertionError with a rank's traceback when
    one fails, and when one is killed or gives no answer in `timeout_s` (scaled). With `fresh` the
    ranks are new, and end with the call. `environment` is added to theirs for this call.
    """
    arguments = (environment or {}, function, *args)
    if not fresh:
        return _world_of(world_size, backend).call(_call_in, arguments, scaled(timeout_s))
    world = _World(world_size, backend)
    try:
        return world.call(_call_in, arguments, scaled(timeout_s))
    finally:
        world.close()


def _call_in(environment: Mapping[str, str], function: Callable[..., Any], *args: Any) -> Any:
    os.environ.update(environment)
    return function(*args)


def run_in_turn(world_size: int, *calls: tuple[Any, ...]) -> list[list[Any]]:
    """Several (function, arguments...) one after the other; results indexed by call, then rank."""
    ranks = run_ranks(_in_turn, world_size, *calls)
    return [list(results) for results in zip(*ranks, strict=True)]


def _in_turn(*calls: tuple[Any, ...]) -> list[Any]:
    return [function(*arguments) for function, *arguments in calls]


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: Backend
    store_port: int
    store_prefix: str
    timeout_s: float


@dataclass(frozen=True)
class _Answer:
    """What a rank answers: a packed value, or the traceback of its failure.

    A rank that `stays` is as it was before the call.
    """

    value: bytes = b""
    error: str | None = None
    stays: bool = True


class _World:
    """Processes of `size` ranks, started when a call finds none.

    They have the same past: libraries keep state that makes a new rank differ from one that served
    before, and then collectives do not match.
    """

    def __init__(self, size: int, backend: Backend) -> None:
        self._size = size
        self._backend: Backend = backend
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._num_calls = 0
        self._store: Any = None

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        """Results of `function(*args)` by rank; raises AssertionError when one fails."""
        self._num_calls += 1
        prefix = f"call-{self._num_calls}"
        collective_s = scaled(_COLLECTIVE_TIMEOUT_S)
        place = (self._size, self._backend, self._store_port())
        call = _Call(function, args, *place, prefix, collective_s)
        packed = _pack(call)
        self._ranks = self._ranks or [_start(rank, self._backend) for rank in range(self._size)]
        stay = False
        try:
            for _, connection in self._ranks:
                connection.send_bytes(packed)
            answers = self._collect(timeout_s)
            stay = all(answer.stays for answer in answers)
            return [_unpack(answer.value) for answer in answers]
        finally:
            if not stay:
                self.close()

    def _collect(self, timeout_s: float) -> list[_Answer]:
        deadline = time.monotonic() + timeout_s
        pending = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        answers: dict[int, _Answer] = {}
        while pending:
            ready = wait(list(pending), deadline - time.monotonic())
            assert ready, f"ranks {sorted(pending.values())} gave no answer in {timeout_s} s"
            for connection in ready:
                rank = pending.pop(connection)
                answer = self._answer_of(rank, connection)
                assert answer.error is None, f"rank {rank} failed:\n{answer.error}"
                answers[rank] = answer
        return [answers[rank] for rank in range(self._size)]

    def _answer_of(self, rank: int, connection: Connection) -> _Answer:
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            process = self._ranks[rank][0]
            process.join(scaled(10))
            return _Answer(error=f"it ended with exit code {process.exitcode}")

    def _store_port(self) -> int:
        """Port of the store where the ranks of each call meet, which this process serves."""
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def close(self) -> None:
        for process, connection in self._ranks:
            process.kill()
            connection.close()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []


_NUM_WORLDS = 2
# The one that was called last at the end.
_worlds: dict[tuple[int, Backend], _World] = {}


def _world_of(size: int, backend: Backend) -> _World:
    """The world of a size; of others only the one that was called last stays, to spare memory."""
    key = (size, backend)
    _worlds[key] = _worlds.pop(key, None) or _World(*key)
    while len(_worlds) > _NUM_WORLDS:
        _worlds.pop(next(iter(_worlds))).close()
    return _worlds[key]


@atexit.register
def _end_worlds() -> None:
    while _worlds:
        _worlds.popitem()[1].close()


def context_of(backend: Backend) -> ForkServerContext | SpawnContext:
    """What starts ranks: CUDA does not survive a fork, and importing what uses it touches it."""
    return FORK_SERVER if backend == "gloo" else multiprocessing.get_context("spawn")


def _start(rank: int, backend: Backend) -> tuple[BaseProcess, Connection]:
    context = context_of(backend)
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _pack(value: Any) -> bytes:
    # As bytes: tensors in a queue are shared memory, which ends with the rank that made it.
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), weights_only=False, map_location="cpu")


# --- in the processes of ranks


def _serve(rank: int, connection: Connection) -> None:
    """Answer calls until pytest hangs up, or one fails."""
    import torch

    die_with_parent()
    torch.set_num_threads(1)
    start = _State.now()
    gc.freeze()  # or each collection would look at all that is imported
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, ConnectionError):
            return
        start.restore()
        answer = _answer(rank, data)
        connection.send(answer)
        if answer.error is not None:
            # Its peers wait for it, and pytest kills them. Nothing that it left is worth a wait.
            os._exit(1)


def _answer(rank: int, data: bytes) -> _Answer:
    import torch.distributed as dist

    try:
        call = _unpack(data)
        os.environ.update(rank_environment(rank, call.world_size, call.store_port))
        store = dist.TCPStore("127.0.0.1", call.store_port, is_master=False)
        device = claim_gpu(rank, call.world_size) if call.backend == "nccl" else None
        dist.init_process_group(
            call.backend,
            store=dist.PrefixStore(call.store_prefix, store),
            rank=rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.timeout_s),
            device_id=device,
        )
        dist.barrier()  # or one that leaves at once would break off a connection being made
        value = _pack(call.function(*call.args))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # DCP raises BaseException; whatever it is, the test must see it
        return _Answer(error=traceback.format_exc())
    # Autograd's threads of GPUs stay for good.
    return _Answer(value, stays=call.backend == "nccl" or threading.active_count() == 1)


def claim_gpu(rank: int, world_size: int) -> torch.device:
    """The GPU of this rank of all that are on this machine, from now on the current one."""
    import torch

    num_gpus = torch.cuda.device_count()
    if world_size > num_gpus:
        # NCCL refuses two ranks of one GPU, unless they seem to be on two hosts.
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        os.environ["LOCAL_WORLD_SIZE"] = str(num_gpus)  # TorchRec numbers GPUs by it
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class _State:
    """What a call may change in its process, as it was before the first one."""

    environment: Mapping[str, str]
    python: Any
    numpy: Any
    torch: Any
    handlers: dict[str, list[logging.Handler]]
    torchrec: dict[str, Any]

    @classmethod
    def now(cls) -> _State:
        import numpy
        import torch
        from torchrec.distributed import comm

        groups = {k: v for k, v in vars(comm).items() if k.isupper() and k.endswith(("_PG", "_2D"))}
        handlers = {name: list(logging.getLogger(name).handlers) for name in ("", "trainer")}
        return cls(
            dict(os.environ),
            random.getstate(),
            numpy.random.get_state(),
            torch.get_rng_state(),
            handlers,
            groups,
        )

    def restore(self) -> None:
        import numpy
        import torch
        from torchrec.distributed import comm

        from trainer import fault_injection

        gc.collect()
        os.environ.clear()
        os.environ.update(self.environment)
        random.setstate(self.python)
        numpy.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        fault_injection.arm(0, 0, 0, {})
        for name, handlers in self.handlers.items():
            logging.getLogger(name).handlers[:] = handlers
        # TorchRec keeps the groups of a host for good.
        for name, value in self.torchrec.items():
            setattr(comm, name, value)
