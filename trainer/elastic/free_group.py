"""Process groups across worlds: one rank of each group, formed anew for every generation.

Each group is a torch.distributed world of its own, so a replica group over several of them is
known to none. It is a bare backend (gloo, on GPUs NCCL) whose ranks find each other in the
coordinator's store, under keys that no other generation uses.

Whoever cannot go on drops the group at once, which closes its sockets: gloo tells nobody that a
rank has given up, and the others would wait for it until the time-out. What gloo is still waiting
for itself cannot be stopped, only left behind, so an operation that is called off ends by itself
later, in memory that nobody uses any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo as Gloo
    from torch.distributed import ProcessGroupNCCL as Nccl  # not in builds of torch for CPUs

_POLL = timedelta(milliseconds=20)
_MEET_POLL_S = 0.001
_DEVICE_POLL_S = 0.0002

IsAborted = Callable[[], bool]


class ExchangeError(RuntimeError):
    """A group could not be formed, or one of its operations failed: a peer is gone, or slow."""


@dataclass(frozen=True)
class Seat:
    """The place of this rank, `index` of `size`, among those with its shard in a generation."""

    generation: int
    shard_index: int
    index: int
    size: int

    @property
    def prefix(self) -> str:
        """What the keys of this replica group begin with in the store."""
        return f"gen{self.generation}/s{self.shard_index}"


class FreeGroup:
    """A replica group outside torch.distributed's world (a `ReplicaGroup`).

    Collective over the group; every method may raise `ExchangeError`, after which the group is
    good for nothing but `drop`. One operation takes at most `timeout_s`, and less when
    `is_aborted` becomes true.
    """

    def __init__(
        self,
        seat: Seat,
        store: dist.Store,
        device: torch.device,
        timeout_s: float,
        is_aborted: IsAborted,
    ) -> None:
        self.seat = seat
        self._device = device
        self._timeout_s = timeout_s
        self._is_aborted = is_aborted
        self._is_stuck = False  # an operation goes on that nobody waits for any more
        own_keys = dist.PrefixStore(seat.prefix, store)
        self._meet(own_keys)
        self._backend: Gloo | Nccl | None = self._form(own_keys)

    def _meet(self, store: dist.Store) -> None:
        """Wait until all are here. Forming the backend waits too, but cannot be called off."""
        here = [f"here{index}" for index in range(self.seat.size)]
        deadline = time.monotonic() + self._timeout_s
        try:
            store.set(here[self.seat.index], "")
            while not store.check(here):
                self._check(deadline, "meet")
                time.sleep(_MEET_POLL_S)
        except RuntimeError as error:
            raise ExchangeError(f"the replica group could not meet: {_first_line(error)}") from None

    def _form(self, store: dist.Store) -> Gloo | Nccl:
        timeout = timedelta(seconds=self._timeout_s)
        try:
            if self._device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                return dist.ProcessGroupNCCL(store, self.seat.index, self.seat.size, options)
            return dist.ProcessGroupGloo(store, self.seat.index, self.seat.size, timeout)
        except RuntimeError as error:
            raise ExchangeError(f"no replica group was formed: {_first_line(error)}") from None

    def size(self) -> int:
        return self.seat.size

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        backend = self._backend
        assert backend is not None, "a dropped group exchanges nothing"
        self._complete(lambda: backend._allgather_base(out, part))  # type: ignore[union-attr]

    def all_to_all(self, out: torch.Tensor, parts: torch.Tensor) -> None:
        backend = self._backend
        assert backend is not None, "a dropped group exchanges nothing"
        self._complete(lambda: backend.alltoall_base(out, parts, [], []))  # type: ignore[union-attr]

    def _complete(self, start: Callable[[], dist.Work]) -> None:
        # The operation holds the sockets open: no frame of the error's traceback may hold it.
        if problem := self._problem_of(start):
            raise ExchangeError(f"an exchange between the copies failed: {problem}")

    def _problem_of(self, start: Callable[[], dist.Work]) -> str:
        """Run an operation to its end; what went wrong, empty if nothing did."""
        deadline = time.monotonic() + self._timeout_s
        try:
            work = start()
            while not self._is_over(work):
                self._is_stuck = True
                self._check(deadline, "answer")
            self._is_stuck = False
            work.wait()
        except RuntimeError as error:
            return _first_line(error)
        return ""

    def _is_over(self, work: dist.Work) -> bool:
        """Whether `work` has ended in whatever way; waits a little for it."""
        if self._device.type == "cuda":
            time.sleep(0 if work.is_completed() else _DEVICE_POLL_S)
        else:
            # Not over yet, or over with an error, which the last wait raises again.
            with suppress(RuntimeError):
                work.wait(_POLL)
        return work.is_completed()

    def _check(self, deadline: float, verb: str) -> None:
        if self._is_aborted():
            raise ExchangeError("the round was given up, since a group was lost or is too slow")
        if time.monotonic() > deadline:
            raise ExchangeError(
                f"some rank did not {verb} within {self._timeout_s:g} s "
                "(recovery.exchange_timeout_s)"
            )

    def drop(self) -> None:
        """Close the sockets, so that nobody waits for this rank. Harmless when repeated."""
        held = [self._backend]
        self._backend = None
        if held[0] is not None:
            held[0].abort()
        if self._is_stuck:
            # Its end waits for the operation's, which the rank must not.
            threading.Thread(target=held.clear, name="dropped group", daemon=True).start()
        else:
            held.clear()


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0]
