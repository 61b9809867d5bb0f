"""Parts of a scripted cluster: an autoscaler that does as it is told, and an attempt."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from trainer.driver.attempt import Attempt, DriverContext
from trainer.driver.autoscale import CapacityRequest, PendingCapacity
from trainer.protocol.outbox import EventWriter
from trainer.spec.job import JobSpec


@dataclass
class Cloud:
    """An autoscaler that gives a request a node when told to."""

    known: dict[str, PendingCapacity] = field(default_factory=dict)
    avoided: list[set[str]] = field(default_factory=list)
    num_asked: int = 0
    kept: list[str] = field(default_factory=list)

    def pending(self) -> list[PendingCapacity]:
        return list(self.known.values())

    def request(self, wanted: CapacityRequest, node_ids: Collection[str]) -> None:
        self.num_asked += 1
        self.avoided.append(set(node_ids))
        self.known[str(self.num_asked)] = PendingCapacity(str(self.num_asked), wanted)

    def withdraw(self, id_: str) -> None:
        self.known.pop(id_, None)
        self.kept = [each for each in self.kept if f"keep {each}" != id_]

    def keep(self, node_id: str) -> str:
        self.kept.append(node_id)
        return f"keep {node_id}"

    def give(self, id_: str, *node_ids: str) -> None:
        self.known[id_] = PendingCapacity(id_, self.known[id_].request, node_ids)


def attempt_in(run_dir: Path, job: JobSpec) -> Attempt:
    context = DriverContext("job", "job-a0", run_dir, None, max_worker_failures=1)
    context.files.root.mkdir(parents=True)
    return Attempt(context, job, EventWriter(context.files.stream_path("driver")))
