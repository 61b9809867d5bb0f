"""Traces and phases of real steps on gloo ranks: what is written, refused, and adds up."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.ranks import run_ranks
from tests.harness.sessions import make_config, told, train_session
from tests.harness.small_model import Case, form_groups, make_batch, spec_of
from trainer.parallel.collectives import reduce_parts
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.sharding import build_parallel_model
from trainer.protocol.events import PHASES, Metrics, Note, TraceWritten
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.training.metrics import phase_part
from trainer.training.profiling import ForwardPhases, PhaseTimes, clock_of
from trainer.training.session import Session

ON_DEMAND = "t-0000abcd"


def _attempt(run_dir: Path) -> AttemptDir:
    return RunDir(run_dir).attempt("job-test-a0")


def _train_and_ask(config: Any) -> dict[str, Any]:
    """Train; after the first report rank 0 asks for a trace of rank 1."""
    original = Session.report

    def report_and_ask(self: Session) -> None:
        original(self)
        dist.barrier()  # or a rank that reports late would find the request at once
        if self.groups.rank == 0 and self.state.step == 5:
            path = _attempt(config.run_dir).trace_request_path
            assert not path.exists(), "the damaged request was removed by then"
            path.write_text(json.dumps({"id": ON_DEMAND, "num_steps": 2, "ranks": [1]}))

    Session.report = report_and_ask  # type: ignore[method-assign]
    return train_session(config)


def _ask_badly(run_dir: Path) -> None:
    path = _attempt(run_dir).trace_request_path
    path.parent.mkdir(parents=True)
    path.write_text('{"id": "../../etc", "num_steps": 0, "ranks": [0]}')


@pytest.fixture(scope="module")
def run_dir(small_movielens: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 15 steps that traced steps 2 and 3 on both ranks, and 11 and 12 on rank 1."""
    folder = tmp_path_factory.mktemp("traced")
    _ask_badly(folder)
    config = make_config(
        small_movielens,
        folder,
        "parallelism.workers=2",
        "parallelism.shard_group_size=1",
        "training.max_steps=15",
        "training.trace.first_step=2",
        "training.trace.num_steps=2",
        "training.trace.ranks=[0,1]",
    )
    run_ranks(_train_and_ask, 2, config, fresh=True)
    yield folder


def _names(path: Path) -> Counter[str]:
    """How often each range occurs in a trace."""
    with gzip.open(path) as file:
        document = json.load(file)
    return Counter(event["name"] for event in document["traceEvents"] if event.get("ph") == "X")


def test_each_trace_is_announced_once_with_what_it_holds(run_dir: Path) -> None:
    written = [(e.rank, e.step, e.num_steps) for e in told(run_dir, TraceWritten)]
    assert sorted(written) == [(0, 3, 2), (1, 3, 2), (1, 12, 2)]
    for event in told(run_dir, TraceWritten):
        path = Path(event.path)
        assert path.parent == _attempt(run_dir).traces_dir
        assert path.stat().st_size == event.size_bytes < 5_000_000


def test_files_are_named_by_request_and_rank_and_none_is_left_half_written(run_dir: Path) -> None:
    names = sorted(path.name for path in _attempt(run_dir).traces_dir.iterdir())
    assert names == ["spec-rank0.json.gz", "spec-rank1.json.gz", f"{ON_DEMAND}-rank1.json.gz"]


@pytest.mark.parametrize(("trace_id", "rank", "first_step"), [("spec", 0, 2), (ON_DEMAND, 1, 11)])
def test_a_trace_shows_steps_and_phases(
    run_dir: Path, trace_id: str, rank: int, first_step: int
) -> None:
    counts = _names(_attempt(run_dir).trace_path(trace_id, rank))
    steps = {name for name in counts if name.startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{first_step}", f"ProfilerStep#{first_step + 1}"}
    for phase in ("forward", "input_dist", "backward", "optimizer", "sync"):
        assert counts[f"shardloom/{phase}"] >= 2, phase


def test_a_bad_request_is_refused_in_a_note_that_names_its_faults(run_dir: Path) -> None:
    (note,) = [e for e in told(run_dir, Note) if "request for a trace" in e.message]
    assert note.level == "warning"
    assert "id:" in note.message
    assert "num_steps:" in note.message


def test_an_answered_request_stays_for_workers_that_start_anew(run_dir: Path) -> None:
    assert json.loads(_attempt(run_dir).trace_request_path.read_text())["id"] == ON_DEMAND


def test_every_report_has_the_phases_and_the_rates(run_dir: Path) -> None:
    reports = [e.values for e in told(run_dir, Metrics) if "train/loss" in e.values]
    assert len(reports) == 3
    for values in reports:
        assert {f"phase/{phase}_s" for phase in PHASES} <= values.keys()
        assert {"balance/step", "optimizer/lr_sparse", "optimizer/lr_dense"} <= values.keys()
        assert all(values[f"phase/{phase}_s"] > 0 for phase in PHASES)


NUM_STEPS = 4


def measure_steps(sharding: tuple[str, ...]) -> dict[str, Any]:
    """Metrics of a few steps, the seconds that they took, and the phases that were entered."""
    case = Case(2, 2, sharding=sharding)
    groups = form_groups(case)
    spec = spec_of(case)
    model, _ = build_parallel_model(spec, groups)
    optimizers = Optimizers(model, spec.optimizer, spec.moment_scale)
    times = PhaseTimes(clock_of(groups.device))
    entered = []
    ForwardPhases(model, times)
    model(make_batch(0, groups.rank, case.batch_size))  # TorchRec sets itself up at the first one
    enter = times.enter
    times.enter = lambda phase: (entered.append(phase), enter(phase))  # type: ignore[method-assign]
    times.restart()
    started = time.perf_counter()
    for step in range(1, NUM_STEPS + 1):
        optimizers.begin_step(step, NUM_STEPS)
        with times.during("dense"):
            loss, _ = model(make_batch(step, groups.rank, case.batch_size))
        with times.during("backward"):
            loss.backward()
        with times.during("optimizer"):
            optimizers.step()
        with times.during("sync"):
            dist.barrier()
    metrics = reduce_parts([phase_part(times.read(NUM_STEPS))], groups.device)
    return {
        "metrics": metrics,
        "elapsed_s": time.perf_counter() - started,
        "entered": entered,
    }


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [("row_wise",), ("table_wise", "data_parallel")])
def test_phases_are_seen_in_order_and_take_no_more_than_the_time_that_passed(
    sharding: tuple[str, ...],
) -> None:
    measured = run_ranks(measure_steps, 2, sharding)
    for rank in measured:
        seconds = {phase: rank["metrics"][f"phase/{phase}_s"] for phase in PHASES}
        never = {"data_wait"}  # nothing is read here
        assert {phase for phase, value in seconds.items() if value <= 0} == never
        longest_s = max(other["elapsed_s"] for other in measured)
        assert sum(seconds.values()) * NUM_STEPS <= longest_s
    first_step = measured[0]["entered"][: measured[0]["entered"].index("backward")]
    changes = [p for i, p in enumerate(first_step) if i == 0 or first_step[i - 1] != p]
    assert changes[:2] == ["dense", "input_dist"]
    assert changes[-2:] == ["dense", "other"]
    # Each sharding type of the module looks up and sends in turn.
    middle = changes[2:-2]
    assert middle == ["lookup", "output_dist"] * (len(middle) // 2)
    assert middle
    assert measured[0]["metrics"] == measured[1]["metrics"]
    assert 1.0 <= measured[0]["metrics"]["balance/step"] <= 2.0
