"""The coordinator's server: `Membership` behind a TCP port.

It runs on a thread of its own in any process; under Ray it is an actor, which Ray restarts. Its
state is not stored: a new server rebuilds it (`trainer.elastic.coordinator.membership`). Messages
are JSON lines (`trainer.coordination.messages`); a line that is none ends its connection. None is
read before a connection has proven itself (`trainer.coordination.authentication`).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import queue
import resource
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from pydantic import ValidationError

from trainer.coordination.authentication import (
    PROOF_TIMEOUT_S,
    RESPONSE_BYTES,
    Challenge,
    UnprovenConnections,
)
from trainer.coordination.detection import RankId
from trainer.coordination.messages import (
    Answer,
    Answered,
    Arrive,
    GroupEnded,
    Heartbeats,
    Hello,
    Ledger,
    Numbered,
    Roster,
    Round,
    RoundResult,
    Vote,
)
from trainer.elastic.coordinator.interface import (
    CoordinatorStatus,
    Effect,
    MembershipPolicy,
    Reply,
)
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.elastic.coordinator.membership import Membership
from trainer.protocol.events import Event
from trainer.protocol.outbox import EventWriter
from trainer.protocol.run_dir import AttemptDir

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_MAX_LINE_BYTES = 64 << 20
_GC_THRESHOLDS = (200_000, 20, 1000)
_BACKLOG = 4096  # all may connect at once
_TICKS_PER_TIMEOUT, _MAX_TICK_S = 10, 0.5
_TURNS_TO_READ = 3
_CALL_S = 30.0


@dataclass(frozen=True)
class CoordinatorConfig:
    """A coordinator for one attempt of one job.

    It listens at `host`, under which the ranks reach it, at a free port unless `port` names one.
    `book` is that of a fresh run. Its events go to the attempt's files. Only clients with `token`,
    the attempt's, are heard. With `only_watches` there is one group that syncs with no other: only
    hangs are reported, and a rank that ends does not end the others.
    """

    policy: MembershipPolicy
    book: LeaseBook
    attempt_dir: Path
    token: bytes = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    only_watches: bool = False


def open_stream(attempt_dir: Path) -> EventWriter:
    """The stream `coordinator-N` with the first free N: each start of the actor has its own."""
    names = (f"coordinator-{number}" for number in itertools.count())
    paths = map(AttemptDir(attempt_dir).stream_path, names)
    path = next(path for path in paths if not path.exists())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return EventWriter(path)


class _Unproven(asyncio.Protocol):
    """A connection without a proof yet; with it a `_Connection` takes its place."""

    transport: asyncio.Transport

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._response = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # In an actor the loop is uvloop's, whose transports have no base class of asyncio.
        self.transport = cast("asyncio.Transport", transport)
        self._challenge = self._coordinator.challenge(self)
        self.transport.write(self._challenge.nonce)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(PROOF_TIMEOUT_S, self._refuse, "no proof came in time")

    def data_received(self, data: bytes) -> None:
        self._response += data
        if len(self._response) < RESPONSE_BYTES:
            return
        is_proven, answer = self._challenge.answer(self._response)
        self.transport.write(answer)
        if not is_proven:
            self._refuse("wrong token")
            return
        self._timer.cancel()
        self._coordinator.unproven.discard(self)
        self.transport.set_protocol(_Connection(self._coordinator, self.transport))

    def _refuse(self, cause: str) -> None:
        self._coordinator.unproven.log_refusal(cause, self.transport.get_extra_info("peername"))
        self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._timer.cancel()
        self._coordinator.unproven.discard(self)
        self._coordinator.forget(self.transport)


class _Connection(asyncio.Protocol):
    """The connection of a group's agent, or of a rank: cuts what comes into lines."""

    def __init__(self, coordinator: Coordinator, transport: asyncio.Transport) -> None:
        self._coordinator, self.transport = coordinator, transport
        self._buffer = b""
        self.speaker: RankId | None = None
        self.roster: Roster | None = None
        """The newest one that it was told."""

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        try:
            for line in lines:
                self._coordinator.receive(self, Numbered.model_validate_json(line))
        except ValidationError:
            logger.exception("%s sent an invalid message", self.speaker)
            self.transport.close()
        if len(self._buffer) > _MAX_LINE_BYTES:
            logger.error("%s sent a line without an end", self.speaker)
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if error:
            logger.info("%s: %s", self.speaker, error)
        self._coordinator.disconnect(self, is_broken=error is not None)


class _AnswerEncoder:
    """Makes lines of answers; what many groups are told is encoded once for all of them."""

    def __init__(self) -> None:
        self._roster, self._roster_line = Roster(members=()), b""
        self._last_roster, self._change_line = self._roster, b""
        self._ledger, self._ledger_json = Ledger(), b""
        self._body: Answer | None = None
        self._encoded = b""

    def lines_for(self, connection: _Connection, reply: Reply) -> bytes:
        """The answer, after the roster of its round, or its change, where that is news."""
        if reply.body is not self._body:
            self._encode(reply.body)
        line = b'{"id":%d,"body":%b}\n' % (reply.id, self._encoded)
        if not isinstance(reply.body, Round) or connection.roster is self._roster:
            return line
        is_change = connection.roster is self._last_roster
        connection.roster = self._roster
        return (self._change_line if is_change else self._roster_line) + line

    def _encode(self, body: Answer) -> None:
        self._body = body
        if isinstance(body, Round):
            roster = Roster(members=body.members)
            if roster != self._roster:
                self._last_roster, self._roster = self._roster, roster
                self._roster_line = _line_of(roster)
                self._change_line = _line_of(roster.since(self._last_roster))
            body = body.model_copy(update={"members": ()})
        if isinstance(body, RoundResult):
            if body.ledger is not self._ledger:
                self._ledger, self._ledger_json = (
                    body.ledger,
                    body.ledger.model_dump_json().encode(),
                )
            rest = body.model_dump_json(exclude={"ledger"}).encode()
            self._encoded = b'%b,"ledger":%b}' % (rest[:-1], self._ledger_json)
        else:
            self._encoded = body.model_dump_json().encode()


def _line_of(roster: Roster) -> bytes:
    return Answered(id=0, body=roster).model_dump_json().encode() + b"\n"


class Coordinator:
    """A running server; its methods may be called from any thread but its own.

    They raise RuntimeError or TimeoutError where an error has ended it.
    """

    def __init__(
        self, config: CoordinatorConfig, on_crash: Callable[[], None] = lambda: None
    ) -> None:
        """Start it. Raises OSError where the port cannot be had, or storage takes no stream.

        `on_crash` is called on its thread if an error, which is logged, has ended it.
        """
        self._config, self._on_crash = config, on_crash
        self._membership = Membership(config.policy, config.book)
        self._connections: dict[RankId, _Connection] = {}
        self._open: set[asyncio.Transport] = set()
        self.unproven = UnprovenConnections[_Unproven](
            "coordinator", _BACKLOG, lambda each: each.transport.abort()
        )
        """Those of `_open` that were not let in."""
        self._encoder = _AnswerEncoder()
        # One thread, so that slow storage does not delay the event loop.
        self._writing = ThreadPoolExecutor(1, "coordinator-events")
        # Time that never runs backwards, near to Unix time.
        self._epoch_s = time.time() - time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._is_stopping = asyncio.Event()
        self._error: BaseException | None = None
        self._started: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()
        address = self._started.get()
        if isinstance(address, BaseException):
            self._writing.shutdown()
            raise address
        self.address = address
        """Where it listens (host:port)."""

    def status(self) -> CoordinatorStatus:
        return self._call(self._membership.status)

    def request(self, step: Literal["want", "drop"], *args: Any) -> None:
        """Take a step that the driver asks for, of this name in `Membership`."""
        take = getattr(self._membership, step)
        self._call(lambda: self._take(lambda: take(*args, self._now())))

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End the server. Who is connected looks for another one."""
        with suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._is_stopping.set)
        self._thread.join()
        self._writing.shutdown()

    def _call(self, function: Callable[[], Result]) -> Result:
        async def call() -> Result:
            return function()

        if self.is_over:
            raise RuntimeError("the coordinator has ended")
        # What is asked for as the loop ends is never called.
        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(_CALL_S)

    # --- on the event loop

    def _now(self) -> float:
        return self._epoch_s + time.monotonic()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        serving = self._loop.create_task(self._serve())
        self._loop.run_until_complete(asyncio.wait([serving]))
        self._loop.close()
        if error := serving.exception():
            # Nobody's loss would be noticed any more, and what it knows may contradict itself.
            logger.error("the coordinator has failed", exc_info=error)
            self._on_crash()

    async def _serve(self) -> None:
        config, server = self._config, None
        try:
            server = await self._loop.create_server(
                lambda: _Unproven(self), config.host, config.port, backlog=_BACKLOG
            )
            self._writer = open_stream(config.attempt_dir)
        except BaseException as error:  # the constructor raises it
            if server:
                server.close()
            self._started.put(error)
            return
        port = server.sockets[0].getsockname()[1]
        ticking = asyncio.create_task(self._tick())
        self._started.put(f"{config.host}:{port}")
        await self._is_stopping.wait()
        server.close()
        ticking.cancel()
        for transport in self._open:
            transport.abort()
        await asyncio.sleep(0)  # in which they close
        if self._error:
            raise self._error

    async def _tick(self) -> None:
        while True:
            timeout_s = self._config.policy.recovery.heartbeat_timeout_s
            await asyncio.sleep(min(timeout_s / _TICKS_PER_TIMEOUT, _MAX_TICK_S))
            for _ in range(_TURNS_TO_READ):  # what has come counts before silence does
                await asyncio.sleep(0)
            self._take(lambda: self._membership.tick(self._now()))

    def _take(self, step: Callable[[], Iterable[Effect]]) -> None:
        """Take a step of the membership and act on it; an error there ends the coordinator."""
        try:
            self._act(step())
        except Exception as error:
            self._error = self._error or error
            self._is_stopping.set()

    def challenge(self, connection: _Unproven) -> Challenge:
        """A connection was accepted; what it must prove."""
        self._open.add(connection.transport)
        self.unproven.add(connection)
        port = connection.transport.get_extra_info("sockname")[1]
        return Challenge(self._config.token, f"{self._config.host}:{port}")

    def forget(self, transport: asyncio.Transport) -> None:
        self._open.discard(transport)

    def disconnect(self, connection: _Connection, is_broken: bool) -> None:
        """Forget a connection; the end of a speaker's newest one is its own."""
        self.forget(connection.transport)
        speaker = connection.speaker
        if speaker is None or self._connections.get(speaker) is not connection:
            return
        del self._connections[speaker]
        if self._is_stopping.is_set():
            return
        if self._config.only_watches:
            self._membership.forget_rank(speaker)
        else:
            self._take(lambda: self._membership.on_disconnect(speaker, self._now(), is_broken))

    def receive(self, connection: _Connection, line: Numbered) -> None:
        body, now = line.body, self._now()
        if isinstance(body, Hello):
            known = RankId(body.group, body.incarnation, body.ranks[0].rank)
            old = self._connections.get(known)
            connection.speaker, self._connections[known] = known, connection
            if old and old is not connection:  # its end was not heard, and may never be
                old.transport.abort()
            self._take(lambda: self._membership.on_hello(body, line.id, now))
        elif speaker := connection.speaker:
            self._take(lambda: self._receive_from(speaker, line, now))
        elif not isinstance(body, Heartbeats):  # which may overtake the hello
            logger.warning("a connection began with %s and not with a hello", body.kind)

    def _receive_from(self, speaker: RankId, line: Numbered, now: float) -> Iterable[Effect]:
        membership = self._membership
        match line.body:
            case Heartbeats() as body:
                return membership.on_heartbeats(speaker, body.ranks, now)
            case Arrive() as body:
                return membership.on_arrive(speaker, line.id, body, now)
            case Vote() as body:
                return membership.on_vote(speaker, line.id, body, now)
            case GroupEnded() as body:
                return membership.on_ended(speaker, body, now)
        return ()

    def _act(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self._send(effect)
            elif not self._config.only_watches or effect.kind == "hang_found":
                self._writing.submit(self._write, effect)

    def _write(self, event: Event) -> None:
        if event.kind != "metrics":
            logger.info("%s", event)
        self._writer.write(event)

    def _send(self, reply: Reply) -> None:
        connection = self._connections.get(reply.to)
        if connection and not connection.transport.is_closing():
            connection.transport.write(self._encoder.lines_for(connection, reply))


def prepare_process() -> None:
    """Let a process of thousands of connections have them (the usual limit is 1024).

    Garbage is looked for less often: messages are in no cycles, and live for about a sync.
    """
    gc.set_threshold(*_GC_THRESHOLDS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
