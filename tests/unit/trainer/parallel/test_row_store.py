"""Rows behind a cache are those of plain tensors, whatever moves in and out of it.

The cache is FBGEMM's in its layout and its rules (slots in sets, least recently used first, rows of
one forward pass never driven out by each other), but without its hash and its kernels.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    construct_cache_state,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.properties import examples
from tests.harness.small_model import NoHostReads
from trainer.elastic.peer_copy import LiveCopy, chunks_of, pieces_of
from trainer.parallel.collectives import Block, ReplicaCollectives
from trainer.parallel.model import TableShard
from trainer.parallel.row_store import CachedRows, FlatRows
from trainer.parallel.sync import PendingSync, blocks_of, whole
from trainer.parallel.touched_rows import RowBase, RowNumbers, Rows, TableBase, wires

CPU = torch.device("cpu")
# Rows, columns and place of each table; the second is looked up by two features.
TABLES = (
    (40, 4, EmbeddingLocation.DEVICE),
    (50, 8, EmbeddingLocation.MANAGED_CACHING),
    (30, 4, EmbeddingLocation.MANAGED_CACHING),
)
FEATURE_TABLES = [1, 0, 2, 1]
NUM_SETS, NUM_WAYS = 3, 4


class FakeKernel:
    """Tables of which some are cached, with the attributes and methods of FBGEMM's kernel."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        self.tables = [torch.randn(n, dim, generator=generator) for n, dim, _ in TABLES]
        rows, _, places = zip(*TABLES, strict=True)
        state = construct_cache_state(list(rows), list(places), FEATURE_TABLES)
        self.feature_table_map = FEATURE_TABLES
        self.weights_physical_placements = list(places)
        self.cache_hash_size_cumsum = torch.tensor(state.cache_hash_size_cumsum)
        self.total_cache_hash_size = state.total_cache_hash_size
        self._table_of = [FEATURE_TABLES[feature] for feature in state.cache_index_table_map]
        self._first = {t: self._table_of.index(t) for t in set(self._table_of)}
        self.lxu_cache_state = torch.full((NUM_SETS, NUM_WAYS), -1)
        self.lxu_cache_weights = torch.full((NUM_SETS * NUM_WAYS, 8), torch.nan)
        self._used = torch.zeros(NUM_SETS, NUM_WAYS)
        self._time = 0

    def _in_table(self, linear: int) -> torch.Tensor:
        table = self._table_of[linear]
        return self.tables[table][linear - self._first[table]]

    def _in_cache(self, slot: int, linear: int) -> torch.Tensor:
        return self.lxu_cache_weights[slot, : self._in_table(linear).numel()]

    def look_up(self) -> None:
        """A forward pass: the rows that it looks up move into the cache where there is room."""
        self._time += 1
        for linear in self._draw.choices(range(self.total_cache_hash_size), k=5):
            index = linear % NUM_SETS
            keys, used = self.lxu_cache_state[index], self._used[index]
            if not (keys == linear).any() and used.min() < self._time:
                way = int(used.argmin())
                slot = index * NUM_WAYS + way
                if keys[way] >= 0:
                    self._in_table(int(keys[way])).copy_(self._in_cache(slot, int(keys[way])))
                self.lxu_cache_weights[slot] = torch.nan
                self._in_cache(slot, linear).copy_(self._in_table(linear))
                # What is left behind must not count.
                self._in_table(linear).fill_(torch.nan)
                keys[way] = linear
            used[keys == linear] = self._time

    def flush(self) -> None:
        for slot, linear in enumerate(self.lxu_cache_state.view(-1).tolist()):
            if linear >= 0:
                self._in_table(linear).copy_(self._in_cache(slot, linear))

    def reset_cache_states(self) -> None:
        self.lxu_cache_state.fill_(-1)
        self._used.zero_()


@pytest.fixture(autouse=True)
def _lookups() -> Iterator[None]:
    with patch.object(torch.ops.fbgemm, "lxu_cache_lookup", _lookup):
        yield


def _lookup(rows: torch.Tensor, state: torch.Tensor, num_rows: int) -> torch.Tensor:
    """What FBGEMM's operator answers on CUDA."""
    # Not a read on the host, which is for the code that is tested to leave.
    assert ((rows.numpy() >= 0) & (rows.numpy() < num_rows)).all()
    found = rows[:, None] == state.view(-1)
    return torch.where(found.any(1), found.int().argmax(1), -1).int()


def _shards(kernel: Any, tables: list[torch.Tensor], draw: random.Random) -> list[TableShard]:
    """Shards of the tables, with moments."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    moments = [torch.rand(len(table), generator=generator) for table in tables]
    moments[1] = torch.rand(tables[1].shape, generator=generator)  # of each element
    return [
        TableShard(f"table_{i}", kernel, i, table, {"sum": moment}, 0, 0)
        for i, (table, moment) in enumerate(zip(tables, moments, strict=True))
    ]


class Pair:
    """The same shards twice: with tables that are cached, and in plain tensors."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, seed = draw, draw.randrange(2**31)
        self.kernel = FakeKernel(draw)
        plain: Any = FakeKernel(draw)
        plain.weights_physical_placements = [EmbeddingLocation.DEVICE] * len(TABLES)
        copies = [table.clone() for table in self.kernel.tables]
        self.cached = _shards(self.kernel, self.kernel.tables, random.Random(seed))
        self.flat = _shards(plain, copies, random.Random(seed))
        kinds = [[type(shard.rows[0]) for shard in each] for each in (self.cached, self.flat)]
        assert kinds == [[FlatRows, CachedRows, CachedRows], [FlatRows] * 3]

    def train(self) -> None:
        """Forward passes move rows, and some are changed where they are."""
        self.kernel.look_up()
        rows = self._rows(len(self.cached[1].weight))
        values = torch.rand(rows.numel(), 8)
        for shards in (self.cached, self.flat):
            shards[1].rows[0].write(values, rows)
            shards[1].rows[1].write(values.square(), rows)

    def numbers(self) -> torch.Tensor:
        return self._rows(sum(rows for rows, _, _ in TABLES)).sort().values

    def _rows(self, num_rows: int) -> torch.Tensor:
        return torch.tensor(self.draw.sample(range(num_rows), self.draw.randint(0, 20))).long()

    def check(self) -> None:
        """Every row is the same in both."""
        for cached, flat in zip(self.cached, self.flat, strict=True):
            for ours, theirs in zip(cached.rows, flat.rows, strict=True):
                assert torch.equal(ours.read(), theirs.tensor)
        self.kernel.flush()
        for cached, flat in zip(self.cached, self.flat, strict=True):
            assert torch.equal(cached.weight, flat.weight), "flushed tables are whole"


EVENTS = ("train", "read", "write", "read_part", "write_part", "flush")


@settings(max_examples=examples(300, fast=60))
@given(st.lists(st.sampled_from(EVENTS), max_size=30), st.integers(0, 2**31))
def test_cached_rows_are_those_of_a_tensor_whatever_moves(happenings: list[str], seed: int) -> None:
    pair = Pair(random.Random(seed))
    for happening in happenings:
        index = pair.draw.choice([1, 2])
        ours, theirs = (shards[index].rows[0] for shards in (pair.cached, pair.flat))
        num_rows = TABLES[index][0]
        if happening.endswith("part"):
            start, stop = sorted(pair.draw.sample(range(num_rows + 1), 2))
            ours, theirs = ours.part(slice(start, stop)), theirs.part(slice(start, stop))
        rows = None if happening.endswith("part") else pair._rows(num_rows)
        if happening == "train":
            pair.train()
        elif happening == "flush":
            pair.kernel.flush()
        elif happening.startswith("read"):
            out = pair.draw.choice([None, torch.empty_like(theirs.read(rows))])
            found = ours.read(rows, out=out)
            assert out is None or found is out
            assert torch.equal(found, theirs.read(rows))
        else:
            values = torch.rand(theirs.read(rows).shape)
            ours.write(values, rows)
            theirs.write(values, rows)
    pair.check()


@settings(max_examples=examples(100, fast=20))
@given(st.booleans(), st.integers(0, 2**31))
def test_rows_that_move_while_they_are_read_are_read_where_they_went(
    is_before: bool, seed: int
) -> None:
    pair = Pair(random.Random(seed))
    num_left = 10

    def lookup_beside_a_forward_pass(*args: Any) -> torch.Tensor:
        # One between two lookups: rows move before they are read, or after.
        nonlocal num_left
        num_left -= 1
        if is_before and num_left > 0:
            pair.kernel.look_up()
        slots = _lookup(*args)
        if not is_before and num_left > 0:
            pair.kernel.look_up()
        return slots

    pair.train()
    with patch.object(torch.ops.fbgemm, "lxu_cache_lookup", lookup_beside_a_forward_pass):
        for cached, flat in zip(pair.cached, pair.flat, strict=True):
            assert torch.equal(cached.rows[0].read(), flat.weight)


class Halving:
    """A group of one whose means are half of what it holds."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def all_gather(self, out: torch.Tensor) -> None:
        if out.is_floating_point():
            out.div_(2)

    def all_to_all(self, out: torch.Tensor, parts: torch.Tensor) -> None:
        out.copy_(parts)


def _collectives() -> ReplicaCollectives:
    replicas = ReplicaCollectives([Halving()], CPU)
    replicas.chunk_bytes = 300  # of several chunks a table
    return replicas


def _rows(shards: list[TableShard], at: torch.Tensor) -> Rows:
    numbers = RowNumbers(shards, CPU)
    return numbers.of_bits(torch.zeros(numbers.num_rows, dtype=torch.bool).index_fill(0, at, True))


def _sync_touched(pair: Pair) -> None:
    rows = _rows(pair.flat, pair.numbers())
    blocks = [blocks_of(RowNumbers(s, CPU), rows, list, Block) for s in (pair.cached, pair.flat)]
    for each in blocks:
        _collectives().average_in_place(each)


def _sync_full(pair: Pair) -> None:
    for shards in (pair.cached, pair.flat):
        _collectives().average_in_place(blocks_of(RowNumbers(shards, CPU), None, list, Block))


def _sync_overlapped(pair: Pair) -> None:
    """Snapshots are taken, training goes on, and the means land later."""
    for rows in (_rows(pair.flat, pair.numbers()), None):
        pending = [
            PendingSync(blocks_of(RowNumbers(shards, CPU), rows, list, Block), _collectives())
            for shards in (pair.cached, pair.flat)
        ]
        pair.train()
        for each in pending:
            each.form_means()
        pair.kernel.look_up()
        for each in pending:
            each.land()


def _sync_changes_of_rows(pair: Pair) -> None:
    """In bf16, against what rows held before they changed."""
    rows = pair.numbers()
    some = rows[::2].contiguous()
    bases = []
    for shards in (pair.cached, pair.flat):
        numbers = RowNumbers(shards, CPU)
        bases.append((numbers, RowBase(numbers, wires(shards, torch.bfloat16, True))))
        with NoHostReads():
            bases[-1][1].save(0, torch.cat([some, some.flip(0), some]))
    for shards in (pair.cached, pair.flat):
        for (weight, *_), local in RowNumbers(shards, CPU).by_run(_rows(shards, some)):
            with NoHostReads():
                weight.write(torch.ones(local.numel(), weight.width), local)
    pair.kernel.look_up()
    for numbers, base in bases:
        touched = _rows(numbers.shards, rows)
        _collectives().average_in_place(blocks_of(numbers, touched, list, base.block))


def _sync_changes_of_tables(pair: Pair) -> None:
    bases = [TableBase(wires(s, torch.bfloat16, True)) for s in (pair.cached, pair.flat)]
    pair.train()
    for shards, base in zip((pair.cached, pair.flat), bases, strict=True):
        numbers = RowNumbers(shards, CPU)
        _collectives().average_in_place(blocks_of(numbers, None, list, base.block))
        base.renew()


def _copy_from_a_peer(pair: Pair) -> None:
    """A donor's rows travel chunk by chunk; some of the joiner's are newer and stay."""
    donor = Pair(random.Random(pair.draw.random()))
    donor.train()
    fresh = pair.numbers()
    for ours, theirs in ((pair.cached, donor.cached), (pair.flat, donor.flat)):
        numbers = RowNumbers(ours, CPU)
        mine, served = pieces_of(numbers), pieces_of(RowNumbers(theirs, CPU))
        copy = LiveCopy(mine, numbers.num_rows, max_bytes=100)
        with copy.applying(fresh):
            pass
        assert chunks_of(mine, 100) == chunks_of(served, 100)
        while chunk := copy.next_chunk(0):
            copy.put(0, chunk, served[chunk.piece].rows(chunk).read().clone())
            donor.kernel.look_up()
            pair.kernel.look_up()


def _write_whole_tables(pair: Pair) -> None:
    """As a load does, or a copy that was broadcast anew."""
    pair.kernel.flush()
    for cached, flat in zip(pair.cached, pair.flat, strict=True):
        for tensor in (cached.weight, flat.weight):
            tensor[::3] = 7.0
    pair.kernel.reset_cache_states()


def _decay(pair: Pair) -> None:
    """As `Optimizers` scales all rows."""
    scaled = [shard.weight for shard in pair.cached] + [pair.kernel.lxu_cache_weights]
    torch._foreach_mul_(scaled, 0.9)
    torch._foreach_mul_([shard.weight for shard in pair.flat], 0.9)


ACTIONS = (
    _sync_touched,
    _sync_full,
    _sync_overlapped,
    _sync_changes_of_rows,
    _sync_changes_of_tables,
    _copy_from_a_peer,
    _write_whole_tables,
    _decay,
)


@settings(max_examples=examples(40, fast=8), deadline=None)
@given(st.permutations(ACTIONS), st.integers(0, 2**31))
def test_whatever_works_on_rows_leaves_cached_ones_as_plain_ones(
    actions: list[Callable[[Pair], None]], seed: int
) -> None:
    pair = Pair(random.Random(seed))
    for act in actions:
        pair.train()
        act(pair)
        pair.kernel.look_up()
    pair.check()


def test_dense_tensors_travel_whole() -> None:
    tensors = [torch.ones(3, 4), torch.full((5,), 2.0)]
    _collectives().average_in_place(whole(tensors))
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.5], [1.0]]


@pytest.mark.parametrize("values", [torch.ones(2, 4), torch.ones(1, 4).half(), torch.ones(2, 2)])
def test_rows_are_written_only_by_as_many_values_of_their_width_and_precision(
    values: torch.Tensor,
) -> None:
    rows = FlatRows(torch.zeros(5, 4, dtype=torch.float16))
    with pytest.raises(AssertionError, match="item"):
        rows.write(values, torch.tensor([1, 3]))
    assert not rows.tensor.any()
