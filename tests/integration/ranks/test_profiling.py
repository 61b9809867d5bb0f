"""Traces and phases of real steps on gloo ranks: what is written, and adds up."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.ranks import run_ranks
from tests.harness.sessions import make_config, told, train_session
from trainer.protocol.events import METRICS, PHASES, Metrics, Phase, TraceWritten
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.training.profiling import PhaseTimes
from trainer.training.session import Session

FIRST, SECOND = "t-00000001", "t-00000002"


def _attempt(run_dir: Path) -> AttemptDir:
    return RunDir(run_dir).attempt("job-test-a0")


def _ask(run_dir: Path, trace_id: str, ranks: list[int]) -> None:
    path = _attempt(run_dir).trace_request_path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"id": trace_id, "num_steps": 2, "ranks": ranks}))


def _train_and_ask(config: Any) -> list[Phase]:
    """Train; after the first report rank 0 asks for a trace of rank 1.

    Returns the phases that this rank entered, in order.
    """
    original, enter = Session.report, PhaseTimes.enter
    entered: list[Phase] = []

    def enter_and_tell(self: PhaseTimes, phase: Phase) -> None:
        entered.append(phase)
        enter(self, phase)

    def report_and_ask(self: Session) -> None:
        original(self)
        dist.barrier()  # or a rank that reports late would find the request at once
        if self.groups.rank == 0 and self.state.step == 5:
            _ask(config.run_dir, SECOND, ranks=[1])

    Session.report = report_and_ask  # type: ignore[method-assign]
    PhaseTimes.enter = enter_and_tell  # type: ignore[method-assign]
    train_session(config)
    return entered


@dataclass(frozen=True)
class Traced:
    """A run that is over, and the phases that each rank entered."""

    run_dir: Path
    entered: list[list[Phase]]


@pytest.fixture(scope="module")
def traced(small_movielens: Path, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A run of 15 steps that traced steps 6 and 7 on both ranks, and 11 and 12 on rank 1."""
    folder = tmp_path_factory.mktemp("traced")
    config = make_config(
        small_movielens,
        folder,
        "parallelism.workers=2",
        "parallelism.shard_group_size=1",
        "training.max_steps=15",
    )
    _ask(folder, FIRST, ranks=[0, 1])
    return Traced(folder, run_ranks(_train_and_ask, 2, config, fresh=True))


@pytest.fixture(scope="module")
def run_dir(traced: Traced) -> Path:
    return traced.run_dir


def _names(path: Path) -> Counter[str]:
    """How often each range occurs in a trace."""
    with gzip.open(path) as file:
        document = json.load(file)
    return Counter(event["name"] for event in document["traceEvents"] if event.get("ph") == "X")


def test_each_trace_is_announced_once_and_nothing_else_is_written(run_dir: Path) -> None:
    written = [(e.rank, e.step, e.num_steps) for e in told(run_dir, TraceWritten)]
    assert sorted(written) == [(0, 7, 2), (1, 7, 2), (1, 12, 2)]
    for event in told(run_dir, TraceWritten):
        path = Path(event.path)
        assert path.parent == _attempt(run_dir).traces_dir
        assert path.stat().st_size == event.size_bytes < 5_000_000
    wanted = [f"{FIRST}-rank0", f"{FIRST}-rank1", f"{SECOND}-rank1"]
    names = sorted(path.name for path in _attempt(run_dir).traces_dir.iterdir())
    assert names == [f"{each}.json.gz" for each in wanted]


@pytest.mark.parametrize(("trace_id", "rank", "first_step"), [(FIRST, 0, 6), (SECOND, 1, 11)])
def test_a_trace_shows_steps_and_phases(
    run_dir: Path, trace_id: str, rank: int, first_step: int
) -> None:
    counts = _names(_attempt(run_dir).trace_path(trace_id, rank))
    steps = {name for name in counts if name.startswith("ProfilerStep#")}
    assert steps == {f"ProfilerStep#{first_step}", f"ProfilerStep#{first_step + 1}"}
    for phase in ("forward", "input_dist", "backward", "optimizer", "sync"):
        assert counts[f"shardloom/{phase}"] >= 2, phase


def test_every_report_has_the_phases_and_the_rates(run_dir: Path) -> None:
    reports = [e.values for e in told(run_dir, Metrics) if "train/loss" in e.values]
    assert len(reports) == 3
    described = re.compile("|".join(re.sub("[A-Z]+", ".+", name) for name in METRICS))
    for values in reports:
        assert {f"phase/{phase}_s" for phase in PHASES} <= values.keys()
        assert {"balance/step", "optimizer/lr_sparse", "optimizer/lr_dense"} <= values.keys()
        assert all(values[f"phase/{phase}_s"] > 0 for phase in PHASES)
        assert not {name for name in values if not described.fullmatch(name)}
        assert 1.0 <= values["balance/step"] <= 2.0
        slowest = values["phase/lookup_s/0"]  # both ranks have a copy, so it is of either
        assert values["balance/lookup_time"] == pytest.approx(slowest / values["phase/lookup_s"])


def test_phases_of_a_step_begin_in_order(traced: Traced) -> None:
    # The ids of the next batch start before the forward pass and go on once all outputs are there;
    # the two groups of tables look up and send in turn.
    look_up = "lookup output_dist " * 2
    order = f"dense input_dist dense input_dist {look_up}input_dist output_dist dense"
    for entered in traced.entered:
        steps = " ".join(phase for phase in entered if phase != "other").split(" backward ")
        for step in steps[2:10]:
            assert step.startswith("optimizer sync ")
            assert step.endswith(f" data_wait {order}")
