"""What the tests of saves, damage and broken storage run on every rank."""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import call, patch

import pytest
import torch
import torch.distributed as dist

from tests.harness.sessions import ask_to_stop, open_session, train_session
from tests.harness.small_model import rank_device
from tests.harness.wait import scaled
from tests.integration.ranks.checkpoint_cases import (
    Sharding,
    build,
    held,
    load,
    refusal_of,
    spec_of,
    train,
)
from trainer import fault_injection
from trainer.checkpoint import manager
from trainer.checkpoint.files import Commit, RowOrder, list_committed
from trainer.checkpoint.manager import CheckpointManager, TrainState
from trainer.checkpoint.save_load import newest_intact
from trainer.checkpoint.state_dict import state_to_save
from trainer.coordination.client import HeartbeatReporter
from trainer.errors import StorageError
from trainer.failures import WorkerFailure
from trainer.layout.layout import Layout
from trainer.parallel.mesh import MeshGroups, build_groups
from trainer.protocol import events
from trainer.protocol.run_dir import COMMIT_MARKER, RunDir
from trainer.protocol.worker_config import WorkerConfig
from trainer.storage import Location
from trainer.training import worker

SLOW_S = scaled(0.5)
ROW_ORDER = RowOrder(100, "a digest")


def config_of(sharding: Sharding, run_dir: Path, **checkpoint: Any) -> WorkerConfig:
    """A small job in `run_dir` with these settings of its checkpoints."""
    spec = spec_of(sharding)
    changed = spec.checkpoint.model_copy(update=checkpoint)
    return WorkerConfig(spec.model_copy(update={"checkpoint": changed}), run_dir, "job-t-a0", 0)


@dataclass
class Saver:
    """Checkpoints of tiny tensors on this rank, and the events that they gave."""

    checkpoints: CheckpointManager
    said: list[events.Event]
    groups: MeshGroups

    @classmethod
    def open(cls, run_dir: Path, **checkpoint: Any) -> Saver:
        """For a job on all ranks, which are one sharding group."""
        size = dist.get_world_size()
        layout = Layout(size, size, "intra_host")
        groups = build_groups(layout, rank_device(), timeout_s=scaled(30), host="host")
        config = config_of(Sharding(size, size, ("row_wise",)), run_dir, **checkpoint)
        said: list[events.Event] = []
        return cls(CheckpointManager(config, groups, said.append, ROW_ORDER), said, groups)

    def save(self, step: int, is_last: bool = False) -> None:
        """One save of a tensor that every rank has."""
        tensors = {"weight": torch.full((1000,), float(step)), "note": b"x"}
        self.checkpoints.save(
            tensors,
            TrainState(step=step),
            {},
            is_best=False,
            is_last=is_last,
            started_s=perf_counter(),
        )

    def notes(self) -> list[str]:
        return [event.message for event in self.said if isinstance(event, events.Note)]


def _arm(*armed: dict[str, Any]) -> None:
    common = {"group": 0, "phase": "checkpoint"}
    environment = {fault_injection.VARIABLE: json.dumps([common | each for each in armed])}
    fault_injection.arm(0, dist.get_rank(), 0, environment)
    fault_injection.wrap()


def save_while_training(sharding: Sharding, run_dir: Path) -> dict[str, Any]:
    """Save slowly after two steps, train on meanwhile, and load what was saved into a new model."""
    config = config_of(sharding, run_dir)
    model, optimizers = build(sharding, config.spec)
    said: list[events.Event] = []
    checkpoints = CheckpointManager(config, model.groups, said.append, ROW_ORDER)
    _arm({"kind": "slow", "rank": 1, "step": 2, "arg": SLOW_S})
    train(model, optimizers, config.spec, steps=[1, 2])
    at_save = held(model, optimizers)
    state = state_to_save(model, optimizers.combined)
    checkpoints.save(
        state, TrainState(step=2), {}, is_best=True, is_last=False, started_s=perf_counter()
    )
    train(model, optimizers, config.spec, steps=[3])
    said_meanwhile = len(said)
    checkpoints.wait()
    (saved,) = list_committed(RunDir(run_dir).checkpoints_dir)
    return {
        "at_save": at_save,
        "after": held(model, optimizers),
        "loaded": load(sharding, saved.path),
        "said_meanwhile": said_meanwhile,
        "said": said,
        "staged": [*checkpoints._staging._buffers],
    }


def save_in_trouble(run_dir: Path) -> dict[str, Any]:
    """A slow save, one that is due meanwhile, one that fails, one at the end that fails."""
    saver = Saver.open(run_dir)
    _arm(
        {"kind": "slow", "rank": 0, "step": 1, "arg": SLOW_S},
        {"kind": "storage_error", "rank": 1, "step": 3},
        {"kind": "storage_error", "rank": 1, "step": 5},
    )
    saver.save(1)
    started = perf_counter()
    saver.save(2)
    waited_s = perf_counter() - started
    saver.save(3)
    saver.checkpoints.wait()
    notes = saver.notes()
    saver.save(4)
    message = refusal_of(lambda: saver.save(5, is_last=True))
    saver.checkpoints.close()
    return {"waited_s": waited_s, "notes": notes, "message": message, "said": saver.said}


def train_over_a_failed_save(config: WorkerConfig, step: int) -> list[int]:
    """Train to the end, where the save at `step` fails at once; the steps that were saved."""
    _arm({"kind": "storage_error", "rank": 1, "step": step})
    train_session(config)
    return [each.commit.step for each in list_committed(RunDir(config.run_dir).checkpoints_dir)]


def train_over_a_failed_best_save(
    config: WorkerConfig, step: int, found: dict[int, float]
) -> list[tuple[Commit, float | None]]:
    """Train to the end, where validations find these values by step and the save at `step` fails;
    each checkpoint, and what was found of it.
    """
    _arm({"kind": "storage_error", "rank": 1, "step": step})
    session = open_session(config)
    session.validation_meter.compute = lambda prefix: {f"{prefix}/rmse": found[session.state.step]}
    worker.train(session)
    saved = list_committed(RunDir(config.run_dir).checkpoints_dir)
    return [(each.commit, each.commit.metrics.get("validation/rmse")) for each in saved]


def stop_slowly(config: WorkerConfig, save_s: float, is_asked: bool) -> tuple[list[int], int]:
    """Train to the end or to a stop that is wanted from the start, where the save is slow.

    Returns the steps saved, and how often the rank said meanwhile that it saves.
    """
    if is_asked:
        ask_to_stop(config)
    _arm({"kind": "slow", "rank": 0, "step": 1, "arg": save_s})
    with patch.object(manager, "_BEAT_S", 0.1), patch.object(HeartbeatReporter, "enter") as enter:
        train_session(config)
    committed = list_committed(RunDir(config.run_dir).checkpoints_dir)
    return [each.commit.step for each in committed], enter.mock_calls.count(call("checkpoint"))


def save_after_another_took_over(run_dir: Path) -> tuple[list[str], str]:
    """Save as the lock names this attempt, then another; what a person is told, and a new start."""
    saver = Saver.open(run_dir)
    lock = RunDir(run_dir).lock_path
    for step, owner in ((1, "job-t-a0"), (2, "job-t-a1")):
        dist.barrier()
        lock.write_text(json.dumps({"name": owner}))
        dist.barrier()
        saver.save(step)
        saver.checkpoints.wait()
    return saver.notes(), refusal_of(saver.checkpoints.newest)


def close_in_the_middle(run_dir: Path) -> int:
    """End while a save is under way; how many checkpoints there are then."""
    saver = Saver.open(run_dir)
    _arm({"kind": "slow", "rank": 0, "step": 1, "arg": SLOW_S})
    saver.save(1)
    saver.checkpoints.close()
    return len(list_committed(RunDir(run_dir).checkpoints_dir))


def _flip(file: Location, place: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 1
    file.write_bytes(bytes(content))


def _largest(folder: Location) -> Location:
    return max(folder.list(), key=lambda file: file.size_bytes())


def _truncate(file: Location) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Location], None]] = {
    "flipped bit": lambda folder: _flip(_largest(folder)),
    "truncated file": lambda folder: _truncate(_largest(folder)),
    "missing file": lambda folder: _largest(folder).delete(),
    "flipped bit in the metadata": lambda folder: _flip(folder / ".metadata"),
    "missing metadata": lambda folder: (folder / ".metadata").delete(),
    "flipped bit in the marker": lambda folder: _flip(folder / COMMIT_MARKER, 0.1),
    "missing marker": lambda folder: (folder / COMMIT_MARKER).delete(),
}
"""What may happen to a checkpoint, by name."""


def look_at_damage(run_dirs: Path) -> list[dict[str, Any]]:
    """For each kind of damage to the newer of two checkpoints: what is found, said and left."""
    return [_look_at(kind, run_dirs / f"run-{n}") for n, kind in enumerate(DAMAGE)]


def _look_at(kind: str, run_dir: Path) -> dict[str, Any]:
    saver = Saver.open(run_dir)
    saver.save(1)
    saver.save(2, is_last=True)
    folder = Location.parse(RunDir(run_dir).checkpoints_dir)
    if dist.get_rank() == 0:
        DAMAGE[kind](folder / "step-00000002-a0-r0")
    dist.barrier()
    looking, again = Saver.open(run_dir), Saver.open(run_dir)
    found = [each.checkpoints.newest() for each in (looking, again)]
    dist.barrier()
    return {
        "kind": kind,
        "steps": [each.commit.step if each else None for each in found],
        "said": looking.said,
        "said_again": again.said,
        "folders": {file.relative_to(folder).split("/")[0] for file in folder.list(recursive=True)},
    }


def check_damage(found: list[dict[str, Any]]) -> None:
    """The checkpoint before counts, all is said once, and what is damaged is kept to look at."""
    assert [each["kind"] for each in found] == list(DAMAGE)
    for each in found:
        kind, said = each["kind"], each["said"]
        assert each["steps"] == [1, 1], kind
        assert each["said_again"] == [], kind
        if kind == "missing marker":
            assert not said, "an unfinished save is no news"
            assert each["folders"] == {"step-00000001-a0-r0"}
            continue
        kept = {"step-00000001-a0-r0", "damaged-step-00000002-a0-r0"}
        assert each["folders"] == kept, kind
        (note,) = [event for event in said if isinstance(event, events.Note)]
        assert note.level == "error"
        assert "step-00000002-a0-r0 is damaged" in note.message, kind
        deleted = [event.step for event in said if isinstance(event, events.CheckpointDeleted)]
        assert deleted == [2], kind


def save_with_file_limit(run_dir: Path) -> dict[str, Any]:
    """Two saves, for the second of which no file may grow beyond a few bytes."""
    saver = Saver.open(run_dir)
    saver.save(1)
    saver.checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        saver.save(2)
        saver.checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found = saver.checkpoints.newest()
    return {"notes": saver.notes(), "step": found.commit.step if found else None}


def open_unwritable(run_dir: Path, path: str | None = None) -> str:
    """The error with which a job is refused whose checkpoints cannot be written."""
    saver = Saver.open(run_dir, path=path)
    return refusal_of(saver.checkpoints.newest)


def start_on_unlike_mounts(folder: Path) -> tuple[WorkerFailure, WorkerFailure, str]:
    """Save where each rank sees a folder of its own, as hosts do which lack a mount.

    How it is refused to start there, also where the other ranks see what the last one sees, and to
    take a checkpoint of rank 0.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mount = folder / f"host-{rank}"
    mount.mkdir()
    with contextlib.chdir(mount):
        saver = Saver.open(Path("run"))
        saver.save(1, is_last=True)
        sites = tuple(replace(s, host=f"host-{s.rank}") for s in saver.groups.sites)
        config = config_of(Sharding(size, size, ("row_wise",)), Path("run"))
        groups = replace(saver.groups, sites=sites)
        looking = CheckpointManager(config, groups, saver.said.append, ROW_ORDER)
        with pytest.raises(WorkerFailure) as lone:
            looking.newest()
        few_see = contextlib.chdir(folder / f"host-{rank % (size - 1)}")
        with few_see, pytest.raises(WorkerFailure) as few:
            looking.newest()
        with pytest.raises(StorageError) as unseen:
            newest_intact(Path("run/checkpoints"))
    return lone.value, few.value, str(unseen.value)


def sweep_beside_another_group(run_dir: Path) -> list[str]:
    """Folders left when a group looks for checkpoints while others may be writing."""
    from trainer.protocol.worker_config import GroupConfig

    saver = Saver.open(run_dir)
    folder = RunDir(run_dir).checkpoints_dir
    names = (
        "step-00000001-a0-r0-g0i0",  # another group's, alive
        "step-00000001-a0-r0-g1i0",  # an earlier life of this one
        "step-00000001-a9-r0-g0i0",  # of an earlier attempt
    )
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    config = config_of(Sharding(1, 1, ("row_wise",)), run_dir)
    config = replace(config, group=GroupConfig(1, 1, actor_name=""))
    CheckpointManager(config, saver.groups, saver.said.append, ROW_ORDER).newest()
    return sorted(path.name for path in folder.iterdir())
