"""What the driver gives every worker: configuration, its sharding group, secrets.

Ray pickles it, so it loads no engine. Secrets travel in an object that never shows its values: not
in Ray's dashboard, which shows the configuration of a Train run, and not in a log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.protocol.mirror import MirrorConfig
from trainer.spec.job import JobSpec

ACTOR_NAMESPACE = "shardloom"


@dataclass(frozen=True, repr=False)
class SecretEnv:
    """Environment variables with secret values, which `repr` leaves out.

    Workers unpickle it before versions are compared, so it stays as older hosts know it.
    """

    values: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"SecretEnv({', '.join(sorted(self.values))})"


@dataclass(frozen=True)
class GroupConfig:
    """Which sharding group a worker belongs to where each is a failure domain of its own.

    `incarnation` counts the restarts of the group. One that `is_spare` waits, with its model built,
    until it is wanted. The coordinator is the Ray actor `actor_name` in
    the namespace `shardloom`.
    """

    group: int
    incarnation: int
    actor_name: str
    is_spare: bool = False


@dataclass(frozen=True)
class FoundData:
    """What an attempt reads, as its driver found it.

    `contents` are the `trainer.data.manifest.FileContents` of each split's folder by the file's
    name, `encodings` a checksum of what ids stand for.
    """

    contents: Mapping[str, Mapping[str, Any]]
    encodings: str


@dataclass(frozen=True)
class WorkerConfig:
    """What the driver gives every worker. `spec` has its tables and its layout resolved.

    `cluster` has the fields of a `trainer.layout.cost.Cluster`, where enough is known of the hosts;
    `watch_address` (host:port) is where the driver hears the workers that have no `group`;
    `versions` are those of the driver. With `token` the workers and the coordinator of an attempt
    prove to each other that they are its own. Where hosts share no run storage `mirror` says how
    this one's copy of the run folder is kept. `data` is None
    where each worker looks for itself; Ray carries a reference to it.
    """

    spec: JobSpec
    run_dir: Path
    attempt_id: str
    run_index: int
    group: GroupConfig | None = None
    watch_address: str | None = None
    secrets: SecretEnv = SecretEnv()
    versions: Mapping[str, str] = field(default_factory=dict)
    token: bytes = field(default=b"", repr=False)
    cluster: Mapping[str, Any] | None = None
    mirror: MirrorConfig | None = None
    data: FoundData | None = None

    @property
    def run_label(self) -> str:
        """Short name of this life of workers, unique within the job: `a0-r1`, or `a0-r0-g2i1`."""
        return f"{self.attempt_id.rpartition('-')[2]}-r{self.run_index}{self._group_label}"

    @property
    def stream(self) -> str:
        """Event stream of these workers' rank 0."""
        return f"{'group' if self.group else 'workers'}{self._group_label}-{self.run_index}"

    def rank_stream(self, rank: int) -> str:
        """Event stream of what one rank alone knows."""
        return f"rank{rank}{self._group_label}-{self.run_index}"

    def log_source(self, rank: int) -> str:
        """Name of the log file of one rank of these workers."""
        return f"group-{self.group.group}-rank-{rank}" if self.group else f"rank-{rank}"

    @property
    def _group_label(self) -> str:
        return f"-g{self.group.group}i{self.group.incarnation}" if self.group else ""
