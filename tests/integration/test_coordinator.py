"""The coordinator over real sockets: lost, stopped and restarted processes, itself included."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration import coordinator_cases as cases
from tests.integration.ports import free_port
from trainer.elastic.member import Identity, Member
from trainer.elastic.protocol import Arrive, Ledger, Vote
from trainer.events import EVENT_ADAPTER, Event

_CONTEXT = multiprocessing.get_context("forkserver")
_NUM_RANKS = 2
# Longer than a test takes: whatever is noticed was not noticed by silence.
_NEVER_S = 60.0


def identity(group: int, incarnation: int = 0, rank: int = 0, num_ranks: int = 1) -> Identity:
    return Identity(group, incarnation, rank, num_ranks, f"host-{group}")


def wait_until(is_so: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not in {timeout_s} s"
        time.sleep(0.005)


class Groups:
    """Processes of ranks, by group."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address, self.timeout_s = address, timeout_s
        self.ranks: dict[int, list[multiprocessing.process.BaseProcess]] = {}

    def start(self, group: int, incarnation: int = 0) -> None:
        self.ranks[group] = [
            _CONTEXT.Process(
                target=cases.live,
                args=(identity(group, incarnation, r, _NUM_RANKS), self.address, self.timeout_s),
                daemon=True,
            )
            for r in range(_NUM_RANKS)
        ]
        for rank in self.ranks[group]:
            rank.start()

    def signal(self, group: int, rank: int, signum: int) -> None:
        pid = self.ranks[group][rank].pid
        assert pid
        os.kill(pid, signum)

    def exit_codes(self, group: int) -> list[int | None]:
        for rank in self.ranks[group]:
            rank.join(20)
        return [rank.exitcode for rank in self.ranks[group]]

    def kill(self) -> None:
        for ranks in self.ranks.values():
            for rank in ranks:
                rank.kill()
                rank.join()


@contextmanager
def training(folder: Path, num_groups: int, timeout_s: float) -> Iterator[tuple]:
    """A coordinator on a thread of this process, with groups as processes."""
    coordinator = cases.start(0, timeout_s, num_groups, folder)
    groups = Groups(coordinator.address, timeout_s)
    try:
        for group in range(num_groups):
            groups.start(group)
        yield coordinator, groups
    finally:
        groups.kill()
        coordinator.stop()


def standing(coordinator, group: int, incarnation: int) -> str | None:
    lives = {(g.group, g.incarnation): g.standing for g in coordinator.status().groups}
    return lives.get((group, incarnation))


def events_of(folder: Path, kind: str) -> list[Event]:
    lines = [
        line
        for path in sorted((folder / "outbox").glob("coordinator-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    found = [EVENT_ADAPTER.validate_json(line) for line in lines]
    return [event for event in found if event.kind == kind]


def test_a_killed_rank_is_missed_at_once_and_its_group_comes_back(tmp_path: Path):
    with training(tmp_path, num_groups=3, timeout_s=_NEVER_S) as (coordinator, groups):
        wait_until(lambda: coordinator.status().commit > 5, "the groups train")
        groups.signal(2, 1, signal.SIGKILL)
        killed = time.monotonic()
        wait_until(lambda: standing(coordinator, 2, 0) is None, "the loss is noticed")
        commit = coordinator.status().commit
        wait_until(lambda: coordinator.status().commit > commit + 1, "the others train on")
        pause_s = time.monotonic() - killed
        groups.start(2, incarnation=1)
        wait_until(lambda: standing(coordinator, 2, 1) == "current", "it counts again")
        assert groups.exit_codes(0) == groups.exit_codes(1) == groups.exit_codes(2) == [0, 0]
        assert coordinator.status().has_finished
    assert pause_s < 5
    assert cases.rows_trained(tmp_path) == cases.EVERY_ROW_ONCE
    assert [lost.reason for lost in events_of(tmp_path, "group_lost")] == ["connection"]
    assert [each.how for each in events_of(tmp_path, "group_joined")] == ["start"] * 3 + [
        "peer_copy"
    ]
    assert events_of(tmp_path, "recovered")[0].syncs_lost <= 1


def test_a_stopped_rank_is_missed_by_its_silence_and_ends_when_it_wakes(tmp_path: Path):
    with training(tmp_path, num_groups=2, timeout_s=3.0) as (coordinator, groups):
        wait_until(lambda: coordinator.status().commit > 5, "the groups train")
        groups.signal(1, 0, signal.SIGSTOP)
        wait_until(lambda: standing(coordinator, 1, 0) is None, "the silence is noticed")
        assert coordinator.status().departures[-1].reason == "silent"
        groups.signal(1, 0, signal.SIGCONT)
        assert groups.exit_codes(1) == [cases.FENCED, cases.FENCED]
        assert groups.exit_codes(0) == [0, 0]
    assert cases.rows_trained(tmp_path) == cases.EVERY_ROW_ONCE


@contextmanager
def coordinating(port: int, num_groups: int, folder: Path) -> Iterator[None]:
    """A coordinator in a process of its own, killed at the end."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(
        target=cases.coordinate, args=(port, _NEVER_S, num_groups, folder, theirs), daemon=True
    )
    process.start()
    assert ours.poll(60), "the coordinator does not start"
    ours.recv()
    try:
        yield
    finally:
        process.kill()
        process.join()


def test_a_run_outlives_its_coordinators(tmp_path: Path):
    port = free_port()
    ids = [identity(group, 0, rank, _NUM_RANKS) for group in range(2) for rank in range(2)]
    lives = [cases.Life(each, lambda: f"127.0.0.1:{port}", _NEVER_S) for each in ids]
    with ThreadPoolExecutor(len(lives)) as pool:
        with coordinating(port, 2, tmp_path):
            ends = [pool.submit(life.run) for life in lives]
            wait_until(lambda: lives[0].ledger.commit > 5, "the groups train")
        with coordinating(port, 2, tmp_path):
            wait_until(lambda: lives[0].ledger.commit > 15, "the groups train on")
        with coordinating(port, 2, tmp_path):
            verdicts = [end.result(60) for end in ends]
    assert {verdict.ledger.rows_trained for verdict in verdicts} == {cases.EPOCHS * cases.ROWS}
    assert cases.rows_trained(tmp_path) == cases.EVERY_ROW_ONCE
    assert not events_of(tmp_path, "group_lost")


def meet(members: list[Member], pool: ThreadPoolExecutor):
    """The first round of `members`, each a group of one rank."""
    for member in members:
        member.join("initial", "seed-0", Ledger(), "")
    arrivals = [pool.submit(m.arrive, Arrive(standing="initial", commit=0)) for m in members]
    return [arrival.result(30) for arrival in arrivals]


def test_a_vote_that_its_coordinator_did_not_live_to_count_fails(tmp_path: Path):
    port = free_port()
    members = [Member(identity(g), lambda: f"127.0.0.1:{port}", _NEVER_S) for g in range(2)]
    with ThreadPoolExecutor(2) as pool:
        with coordinating(port, 2, tmp_path):
            first = meet(members, pool)
            members[0].store().set("seat", "taken")
            assert members[1].store().check(["seat"])
            vote = Vote(round=first[0].round, commit=1, ok=True)
            early = pool.submit(members[0].vote, vote)
            time.sleep(0.1)  # the vote travels; whether it gets there makes no difference
            assert not early.done()
        with coordinating(port, 2, tmp_path):
            verdicts = [members[1].vote(vote), early.result(30)]
            arrive = Arrive(standing="initial", commit=0)
            second = [pool.submit(m.arrive, arrive).result for m in members]
            rounds = [result(30) for result in second]
            assert not members[0].store().check(["seat"]), "a new coordinator, a new store"
        for member in members:
            member.close()
    assert [verdict.committed for verdict in verdicts] == [False, False]
    assert rounds[0].round > first[0].round
    assert rounds[0].generation > first[0].generation


def test_a_rank_that_waits_in_a_collective_hears_that_its_round_failed(tmp_path: Path):
    coordinator = cases.start(0, _NEVER_S, 2, tmp_path)
    members = [Member(identity(g), lambda: coordinator.address, _NEVER_S) for g in range(2)]
    heard, is_aborted = [], threading.Event()

    def on_abort(number: int) -> None:
        heard.append(number)
        is_aborted.set()

    members[0].on_abort = on_abort
    try:
        with ThreadPoolExecutor(2) as pool:
            first, _ = meet(members, pool)
        assert not members[0].is_aborted(first.round)
        members[1].close()
        assert is_aborted.wait(30)
        assert heard == [first.round]
        assert members[0].is_aborted(first.round)
        vote = Vote(round=first.round, commit=1, ok=False, error="its peer is gone")
        assert not members[0].vote(vote).committed
    finally:
        members[0].close()
        coordinator.stop()


def test_a_port_that_is_taken_is_an_error(tmp_path: Path):
    coordinator = cases.start(0, _NEVER_S, 1, tmp_path)
    try:
        with pytest.raises(OSError, match="address already in use"):
            cases.start(int(coordinator.address.rpartition(":")[2]), _NEVER_S, 1, tmp_path)
    finally:
        coordinator.stop()
