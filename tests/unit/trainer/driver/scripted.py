"""Parts of a scripted cluster: an autoscaler that does as it is told, and an attempt."""

from __future__ import annotations

import errno
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainer.driver.attempt import Attempt, DriverContext
from trainer.driver.autoscale import CapacityRequest, PendingCapacity
from trainer.protocol import requests
from trainer.protocol.outbox import EventWriter
from trainer.spec.job import JobSpec


@dataclass
class Cloud:
    """An autoscaler that gives a request a node when told to."""

    known: dict[str, PendingCapacity] = field(default_factory=dict)
    avoided: list[set[str]] = field(default_factory=list)
    num_asked: int = 0

    def pending(self) -> list[PendingCapacity]:
        return list(self.known.values())

    def request(self, wanted: CapacityRequest, node_ids: Collection[str]) -> None:
        self.num_asked += 1
        self.avoided.append(set(node_ids))
        self.known[str(self.num_asked)] = PendingCapacity(str(self.num_asked), wanted)

    def withdraw(self, id_: str) -> None:
        del self.known[id_]

    def give(self, id_: str, *node_ids: str) -> None:
        self.known[id_] = PendingCapacity(id_, self.known[id_].request, node_ids)


def attempt_in(run_dir: Path, job: JobSpec) -> Attempt:
    context = DriverContext("job", "job-a0", run_dir, None, max_worker_failures=1)
    context.files.root.mkdir(parents=True)
    return Attempt(context, job, EventWriter(context.files.stream_path("driver")))


class RunStorage:
    """The run folder's mount: while it is away no request is written and no mark is looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._is_away = False
        self._write, self._stat = requests.write_whole, Path.stat
        monkeypatch.setattr(requests, "write_whole", self._write_unless_away)
        monkeypatch.setattr(Path, "stat", lambda path, **how: self._stat_unless_away(path, **how))

    def leave(self) -> None:
        self._is_away = True

    def come_back(self) -> None:
        self._is_away = False

    def _write_unless_away(self, path: Path, content: bytes) -> None:
        if self._is_away:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self._write(path, content)

    def _stat_unless_away(self, path: Path, **how: Any) -> Any:
        if self._is_away and path.name.startswith("stopping-"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return self._stat(path, **how)
