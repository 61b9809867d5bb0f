"""A worker of the domain `job`: its heartbeats to the driver, which looks for hangs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from trainer.elastic.member import Identity, Member
from trainer.elastic.policy import WATCH_SILENCE_S
from trainer.elastic.protocol import Ledger
from trainer.pulse import Pulse
from trainer.ray_worker import WorkerConfig

logger = logging.getLogger(__name__)

_EXIT_DROPPED = 70


@contextmanager
def watched(config: WorkerConfig, host: str | None) -> Iterator[Pulse]:
    """The pulse of this rank, heard by the driver where that listens."""
    if config.watch_address is None:
        yield Pulse()
        return
    address: str = config.watch_address
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    identity = Identity(0, config.run_index, rank, num_ranks, host or "localhost")
    member = Member(identity, lambda: address, WATCH_SILENCE_S / 6)
    member.on_refusal = end_process
    member.join("initial", f"run-{config.run_index}", Ledger(), donor="")
    try:
        yield Pulse(member)
    finally:
        member.on_refusal = None
        member.close()


def end_process(message: str) -> None:
    """End this worker at once, since it does not count any more; for `Member.on_refusal`."""
    # The main thread may hang for good; without this process its peers get an error at once.
    logger.error("this worker is given up: %s", message)
    sys.stderr.flush()
    os._exit(_EXIT_DROPPED)
