"""Batches made in a process of their own: the same ones, and what becomes of faults and ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.harness.wait import scaled
from trainer.coordination.messages import Lease
from trainer.data import process as reading
from trainer.data.batches import Batch, LeaseBatches, TrainBatches, ValidationBatches
from trainer.data.process import ReaderProcess
from trainer.data.reader import open_source
from trainer.errors import StorageError
from trainer.failures import EndReason, reason_of

LEFT_BEHIND = """
import os
from trainer.data.process import ReaderProcess
process = ReaderProcess()
process.await_start()
is_imported = process.make(eval, "'trainer.data.batches' in __import__('sys').modules")
print(process.call(is_imported, "__bool__"), flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def process() -> Iterator[ReaderProcess]:
    with closing(ReaderProcess()) as process:
        yield process


def assert_same(found: Batch, wanted: Batch) -> None:
    assert found.quarantined == wanted.quarantined
    for name, value in wanted._parts().items():
        part = getattr(found, name)
        if isinstance(value, KeyedJaggedTensor):
            assert part.keys() == value.keys()
            assert part.length_per_key() == value.length_per_key()
            assert torch.equal(part.values(), value.values())
            part, value = part.lengths(), value.lengths()
        assert torch.equal(part, value)


SEQUENCE = {"name": "liked", "type": "sequence", "column": "history_liked", "table": "liked"}
NO_POOLED_IDS = {
    "features": [SEQUENCE, {"name": "year", "type": "dense"}],
    "embedding_tables": [{"name": "liked", "embedding_dim": 4, "num_embeddings": 5000}],
}


@pytest.mark.parametrize("document", [{}, NO_POOLED_IDS], ids=["all", "no pooled ids"])
def test_batches_are_those_that_are_made_here(make_spec, train, process, document) -> None:
    spec = make_spec(batch_size=100, training={"epochs": 2}, **document)
    with (
        TrainBatches(train, spec, 1, 2) as here,
        TrainBatches(train, spec, 1, 2, process=process) as there,
    ):
        for index, ((batch, step), (made, its_step)) in enumerate(zip(here, there, strict=True)):
            assert (its_step.epoch, its_step.number) == (step.epoch, step.number)
            assert_same(made, batch)
            if index == 1:  # while others of another reader are under way
                with (
                    ValidationBatches(train, spec, 0, 1) as held_out,
                    ValidationBatches(train, spec, 0, 1, process=process) as its_held_out,
                ):
                    for (batch, _), (made, _) in zip(held_out, its_held_out, strict=True):
                        assert_same(made, batch)


def test_a_fault_there_is_raised_here_and_others_go_on(
    make_spec, prepared, train, process, tmp_path
) -> None:
    spec = make_spec(batch_size=10)
    shutil.copytree(prepared / "train", tmp_path / "gone")
    source = open_source(spec, tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    with (
        TrainBatches(source, spec, 0, 1, process=process) as batches,
        pytest.raises(StorageError, match=r"\.parquet.*mounted on this host"),
    ):
        next(batches)
    with pytest.raises(RuntimeError, match="MemoryError: Unable to allocate") as too_large:
        process.make(np.ones, 10**15)
    assert reason_of(too_large.value) == EndReason.HOST_OOM
    with LeaseBatches(train, spec, 0, 1, process=process) as leased:
        leased.submit(Lease(id=0, epoch=0, spans=[(0, 10)]))
        assert next(leased)[0].weight.sum() == 10


def test_answers_are_received_with_the_gpu_of_who_started_the_process(process, monkeypatch) -> None:
    happened: list[object] = []

    @contextmanager
    def with_gpu(index: int) -> Iterator[None]:
        happened.append(index)
        yield
        happened.append("left")

    receive = reading._receive
    monkeypatch.setattr(reading, "_receive", lambda *a: happened.append("received") or receive(*a))
    monkeypatch.setattr(torch.cuda, "device", with_gpu)
    monkeypatch.setattr(process, "_gpu", 3)
    process.make(list)
    assert happened == [3, "received", "left"]


def test_a_worker_and_its_reader_load_torch_but_neither_ray_nor_what_plots(process) -> None:
    watched = ["torch", "torchrec", "ray", "matplotlib", "rfc3987_syntax"]
    loaded = f"[name for name in {watched} if name in __import__('sys').modules]"
    found = process.make(eval, f"__import__('trainer.training.worker') and {loaded}")
    assert process.call(found, "copy") == ["torch", "torchrec"]


def test_its_end_is_told_and_it_does_not_outlive_who_started_it(make_spec, train, process) -> None:
    ended = ReaderProcess()
    ended._process.kill()
    with (
        closing(ended),
        TrainBatches(train, make_spec(batch_size=10), 0, 1, process=ended) as batches,
        pytest.raises(MemoryError, match=r"ended \(exit code -9, .*for memory\?") as killed,
    ):
        next(batches)
    assert reason_of(killed.value) == EndReason.HOST_OOM
    # What cannot be sent ends it; no test uses it after this one.
    with pytest.raises(RuntimeError, match=r"code (1|not known yet), .*log") as broken:
        process.call(process.make(eval, "[lambda: 0]"), "pop")
    assert reason_of(broken.value) == EndReason.WORKERS_LOST
    # Both hold the pipe that is read to its end.
    left = [sys.executable, "-c", LEFT_BEHIND]
    found = subprocess.run(left, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert (found.stdout, found.stderr, found.returncode) == ("True\n", "", -9)
