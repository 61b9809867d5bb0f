"""Means that are formed while training goes on, and how they are applied to what has moved on.

A round takes a snapshot of the rows, forms their means in the background, and lands later: each
value becomes mean + (current - snapshot). Where nothing changed since the snapshot that is exactly
the mean, so such rows end bitwise equal on all copies; the others keep what they learned meanwhile
and are averaged again at the next sync.

The background has a process group of its own, over the same ranks as the replica group, so that
its collectives never interleave with those of the training step: on CPU a thread calls them, on
CUDA they are queued on a side stream.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import torch
import torch.distributed as dist

from trainer.parallel.averaging import Block, ReplicaCollectives
from trainer.parallel.groups import MeshGroups


def apply_difference(
    current: torch.Tensor, snapshot: torch.Tensor, mean: torch.Tensor
) -> torch.Tensor:
    """`mean` plus what changed since `snapshot`: exactly `mean` where nothing did.

    All of one shape and dtype; computed in at least fp32. A second moment stays non-negative: an
    AdaGrad's only grows after its snapshot, and Adam's loses a thousandth in the one step between.
    """
    dtype = torch.promote_types(current.dtype, torch.float32)
    return (mean.to(dtype) + (current.to(dtype) - snapshot.to(dtype))).to(current.dtype)


def background_group(groups: MeshGroups) -> dist.ProcessGroup:
    """A second process group over this rank's replica group. Collective over all ranks."""
    formed = {
        ranks: dist.new_group(list(ranks), timeout=groups.timeout, sort_ranks=False)
        for ranks in groups.mesh.replica_groups
    }
    return next(group for ranks, group in formed.items() if groups.rank in ranks)


class Background:
    """Runs functions one after the other beside the training step, in the order submitted."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: queue.Queue[tuple[Callable[[], None], Future[None]] | None] = queue.Queue()
        if self._stream is None:
            # A daemon: a rank that fails must not wait at its exit for a peer that never answers.
            threading.Thread(target=self._work, name="sync", daemon=True).start()

    def submit(self, task: Callable[[], None]) -> Callable[[], None]:
        """Start `task`; the function returned waits for it and raises what it raised."""
        if self._stream is not None:
            return self._queue_on(self._stream, task)
        done: Future[None] = Future()
        self._tasks.put((task, done))
        return done.result

    @staticmethod
    def _queue_on(stream: torch.cuda.Stream, task: Callable[[], None]) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            task()
        return lambda: torch.cuda.current_stream(stream.device).wait_stream(stream)

    def _work(self) -> None:
        while item := self._tasks.get():
            task, done = item
            try:
                task()
            except BaseException as error:  # whatever it is, the rank that waits must see it
                done.set_exception(error)
            else:
                done.set_result(None)

    def close(self) -> None:
        """End the thread once all tasks are done."""
        self._tasks.put(None)


class Round:
    """Blocks on their way to their means.

    Takes memory for the snapshot and the means: twice the blocks' size. `replicas` is its own, as
    the thread counts costs there.
    """

    def __init__(
        self, blocks: Iterable[Block], replicas: ReplicaCollectives, background: Background
    ) -> None:
        self.replicas = replicas
        self._batches = list(replicas.batches(blocks))
        self._snapshots = [batch.pack() for batch in self._batches]
        self._means: list[torch.Tensor] = []
        self._wait = background.submit(self._form_means)

    @torch.no_grad()
    def _form_means(self) -> None:
        for batch, snapshot in zip(self._batches, self._snapshots, strict=True):
            self._means.append(self.replicas.mean_of(batch, snapshot))

    def wait(self) -> None:
        """Wait until the means are there; raises what forming them raised."""
        self._wait()

    def land(self) -> list[Block]:
        """Wait for the means and apply them; the blocks that it was about, in pieces."""
        self.wait()
        for batch, snapshot, mean in zip(self._batches, self._snapshots, self._means, strict=True):
            moved = apply_difference(batch.pack(), snapshot, mean)
            for (block, new), (_, agreed) in zip(
                batch.unpack(moved), batch.unpack(mean), strict=True
            ):
                block.write(new)
                block.agree(agreed)
        return [block for batch in self._batches for block in batch.blocks]
