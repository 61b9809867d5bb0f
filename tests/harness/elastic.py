"""A job whose groups are failure domains, without Ray: coordinator and ranks as bare processes.

The harness starts them, starts a group again when it dies, and keeps what every rank wrote down. A
test says what befalls whom: by `Fault`s that ranks carry, or by signals.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from typing import Any, Self

from tests.harness.elastic_ranks import Control, RankLife, backend_of, coordinate, live
from tests.harness.emulated import EmulatedHosts
from tests.harness.ranks import FORK_SERVER, context_of
from tests.harness.wait import free_port, scaled
from trainer.fault_injection import FAULTS, Fault
from trainer.protocol.worker_config import GroupConfig, WorkerConfig

_POLL_S = 0.05
_ASK_COORDINATOR_S = 0.25
_MAX_LIVES = 40

Record = Mapping[str, Any]


@dataclass
class GroupLife:
    """The processes of one life of a group, by rank."""

    group: int
    incarnation: int
    ranks: list[ForkServerProcess] | list[SpawnProcess]

    @property
    def exit_codes(self) -> list[int | None]:
        """Of each rank; None while it runs, negative for a signal."""
        return [rank.exitcode for rank in self.ranks]

    @property
    def is_over(self) -> bool:
        """Whether all ranks have ended as they should."""
        return all(code == 0 for code in self.exit_codes)

    @property
    def is_broken(self) -> bool:
        """Whether some rank ended as it should not."""
        return any(code not in (None, 0) for code in self.exit_codes)

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.is_alive():
                rank.kill()
        for rank in self.ranks:
            rank.join()


@dataclass
class Coordinator:
    process: ForkServerProcess
    pipe: Connection

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the server; raises AssertionError when it fails."""
        self.pipe.send((method, args))
        assert self.pipe.poll(scaled(10)), f"the coordinator did not answer {method}"
        error, value = self.pipe.recv()
        assert error is None, f"{method} failed:\n{error}"
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


@dataclass
class ElasticHarness:
    """One job. A context manager: its processes are gone after it.

    `config` is the job's, without a group. Group g runs on host 127.0.0.(g + 2), which is no more
    than a name; with a `network` on host g + 1 of that, the coordinator being on host 0.
    `restarts` says whether groups that die are started again; for `pace_s` see `Control`.
    """

    config: WorkerConfig
    folder: Path
    num_groups: int
    pace_s: float = 0.0
    restarts: bool = True
    network: EmulatedHosts | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        head = self.network.addresses[0] if self.network else "127.0.0.1"
        self._address = f"{head}:{free_port()}"
        self._lives: dict[int, GroupLife] = {}
        self.ended: list[GroupLife] = []
        self._records: dict[Path, tuple[int, list[Record]]] = {}
        self._coordinator: Coordinator | None = None
        self._faults: list[Fault] = []
        self._asked_at = 0.0
        self._tell_ranks()

    def __enter__(self) -> Self:
        self.start_coordinator()
        self.coordinator.call("request", "want", range(self.num_groups), 0, {}, 0, {})
        for group in range(self.num_groups):
            self.start_group(group)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for life in self._lives.values():
            life.kill()
        if self._coordinator:
            self._coordinator.kill()

    # --- processes

    @property
    def coordinator(self) -> Coordinator:
        assert self._coordinator, "the coordinator was not started"
        return self._coordinator

    @property
    def _head(self) -> Path | None:
        return self.network.network(0) if self.network else None

    def start_coordinator(self) -> None:
        ours, theirs = FORK_SERVER.Pipe()
        process = FORK_SERVER.Process(
            target=coordinate,
            args=(self.config, self.num_groups, self._address, self._head, self.folder, theirs),
        )
        process.start()
        theirs.close()
        self._coordinator = Coordinator(process, ours)
        self.coordinator.call("address")

    def kill_coordinator(self, down_s: float = 0.0) -> None:
        """SIGKILL it, and start another one after a while."""
        self.coordinator.kill()
        time.sleep(down_s)
        self.start_coordinator()

    def start_group(self, group: int, incarnation: int = 0, *, is_spare: bool = False) -> None:
        placed = GroupConfig(group, incarnation, actor_name="", is_spare=is_spare)
        life = RankLife(
            config=replace(self.config, group=placed, run_index=0),
            rank=0,
            coordinator=self._address,
            store_port=free_port(),
            host=self.network.addresses[group + 1] if self.network else f"127.0.0.{group + 2}",
            network=self.network.network(group + 1) if self.network else None,
            control=self._control_path,
            records=self.folder,
        )
        context = context_of(backend_of(self.config.spec))
        ranks = [
            context.Process(target=live, args=(replace(life, rank=rank),), daemon=True)
            for rank in range(self.num_ranks)
        ]
        for rank in ranks:
            rank.start()
        self._lives[group] = GroupLife(group, incarnation, ranks)

    @property
    def groups(self) -> list[int]:
        """Groups that are there, or are being started again."""
        return sorted(group for group, life in self._lives.items() if not life.is_over)

    @property
    def num_ranks(self) -> int:
        """L, the ranks of each group."""
        return self.config.spec.parallelism.group_size

    def life(self, group: int) -> GroupLife:
        return self._lives[group]

    def inject(self, *faults: Fault) -> None:
        """Arm faults in the ranks that they name, in place of those that were armed before."""
        self._faults = list(faults)
        self._tell_ranks()

    def set_pace(self, pace_s: float) -> None:
        """Let every lease take so much longer from now on."""
        self.pace_s = pace_s
        self._tell_ranks()

    @property
    def _control_path(self) -> Path:
        return self.folder / "control.json"

    def _tell_ranks(self) -> None:
        text = FAULTS.dump_json(self._faults).decode()
        Control(text, self.pace_s).write(self._control_path)

    def tend(self) -> None:
        """Bury the groups that broke or that the coordinator dropped, and start them again.

        Without `restarts` dropped ones live on, as when their host is only cut off.
        """
        dropped = self._dropped() if self.restarts else set()
        for life in list(self._lives.values()):
            if not (life.is_broken or (life.group, life.incarnation) in dropped):
                continue
            life.kill()
            self.ended.append(life)
            assert life.incarnation < _MAX_LIVES, f"group {life.group} dies again and again"
            if self.restarts:
                self.start_group(life.group, life.incarnation + 1)
            else:
                del self._lives[life.group]

    def _dropped(self) -> set[tuple[int, int]]:
        """Lives that are over for the coordinator, which is asked now and then."""
        if time.monotonic() < self._asked_at + _ASK_COORDINATOR_S:
            return set()
        self._asked_at = time.monotonic()
        departures = self.coordinator.call("status").departures
        return {(each.group, each.incarnation) for each in departures if each.is_lost}

    def wait_for(self, is_there: Callable[[], object], timeout_s: float, what: str) -> None:
        """Tend the groups until `is_there`; raises AssertionError with the logs' ends.

        The limit is scaled.
        """
        timeout_s = scaled(timeout_s)
        deadline = time.monotonic() + timeout_s
        while not is_there():
            self.tend()
            assert time.monotonic() < deadline, f"{what}: not in {timeout_s} s\n{self.tails()}"
            time.sleep(_POLL_S)

    def wait_for_commit(self, commit: int) -> None:
        self.wait_for(lambda: self.commit >= commit, 60, f"commit {commit}")

    def wait_to_end(self, timeout_s: float = 120) -> None:
        def are_over() -> bool:
            return all(life.is_over for life in self._lives.values())

        self.wait_for(are_over, timeout_s, "the end of the job")

    # --- what was written down

    def records(self) -> list[Record]:
        """Everything that ranks wrote down so far, by time."""
        for path in self.folder.glob("g*i*r*.jsonl"):
            self._read(path)
        found = [record for _, records in self._records.values() for record in records]
        return sorted(found, key=lambda record: record["time"])

    def _read(self, path: Path) -> None:
        offset, records = self._records.setdefault(path, (0, []))
        with path.open("rb") as file:
            file.seek(offset)
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            records += [json.loads(line) for line in whole.splitlines()]
            self._records[path] = (offset + len(whole) + 1, records)

    def of(self, event: str) -> list[Record]:
        """Records of one kind, by time."""
        return [record for record in self.records() if record["event"] == event]

    @property
    def commit(self) -> int:
        """Number of the newest sync that some rank knows to be committed."""
        return max((record["commit"] for record in self.of("committed")), default=0)

    def standing(self, group: int) -> str | None:
        """Standing of a group's newest life as its rank 0 heard it last; None before that."""
        incarnation = self._lives[group].incarnation
        mine = [
            record["standing"]
            for record in self.of("committed")
            if (record["group"], record["incarnation"], record["rank"]) == (group, incarnation, 0)
        ]
        return mine[-1] if mine else None

    def tails(self) -> str:
        lines: list[str] = []
        for path in sorted(self.folder.glob("*.log")):
            lines += [f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-12:]]
        return "\n  ".join(lines)
