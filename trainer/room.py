"""What one job has asked the autoscaler of its cluster for, kept in step with what it wants."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trainer import events
from trainer.autoscale import Ask, Need, Wish, holding_on, revise, with_held
from trainer.cluster import Host

logger = logging.getLogger(__name__)


# Far above what workers need until they have their room.
_KEEP_S = 300.0
_SETTLE_S = 10.0


class Autoscaler(Protocol):
    """Takes wishes and holds the room that comes; no call waits for room."""

    def asks(self) -> list[Ask]:
        """What it was asked for and not told to forget."""

    def ask(self, wish: Wish, node_ids: Collection[str]) -> None:
        """Ask for a wish, which none of the nodes in `node_ids` can fulfil."""

    def withdraw(self, ask_id: str) -> None:
        """Forget an ask, and let go of the room that it holds; or let a kept node go."""

    def keep(self, node_id: str) -> str:
        """Keep a node from leaving as idle, without taking room on it; the id to withdraw."""


@dataclass
class Room:
    """The asks of one job. `read_free_hosts` gives live hosts by what is free for anybody.

    The lives of a job may ask from several threads.
    """

    autoscaler: Autoscaler
    read_free_hosts: Callable[[], list[Host]]
    demand: Mapping[str, float]
    write: Callable[[events.Event], None]
    clock: Callable[[], float] = time.monotonic
    _told: tuple[int, int] = field(default=(0, 0), init=False)
    _kept: dict[str, tuple[str, float]] = field(default_factory=dict, init=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False)

    def read_hosts(self) -> list[Host]:
        """Live hosts by what is free for this job: what is held for it, too."""
        # In this order: what is placed between the two looks is seen by neither, not by both.
        asks = self.autoscaler.asks()
        return with_held(self.read_free_hosts(), asks)

    def seek(self, need: Need, hosts: Sequence[Host]) -> None:
        """Ask for what is needed, and for nothing else any more.

        `need` counts no room that is held already; `hosts` are the live ones.
        """
        with self._lock:
            self._let_go(hosts)
            addresses = {host.node_id: host.address for host in hosts}
            asks = self.autoscaler.asks()
            revision = revise(need.wishes, asks, addresses)
            for ask_id in revision.withdrawn:
                self.autoscaler.withdraw(ask_id)
            for wish in revision.wishes:
                avoided = [each for each in addresses if addresses[each] in wish.avoided]
                self.autoscaler.ask(wish, avoided)
            kept = [ask for ask in asks if ask.id not in revision.withdrawn]
            self._tell(need, sum(len(ask.node_ids) for ask in kept))

    def give(self, node_ids: Sequence[str]) -> None:
        """Let go of what is held on these nodes, or anywhere if there are none: it is taken now.

        The workers may need longer than an idle node stays, so the nodes are kept meanwhile.
        """
        with self._lock:
            held = [ask for ask in self.autoscaler.asks() if ask.holds_room]
            ids = holding_on(held, node_ids or [each for ask in held for each in ask.node_ids])
            for ask in held:
                if ask.id in ids:
                    self._keep(ask.node_ids)
                    self.autoscaler.withdraw(ask.id)

    def _keep(self, node_ids: Sequence[str]) -> None:
        for node_id in set(node_ids) - set(self._kept):
            self._kept[node_id] = self.autoscaler.keep(node_id), self.clock()

    def _let_go(self, hosts: Sequence[Host]) -> None:
        """Keep those nodes no longer that are in use or gone, or that nobody came to."""
        live = {host.node_id for host in hosts}
        used = {host.node_id for host in hosts if host.num_free < host.num_slots}
        for node_id, (ask_id, since) in list(self._kept.items()):
            age_s = self.clock() - since
            # For a moment the cluster counts room as used that was just let go of.
            is_used = node_id in used and age_s > _SETTLE_S
            if is_used or node_id not in live or age_s > _KEEP_S:
                del self._kept[node_id]
                self.autoscaler.withdraw(ask_id)

    def close(self) -> None:
        """Ask for nothing any more."""
        self.seek(Need(0, 0), ())

    def _tell(self, need: Need, num_held: int) -> None:
        """Say so when more is wanted, or more of it is missing, than was said last."""
        wants, num_missing = need.wants, max(0, need.wants - need.has - num_held)
        told_wants, told_missing = self._told
        if num_missing and (wants > told_wants or num_missing > told_missing):
            told = events.RoomAsked(
                time=time.time(),
                num_workers=need.has + num_held,
                num_wanted=need.wants,
                num_needed=need.least,
                resources_per_worker=dict(self.demand),
            )
            self.write(told)
            logger.info("asked the autoscaler for room: %s", told)
        self._told = wants, num_missing
