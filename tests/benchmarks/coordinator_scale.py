"""What a coordinator of up to 512 groups x 8 ranks costs: CPU, time and bytes of syncs and losses.

python -m tests.benchmarks.coordinator_scale --json FILE

The coordinator is the real one, at real sockets, alone in this process, with a book of as many
windows as a large split has, of which every lane has one. The groups' agents are simulated in other
processes, each with its own connection: in a sync every agent sends the heartbeats of its ranks and
arrives, votes as soon as it is told of the round, and waits for the verdict. Their messages are
those of the real client; of the answers they read only what the next message needs. Then one group
closes its connection in a round on which all others have voted, and these are told that it has
failed.

`cpu_s_512`: CPU of the coordinator's process for one sync; `commit_s_512`: from the moment that the
last group arrives until the last has its verdict; `loss_s_512`: from the connection closed until
the last survivor is told; `exponent`: how CPU of a sync grows with groups, from 64 to 512. What
goes on between an agent and its ranks, within a host or two, is not in these.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import selectors
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.report import BenchmarkError, BenchmarkReport, Goal, Run, log, main
from tests.harness.processes import die_with_parent
from trainer.coordination.authentication import authenticate
from trainer.coordination.messages import (
    Arrive,
    Heartbeat,
    Heartbeats,
    Hello,
    Lease,
    Ledger,
    Numbered,
    RankProcess,
    Request,
    Vote,
)
from trainer.elastic.coordinator.interface import MembershipPolicy
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.elastic.coordinator.server import Coordinator, CoordinatorConfig, prepare_process
from trainer.spec.training import RecoverySpec

NAME = "coordinator_scale"
RUNS = 3
NUM_GROUPS = (8, 64, 512)
NUM_RANKS = 8
NUM_SYNCS = 5
NUM_PROCESSES = 2
ROWS_PER_LEASE = NUM_RANKS * 1024
NUM_WINDOWS, ROWS_PER_WINDOW = 16_384, 1 << 16
_NEVER_S = 3600.0
_HEARTBEAT_TIMEOUT_S = 20.0
_ANSWER_S = 300.0
_RECV_BYTES = 1 << 20
_TOKEN = bytes(range(32))
_ROUND = re.compile(rb'"kind":"round","round":(\d+),.*?"commit":(\d+)')
GOALS = [
    Goal("cpu_s_512", "cpu_s_512", "s", 0.5, "lower", "one second"),
    Goal("commit_s_512", "commit_s_512", "s", 1.0, "lower", "one second"),
    Goal("loss_s_512", "loss_s_512", "s", 2.0, "lower", "one second"),
    Goal("exponent", "exponent", "", 1.3, "lower", "in proportion"),
]


@dataclass(frozen=True)
class Scale:
    """What one number of groups costs: medians of the syncs, and one loss."""

    num_groups: int
    cpu_s: float
    commit_s: float
    sent_bytes: float
    loss_s: float


def run(num_runs: int) -> BenchmarkReport:
    """Measure; there is no peer, so each value is compared with 1."""
    runs, scales = [], []
    for number in range(num_runs):
        scales = [measure(num_groups) for num_groups in NUM_GROUPS]
        runs.append(Run(number, "ours", values_of(scales)))
        runs.append(Run(number, "peer", dict.fromkeys(runs[-1].values, 1.0)))
    settings = {"num_ranks": NUM_RANKS, "num_syncs": NUM_SYNCS, "rows": "those of the last run"}
    return BenchmarkReport(NAME, settings, GOALS, runs, [asdict(scale) for scale in scales])


def values_of(scales: Sequence[Scale]) -> dict[str, float]:
    """The values of the goals, of the two largest sizes."""
    *_, smaller, largest = scales
    growth = math.log(largest.cpu_s / smaller.cpu_s)
    return {
        "cpu_s_512": largest.cpu_s,
        "commit_s_512": largest.commit_s,
        "loss_s_512": largest.loss_s,
        "exponent": growth / math.log(largest.num_groups / smaller.num_groups),
    }


def measure(num_groups: int, num_syncs: int = NUM_SYNCS) -> Scale:
    """Syncs of so many groups, the first of which starts the run and is left out, and a loss."""
    with ExitStack() as stack:
        coordinator = stack.enter_context(coordinator_of(num_groups))
        agents = [
            stack.enter_context(agents_of(coordinator.address, groups))
            for groups in (range(n, num_groups, NUM_PROCESSES) for n in range(NUM_PROCESSES))
        ]
        ask_all(agents, "join")
        syncs = [_measure_sync(agents) for _ in range(num_syncs + 1)][1:]
        ledger = coordinator._membership._rounds.ledger
        if ledger.commit != num_syncs + 1 or not ledger.rows_trained:
            raise BenchmarkError(f"the syncs were not committed as expected: {ledger}")
        loss_s = _measure_loss(agents)
        departed = [each.group for each in coordinator.status().departures]
        if departed != [0]:
            raise BenchmarkError(f"groups {departed} were lost instead of [0]")
    cpu_s, commit_s, sent = (statistics.median(each) for each in zip(*syncs, strict=True))
    scale = Scale(num_groups, cpu_s, commit_s, sent, loss_s)
    log(str(scale))
    return scale


def _measure_sync(agents: Sequence[Connection]) -> tuple[float, float, int]:
    """(CPU seconds, seconds from the last arrival, bytes sent) of a sync."""
    cpu_s = time.process_time()
    told = ask_all(agents, "sync")
    cpu_s = time.process_time() - cpu_s
    commit_s = max(each.ended_at for each in told) - max(each.began_at for each in told)
    return cpu_s, commit_s, sum(each.read_bytes for each in told)


def _measure_loss(agents: Sequence[Connection]) -> float:
    """Seconds from the loss of group 0 until the last survivor is told."""
    ask_all(agents, "vote_all_but_one")
    told = ask_all(agents, "lose_one")
    return max(each.ended_at for each in told) - min(each.began_at for each in told)


@contextmanager
def coordinator_of(num_groups: int) -> Iterator[Coordinator]:
    """The real coordinator, which loses nobody for being slow: all share this machine's cores."""
    limits = RecoverySpec(
        start_grace_s=_NEVER_S,
        heartbeat_timeout_s=_HEARTBEAT_TIMEOUT_S,
        exchange_timeout_s=_NEVER_S,
        min_hang_s=_NEVER_S,
    )
    policy = MembershipPolicy(num_groups, recovery=limits)
    bounds = window_bounds()
    book = LeaseBook(bounds[-1], 1, ROWS_PER_LEASE, windows=bounds, num_lanes=NUM_RANKS)
    prepare_process()  # as the actor does
    with TemporaryDirectory() as folder:
        attempt_dir = Path(folder, "runs", "job", "attempts", "a0")
        coordinator = Coordinator(CoordinatorConfig(policy, book, attempt_dir, _TOKEN))
        try:
            yield coordinator
        finally:
            coordinator.stop()


def window_bounds() -> list[int]:
    """Bounds of windows of unequal size, as row groups of files are."""
    random = Random(0)
    sizes = (random.randint(ROWS_PER_WINDOW // 2, ROWS_PER_WINDOW) for _ in range(NUM_WINDOWS))
    return [0, *accumulate(sizes)]


# --- simulated agents


@dataclass(frozen=True)
class Told:
    """When a phase began and ended (monotonic seconds, alike in all processes); bytes read."""

    began_at: float
    ended_at: float
    read_bytes: int


@contextmanager
def agents_of(address: str, groups: range) -> Iterator[Connection]:
    """A process with the agents of `groups`; it answers the name of each phase with `Told`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=simulate, args=(address, groups, theirs))
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        child.join(_ANSWER_S)


def ask_all(agents: Sequence[Connection], phase: str) -> list[Told]:
    """Let all processes go through a phase at the same time."""
    for agent in agents:
        agent.send(phase)
    told = []
    for agent in agents:
        if not agent.poll(_ANSWER_S):
            raise BenchmarkError(f"simulated agents did not end the phase {phase} in {_ANSWER_S} s")
        told.append(agent.recv())
    return told


def simulate(address: str, groups: range, pipe: Connection) -> None:
    """Body of a process of simulated agents, until the other end of the pipe is closed."""
    die_with_parent()
    prepare_process()
    agents = SimulatedAgents(address, groups)
    phases: dict[str, Callable[[], Told]] = {
        "join": agents.join,
        "sync": agents.sync,
        "vote_all_but_one": agents.vote_all_but_one,
        "lose_one": agents.lose_one,
    }
    while True:
        try:
            phase = pipe.recv()
        except EOFError:
            return
        pipe.send(phases[phase]())


@dataclass(eq=False)
class SimulatedAgent:
    group: int
    connection: socket.socket
    buffer: bytearray = field(default_factory=bytearray)


class SimulatedAgents:
    """Agents of several groups on one thread."""

    def __init__(self, address: str, groups: range) -> None:
        host, _, port = address.rpartition(":")
        self._selector = selectors.DefaultSelector()
        self._agents: list[SimulatedAgent] = []
        self._verdicts: dict[int, dict[str, Any]] = {}
        self._num_read = 0
        for group in groups:
            connection = socket.create_connection((host, int(port)), _ANSWER_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            authenticate(connection, _TOKEN, address, _ANSWER_S)
            agent = SimulatedAgent(group, connection)
            self._agents.append(agent)
            self._selector.register(connection, selectors.EVENT_READ, agent)

    def join(self) -> Told:
        began_at = self._begin()
        for agent in self._agents:
            self._send(agent, 1, _hello_of(agent))
        self._wait(self._agents, b'"kind":"welcome"', lambda agent, line: None)
        return self._told(began_at)

    def sync(self) -> Told:
        """Beat, arrive, vote, and keep what is told to the group."""
        self._begin()
        began_at = self._arrive()
        self._wait(self._agents, b'"kind":"round"', self._vote)
        self._wait(self._agents, b'"kind":"verdict","committed":true', self._keep)
        return self._told(began_at)

    def vote_all_but_one(self) -> Told:
        """A round in which group 0 does not vote."""
        self._begin()
        began_at = self._arrive()

        def vote(agent: SimulatedAgent, line: bytes) -> None:
            if agent.group != 0:
                self._vote(agent, line)

        self._wait(self._agents, b'"kind":"round"', vote)
        return self._told(began_at)

    def lose_one(self) -> Told:
        """Group 0 ends, and the others are told that the round has failed."""
        began_at = self._begin()
        for agent in self._agents:
            if agent.group == 0:
                self._selector.unregister(agent.connection)
                agent.connection.close()
        survivors = [agent for agent in self._agents if agent.group != 0]
        self._wait(survivors, b'"kind":"verdict","committed":false', lambda agent, line: None)
        return self._told(began_at)

    def _begin(self) -> float:
        self._num_read = 0
        return time.monotonic()

    def _told(self, began_at: float) -> Told:
        return Told(began_at, time.monotonic(), self._num_read)

    def _arrive(self) -> float:
        """All beat, then all arrive; returns when the last one did."""
        beat = Heartbeat(progress=self._num_read, phase="train", step_time_s=0.1, local_s=0.08)
        beats = tuple(beat.model_copy(update={"rank": rank}) for rank in range(NUM_RANKS))
        for agent in self._agents:
            self._send(agent, 0, Heartbeats(ranks=beats))
        for agent in self._agents:
            self._send(agent, 2, self._arrival_of(agent.group))
        return time.monotonic()

    def _arrival_of(self, group: int) -> Arrive:
        verdict = self._verdicts.get(group)
        if verdict is None:
            return Arrive(commit=0)
        lease = Lease.model_validate(verdict["leases"][0])
        return Arrive(
            commit=verdict["ledger"]["commit"],
            leases=(lease.id,),
            num_rows=lease.num_rows,
            train_s=0.1 + 0.1 * (group % 4),
        )

    def _vote(self, agent: SimulatedAgent, line: bytes) -> None:
        found = _ROUND.search(line)
        assert found, line[:200]
        self._send(agent, 3, Vote(round=int(found[1]), commit=int(found[2]), ok=True))

    def _keep(self, agent: SimulatedAgent, line: bytes) -> None:
        self._verdicts[agent.group] = json.loads(line)["body"]

    def _send(self, agent: SimulatedAgent, request_id: int, body: Request) -> None:
        line = Numbered(id=request_id, body=body).model_dump_json().encode() + b"\n"
        agent.connection.sendall(line)

    def _wait(
        self,
        agents: Sequence[SimulatedAgent],
        kind: bytes,
        take: Callable[[SimulatedAgent, bytes], None],
    ) -> None:
        """Read until each of `agents` has a line of this kind, which `take` is given."""
        waiting = set(agents)
        for agent in agents:
            if b"\n" in agent.buffer:
                self._take_line(agent, kind, take, waiting)
        while waiting:
            for key, _ in self._selector.select(_ANSWER_S):
                agent = key.data
                data = agent.connection.recv(_RECV_BYTES)
                assert data, f"group {agent.group} was cut off"
                self._num_read += len(data)
                agent.buffer += data
                if data.endswith(b"\n"):
                    self._take_line(agent, kind, take, waiting)

    @staticmethod
    def _take_line(
        agent: SimulatedAgent,
        kind: bytes,
        take: Callable[[SimulatedAgent, bytes], None],
        waiting: set[SimulatedAgent],
    ) -> None:
        """Take the line of an agent that waits for one; another's stays in its buffer.

        Nobody is told two things at once, but a verdict may come while others wait for a round.
        """
        if agent not in waiting:
            return
        line = bytes(agent.buffer).splitlines()[-1]  # a roster may come before it
        assert kind in line[:200], f"waited for {kind!r}, was told {line[:200]!r}"
        agent.buffer.clear()
        waiting.discard(agent)
        take(agent, line)


def _hello_of(agent: SimulatedAgent) -> Hello:
    host = f"10.0.{agent.group // 250}.{agent.group % 250}"
    return Hello(
        group=agent.group,
        incarnation=0,
        ranks=tuple(
            RankProcess(rank=rank, host=host, pid=1, donor=f"{host}:{41234 + rank}")
            for rank in range(NUM_RANKS)
        ),
        origin="seed",
        standing="initial",
        ledger=Ledger(),
    )


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=RUNS, description=__doc__))
