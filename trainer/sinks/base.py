"""What a sink is, and what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.events import Event

# What a sink remembers from one attempt to the next: plain JSON.
Memory = dict[str, Any]


@dataclass(frozen=True)
class JobFacts:
    """What sinks tell of the job whose records they take."""

    job_id: str
    spec: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self.spec.get("name", self.job_id))


class Sink(Protocol):
    """Takes the records of a job in order, in a thread of its own. May raise whatever it likes."""

    name: str

    def open(self, memory: Memory) -> None:
        """Begin, or go on where an earlier attempt was; what is put into `memory` is kept."""

    def take(self, events: Sequence[Event]) -> None:
        """Take records; when it raises it is given them again."""

    def close(self) -> None:
        """Nothing more will come."""
