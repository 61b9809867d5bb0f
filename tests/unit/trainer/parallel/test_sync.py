"""Syncs: means in a fixed order, packed rows, and means applied late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest.mock import Mock, PropertyMock, patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.small_model import pairwise_mean
from trainer.parallel import sync
from trainer.parallel.collectives import (
    Batch,
    Block,
    Buffers,
    Exchange,
    ReplicaCollectives,
    in_background,
    run_exchanges,
)
from trainer.parallel.row_store import FlatRows
from trainer.parallel.sync import DeferredSync, PendingSync, SyncThread, apply_difference

FLOATS = st.floats(-(2.0**90), 2.0**90, width=32, allow_subnormal=False)


@given(st.lists(FLOATS, min_size=1, max_size=20), st.sampled_from([1, 2, 4, 8, 16]))
def test_the_mean_of_equal_values_is_that_value_for_powers_of_two(
    values: list[float], num_copies: int
) -> None:
    value = torch.tensor(values)
    assert torch.equal(pairwise_mean(value.expand(num_copies, -1)), value)


def test_a_mean_depends_on_its_own_values_alone() -> None:
    parts = torch.randn(3, 100)
    apart = torch.cat([pairwise_mean(parts[:, i : i + 1]) for i in range(100)])
    assert torch.equal(pairwise_mean(parts), apart)
    # Half precision is summed in fp32: the sum, 80000, is beyond fp16.
    assert pairwise_mean(torch.tensor([[40000.0], [40000.0]]).half()).item() == 40000.0


@given(st.integers(1, 9), st.integers(1, 10**6), st.integers(0, 2**31))
def test_equal_weights_change_no_bit(num_copies: int, weight: int, seed: int) -> None:
    parts = torch.randn(num_copies, 50, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(pairwise_mean(parts, [weight] * num_copies), pairwise_mean(parts))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(0, 2**31))
def test_weighted_means_are_right_to_a_few_roundings(weights: list[int], seed: int) -> None:
    weights = [*weights, 1]
    parts = torch.randn(len(weights), 50, generator=torch.Generator().manual_seed(seed))
    share = torch.tensor(weights).double()[:, None] / sum(weights)
    exact, size = (parts * share).sum(dim=0), (parts.abs() * share).sum(dim=0)
    assert bool(((pairwise_mean(parts, weights) - exact).abs() <= size * 2.0**-24 * 8).all())


@given(st.lists(st.booleans(), max_size=6), st.integers(0, 2**31))
def test_what_weighs_nothing_leaves_no_trace(is_deaf: list[bool], seed: int) -> None:
    counts = torch.tensor([*is_deaf, True])
    parts = torch.randn(counts.numel(), 20, generator=torch.Generator().manual_seed(seed))
    parts[~counts] = torch.nan
    mean = pairwise_mean(parts, [3 * int(each) for each in counts])
    assert torch.equal(mean, pairwise_mean(parts[counts]))


def _blocks(seed: int, shapes: list[tuple[int, int, bool]]) -> list[Block]:
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for num_rows, width, is_sparse in shapes:
        tensor = torch.rand(num_rows, width, generator=generator)
        picked = torch.rand(num_rows, generator=generator) < 0.5
        blocks.append(Block(FlatRows(tensor), picked.nonzero().view(-1) if is_sparse else None))
    return blocks


SHAPES = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 5), st.booleans()), min_size=1, max_size=6
)


def _batches(blocks: list[Block], max_bytes: int, num_replicas: int) -> Iterator[Batch]:
    replicas = ReplicaCollectives([Mock(size=lambda: num_replicas)], torch.device("cpu"))
    replicas.chunk_bytes = max_bytes
    return replicas.batches(blocks)


@given(SHAPES, st.integers(0, 1000), st.integers(1, 4), st.integers(20, 400))
def test_rows_packed_in_batches_are_written_back_where_they_were(
    shapes: list[tuple[int, int, bool]], seed: int, multiple: int, max_bytes: int
) -> None:
    blocks = _blocks(seed, shapes)
    starts = [block.tensor.clone() for block in blocks]
    num_rows = 0
    for batch in _batches(blocks, max_bytes, multiple):
        packed = batch.pack(Buffers(torch.device("cpu")))
        assert packed.numel() % multiple == 0
        single_row = len(batch.blocks) == 1 and batch.blocks[0].num_rows == 1
        assert single_row or sum(b.numel for b in batch.blocks) * 4 <= max_bytes
        for block, part in batch.unpack(packed + 1):
            block.write(part)
            num_rows += block.num_rows
    assert num_rows == sum(block.num_rows for block in blocks)
    for block, start in zip(blocks, starts, strict=True):
        rows = slice(None) if block.rows is None else block.rows
        expected = start.clone()
        expected[rows] += 1
        assert torch.equal(block.tensor, expected)


def test_dtypes_and_wires_never_share_a_batch() -> None:
    base = torch.zeros(2, 4)
    blocks = [
        Block(FlatRows(torch.ones(2, 4))),
        Block(FlatRows(torch.ones(2, 4).half())),
        Block(FlatRows(torch.ones(2, 4)), None, base, torch.bfloat16),
        Block(FlatRows(torch.ones(3, 4))),
    ]
    found = list(_batches(blocks, 1000, 2))
    assert sorted(len(batch.blocks) for batch in found) == [1, 1, 2]


def test_many_small_tables_are_packed_in_time_proportional_to_their_number() -> None:
    blocks = [Block(FlatRows(torch.ones(1, 4))) for _ in range(300)]
    with patch.object(Block, "numel", new_callable=PropertyMock, return_value=4) as numel:
        (batch,) = _batches(blocks, 10**6, 1)
    assert len(batch.blocks) == 300
    assert numel.call_count <= 10 * 300


def test_the_base_of_a_split_block_is_split_with_it() -> None:
    tensor, base = torch.arange(40.0).view(10, 4), torch.arange(40.0).view(10, 4) / 2
    block = Block(FlatRows(tensor), torch.tensor([1, 4, 7]), base[[1, 4, 7]], torch.float16)
    for part in block.split(4):
        assert part.base is not None
        rows = torch.empty(part.numel)
        part.read_into(rows)
        assert torch.equal(part.base.view(-1), rows / 2)


PARAMETERS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


@given(st.lists(st.tuples(PARAMETERS, PARAMETERS), min_size=1))
def test_a_value_that_did_not_change_becomes_exactly_the_mean(
    values: list[tuple[float, float]],
) -> None:
    current, mean = torch.tensor(values).unbind(1)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        kept, mean_then = current.to(dtype), mean.clamp(-6e4, 6e4).to(dtype)
        kept = torch.where(kept.isfinite(), kept, 0)
        assert torch.equal(apply_difference(kept, kept.clone(), mean_then), mean_then)


@given(st.lists(st.tuples(*[st.floats(0, 1e6, width=32, allow_subnormal=False)] * 3), min_size=1))
def test_a_moment_never_becomes_negative(values: list[tuple[float, float, float]]) -> None:
    snapshot, growth, mean = torch.tensor(values).unbind(1)
    assert bool((apply_difference(snapshot + growth, snapshot, mean) >= 0).all())


def test_two_exchanges_are_under_way_and_go_on_in_turn() -> None:
    begun, ended = [], []

    def exchange(number: int, slot: int) -> Exchange[None]:
        assert slot == number % 2
        begun.append(number)
        yield
        assert len(begun) - len(ended) == 2 or number == 4
        yield
        ended.append(number)

    run_exchanges(range(5), exchange, num_at_once=2)
    assert begun == ended == [0, 1, 2, 3, 4]


def test_the_memory_of_a_sync_is_that_of_the_sync_before() -> None:
    tensor, buffers = torch.zeros(100, 4), Buffers(torch.device("cpu"))
    replicas = ReplicaCollectives([Mock(size=lambda: 1, rank=lambda: 0)], torch.device("cpu"))
    addresses = []
    for rows in (torch.arange(90), torch.arange(80)):
        pending = PendingSync([Block(FlatRows(tensor), rows)], replicas, buffers)
        with patch.object(replicas, "_levels", []):
            pending.form_means()
        addresses.append([mean.data_ptr() for mean in pending.means])
    assert addresses[0] == addresses[1]


class PairOfReplicas:
    """A replica group of two, of which this is number `rank`, and the other holds 3 x + 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self._rank

    def all_gather(self, out: torch.Tensor) -> None:
        parts = out.view(2, -1)
        torch.add(parts[self._rank] * 3, 1, out=parts[1 - self._rank])

    def all_to_all(self, out: torch.Tensor, parts: torch.Tensor) -> None:
        raise AssertionError("two replicas need one exchange")


@given(
    SHAPES,
    st.integers(0, 1000),
    st.integers(0, 1),
    st.integers(20, 400),
    st.sampled_from([torch.float32, torch.float16, torch.int64]),
)
def test_two_replicas_form_their_means_as_they_land(
    shapes: list[tuple[int, int, bool]], seed: int, rank: int, max_bytes: int, dtype: torch.dtype
) -> None:
    blocks = [
        Block(FlatRows((block.tensor * 100).to(dtype)), block.rows)
        for block in _blocks(seed, shapes)
    ]
    starts = [block.tensor.clone() for block in blocks]
    replicas = ReplicaCollectives([PairOfReplicas(rank)], torch.device("cpu"))
    replicas.chunk_bytes = max_bytes
    with patch.object(sync, "_CACHE_BYTES", max_bytes // 3):  # a batch lands in several pieces
        pending = PendingSync(blocks, replicas)
    for block in blocks:
        block.tensor[::2] += 1
    pending.form_means()
    pending.land()
    for block, before in zip(blocks, starts, strict=True):
        mean = first = [before, before * 3 + 1][rank]
        if dtype.is_floating_point:
            mean = ((first.float() + [before * 3 + 1, before][rank].float()) / 2).to(dtype)
        expected = before.clone()
        expected[::2] += 1
        rows = slice(None) if block.rows is None else block.rows
        expected[rows] = apply_difference(expected.clone(), before, mean)[rows]
        assert torch.equal(block.tensor, expected)


@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 20))
def test_each_step_forms_an_equal_portion_and_who_waits_the_rest(
    num_batches: int, num_steps: int, num_ticks: int
) -> None:
    blocks = [Block(FlatRows(torch.ones(1, 4))) for _ in range(num_batches)]
    replicas = ReplicaCollectives([], torch.device("cpu"))
    replicas.chunk_bytes = 16  # a batch for each block
    pending = PendingSync(blocks, replicas)
    background = Mock(submit=lambda form: form() or Mock())
    deferred = DeferredSync(pending, background, num_steps)
    for step in range(1, num_ticks):
        assert abs(pending.num_formed - num_batches * min(1, step / num_steps)) <= 1
        deferred.start()
    deferred.land()
    assert pending.num_formed == num_batches


def test_no_portion_is_formed_after_one_that_failed() -> None:
    pending, background = Mock(), SyncThread(torch.device("cpu"))
    pending.form_means.side_effect = [None, RuntimeError("a replica was lost"), None]
    deferred = DeferredSync(pending, background, num_steps=3)
    for _ in range(2):
        deferred.start()
    with pytest.raises(RuntimeError, match="a replica was lost"):
        deferred.land()
    assert pending.form_means.call_count == 2
    pending.land.assert_not_called()


@patch.object(torch.cuda, "set_device")
def test_a_thread_in_the_background_has_the_gpu_of_its_task(set_device: Mock) -> None:
    threads: list[str] = []
    set_device.side_effect = lambda _: threads.append(threading.current_thread().name)
    device = torch.device("cuda", 3)
    assert in_background(lambda: list(threads), "report", device).result() == ["report"]
    set_device.assert_called_once_with(device)
    for none in (None, torch.device("cpu")):
        assert in_background(lambda: len(threads), "report", none).result() == 1
