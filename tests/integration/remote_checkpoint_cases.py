"""What the tests of checkpoints on an object store run on every rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.integration.ranks.checkpoint_cases import Sharding, build, held, load, spec_of, train
from tests.integration.ranks.save_cases import Saver, config_of
from trainer.checkpoint.files import checkpoints_of
from trainer.checkpoint.manager import CheckpointManager, TrainState
from trainer.checkpoint.resume import warm_start
from trainer.checkpoint.save_load import CheckpointError, list_committed
from trainer.checkpoint.state_dict import state_to_save
from trainer.protocol import events
from trainer.protocol.run_dir import COMMIT_MARKER
from trainer.storage import Location


def train_save_and_load(
    environment: Mapping[str, str], sharding: Sharding, run_dir: Path, path: str
) -> dict[str, Any]:
    """Train, save to `path`, and load that into a new model: what this rank held and holds."""
    os.environ.update(environment)
    config = config_of(sharding, run_dir, path=path)
    model, optimizers = build(sharding, config.spec)
    said: list[events.Event] = []
    checkpoints = CheckpointManager(config, model.groups, said.append)
    checkpoints.newest()
    train(model, optimizers, config.spec, steps=[1, 2])
    at_save = held(model, optimizers)
    state = state_to_save(model, optimizers.combined)
    checkpoints.save(
        state, TrainState(step=2), {}, False, is_last=True, started_s=time.perf_counter()
    )
    found = checkpoints.newest()
    assert found is not None
    return {"at_save": at_save, "loaded": load(sharding, found.path), "said": said}


def load_resharded(
    environment: Mapping[str, str], sharding: Sharding, run_dir: Path, path: str
) -> dict[str, Any]:
    """What this rank holds of the newest checkpoint below `path`, in another sharding."""
    os.environ.update(environment)
    found = list_committed(checkpoints_of(run_dir, path))[-1]
    return load(sharding, found.path)


def start_warm(
    environment: Mapping[str, str], sharding: Sharding, path: str, tables: tuple[str, ...]
) -> dict[str, Any]:
    """What this rank holds after a warm start with some tables of a run at `path`."""
    os.environ.update(environment)
    spec = spec_of(sharding)
    document = spec.model_dump(mode="json")
    document["checkpoint"]["warm_start"] = {"path": path, "tables": tables, "dense": False}
    spec = type(spec).model_validate(document)
    model, optimizers = build(sharding, spec)
    found = warm_start(spec, model, optimizers)
    assert found is not None
    return held(model, optimizers)


def save_large(
    environment: Mapping[str, str], run_dir: Path, path: str, num_bytes: int, steps: list[int]
) -> dict[str, Any]:
    """Save tensors of `num_bytes` a rank at some steps; what was said, and what the newest holds.

    The last save must succeed.
    """
    os.environ.update(environment)
    saver = Saver.open(run_dir, path=path)
    saver.checkpoints.newest()
    for step in steps:
        tensors = {f"weight-{dist.get_rank()}": _noise(step, num_bytes)}
        saver.checkpoints.save(
            tensors, TrainState(step=step), {}, False, step == steps[-1], time.perf_counter()
        )
    return {"said": saver.said, "notes": saver.notes(), "equal": _is_as_saved(saver, num_bytes)}


def _noise(step: int, num_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + dist.get_rank())
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


def _is_as_saved(saver: Saver, num_bytes: int) -> bool:
    from trainer.checkpoint import save_load

    found = saver.checkpoints.newest()
    if found is None:
        return False
    state = {f"weight-{dist.get_rank()}": torch.zeros(num_bytes, dtype=torch.uint8)}
    save_load.load(found.path, state)
    return torch.equal(*state.values(), _noise(found.commit.step, num_bytes))


def look_for_newest(environment: Mapping[str, str], run_dir: Path, path: str) -> dict[str, Any]:
    """What a start finds and says."""
    os.environ.update(environment)
    saver = Saver.open(run_dir, path=path)
    found = saver.checkpoints.newest()
    return {"step": found.commit.step if found else None, "notes": saver.notes()}


def look_with_impatient_peers(environment: Mapping[str, str], run_dir: Path, path: str) -> int:
    """The step that a start finds and loads where no other collective waits for 2 s."""
    from trainer.checkpoint import save_load

    os.environ.update(environment)
    saver = Saver.open(run_dir, path=path)
    dist.barrier()
    _set_pg_timeout(timedelta(seconds=2), dist.group.WORLD)
    found = saver.checkpoints.newest()
    assert found is not None
    state = {f"weight-{dist.get_rank()}": torch.zeros(1000, dtype=torch.uint8)}
    save_load.load(found.path, state, saver.checkpoints.group)
    _set_pg_timeout(timedelta(seconds=60), dist.group.WORLD)
    return found.commit.step


def _largest(folder: Location) -> Location:
    return max(folder.list(), key=lambda file: file.size_bytes())


def _flip(file: Location) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def _truncate(file: Location) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Location], None]] = {
    "flipped bit": lambda folder: _flip(_largest(folder)),
    "truncated object": lambda folder: _truncate(_largest(folder)),
    "missing object": lambda folder: _largest(folder).delete(),
    "missing metadata": lambda folder: (folder / ".metadata").delete(),
    "torn marker": lambda folder: _truncate(folder / COMMIT_MARKER),
    "empty marker": lambda folder: (folder / COMMIT_MARKER).write_bytes(b""),
}
"""What may happen to a checkpoint, by name."""


def look_at_damage(
    environment: Mapping[str, str], run_dirs: Path, path: str
) -> list[dict[str, Any]]:
    """For each kind of damage to the newer of two checkpoints: what is found, said and left."""
    os.environ.update(environment)
    return [_look_at(kind, run_dirs / f"run-{n}", path) for n, kind in enumerate(DAMAGE)]


def _look_at(kind: str, run_dir: Path, path: str) -> dict[str, Any]:
    saver = Saver.open(run_dir, path=path)
    saver.save(1)
    saver.save(2, is_last=True)
    newer = checkpoints_of(run_dir, path) / "step-00000002-a0-r0"
    assert isinstance(newer, Location)
    DAMAGE[kind](newer)
    found = look_for_newest({}, run_dir, path)
    again = look_for_newest({}, run_dir, path)
    return {"kind": kind, "is_kept": bool(newer.list()), "again": again} | found


def refusal_of_start(environment: Mapping[str, str], run_dir: Path, path: str) -> tuple[str, str]:
    """Kind and message of the error with which a start is refused."""
    os.environ.update(environment)
    saver = Saver.open(run_dir, path=path)
    try:
        saver.checkpoints.newest()
    except CheckpointError as error:
        return type(error).__name__, str(error)
    raise AssertionError("checkpoints can be written")


def die_in_the_middle(environment: Mapping[str, str], run_dir: Path, path: str) -> None:
    """A whole save, then one in which this process ends by SIGKILL once objects are written."""
    import signal

    from trainer.checkpoint import save_load

    os.environ.update(environment)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saver = Saver.open(run_dir, path=path)
    saver.save(1)
    saver.checkpoints.wait()
    save_load.write_marker = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    saver.save(2)
    saver.checkpoints.wait()
