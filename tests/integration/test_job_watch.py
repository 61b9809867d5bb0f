"""A worker that stands still outside any collective is given up, and its peers get an error."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from tests.integration.session_cases import make_config
from trainer import failures
from trainer.attempt import Attempt, DriverContext
from trainer.elastic.job_watch import JobWatch
from trainer.elastic.member import Identity, Member
from trainer.elastic.protocol import Ledger
from trainer.events import HangFound, read_record
from trainer.outbox import EventWriter
from trainer.ray_worker import WorkerConfig


def attempt_of(config: WorkerConfig) -> Attempt:
    context = DriverContext("job-test", config.attempt_id, config.run_dir, None, 0)
    context.files.outbox_dir.mkdir(parents=True)
    return Attempt(context, config.spec, EventWriter(context.files.stream_path("driver")))


def hang(address: str, rank: int, stands_still: bool) -> None:
    """A worker's process: its heart beats; after three steps its main thread may stand still."""
    member = Member(Identity(0, 4, rank, 2, "127.0.0.2"), lambda: address, 1.0)
    member.on_refusal = lambda message: os._exit(70)
    member.join("initial", "run-4", Ledger(), donor="")
    for step in range(1, 1000):
        if step <= 3 or not stands_still:
            member.progress("train", step, 0.01)
        time.sleep(0.05)


def test_a_worker_that_hangs_is_found_and_ends_with_its_peers(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(small_movielens, tmp_path, "recovery.min_hang_s=1.5")
    attempt = attempt_of(config)
    watch = JobWatch(attempt, "127.0.0.1")
    context = multiprocessing.get_context("forkserver")
    workers = [
        context.Process(target=hang, args=(watch.address, rank, rank == 1), daemon=True)
        for rank in range(2)
    ]
    try:
        for worker in workers:
            worker.start()
        failure = _look_until_found(watch, 4)
        assert failure.reason == failures.HANG
        assert watch.processes() == {"127.0.0.2": {worker.pid for worker in workers}}
        assert watch.look(5) is None  # the next life has nothing to do with it
        for worker in workers:
            worker.join(10)
        assert [worker.exitcode for worker in workers] == [70, 70]
    finally:
        watch.close()
        for worker in workers:
            worker.kill()
    lines = attempt.context.files.stream_path("coordinator-0").read_bytes().splitlines()
    (found,) = [read_record(line, now=0.0) for line in lines]
    assert isinstance(found, HangFound)
    assert (found.rank, found.phase) == (1, "train")


def train(address: str, rank: int, num_steps: int) -> None:
    """A worker's process that takes steps and leaves."""
    member = Member(Identity(0, 0, rank, 2, "127.0.0.2"), lambda: address, 1.0)
    member.on_refusal = lambda message: os._exit(70)
    member.join("initial", "run-0", Ledger(), donor="")
    for step in range(num_steps):
        member.progress("train", step, 0.01)
        time.sleep(0.05)
    member.close()


def test_a_worker_that_has_ended_does_not_end_its_peers(
    small_movielens: Path, tmp_path: Path
) -> None:
    attempt = attempt_of(make_config(small_movielens, tmp_path))
    watch = JobWatch(attempt, "127.0.0.1")
    context = multiprocessing.get_context("forkserver")
    workers = [
        context.Process(target=train, args=(watch.address, rank, 10 + 40 * rank), daemon=True)
        for rank in range(2)
    ]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert [worker.exitcode for worker in workers] == [0, 0]
        assert watch.look(0) is None
    finally:
        watch.close()
        for worker in workers:
            worker.kill()


def _look_until_found(watch: JobWatch, run_index: int) -> failures.Failure:
    deadline = threading.Event()
    for _ in range(600):
        failure = watch.look(run_index)
        if failure:
            return failure
        deadline.wait(0.1)
    pytest.fail("the hang was not found in a minute")
