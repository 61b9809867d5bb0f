"""A rank's side of the coordinator: requests, heartbeats, reconnection; loads no torch by itself.

`CoordinatorClient` connects a rank to its group's agent, and the agent to the coordinator;
`HeartbeatReporter` times a rank's steps, for its heartbeats; `report_heartbeats` connects a worker
of the domain `job`, for hang detection only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeVar

from trainer.coordination.authentication import authenticate
from trainer.coordination.detection import UNTIMED_FACTOR
from trainer.coordination.messages import (
    WATCH_SILENCE_S,
    Answer,
    Answered,
    Arrive,
    GroupEnded,
    Heartbeat,
    HeartbeatPhase,
    Heartbeats,
    Hello,
    Ledger,
    Numbered,
    RankProcess,
    Rejection,
    Request,
    Roster,
    Round,
    RoundResult,
    Vote,
    Welcome,
)
from trainer.protocol.events import GroupState
from trainer.spec.training import RecoverySpec

logger = logging.getLogger(__name__)
Expected = TypeVar("Expected", Welcome, Round, RoundResult)
_MIN_BEAT_S, _MAX_BEAT_S = 0.05, 1.0  # hangs, too, are found by them
_BEATS_PER_TIMEOUT = 5
LOCATE_S = 2.0
"""Longest time to ask where the coordinator is."""
LONGEST_S = 86_400.0
"""Longest time-out of a socket: the system takes none of a month."""
_RETRY_S = 0.1
_LOST_AFTER_S = 120.0  # beyond what a recovery may take
_AGENT_S = 30.0  # longest that a rank looks for its agent
_PROVING_FACTOR = 5
_RECV_BYTES = 1 << 16
_NUM_STEP_TIMES = 50
_EXIT_DROPPED = 70
_RECORDER_S = 1.0  # the driver kills what is left of a lost group soon


class Refused(Exception):
    """The coordinator does not let this rank go on: its life, or the whole run, is over."""


class Dismissed(Refused):
    """This rank is of a spare group, which is not wanted any more."""


class CoordinatorLost(Exception):
    """No coordinator could be reached for a long time."""


@dataclass(frozen=True)
class Identity:
    """Who this rank is; `incarnation` counts the lives of its group."""

    group: int
    incarnation: int
    rank: int
    num_ranks: int
    host: str


def finding_s(heartbeat_timeout_s: float) -> float:
    """Seconds in which every rank finds a restarted coordinator, though its first try is in vain.

    A try is to ask where it is, and to connect.
    """
    return 2 * (LOCATE_S + _connect_timeout_s(heartbeat_timeout_s) + _RETRY_S)


def starting_s(recovery: RecoverySpec) -> float:
    """Longest time that a worker takes to join: as a rank may stand still outside of training."""
    return max(UNTIMED_FACTOR * recovery.min_hang_s, recovery.start_grace_s)


def end_unless_joined(limit_s: float) -> None:
    """End this process, with the stacks of its threads, unless it joins by then.

    Nobody knows it before, and could kill it. It works also where the main thread holds the GIL.
    """
    faulthandler.dump_traceback_later(min(limit_s, threading.TIMEOUT_MAX), exit=True, file=2)


def _connect_timeout_s(heartbeat_timeout_s: float) -> float:
    return min(max(1.0, heartbeat_timeout_s), LONGEST_S)


class CoordinatorClient:
    """A connection of one rank, or of an agent, kept up by a thread; another one sends heartbeats.

    Requests are repeated after a reconnection. One thread may send requests; `is_aborted` may be
    called from any. `reporter` knows what the heartbeats say.
    """

    def __init__(
        self,
        identity: Identity,
        locate: Callable[[], str],
        heartbeat_timeout_s: float,
        token: bytes,
        *,
        is_agent: bool = False,
    ) -> None:
        """`locate` gives the coordinator's address (host:port), also after it was restarted.

        It raises `OSError` or `ValueError` while there is none, and `Refused` where there will be
        none any more. Where it is an agent's, this rank ends with that. `token` is the attempt's.
        """
        self.identity, self._locate, self.token = identity, locate, token
        self._is_agent, self._has_connected = is_agent, False
        beat_s = heartbeat_timeout_s / _BEATS_PER_TIMEOUT
        self._beat_every_s = min(max(_MIN_BEAT_S, beat_s), _MAX_BEAT_S)
        self._connect_timeout_s = _connect_timeout_s(heartbeat_timeout_s)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._hello: Hello | None = None
        self._request: Numbered | None = None
        self._answer: Answer | None = None
        self._refusal: Rejection | None = None
        self._next_id = 1
        self._welcome_id = 0
        self._is_welcome = False
        self._away_since = time.monotonic()
        self._problem = ""  # why the newest try to connect failed
        self._aborted_round = -1
        self._roster = Roster(members=())
        self.reporter = HeartbeatReporter()
        self._is_through = False
        self._threads: list[threading.Thread] = []
        self.on_refusal: Callable[[str], None] | None = None
        """Called on another thread when this life of the group is over, even if the rank hangs."""

    def join(
        self, standing: GroupState, origin: str, ledger: Ledger, donor: str, plan: str = ""
    ) -> Welcome:
        """Say who this rank is and what it holds; may be said again before the first `arrive`.

        All ranks of its group say the same. Raises `Refused` or `CoordinatorLost`.
        """
        faulthandler.cancel_dump_traceback_later()
        identity = self.identity
        process = RankProcess(rank=identity.rank, host=identity.host, pid=os.getpid(), donor=donor)
        hello = Hello(
            group=identity.group,
            incarnation=identity.incarnation,
            ranks=(process,),
            origin=origin,
            standing=standing,
            ledger=ledger,
            plan=plan,
        )
        return self._answer_to(hello, Welcome)

    def arrive(self, arrive: Arrive) -> Round:
        """Wait until the next round opens. Raises as `join`."""
        return self._answer_to(arrive, Round)

    def vote(self, vote: Vote) -> RoundResult:
        """Wait until the round has ended. Raises as `join`."""
        return self._answer_to(vote, RoundResult)

    def _answer_to(self, body: Request, expected: type[Expected]) -> Expected:
        answer = self.ask(body)
        assert isinstance(answer, expected), f"{body.kind} was answered by {answer.kind}"
        return answer

    def is_aborted(self, number: int) -> bool:
        return number <= self._aborted_round

    def close(self) -> None:
        """Disconnect, which the coordinator takes for the end of this rank."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._hang_up()
        for thread in self._threads:
            thread.join(timeout=2 * self._connect_timeout_s)

    def ask(self, body: Request) -> Answer:
        """Send a request and wait for its answer; the first is a `Hello`. Raises as `join`."""
        with self._changed:
            if isinstance(body, Hello):
                self._hello = body
            request = Numbered(id=self._next_id, body=body)
            self._next_id += 1
            self._request, self._answer = request, None
            is_welcome = self._is_welcome
        if not self._threads:
            self._start()
        elif is_welcome:
            self._send(request)
        with self._changed:
            while self._answer is None:
                self._check()
                self._changed.wait(timeout=1.0)
            answer, self._answer, self._request = self._answer, None, None
        return answer

    def end_group(self, reason: Literal["connection", "stale"], message: str) -> None:
        """Say that the group of this agent is over."""
        self._send(Numbered(id=0, body=GroupEnded(reason=reason, message=message)))

    def _start(self) -> None:
        self._away_since = time.monotonic()
        name = f"member-{self.identity.group}-{self.identity.rank}"
        for run, suffix in ((self._keep_connected, ""), (self._send_heartbeats, "-beat")):
            thread = threading.Thread(target=run, name=f"{name}{suffix}", daemon=True)
            thread.start()
            self._threads.append(thread)  # now `close` may wait for it

    def _check(self) -> None:
        """Raise if no answer can come any more."""
        if self._refusal and self._refusal.reason == "dismissed":
            raise Dismissed(self._refusal.message)
        if self._refusal:
            raise Refused(self._refusal.message)
        if self._is_closed:
            raise CoordinatorLost("this rank has closed its connection to the coordinator")
        away_s = 0.0 if self._is_welcome else time.monotonic() - self._away_since
        if away_s > _LOST_AFTER_S + finding_s(self._connect_timeout_s):
            raise CoordinatorLost(
                f"no coordinator answered for {away_s:.0f} s ({self._problem or 'no answer'}); was "
                "the job's driver killed, or is the head node cut off?"
            )

    def _send(self, line: Numbered) -> None:
        """Send if there is a connection; if it breaks, the other thread repeats the request."""
        data = line.model_dump_json().encode() + b"\n"
        with self._sending:
            if self._socket:
                with contextlib.suppress(OSError):
                    self._socket.sendall(data)

    def _keep_connected(self) -> None:
        while not self._is_closed and self._refusal is None:
            try:
                self._serve_connection()
            except Refused as error:
                self.take_rejection(Rejection(reason="failed", message=str(error)))
            except (OSError, ValueError) as error:
                self._problem = str(error)
                logger.debug("the coordinator is away: %s", error)
            self._hang_up()
            if self._is_agent and not self._is_closed:
                self._end_with_agent()
            with self._changed:
                if self._is_welcome and not (self._is_closed or self._refusal):
                    logger.warning("the coordinator is away; this rank looks for it")
                    self._away_since = time.monotonic()
                self._is_welcome = False
                if not self._is_closed:
                    self._changed.wait(timeout=_RETRY_S)

    def _end_with_agent(self) -> None:
        """End this rank where its agent has ended, or was looked for in vain."""
        away_s = time.monotonic() - self._away_since
        if self._has_connected:
            message = "the agent of this group, its first rank, has ended"
        elif away_s > _AGENT_S:
            message = (
                f"the agent of this group, its first rank, took no connection for {away_s:.0f} s "
                f"({self._problem}); did it end at its start, or can this host not reach its host?"
            )
        else:
            return
        self.take_rejection(Rejection(reason="fenced", message=message))

    def _serve_connection(self) -> None:
        """Connect, introduce this rank, repeat what is unanswered, and read until it breaks."""
        connection = self._connect()
        self._has_connected = True
        with self._sending:
            self._socket = connection
        if self._is_closed:
            return
        self._introduce()
        buffer = b""
        while data := connection.recv(_RECV_BYTES):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._take_line(Answered.model_validate_json(line))

    def _connect(self) -> socket.socket:
        """A connection to the coordinator, after both have proven that they have the token."""
        address = self._locate()
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), self._connect_timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # What nobody confirms ends a connection. TCP would try it again after ever longer
            # pauses, the last as long as the network was away; a new connection is there sooner.
            unconfirmed_ms = int(1000 * self._connect_timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unconfirmed_ms)
            # Thousands of ranks may come at once.
            proving_s = _PROVING_FACTOR * self._connect_timeout_s
            authenticate(connection, self.token, address, proving_s)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        return connection

    def _introduce(self) -> None:
        with self._changed:
            assert self._hello, "a rank connects when it joins"
            request = self._request
            if request and isinstance(request.body, Hello):
                self._welcome_id = request.id
            else:
                self._welcome_id, self._next_id = self._next_id, self._next_id + 1
            hello = Numbered(id=self._welcome_id, body=self._hello)
        self._send(hello)

    def _take_line(self, line: Answered) -> None:
        if isinstance(line.body, Roster):
            self._roster = line.body.after(self._roster)
        elif isinstance(line.body, Round):
            body = line.body.model_copy(update={"members": self._roster.members})
            self._take_answer(line.model_copy(update={"body": body}))
        else:
            self._take_answer(line)

    def _take_answer(self, line: Answered) -> None:
        if isinstance(line.body, Rejection):
            self.take_rejection(line.body)
            return
        if line.id == 0:
            if isinstance(line.body, RoundResult):
                self.take_abort(line.body)
            return
        again = None
        with self._changed:
            if isinstance(line.body, RoundResult):
                self._is_through = line.body.should_leave or line.body.has_finished
            assert self._hello
            self._hello = remembering(self._hello, line.body)
            if line.id == self._welcome_id and not self._is_welcome:
                self._is_welcome = True
                again = self._request if self._request and self._request.id != line.id else None
            if self._request and line.id == self._request.id:
                self._answer = line.body
            self._changed.notify_all()
        if again:
            self._send(again)

    def take_abort(self, result: RoundResult) -> None:
        """A round has failed while this rank may still wait in a collective of it."""
        self._aborted_round = max(self._aborted_round, result.round)

    def take_rejection(self, refusal: Rejection) -> None:
        """This life of the group, or the whole run, is over; what was said first holds."""
        with self._changed:
            self._refusal = self._refusal or refusal
            self._changed.notify_all()
        if self.on_refusal and refusal.reason == "fenced" and not self._is_through:
            self.on_refusal(refusal.message)

    def _hang_up(self) -> None:
        with self._sending:
            connection, self._socket = self._socket, None
        if connection:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _send_heartbeats(self) -> None:
        def has_ended() -> bool:
            return self._is_closed or self._refusal is not None

        while True:
            with self._changed:
                if self._changed.wait_for(has_ended, timeout=self._beat_every_s):
                    return
            self._send(Numbered(id=0, body=Heartbeats(ranks=self.heartbeats())))

    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """What there is to say now of the ranks that this connection speaks for."""
        return (self.reporter.heartbeat(self.identity.rank),)


def remembering(hello: Hello, answer: Answer) -> Hello:
    """What a group says next time after this answer: what a restarted coordinator will need."""
    news: dict[str, object] = {}
    if isinstance(answer, Round):
        members = tuple((member.group, member.incarnation) for member in answer.members)
        news = {
            "members": members,
            "round": answer.round,
            "generation": answer.generation,
        }
        if answer.donors:
            news["standing"] = "listening"
    elif isinstance(answer, RoundResult):
        # `initial` tells a listener to start over: it is not what a seed or checkpoint made.
        standing = "current" if answer.standing == "current" else "listening"
        # Until a round commits a checkpoint's own ledger counts: this one may be of a coordinator
        # that was restarted and knows of no run yet.
        if hello.standing != "initial" or answer.committed:
            news = {"ledger": answer.ledger, "leases": answer.leases, "standing": standing}
    return hello.model_copy(update=news)


class HeartbeatReporter:
    """What a rank's heartbeats say: how it gets on, and how long its steps take."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._times_s: deque[float] = deque(maxlen=_NUM_STEP_TIMES)
        self._began_at = 0.0
        self._phase: HeartbeatPhase = "start"
        self._progress = self._num_steps = 0
        # Seconds of a step, reading included, without waiting for other ranks.
        self.local_s = 0.0

    def begin_step(self) -> None:
        self._began_at = self._clock()
        self._num_steps += 1
        # The first one compiles, connects and warms up.
        self.enter("train" if self._times_s else self._phase)

    def end_step(self) -> None:
        self._times_s.append(self._clock() - self._began_at)
        self.enter("train")

    def enter(self, phase: HeartbeatPhase) -> None:
        """A phase begins, or makes progress."""
        self._phase = phase
        self.advance()

    def advance(self) -> None:
        """The same phase gets on, as with each part of a long exchange; for any thread."""
        self._progress += 1

    def heartbeat(self, rank: int) -> Heartbeat:
        """That of `rank` now; for any thread."""
        times_s = self._times_s.copy()
        return Heartbeat(
            rank=rank,
            progress=self._progress,
            num_steps=self._num_steps,
            phase=self._phase,
            step_time_s=median(times_s) if times_s else 0.0,
            local_s=self.local_s,
        )


@contextmanager
def report_heartbeats(
    address: str | None, identity: Identity, token: bytes
) -> Iterator[HeartbeatReporter]:
    """Send this rank's heartbeats to the driver, if that listens at an `address` (host:port)."""
    if address is None:
        yield HeartbeatReporter()
        return
    member = CoordinatorClient(identity, lambda: address, WATCH_SILENCE_S / 6, token)
    member.on_refusal = end_process
    member.join("initial", f"run-{identity.incarnation}", Ledger(), donor="")
    try:
        yield member.reporter
    finally:
        member.on_refusal = None
        member.close()


def end_process(message: str) -> None:
    """End this worker, which was given up, and log what its threads were doing.

    For `CoordinatorClient.on_refusal`: the main thread may hang for good, and when the process ends
    its peers get an error at once.
    """
    logger.error("this worker is given up: %s", message)
    faulthandler.dump_traceback(all_threads=True)
    # A thread that hangs in NCCL may hold the recorder's lock.
    recorder = threading.Thread(target=_log_collectives, name="flight-recorder", daemon=True)
    recorder.start()
    recorder.join(_RECORDER_S)
    sys.stderr.flush()
    os._exit(_EXIT_DROPPED)


def _log_collectives() -> None:
    """Log the collectives of NCCL that are under way, where there is NCCL (torch's recorder)."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is not None and hasattr(c10d, "ProcessGroupNCCL"):
        found = c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=True)
        logger.error("NCCL's flight recorder, active collectives: %s", found.decode())
