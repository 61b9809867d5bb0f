"""A group's agent: one connection to the coordinator that speaks for all ranks of the group.

The agent lives on threads of the group's first rank. All ranks, that one too, connect to it as if
it were the coordinator; it waits for what they ask, asks it once, and gives each the answer.

Of a result's ledger, ranks get the rows of open epochs only where their group leads, as it alone
saves them. The agent keeps all for a restarted coordinator.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pydantic import ValidationError

from trainer.coordination.authentication import AuthenticatedServer
from trainer.coordination.client import (
    CoordinatorClient,
    CoordinatorLost,
    Dismissed,
    Identity,
    Refused,
)
from trainer.coordination.messages import (
    Answer,
    Answered,
    Arrive,
    Heartbeat,
    Heartbeats,
    Hello,
    Numbered,
    Rejection,
    Request,
    Roster,
    Round,
    RoundResult,
    Vote,
)

logger = logging.getLogger(__name__)
_FAREWELL_S = 10.0


class Disagreement(Exception):
    """Ranks of a group contradict each other: it must not go on."""


@dataclass(eq=False)
class _Link:
    """The connection of one rank: what it asks, and what it said since the last heartbeats."""

    rank: int
    host: str
    connection: socket.socket
    request: Numbered | None = None
    heartbeat: Heartbeat | None = None


class _Upstream(CoordinatorClient):
    """The agent's own connection, to the coordinator."""

    agent: GroupAgent

    def heartbeats(self) -> tuple[Heartbeat, ...]:
        return self.agent.take_heartbeats()

    def take_abort(self, result: RoundResult) -> None:
        self.agent.tell_all(result)

    def take_rejection(self, refusal: Rejection) -> None:
        super().take_rejection(refusal)
        self.agent.reject(refusal)


class GroupAgent:
    """Speaks for the group of `identity`, which is its first rank's."""

    def __init__(
        self,
        identity: Identity,
        locate: Callable[[], str],
        heartbeat_timeout_s: float,
        token: bytes,
    ) -> None:
        self._identity = identity
        self._changed = threading.Condition()
        self._links: dict[int, _Link] = {}
        self._roster = Roster(members=())
        self._result: RoundResult | None = None
        self._is_over = False  # every rank will end by itself
        self._is_closed = False
        self._upstream = _Upstream(identity, locate, heartbeat_timeout_s, token)
        self._upstream.agent = self
        self._server = AuthenticatedServer("agent", identity.host, token, self._serve)
        self.address = self._server.address
        """Where the ranks connect to it (host:port)."""
        threading.Thread(target=self._speak, name="agent", daemon=True).start()

    def close(self) -> None:
        """End it; at the end of the run not before the other ranks, unless they take long."""
        with self._changed:
            if self._is_over:
                self._changed.wait_for(lambda: not self._links, _FAREWELL_S)
            self._is_closed = True
            self._changed.notify_all()
        self._server.close()
        self._upstream.close()

    # --- ranks

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = None
        try:
            with connection.makefile("rb") as lines:
                for line in lines:
                    asked = Numbered.model_validate_json(line)
                    if isinstance(asked.body, Hello) and link is None:
                        link = self._enter(asked.body, connection)
                    if link:
                        self._take(link, asked)
        except ValidationError:
            logger.exception("a rank sent an invalid message")
        finally:
            if link:
                self._lose(link)

    def _enter(self, hello: Hello, connection: socket.socket) -> _Link:
        process = hello.ranks[0]
        link = _Link(process.rank, process.host, connection)
        with self._changed:
            self._links[link.rank] = link
        return link

    def _take(self, link: _Link, asked: Numbered) -> None:
        body = asked.body
        with self._changed:
            result = self._result
            if isinstance(body, Heartbeats):
                (link.heartbeat,) = body.ranks
            elif isinstance(body, Vote) and result and body.round == result.round:
                # It ended by the refusal of another rank.
                self._send(link, asked.id, result)
            else:
                link.request = asked
                self._changed.notify_all()

    def _lose(self, link: _Link) -> None:
        with self._changed:
            del self._links[link.rank]
            self._changed.notify_all()
            is_expected = self._is_over or self._is_closed
        if not is_expected:
            message = f"rank {link.rank} on {link.host} ended: its connection was closed"
            self._upstream.end_group("connection", message)
            self.reject(Rejection(reason="fenced", message=message))

    def _send(self, link: _Link, request_id: int, body: Answer) -> None:
        line = Answered(id=request_id, body=body).model_dump_json().encode() + b"\n"
        with suppress(OSError):  # its end is seen where it is heard
            link.connection.sendall(line)

    # --- the coordinator

    def take_heartbeats(self) -> tuple[Heartbeat, ...]:
        """Those of the ranks that were heard since the last call."""
        found = []
        with self._changed:
            for link in self._links.values():
                if link.heartbeat:
                    waits = {"is_waiting": link.request is not None}
                    found.append(link.heartbeat.model_copy(update=waits))
                link.heartbeat = None
        return tuple(found)

    def tell_all(self, body: Answer) -> None:
        """Tell every rank something that it did not ask for."""
        with self._changed:
            for link in self._links.values():
                self._send(link, 0, body)

    def reject(self, refusal: Rejection) -> None:
        """The group, or the run, is over: every rank is told so, once."""
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                self._is_over |= refusal.reason == "dismissed"
                self.tell_all(refusal)
                self._changed.notify_all()

    def _speak(self) -> None:
        """Ask what the ranks ask, and tell them the answer, until the group is over."""
        try:
            while asked := self._next_requests():
                self._tell(self._upstream.ask(merged(asked)))
        except Disagreement as error:
            self._upstream.end_group("stale", str(error))
            self.reject(Rejection(reason="fenced", message=str(error)))
        except Dismissed as error:
            self.reject(Rejection(reason="dismissed", message=str(error)))
        except (Refused, CoordinatorLost) as error:
            self.reject(Rejection(reason="failed", message=str(error)))

    def _next_requests(self) -> dict[int, Request]:
        """What all ranks ask, once they do, or once one that voted has failed; {} at the end.

        Who could not go through with a round is not to wait for others, which may hang in it.
        """

        def asked() -> dict[int, Request]:
            links = sorted(self._links.items())
            return {rank: link.request.body for rank, link in links if link.request}

        def is_due() -> bool:
            found = asked()
            votes = (body for body in found.values() if isinstance(body, Vote))
            has_failed = any(not (vote.ok or vote.gave_up) for vote in votes)
            return self._is_closed or has_failed or len(found) == self._identity.num_ranks

        with self._changed:
            self._changed.wait_for(is_due)
            return {} if self._is_closed else asked()

    def _tell(self, answer: Answer) -> None:
        """Give every rank the answer; who has not voted yet may wait in a collective."""
        with self._changed:
            told: Answer = answer
            if isinstance(answer, RoundResult):
                told = self._result = self._for_ranks(answer)
                self._is_over = answer.should_leave or answer.has_finished
            elif isinstance(answer, Round):
                roster = Roster(members=answer.members)
                if roster != self._roster:
                    self._roster = roster
                    self.tell_all(roster)
                told = answer.model_copy(update={"members": ()})
            for link in self._links.values():
                asked, link.request = link.request, None
                if asked or isinstance(told, RoundResult):
                    self._send(link, asked.id if asked else 0, told)

    def _for_ranks(self, result: RoundResult) -> RoundResult:
        if result.leader == self._identity.group:
            return result
        ledger = result.ledger.model_copy(update={"open_epochs": ()})
        return result.model_copy(update={"ledger": ledger})


def merged(asked: Mapping[int, Request]) -> Request:
    """What a group asks whose ranks ask this, by rank. Raises `Disagreement`."""
    bodies = list(asked.values())
    hellos = [each for each in bodies if isinstance(each, Hello)]
    arrivals = [each for each in bodies if isinstance(each, Arrive)]
    votes = {rank: each for rank, each in asked.items() if isinstance(each, Vote)}
    if len(hellos) == len(bodies):
        return _hello_of(hellos)
    if len(arrivals) == len(bodies):
        return _arrival_of(arrivals)
    if len(votes) == len(bodies):
        return _vote_of(votes)
    raise Disagreement(f"its ranks ask different things: {[each.kind for each in bodies]}")


def _hello_of(hellos: Sequence[Hello]) -> Hello:
    _check({(each.standing, each.ledger.commit) for each in hellos}, "standings or commits")
    ranks = tuple(process for each in hellos for process in each.ranks)
    return hellos[0].model_copy(update={"ranks": ranks})


def _arrival_of(arrivals: Sequence[Arrive]) -> Arrive:
    seen = {(each.leases, each.num_rows, each.commit, each.measured) for each in arrivals}
    _check(seen, "leases, rows, commits or shares of the validation")
    return arrivals[0].model_copy(
        update={
            "train_s": max(each.train_s for each in arrivals),
            "has_copied": all(each.has_copied for each in arrivals),
            "is_poisoned": any(each.is_poisoned for each in arrivals),
            "may_overlap": all(each.may_overlap for each in arrivals),
            "needs_exact": any(each.needs_exact for each in arrivals),
            "report": next((each.report for each in arrivals if each.report), None),
            "copied_bytes": sum(each.copied_bytes for each in arrivals),
            "num_quarantined": sum(each.num_quarantined for each in arrivals),
        }
    )


def _vote_of(votes: Mapping[int, Vote]) -> Vote:
    _check({(vote.round, vote.commit) for vote in votes.values()}, "rounds")
    failed = {rank: vote for rank, vote in votes.items() if not vote.ok}
    if not failed:
        checksums = tuple(found for vote in votes.values() for found in vote.checksums)
        return next(iter(votes.values())).model_copy(update={"checksums": checksums})
    found = {rank: vote for rank, vote in failed.items() if not vote.gave_up} or failed
    (rank, vote), *_ = found.items()
    suspects = sorted({group for each in found.values() for group in each.suspects})
    update = {"error": f"rank {rank}: {vote.error}", "suspects": tuple(suspects), "checksums": ()}
    return vote.model_copy(update=update)


def _check(seen: Collection[object], what: str) -> None:
    if len(seen) > 1:
        raise Disagreement(f"its ranks came with different {what}: {sorted(map(str, seen))}")
