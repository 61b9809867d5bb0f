"""Joining by peer copy: over a loopback connection, and into groups that train on meanwhile."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from tests.harness.sessions import TOKEN
from tests.harness.small_model import fused_kernel, shards_of
from tests.harness.wait import scaled, wait_for
from tests.integration.elastic.group_sync_cases import (
    HOST,
    Groups,
    Life,
    assert_all_equal,
    run_groups,
)
from tests.integration.ranks.sync_cases import Table
from trainer.coordination.client import Identity
from trainer.coordination.messages import Round, RoundMember
from trainer.elastic.peer_copy import (
    Chunk,
    DonorServer,
    Joiner,
    LiveCopy,
    PeerCopyError,
    pieces_of,
)
from trainer.parallel.touched_rows import RowNumbers, Rows
from trainer.protocol.events import GroupState

CPU = torch.device("cpu")
DEADLINE_S = scaled(20)


def _numbers(num_rows: int = 50, seed: int = 0) -> RowNumbers:
    """One table with random weights and moments."""
    torch.manual_seed(seed)
    kernel = fused_kernel([num_rows], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    (shard,) = shards_of(kernel)
    shard.states["sum"].copy_(torch.rand(num_rows))
    return RowNumbers([shard], CPU)


def _identity(group: int) -> Identity:
    return Identity(group, 0, 0, 1, HOST)


@pytest.fixture
def servers() -> Iterator[list[DonorServer]]:
    """Closed at the end."""
    opened: list[DonorServer] = []
    yield opened
    for server in opened:
        server.close()


def _serve(servers: list[DonorServer], numbers: RowNumbers, group: int = 0) -> str:
    servers.append(DonorServer(_identity(group), pieces_of(numbers), TOKEN))
    return servers[-1].address


def _joiner(numbers: RowNumbers, group: int = 1, token: bytes = TOKEN) -> Joiner:
    return Joiner(_identity(group), numbers, scaled(5), token)


def _round(commit: int, donor: str, standings: dict[int, GroupState]) -> Round:
    members = tuple(
        RoundMember(group=group, incarnation=0, standing=standing)
        for group, standing in standings.items()
    )
    donors = (donor,) if donor else ()
    return Round(round=commit, generation=1, members=members, commit=commit, donors=donors)


def _hear(joiner: Joiner) -> None:
    """A commit without any row."""
    joiner.vote()
    nothing = Rows(torch.empty(0, dtype=torch.int64), [0, 0])
    with joiner.applying(nothing, nothing, is_idle=False):
        pass


def _copy_all(joiner: Joiner, donor: str) -> None:
    joiner.attend(_round(1, donor, {0: "current", 1: "listening"}))
    _hear(joiner)
    _wait_for(joiner)


def _wait_for(joiner: Joiner) -> None:
    wait_for(lambda: joiner.is_complete, "a complete copy", 20, poll_s=0.002)


def _assert_equal(ours: RowNumbers, theirs: RowNumbers) -> None:
    for mine, other in zip(pieces_of(ours), pieces_of(theirs), strict=True):
        assert torch.equal(mine.tensor, other.tensor)


def test_who_has_not_proven_the_token_gets_no_byte_of_a_table(
    servers: list[DonorServer], caplog: pytest.LogCaptureFixture
) -> None:
    donor, ours = _numbers(), _numbers(seed=1)
    before = _numbers(seed=1)
    host, _, port = _serve(servers, donor).rpartition(":")
    with socket.create_connection((host, int(port)), scaled(10)) as stranger:
        stranger.sendall((struct.pack("!IQQ", 0, 0, 50) * 4)[:64])  # as a joiner asks for rows
        told = stranger.makefile("rb").read()  # to its end
    assert len(told) == 64 and told.endswith(bytes(32)), "a nonce and a refusal"
    other = _joiner(ours, token=bytes(32))
    attends = _round(1, servers[0].address, {0: "current", 1: "listening"})

    def is_refused() -> bool:
        other.attend(attends)
        return "refused this rank's token" in caplog.text

    wait_for(is_refused, "the refusal of another token", 20, poll_s=0.002)
    assert other.num_bytes == 0
    _assert_equal(ours, before)
    _copy_all(_joiner(ours), servers[0].address)
    _assert_equal(ours, donor)


def test_a_missed_commit_starts_the_copy_over(servers: list[DonorServer]) -> None:
    donor, ours = _numbers(), _numbers(seed=1)
    joiner = _joiner(ours)
    address = _serve(servers, donor)
    _copy_all(joiner, address)
    for piece in pieces_of(donor):
        piece.tensor.add_(1)
    joiner.attend(_round(3, address, {0: "current", 1: "listening"}))
    assert not joiner.is_complete
    _hear(joiner)
    _wait_for(joiner)
    _assert_equal(ours, donor)
    assert joiner.num_bytes == 2 * 50 * (4 + 1) * 4


def test_what_followed_the_last_commit_is_copied_again_when_the_donor_is_lost(
    servers: list[DonorServer],
) -> None:
    lost, donor, ours = _numbers(seed=1), _numbers(seed=2), _numbers(seed=3)
    joiner = _joiner(ours, group=2)
    joiner.attend(_round(1, _serve(servers, lost), {0: "current", 1: "current", 2: "listening"}))
    _hear(joiner)
    _wait_for(joiner)
    joiner.attend(_round(2, _serve(servers, donor, 1), {1: "current", 2: "listening"}))
    _hear(joiner)
    _wait_for(joiner)
    _assert_equal(ours, donor)


def test_nothing_is_taken_from_who_only_listens(servers: list[DonorServer]) -> None:
    ours, before = _numbers(seed=1), _numbers(seed=1)
    joiner = _joiner(ours)
    address = _serve(servers, _numbers(), group=2)
    joiner.attend(_round(1, address, {0: "current", 1: "listening", 2: "listening"}))
    _hear(joiner)
    assert joiner._thread and isinstance(joiner._thread.exception(DEADLINE_S), ConnectionError)
    assert not joiner.is_complete
    _assert_equal(ours, before)


@pytest.mark.parametrize(
    ("num_rows", "change"), [(49, {}), (50, {"table": "another"}), (50, {"row_offset": 50})]
)
def test_another_shard_is_refused(
    servers: list[DonorServer], num_rows: int, change: dict[str, Any]
) -> None:
    (shard,) = _numbers(num_rows).shards
    joiner = _joiner(RowNumbers([replace(shard, **change)], CPU))
    address = _serve(servers, _numbers())
    with pytest.raises(PeerCopyError, match="all groups of a job must be planned alike"):
        for _ in range(int(DEADLINE_S * 100)):
            joiner.attend(_round(1, address, {0: "current", 1: "listening"}))
            time.sleep(0.01)


def test_the_copy_goes_on_when_its_connection_breaks(
    servers: list[DonorServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    donor, ours = _numbers(), _numbers(seed=1)
    joiner = _joiner(ours)
    joiner.chunk_bytes = 100
    joiner.restart()
    chunks = threading.Semaphore(1)
    monkeypatch.setattr(LiveCopy, "next_chunk", _one_of(chunks))
    joiner.attend(_round(1, _serve(servers, donor), {0: "current", 1: "listening"}))
    while not joiner.num_bytes:
        time.sleep(0.01)
    servers[0].close()
    _hear(joiner)
    chunks.release(100)
    address = _serve(servers, donor)
    for commit in range(2, int(DEADLINE_S * 100)):
        joiner.attend(_round(commit, address, {0: "current", 1: "listening"}))
        _hear(joiner)
        if joiner.is_complete:
            break
        time.sleep(0.01)
    _assert_equal(ours, donor)
    assert joiner.num_bytes < 2 * 50 * (4 + 1) * 4, "what was sure was not copied again"


_next_chunk = LiveCopy.next_chunk


def _one_of(chunks: threading.Semaphore) -> Callable[[LiveCopy, int], Chunk | None]:
    """The next chunk of a copy, once it may have one of `chunks`."""

    def next_chunk(copy: LiveCopy, ticket: int) -> Chunk | None:
        chunk = _next_chunk(copy, ticket)
        if chunk:
            chunks.acquire()
        return chunk

    return next_chunk


TABLES = (Table(2000), Table(37, "table_wise"), Table(5, "data_parallel"))
JOINERS = [(2, 0), (2, 1)]


def _join_while_others_train(groups: Groups, sync: dict[str, Any]) -> dict[str, Any]:
    """Groups 0 and 1 train; group 2 joins slowly, dies, and joins again, while group 1 dies."""
    Joiner.chunk_bytes = 4000
    number = dist.get_rank()
    case = {"tables": TABLES, "sync": sync}
    if number < 2:
        return _stay(Life(groups, number, **case))
    lives = [_join_and_train(Life(groups, *joiner, **case)) for joiner in JOINERS]
    return {"lives": lives, "hashes": lives[0]["hashes"] | lives[1]["hashes"]}


def _stay(life: Life) -> dict[str, Any]:
    """Train until the second life of group 2 has; group 1 dies in the middle of its copying."""
    _add_buffers(life)
    life.join()
    num_heard = num_trained = 0
    while num_trained < 3 and not (life.group == 1 and num_heard == 4):
        life.interval()
        standing = life.standing_of(*JOINERS[1])
        num_heard += standing == "listening"
        num_trained += standing == "current"
    life.end()
    return {"hashes": life.hashes, "buffers": _buffers(life)}


def _add_buffers(life: Life) -> None:
    """A joiner does not begin with those of the others."""
    is_joiner = life.group == 2
    life.training.model.module.register_buffer("mean", torch.tensor(0.25 + is_joiner))
    life.training.model.module.register_buffer("count", torch.tensor(7 + is_joiner))


def _buffers(life: Life) -> list[float]:
    module = life.training.model.module
    return [module.mean.item(), module.count.item()]


def _join_and_train(life: Life) -> dict[str, Any]:
    """Copy two chunks between commits, train three times, die.

    Whom it copied from, and how many commits that took.
    """
    chunks = threading.Semaphore(0)
    LiveCopy.next_chunk = _one_of(chunks)  # type: ignore[method-assign]
    life.spoil()
    _add_buffers(life)
    life.join_late()
    donors, num_commits, num_trained = set(), 0, 0
    while num_trained < 3:
        life.interval()
        chunks.release(2)
        num_trained += life.standing_of(life.group, life.incarnation) == "current"
        if life.sync._joiner:
            donors.add(life.sync._joiner._copy.donor)
            num_commits += 1
    life.end()
    found = {"hashes": life.hashes, "donors": donors - {None}, "num_commits": num_commits}
    return found | {"buffers": _buffers(life)}


@pytest.mark.parametrize(
    "sync",
    [{}, {"dtype": "bf16"}, {"optimizer_state": "never"}, {"optimizer_state": "delayed"}],
    ids=["every", "half", "never", "delayed"],
)
def test_a_group_that_copies_slowly_ends_with_the_same_bits_as_those_that_train_on(
    sync: dict[str, Any], tmp_path: Path
) -> None:
    found = run_groups(_join_while_others_train, 3, tmp_path, sync, timeout_s=240)
    assert_all_equal([each["hashes"] for each in found], 1)
    first, second = found[2]["lives"]
    assert first["donors"] == {(1, 0)}
    assert second["donors"] == {(1, 0), (0, 0)}, "the first donor died before the copy was complete"
    for life in (first, second):
        assert life["num_commits"] >= 8, "the others trained on meanwhile"
        assert len(life["hashes"]) >= 3
        assert set(life["hashes"]) < set(found[0]["hashes"])
        assert life["buffers"] == found[0]["buffers"] == [0.25, 7]
