"""Pipelined steps do exactly what steps one after the other do."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.harness.ranks import run_in_turn
from tests.harness.sessions import make_config, open_session, snapshot, told
from tests.integration.ranks.test_dynamic_ids import DYNAMIC
from trainer.coordination.messages import Lease
from trainer.data.batches import Batch, LeaseBatches
from trainer.parallel.sharding import ids_by_table
from trainer.protocol.events import Metrics
from trainer.protocol.worker_config import WorkerConfig
from trainer.training import pipeline
from trainer.training.pipeline import _sharded_modules
from trainer.training.worker import train

# Validations and saves fall between steps.
BETWEEN = (
    "training.max_steps=9",
    "training.validate_every_steps=4",
    "checkpoint.every_steps=8",
    "training.accumulate_steps=2",
    "training.report_every_steps=2",
)
CASES = {
    "1D": (1, "parallelism.workers=1", "parallelism.shard_group_size=1", "parallelism.sync=null"),
    "2D, tables by rows and by columns, dense part in bf16": (
        4,
        "embedding_tables[0].constraints={sharding_types: [row_wise]}",
        "embedding_tables[1].constraints={sharding_types: [column_wise]}",
        "parallelism.dense=at_sync",
        "parallelism.sync={every_steps: 4, mode: touched_rows, overlap: true}",
        "training.dense_precision=bf16",
    ),
    "dynamic ids and a sequence": (
        2,
        *("parallelism.workers=2", "parallelism.shard_group_size=2", *DYNAMIC),
        "training.validate_every_steps=4",
    ),
}


def train_session(config: WorkerConfig, is_ahead: bool | None) -> dict[str, Any]:
    """Train to the end, pipelined where it can be, or not at all (False)."""
    session = open_session(config)
    session.pipeline.is_ahead = is_ahead
    train(session)
    ids = {table: each.state_dict() for table, each in ids_by_table(session.model)}
    return {"is_ahead": session.pipeline.is_ahead, "ids": ids, **snapshot(session)}


@pytest.mark.parametrize("name", CASES)
def test_state_and_metrics_are_bitwise_those_of_a_plain_loop(
    small_movielens: Path, tmp_path: Path, name: str
) -> None:
    num_ranks, *overrides = CASES[name]
    configs = [
        make_config(small_movielens, tmp_path / run, *BETWEEN, *overrides)
        for run in ("ahead", "plain")
    ]
    calls = zip([train_session] * 2, configs, [None, False], strict=True)
    for ahead, plain in zip(*run_in_turn(num_ranks, *calls), strict=True):
        assert (ahead.pop("is_ahead"), plain.pop("is_ahead")) == (True, False)
        torch.testing.assert_close(ahead, plain, atol=0, rtol=0)
    ahead, plain = map(_learned, configs)
    assert ahead == plain != {}


def _learned(config: WorkerConfig) -> dict[tuple[int, str], float]:
    """Metrics of training and of validations, by step and name."""
    return {
        (report.step, name): value
        for report in told(config.run_dir, Metrics)
        for name, value in report.values.items()
        if name.startswith(("train/", "validation/"))
    }


def train_leases(config: WorkerConfig, is_ahead: bool | None) -> dict[str, Any]:
    """Train two of three leases: one is taken back as that before it ends."""
    session = open_session(config)
    session.pipeline.is_ahead = is_ahead
    num_rows = 3 * session.shape.rows_per_step
    trained, num_sent = [], 0
    with LeaseBatches(
        session.train_source, config.spec, session.rank, session.world_size
    ) as loader:
        stream = session.pipeline.over(loader)

        def submit(number: int) -> None:
            rows = (number * num_rows, (number + 1) * num_rows)
            loader.submit(Lease(id=number, epoch=0, spans=[rows]))

        submit(0)
        submit(1)
        for batch, step in stream:
            trained.append(step.lease.id)
            session.run_step(batch, len(trained), is_dense_step=True)
            if trained == [0, 0, 0]:
                num_sent += len(stream._ahead.exchanges or [])
                stream.take_back(lambda ahead: ahead.lease.id == 1)
                loader.forget({1})
                assert next(stream, None) is None, "nothing is leased"
                submit(2)
    return {"trained": trained, "num_sent": num_sent, **snapshot(session)}


def test_a_batch_that_is_taken_back_on_its_way_leaves_no_trace(
    small_movielens: Path, tmp_path: Path
) -> None:
    size = ("parallelism.workers=2", "parallelism.shard_group_size=2", "parallelism.sync=null")
    config = make_config(small_movielens, tmp_path, *size)
    calls = [(train_leases, config, is_ahead) for is_ahead in (None, False)]
    for ahead, plain in zip(*run_in_turn(2, *calls), strict=True):
        assert (ahead.pop("num_sent"), plain.pop("num_sent")) == (1, 0)
        assert ahead["trained"] == [0, 0, 0, 2, 2, 2]
        torch.testing.assert_close(ahead, plain, atol=0, rtol=0)


def train_recorded(config: WorkerConfig) -> list[tuple[str, int]]:
    """What happens to each batch, by number, where a stream of its own copies them."""
    session = open_session(config)
    batches: list[Batch] = []  # in the order of their copies
    log: list[tuple[str, int]] = []

    def note(what: str, batch: Batch) -> None:
        number = next(n for n, each in enumerate(batches) if each is batch)
        log.append((what, number))

    def copy(batch: Batch, *args: Any, **named: Any) -> Batch:
        batches.append(batch)
        note("copy", batch)
        return batch

    begin, forward = session.loss_weighting.begin, session.pipeline.forward
    with (
        patch.object(pipeline, "_on", lambda stream: nullcontext()),
        patch.object(pipeline, "_hand_over", lambda batch, *streams: note("wait", batch)),
        patch.object(torch.cuda, "current_stream", lambda: "main"),
        patch.object(session.pipeline, "_copy_stream", "copy"),
        patch.object(Batch, "to", copy),
        patch.object(session.loss_weighting, "begin", lambda b: (note("use", b), begin(b))),
        patch.object(session.pipeline, "forward", lambda b: (note("use", b), forward(b))[1]),
    ):
        train(session)
    return log


def test_a_batch_is_used_after_its_copy_which_is_awaited_once(
    small_movielens: Path, tmp_path: Path
) -> None:
    size = ("parallelism.workers=1", "parallelism.shard_group_size=1", "parallelism.sync=null")
    # A validation comes between the steps, with a stream of its own.
    steps = ("training.max_steps=4", "training.validate_every_steps=2")
    config = make_config(small_movielens, tmp_path, *size, *steps)
    ((log,),) = run_in_turn(1, (train_recorded, config))
    uses = ["use", "use"]  # its weights, then all of it, and only the latter in a validation
    for number in range(sum(what == "copy" for what, _ in log)):
        found = [what for what, of in log if of == number]
        assert found[:2] in (["copy"], ["copy", "wait"]) and found[2:] in ([], uses[1:], uses)
    assert sum(what == "wait" for what, _ in log) > 4, "steps and validations"
    assert log[:3] == [("copy", 0), ("wait", 0), ("copy", 1)], "the next copy is not awaited"


def doubled(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same ids in tensors of their own."""
    return KeyedJaggedTensor(ids.keys(), ids.values().clone(), lengths=ids.lengths())


def train_rewritten(config: WorkerConfig, from_step: int) -> tuple[bool | None, str]:
    """Whether a job whose network rewrites its ids is pipelined, and how it fails."""
    session = open_session(config)
    steps = count()

    def rewrite(_network: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        dense, sparse, sequences = args
        return dense, doubled(sparse) if next(steps) >= from_step else sparse, sequences

    session.model.module.network.register_forward_pre_hook(rewrite)
    try:
        train(session)
    except ValueError as error:
        return session.pipeline.is_ahead, str(error)
    return session.pipeline.is_ahead, ""


def test_a_model_that_rewrites_its_ids_trains_in_plain_steps_if_it_always_does(
    small_movielens: Path, tmp_path: Path
) -> None:
    size = ("parallelism.workers=1", "parallelism.shard_group_size=1", "parallelism.sync=null")
    calls = [
        (
            train_rewritten,
            make_config(small_movielens, tmp_path / f"{step}", *size, "training.max_steps=6"),
            step,
        )
        for step in (0, 3)
    ]
    ((always,), (later,)) = run_in_turn(1, *calls)
    assert always == (False, "")
    assert later[0] and "other ids than in the first step" in later[1]


def train_called_twice(config: WorkerConfig, has_caches: bool) -> str:
    """How a job fails whose network looks its ids up twice."""
    session = open_session(config)
    network = session.model.module.network
    (collection,) = _sharded_modules(session.model.module)
    network.register_forward_pre_hook(lambda _, args: collection(args[1]) and None)
    # By the plan: this rank itself holds no cache.
    kernels = {"movies": ("fused_uvm_caching", 0.2 if has_caches else 1.0)}
    with patch.object(pipeline, "kernels_of", lambda _: kernels):
        try:
            train(session)
        except ValueError as error:
            return str(error)
    return ""


def test_cached_tables_are_looked_up_once_a_step(small_movielens: Path, tmp_path: Path) -> None:
    # FBGEMM's second lookup moves rows of the first, whose gradients would go to others.
    size = ("parallelism.workers=1", "parallelism.shard_group_size=1", "parallelism.sync=null")
    calls = [
        (
            train_called_twice,
            make_config(small_movielens, tmp_path / f"{cached}", *size, "training.max_steps=2"),
            cached,
        )
        for cached in (False, True)
    ]
    ((flat,), (cached,)) = run_in_turn(1, *calls)
    assert flat == ""
    assert "more than once in a step" in cached
