"""An autoscaler that does as it is told, for tests of those who ask it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from trainer.autoscale import Ask, Wish


@dataclass
class Cloud:
    """An autoscaler that gives a wish a node when told to."""

    known: dict[str, Ask] = field(default_factory=dict)
    avoided: list[set[str]] = field(default_factory=list)
    num_asked: int = 0
    kept: list[str] = field(default_factory=list)

    def asks(self) -> list[Ask]:
        return list(self.known.values())

    def ask(self, wish: Wish, node_ids: Collection[str]) -> None:
        self.num_asked += 1
        self.avoided.append(set(node_ids))
        self.known[str(self.num_asked)] = Ask(str(self.num_asked), wish)

    def withdraw(self, ask_id: str) -> None:
        self.known.pop(ask_id, None)
        self.kept = [each for each in self.kept if f"keep {each}" != ask_id]

    def keep(self, node_id: str) -> str:
        self.kept.append(node_id)
        return f"keep {node_id}"

    def give(self, ask_id: str, *node_ids: str) -> None:
        self.known[ask_id] = Ask(ask_id, self.known[ask_id].wish, node_ids)
