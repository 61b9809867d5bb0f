"""A shard copied while its donor trains, simulated step by step in any order of events."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.properties import examples
from trainer.elastic.peer_copy import Chunk, LiveCopy, Piece, Superseded, chunks_of
from trainer.parallel.row_store import FlatRows

NUM_ROWS = 7
WIDTH = 4


@dataclass
class Copy:
    """What a group holds: weights [rows, 4], moments [rows], and the rows it touched."""

    weight: torch.Tensor
    moment: torch.Tensor
    touched: torch.Tensor = field(default_factory=lambda: torch.zeros(NUM_ROWS, dtype=torch.bool))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.weight, self.moment]

    @property
    def pieces(self) -> list[Piece]:
        """As they are served."""
        return [Piece(FlatRows(tensor), 0) for tensor in self.tensors]


def _copy(draw: random.Random) -> Copy:
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return Copy(
        torch.randn(NUM_ROWS, WIDTH, generator=generator), torch.rand(NUM_ROWS, generator=generator)
    )


class Simulation:
    """Two groups that train and sync, and a third that copies from one of them.

    Where it is calm, nothing happens in the middle of something else.
    """

    def __init__(self, draw: random.Random, is_calm: bool = False) -> None:
        self.draw, self.is_calm = draw, is_calm
        first = _copy(draw)
        self.groups = {
            number: Copy(first.weight.clone(), first.moment.clone()) for number in (0, 1)
        }
        self.joiner = _copy(draw)
        self.copy = LiveCopy(self.joiner.pieces, NUM_ROWS, max_bytes=2 * WIDTH * 4)
        self.flying: deque[tuple[int, Chunk, torch.Tensor]] = deque()
        self._turn_to(draw.choice([0, 1]))

    def _turn_to(self, donor: int) -> None:
        self.donor, self.ticket = donor, self.copy.roll_back()
        self.copy.begin(self.ticket, (donor, 0))

    def train(self, number: int | None = None) -> None:
        """A group changes a row: marks it, then writes it in two halves."""
        group = self.groups[self.draw.choice(list(self.groups)) if number is None else number]
        row = self.draw.randrange(NUM_ROWS)
        group.touched[row] = True
        self._may_read()
        group.weight[row, :2] = self.draw.random()
        self._may_read()
        group.weight[row, 2:] = self.draw.random()
        group.moment[row] += self.draw.random()

    def _may_read(self) -> None:
        if not self.is_calm and self.draw.random() < 0.3:
            self.read()

    def read(self) -> None:
        """The next chunk leaves the donor; one is on its way at a time."""
        chunk = self.copy.next_chunk(self.ticket)
        if chunk and not self.flying:
            values = self.groups[self.donor].tensors[chunk.piece][chunk.start : chunk.stop]
            self.flying.append((self.ticket, chunk, values.clone()))

    def land(self) -> None:
        """It arrives, perhaps too late."""
        if self.flying:
            ticket, chunk, values = self.flying.popleft()
            if ticket == self.ticket:
                self.copy.put(ticket, chunk, values)
            else:
                with pytest.raises(Superseded):
                    self.copy.put(ticket, chunk, values)

    def fail_round(self) -> None:
        """A round is tried and given up."""
        self.copy.vote()

    def commit(self, is_last: bool = False, is_whole: bool = False) -> None:
        """A sync of all groups, applied in any order, row by row."""
        union = torch.stack([group.touched for group in self.groups.values()]).any(dim=0)
        rows = union.nonzero().view(-1)
        means = [
            torch.stack(copies)[:, rows].mean(dim=0)
            for copies in zip(*(group.tensors for group in self.groups.values()), strict=True)
        ]
        self.copy.vote()
        appliers = [*self.groups, None]
        self.draw.shuffle(appliers)
        for number in appliers:
            if number is None:
                with self.copy.applying(None if is_whole else rows):
                    _write(self.joiner, rows, means)
                continue
            self._apply(self.groups[number], rows, means)
            if not (is_last or self.is_calm) and self.draw.random() < 0.5:
                self.go_on(number)

    def commit_all(self) -> None:
        """A sync of all rows, whatever was touched."""
        for group in self.groups.values():
            group.touched[:] = True
        self.commit(is_last=True, is_whole=True)

    def _apply(self, group: Copy, rows: torch.Tensor, means: list[torch.Tensor]) -> None:
        half = rows.numel() // 2
        _write(group, rows[:half], [mean[:half] for mean in means])
        self._may_read()
        _write(group, rows[half:], [mean[half:] for mean in means])
        group.touched[:] = False

    def go_on(self, number: int) -> None:
        """Who has applied a sync trains on, while the others have not heard of it yet."""
        self.train(number)
        self.read()
        self.land()

    def lose(self) -> None:
        """The donor dies with what it trained since the last sync; the other group goes on."""
        if len(self.groups) > 1:
            del self.groups[self.donor]
            self._turn_to(*self.groups)

    def break_off(self) -> None:
        """The connection breaks; the donor lives."""
        self._turn_to(self.donor)

    def finish(self) -> None:
        """Copy what is missing, beside more training, and hear one more commit."""
        while not self.copy.is_complete:
            self.train()
            self.read()
            self.land()
        self.train()
        self.commit(is_last=True)


def _write(copy: Copy, rows: torch.Tensor, means: list[torch.Tensor]) -> None:
    for tensor, mean in zip(copy.tensors, means, strict=True):
        tensor[rows] = mean


EVENTS = ["train", "read", "land", "commit", "fail_round", "commit_all", "lose", "break_off"]


@settings(max_examples=examples(200, fast=40))
@given(
    st.lists(st.sampled_from([*EVENTS, "train", "read", "land"]), max_size=60),
    st.integers(0, 2**31),
)
def test_the_copy_is_exact_after_the_commit_that_follows_its_end(
    happenings: list[str], seed: int
) -> None:
    simulation = Simulation(random.Random(seed))
    for happening in happenings:
        getattr(simulation, happening)()
    simulation.finish()
    (truth, *others) = simulation.groups.values()
    for holder in (*others, simulation.joiner):
        for ours, theirs in zip(holder.tensors, truth.tensors, strict=True):
            assert torch.equal(ours, theirs)


def test_a_commit_makes_sure_what_was_there_at_its_vote() -> None:
    simulation = Simulation(random.Random(1), is_calm=True)
    for _ in range(2):
        simulation.read()
        simulation.land()
    simulation.commit()
    simulation.read()
    simulation.land()
    simulation.lose()
    assert simulation.copy.next_chunk(simulation.ticket) == Chunk(0, 4, 6)


def test_what_lands_between_the_vote_and_the_commit_is_not_sure() -> None:
    # The donor may have applied the commit, and trained on, before this rank hears of it.
    simulation = Simulation(random.Random(1), is_calm=True)
    simulation.copy.vote()
    simulation.read()
    simulation.land()
    with simulation.copy.applying(torch.empty(0, dtype=torch.int64)):
        pass
    simulation.lose()
    assert simulation.copy.next_chunk(simulation.ticket) == Chunk(0, 0, 2)


def test_what_was_there_at_a_vote_without_a_commit_is_not_sure() -> None:
    simulation = Simulation(random.Random(1), is_calm=True)
    simulation.read()
    simulation.land()
    simulation.fail_round()
    simulation.lose()
    assert simulation.copy.next_chunk(simulation.ticket) == Chunk(0, 0, 2)


def test_a_commit_of_all_rows_completes_the_copy() -> None:
    simulation = Simulation(random.Random(2), is_calm=True)
    simulation.read()
    simulation.commit_all()
    assert simulation.copy.is_complete
    simulation.land()
    assert simulation.copy.is_complete
    simulation.lose()
    assert simulation.copy.is_complete


def test_chunks_hold_every_row_once_within_the_size_asked_for() -> None:
    tensors = (torch.zeros(10, 3), 0), (torch.zeros(10), 0), (torch.zeros(1, 99), 10)
    pieces = [Piece(FlatRows(tensor), first) for tensor, first in tensors]
    chunks = chunks_of(pieces, max_bytes=48)
    assert chunks[:3] == [Chunk(0, 0, 4), Chunk(0, 4, 8), Chunk(0, 8, 10)]
    assert chunks[3:] == [Chunk(1, 0, 10), Chunk(2, 0, 1)]
