"""Gloo ranks on emulated hosts: calls a function on every rank and hands back what they return.

One *launcher* process per host imports what the ranks need, once; the ranks of a call are forked
from it and end with the call, so each call starts with fresh memory and within milliseconds.
Ranks are numbered host by host. Gloo binds to eth0, so ranks of one host talk through the host's
loopback and ranks of different hosts through the shaped link; rank 0's host holds the store.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tests.harness.emulated import INTERFACE, EmulatedHosts, EmulationError
from trainer.layout.layout import WorkerSite

_FIRST_PORT = 29500
_COLLECTIVE_TIMEOUT = timedelta(seconds=120)
# By its module's name: what `python -m` runs is called __main__, and would not pickle.
_LAUNCHER = f"from {__name__} import launch; launch()"
# Advice of libraries to their users, which every rank would repeat. Errors are still told.
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Call:
    """One call on all ranks, as a launcher gets it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    sites: tuple[WorkerSite, ...]
    world_size: int
    store_address: str
    store_port: int


@dataclass(frozen=True, order=True)
class Failure:
    """How a rank failed, and when: one failure brings others with it, so the first one counts."""

    time: float
    words: str


Answer = tuple[Failure | None, dict[int, Any]]


class HostRanks:
    """`ranks_per_host` ranks on each of `hosts`, with `environment` on top of our own.

    Launchers import `modules` ahead of the calls.
    """

    def __init__(
        self,
        hosts: EmulatedHosts,
        ranks_per_host: int,
        modules: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._hosts = hosts
        self._modules = modules
        self._environment = os.environ | _QUIET | dict(environment)
        self._next_port = _FIRST_PORT
        self._stack = ExitStack()
        self._launchers: list[Connection] = []
        num_hosts = len(hosts.addresses)
        self._sites = [
            tuple(
                WorkerSite(host * ranks_per_host + local, f"host-{host}", local)
                for local in range(ranks_per_host)
            )
            for host in range(num_hosts)
        ]
        self.world_size = num_hosts * ranks_per_host

    def __enter__(self) -> Self:
        """Start the launchers. To be entered in the main thread."""
        with self._stack:
            self._launchers = [self._launch(host) for host in range(len(self._sites))]
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = 600) -> list[Any]:
        """`function(site, *args)` on every rank of a fresh gloo world; results indexed by rank.

        `site` is the rank's WorkerSite; function, arguments and results must pickle. Raises
        `EmulationError` with the rank's traceback when one fails, or when a host gives no answer
        within `timeout_s`.
        """
        self._next_port += 1  # the last one may still linger in the kernel
        for launcher, sites in zip(self._launchers, self._sites, strict=True):
            call = Call(
                function=function,
                args=args,
                sites=sites,
                world_size=self.world_size,
                store_address=self._hosts.addresses[0],
                store_port=self._next_port,
            )
            with suppress(BrokenPipeError):  # a launcher that is gone is found out below
                launcher.send(call)
        answers = [self._answer_of(launcher, timeout_s) for launcher in self._launchers]
        failures = [failure for failure, _ in answers if failure]
        if failures:
            raise EmulationError(min(failures).words)
        results = {rank: result for _, found in answers for rank, result in found.items()}
        return [results[rank] for rank in range(self.world_size)]

    @staticmethod
    def _answer_of(launcher: Connection, timeout_s: float) -> Answer:
        if not launcher.poll(timeout_s):
            raise EmulationError(f"no answer from a host within {timeout_s} s")
        try:
            return launcher.recv()
        except (EOFError, ConnectionError):
            raise EmulationError("a launcher ended; what it wrote to stderr says why") from None

    def _launch(self, host: int) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._hosts.start(
                host,
                [sys.executable, "-c", _LAUNCHER, str(theirs.fileno()), *self._modules],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).parents[2],
                env=self._environment,
            )
        self._stack.callback(process.wait)  # it ends when its connection closes
        connection = Connection(ours.detach())
        self._stack.callback(connection.close)
        return connection


def _serve(launcher: Connection) -> None:
    """Answer calls until the benchmark hangs up."""
    while True:
        try:
            call = launcher.recv()
        except (EOFError, ConnectionError):
            return
        launcher.send(_run_ranks(call))


def _run_ranks(call: Call) -> Answer:
    """(failure of the first rank that failed or None, results by rank) of one host's ranks."""
    processes, pipes = [], {}
    for site in call.sites:
        receiver, sender = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_run_rank, args=(call, site, sender))
        process.start()
        sender.close()
        processes.append(process)
        pipes[receiver] = site.rank
    try:
        return _collect(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: dict[Connection, int]) -> Answer:
    results: dict[int, Any] = {}
    while pipes:
        for pipe in wait(list(pipes)):
            assert isinstance(pipe, Connection)
            rank = pipes.pop(pipe)
            try:
                failure, results[rank] = pipe.recv()
            except EOFError:
                failure = Failure(time.time(), f"rank {rank} was killed, or ended without a word")
            if failure:
                return failure, {}
    return None, results


def _run_rank(call: Call, site: WorkerSite, pipe: Connection) -> None:
    """One rank: form the world, call, answer."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(site.rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_RANK=str(site.local_rank),
        LOCAL_WORLD_SIZE=str(len(call.sites)),
        MASTER_ADDR=call.store_address,
        MASTER_PORT=str(call.store_port),
        GLOO_SOCKET_IFNAME=INTERFACE,
    )
    try:
        dist.init_process_group(
            "gloo", rank=site.rank, world_size=call.world_size, timeout=_COLLECTIVE_TIMEOUT
        )
        result = call.function(site, *call.args)
        dist.barrier()  # rank 0 holds the store, so it leaves with the others
        pipe.send((None, result))
    except BaseException:  # whatever it is, the caller must see it
        words = f"rank {site.rank} failed:\n{traceback.format_exc()}"
        pipe.send((Failure(time.time(), words), None))


def launch() -> None:
    """What a launcher runs: import what its ranks need, then answer calls."""
    logging.disable(logging.WARNING)
    descriptor, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    with Connection(int(descriptor)) as launcher:
        _serve(launcher)
