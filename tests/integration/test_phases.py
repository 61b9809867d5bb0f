"""Phases of real steps on gloo ranks: each is seen, they add up, and the ranks share one report."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.gloo import run_ranks
from tests.integration.two_d_cases import Case, form_groups, make_batch, spec_of
from trainer.balance import across_ranks, phase_metrics
from trainer.parallel.optimizer import Optimizers
from trainer.parallel.phases import PHASES, ForwardPhases, PhaseTimes, clock_of
from trainer.parallel_model import build_parallel_model

NUM_STEPS = 4
IN_FORWARD = ("input_dist", "lookup", "output_dist", "dense")


def measure_steps(sharding: tuple[str, ...]) -> dict[str, Any]:
    """Metrics of a few steps, this rank's seconds in and around the forward passes, and the log."""
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
    forward_s = 0.0
    for step in range(1, NUM_STEPS + 1):
        optimizers.begin_step(step, NUM_STEPS)
        forward_started = time.perf_counter()
        with times.during("dense"):
            loss, _ = model(make_batch(step, groups.rank, case.batch_size))
        forward_s += time.perf_counter() - forward_started
        with times.during("backward"):
            loss.backward()
        with times.during("optimizer"):
            optimizers.step()
        with times.during("sync"):
            dist.barrier()
        times.step()
    metrics = phase_metrics(times.read(), groups.device)
    return {
        "metrics": metrics,
        "elapsed_s": time.perf_counter() - started,
        "forward_s": forward_s,
        "entered": entered,
        "gathered": across_ranks([float(dist.get_rank()), 5.0], groups.device),
    }


@pytest.fixture(scope="module", params=[("row_wise",), ("table_wise", "data_parallel")])
def measured(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """`measure_steps` of each rank."""
    return run_ranks(measure_steps, 2, request.param)


def test_phases_are_seen_and_take_no_more_than_the_time_that_passed(
    measured: list[dict[str, Any]],
) -> None:
    for rank in measured:
        seconds = {phase: rank["metrics"][f"phase/{phase}_s"] for phase in PHASES}
        never = {"data_wait"}  # nothing is read here
        assert {phase for phase, value in seconds.items() if value <= 0} == never
        longest_s = max(other["elapsed_s"] for other in measured)
        assert sum(seconds.values()) * NUM_STEPS <= longest_s


def test_phases_inside_the_forward_pass_add_up_to_it(measured: list[dict[str, Any]]) -> None:
    mean_s = sum(rank["forward_s"] for rank in measured) / len(measured)
    metrics = measured[0]["metrics"]
    inside_s = sum(metrics[f"phase/{phase}_s"] for phase in IN_FORWARD) * NUM_STEPS
    # The rest is a `with` statement per step.
    assert inside_s == pytest.approx(mean_s, rel=0.05, abs=2e-4)


def test_the_forward_pass_goes_through_its_phases_in_order(measured: list[dict[str, Any]]) -> None:
    first_step = measured[0]["entered"][: measured[0]["entered"].index("backward")]
    changes = [p for i, p in enumerate(first_step) if i == 0 or first_step[i - 1] != p]
    assert changes[:2] == ["dense", "input_dist"]
    assert changes[-2:] == ["dense", "other"]
    # Each sharding type of the module looks up and sends in turn.
    middle = changes[2:-2]
    assert middle == ["lookup", "output_dist"] * (len(middle) // 2)
    assert middle


def test_all_ranks_report_the_same_means(measured: list[dict[str, Any]]) -> None:
    assert measured[0]["metrics"] == measured[1]["metrics"]
    assert 1.0 <= measured[0]["metrics"]["balance/step"] <= 2.0
    assert torch.equal(measured[0]["gathered"], torch.tensor([[0.0, 5.0], [1.0, 5.0]]).double())
