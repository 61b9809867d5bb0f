"""The ranks that tests run on: every call starts alike, and what breaks a world ends with it."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import run_ranks


def use_up() -> tuple[int, str | None, float, float, int]:
    """This rank's process, and what a call before may have left; leaves that itself."""
    found = os.environ.get("LEFT_BEHIND"), random.random(), torch.rand(()).item()
    os.environ["LEFT_BEHIND"] = "yes"
    dist.new_group([0, 1])
    return os.getpid(), *found, dist.distributed_c10d._world.group_count


def die_on_rank_1() -> None:
    """Rank 0 waits for one that is gone."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_a_thread() -> int:
    """A thread that nobody ends."""
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def test_calls_find_the_same_ranks_as_they_were_at_the_start() -> None:
    first, second = run_ranks(use_up, 2), run_ranks(use_up, 2)
    assert first == second
    assert first[0][1] is None
    assert [rank[0] for rank in run_ranks(use_up, 2, fresh=True)] != [rank[0] for rank in first]
    assert run_ranks(use_up, 2) == first


def test_a_killed_rank_is_told_and_the_next_call_has_a_new_world() -> None:
    before = run_ranks(os.getpid, 2)
    with pytest.raises(AssertionError, match=r"rank \d failed"):
        run_ranks(die_on_rank_1, 2)
    assert not set(run_ranks(os.getpid, 2)) & set(before)


def test_a_thread_that_is_left_behind_ends_the_world() -> None:
    before = run_ranks(leave_a_thread, 2)
    assert not set(run_ranks(os.getpid, 2)) & set(before)
