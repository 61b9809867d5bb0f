"""Checkpoints on a real S3 endpoint: as on a disk, and in trouble."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tests.harness.object_store import Faults, ObjectStore
from tests.harness.ranks import FORK_SERVER, run_ranks
from tests.harness.wait import scaled
from tests.integration.ranks.checkpoint_cases import (
    Sharding,
    build,
    held,
    load,
    train,
    whole_tables,
)
from tests.integration.ranks.save_cases import (
    ROW_ORDER,
    Saver,
    config_of,
    open_unwritable,
)
from tests.integration.ranks.test_warm_start import start as start_warm
from trainer.checkpoint import save_load
from trainer.checkpoint.files import (
    checkpoints_of,
    list_committed,
    remove_probe,
    remove_uncommitted,
    set_aside,
    write_probe,
)
from trainer.checkpoint.manager import CheckpointManager, TrainState
from trainer.checkpoint.state_dict import state_to_save
from trainer.protocol import events
from trainer.protocol.events import CheckpointCommitted, CheckpointDeleted
from trainer.protocol.run_dir import COMMIT_MARKER, RunDir
from trainer.spec.training import WarmStartSpec
from trainer.storage import Location

TWO = Sharding(2, 1, ("row_wise",))
OTHER = Sharding(3, 3, ("column_wise", "table_wise", "row_wise"), min_partition=8)
MEBIBYTE = 2**20


def train_save_and_load(sharding: Sharding, run_dir: Path, path: str) -> dict[str, Any]:
    """Train, save to `path`, and load that into a new model: what this rank held and holds."""
    config = config_of(sharding, run_dir, path=path)
    model, optimizers = build(sharding, config.spec)
    said: list[events.Event] = []
    checkpoints = CheckpointManager(config, model.groups, said.append, ROW_ORDER)
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


def load_resharded(sharding: Sharding, run_dir: Path, path: str) -> dict[str, Any]:
    """What this rank holds of the newest checkpoint below `path`, in another sharding."""
    found = list_committed(checkpoints_of(run_dir, path))[-1]
    return load(sharding, found.path)


def save_large(run_dir: Path, path: str, num_bytes: int, steps: list[int]) -> dict[str, Any]:
    """Save `num_bytes` a rank at some steps; what was said, and whether the newest holds them.

    The last save must succeed.
    """
    saver = Saver.open(run_dir, path=path)
    saver.checkpoints.newest()
    for step in steps:
        saver.checkpoints.save(
            _noise(step, num_bytes),
            TrainState(step=step),
            {},
            False,
            step == steps[-1],
            time.perf_counter(),
        )
    return {"said": saver.said, "notes": saver.notes(), "equal": _is_as_saved(saver, num_bytes)}


def _noise(step: int, num_bytes: int) -> dict[str, torch.Tensor]:
    """A tensor for each rank to write, all of which each rank has."""
    generator = torch.Generator().manual_seed(step)
    return {
        f"weight-{rank}": torch.randint(
            0, 256, (num_bytes,), dtype=torch.uint8, generator=generator
        )
        for rank in range(dist.get_world_size())
    }


def _is_as_saved(saver: Saver, num_bytes: int) -> bool:
    found = saver.checkpoints.newest()
    if found is None:
        return False
    saved = _noise(found.commit.step, num_bytes)
    state = {name: torch.zeros_like(value) for name, value in saved.items()}
    save_load.load(found.path, state)
    return all(torch.equal(state[name], saved[name]) for name in saved)


def look_for_newest(run_dir: Path, path: str) -> dict[str, Any]:
    """What a start finds and says."""
    saver = Saver.open(run_dir, path=path)
    found = saver.checkpoints.newest()
    return {"step": found.commit.step if found else None, "notes": saver.notes()}


def look_with_impatient_peers(run_dir: Path, path: str) -> int:
    """The step that a start finds and loads where no other collective waits for long."""
    saver = Saver.open(run_dir, path=path)
    dist.barrier()
    _set_pg_timeout(timedelta(seconds=scaled(2)), dist.group.WORLD)
    found = saver.checkpoints.newest()
    assert found is not None
    state = {f"weight-{dist.get_rank()}": torch.zeros(1000, dtype=torch.uint8)}
    save_load.load(found.path, state, saver.checkpoints.group)
    _set_pg_timeout(timedelta(seconds=scaled(60)), dist.group.WORLD)
    return found.commit.step


def die_in_the_middle(environment: Mapping[str, str], run_dir: Path, path: str) -> None:
    """A whole save, then one in which this process ends by SIGKILL once objects are written."""
    os.environ.update(environment)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saver = Saver.open(run_dir, path=path)
    saver.save(1)
    saver.checkpoints.wait()
    save_load.write_marker = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    saver.save(2)
    saver.checkpoints.wait()


@pytest.fixture
def run_dir(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run folder named as no other test's, as its name is that of the folder in the bucket."""
    return tmp_path / f"job-{abs(hash(request.node.name)):x}"


def folder_of(store: ObjectStore, run_dir: Path) -> Location:
    folder = checkpoints_of(run_dir, store.url("runs"))
    assert isinstance(folder, Location)
    return folder


def names_in(folder: Location) -> set[str]:
    return {file.relative_to(folder) for file in folder.list(recursive=True)}


def test_a_checkpoint_loads_bitwise_in_its_own_and_in_another_sharding_and_warm(store, run_dir):
    path, environment = store.url("runs"), store.environment
    ranks = run_ranks(train_save_and_load, 2, TWO, run_dir, path, environment=environment)
    saved = whole_tables([rank["at_save"] for rank in ranks])
    for name, values in whole_tables([rank["loaded"] for rank in ranks]).items():
        assert torch.equal(values.nan_to_num(), saved[name].nan_to_num()), name
    (committed,) = [e for e in ranks[0]["said"] if isinstance(e, CheckpointCommitted)]
    assert committed.path == f"s3://data/runs/{run_dir.name}/checkpoints/step-00000002-a0-r0"
    assert not RunDir(run_dir).checkpoints_dir.exists(), "nothing lies on run storage"

    others = run_ranks(load_resharded, 3, OTHER, run_dir, path, environment=environment)
    for name, values in whole_tables(others).items():
        if not name.endswith(".moments"):
            assert torch.equal(values, saved[name]), name

    source = WarmStartSpec(path=f"{path}/{run_dir.name}", tables=("movies",), dense=False)
    one = Sharding(1, 1, ("row_wise",))
    (warm,) = run_ranks(start_warm, 1, one, source, environment=environment)
    tables = whole_tables([warm])
    assert torch.equal(tables["movies"], saved["movies"])
    assert not torch.equal(tables["users"], saved["users"])


@pytest.mark.slow
def test_large_shares_go_up_in_parts_and_retention_leaves_the_newest(store, run_dir):
    with store.failing() as seen:
        arguments = (run_dir, store.url("runs"), 12 * MEBIBYTE, [1, 2, 3])
        first, second = run_ranks(save_large, 2, *arguments, environment=store.environment)
    assert first["equal"]
    assert second["equal"]
    assert seen.counts["PUT part"] >= 3 * 2 * 2, seen.counts
    folders = {name.split("/")[0] for name in names_in(folder_of(store, run_dir))}
    assert folders == {"step-00000002-a0-r0", "step-00000003-a0-r0"}
    deleted = [e.step for e in first["said"] if isinstance(e, CheckpointDeleted)]
    assert deleted == [1]


@pytest.mark.parametrize(
    "rates",
    [
        {"500": 0.05, "503": 0.05, "slow_down": 0.05},
        pytest.param({"reset": 0.15, "cut": 0.15}, marks=pytest.mark.slow),
    ],
    ids=["busy", "broken connections"],
)
def test_saves_and_loads_outlive_a_store_in_trouble(store, run_dir, rates):
    with store.failing(rates=rates, seed=1) as seen:
        arguments = (run_dir, store.url("runs"), 11 * MEBIBYTE, [1])
        first, second = run_ranks(save_large, 2, *arguments, environment=store.environment)
    assert first["notes"] == []
    assert first["equal"]
    assert second["equal"]
    assert sum(seen.counts[fault] for fault in rates) > 1


def test_a_store_that_is_away_fails_one_save_and_the_next_is_whole(store, run_dir):
    impatient = store.environment | {"SHARDLOOM_STORAGE_RETRY_S": "0"}
    down = {"rates": {"503": 1.0}, "only": r"(PUT|POST) .*step-00000002"}
    with store.failing(**down):
        arguments = (run_dir, store.url("runs"), MEBIBYTE, [1, 2, 3])
        (found,) = run_ranks(save_large, 1, *arguments, environment=impatient)
    (note,) = found["notes"]
    assert "step-00000002-a0-r0 could not be written" in note
    assert "the endpoint does not answer, or is busy" in note
    assert "Earlier checkpoints are untouched" in note
    steps = [each.commit.step for each in list_committed(folder_of(store, run_dir))]
    assert steps == [1, 3]
    assert found["equal"]


def test_a_save_that_was_killed_in_the_middle_counts_for_nothing_and_is_cleared_away(
    store, run_dir
):
    arguments = (store.environment, run_dir, store.url("runs"))
    process = FORK_SERVER.Process(target=die_in_the_middle, args=arguments)
    process.start()
    try:
        process.join(scaled(180))
        assert process.exitcode == -signal.SIGKILL
    finally:
        process.kill()
    folder = folder_of(store, run_dir)
    half = {name for name in names_in(folder) if name.startswith("step-00000002")}
    assert half, "files were written"
    assert not any(name.endswith(COMMIT_MARKER) for name in half)
    (found,) = run_ranks(look_for_newest, 1, *arguments[1:], environment=store.environment)
    assert found == {"step": 1, "notes": []}
    assert {name.split("/")[0] for name in names_in(folder)} == {"step-00000001-a0-r0"}


@pytest.mark.slow
def test_a_store_that_is_away_or_refuses_at_the_start_damages_nothing(store, run_dir):
    place, environment = (run_dir, store.url("runs")), store.environment
    run_ranks(save_large, 1, *place, 1000, [1], environment=environment)
    impatient = environment | {"SHARDLOOM_STORAGE_RETRY_S": "0"}
    with (
        store.failing(rates={"503": 1.0}, only="GET .*distcp"),
        pytest.raises(AssertionError, match="StorageAwayError"),
    ):
        run_ranks(look_for_newest, 2, *place, environment=impatient)
    wrong = environment | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    refused = run_ranks(open_unwritable, 2, *place, environment=wrong)
    assert refused == [refused[0]] * 2, "on every rank"
    assert refused[0].startswith("CheckpointRefused: checkpoints cannot be written: s3://data/runs")
    found, _ = run_ranks(look_for_newest, 2, *place, environment=environment)
    assert found == {"step": 1, "notes": []}


@pytest.mark.slow
def test_a_start_waits_for_the_rank_whose_storage_is_away(store, run_dir):
    patient = store.environment | {"SHARDLOOM_STORAGE_RETRY_S": f"{scaled(30)}"}
    place = (run_dir, store.url("runs"))
    run_ranks(save_large, 2, *place, 1000, [1], environment=patient)
    with away_for(store, scaled(6.0), only="GET .*__0_0.distcp") as seen:
        found, other = run_ranks(look_with_impatient_peers, 2, *place, environment=patient)
    assert seen.counts["503"] > 1
    assert found == other == 1


@contextmanager
def away_for(store: ObjectStore, duration_s: float, only: str) -> Iterator[Faults]:
    """The store answers nothing until `duration_s` after it was first asked for `only`."""
    ended = threading.Event()
    with store.failing(rates={"503": 1.0}, only=only) as seen:

        def mend() -> None:
            while not (seen.counts["503"] or ended.wait(0.05)):
                pass
            ended.wait(duration_s)
            seen.rates = {}

        mending = threading.Thread(target=mend)
        mending.start()
        try:
            yield seen
        finally:
            ended.set()
            mending.join()


@pytest.mark.slow
def test_groups_that_start_together_probe_clear_away_and_set_aside_together(store):
    def at_once(act: Callable[[], None]) -> None:
        barrier = threading.Barrier(2)

        def go(_: int) -> None:
            barrier.wait()
            act()

        with ThreadPoolExecutor(2) as groups:
            list(groups.map(go, range(2)))

    # Half of the rounds went wrong where a deletion could not bear another one.
    for number in range(20):
        folder = Location.parse(store.url(f"groups/job-{number}/checkpoints"))
        at_once(lambda folder=folder: remove_probe(folder, write_probe(folder)))
        cut_off, damaged = folder / "step-00000002-a0-r0", folder / "step-00000001-a0-r0"
        for file in range(4):
            (cut_off / f"__{file}_0.distcp").write_bytes(b"x")
        (damaged / COMMIT_MARKER).write_bytes(b"what it held")
        at_once(lambda folder=folder: remove_uncommitted(folder))
        at_once(lambda folder=damaged: set_aside(folder))
        assert names_in(folder) == {f"{damaged.name}/COMMIT.damaged.json"}
        assert (damaged / "COMMIT.damaged.json").read_bytes() == b"what it held"
