"""The tuner of the sync interval, on traces of metrics as reports have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainer.coordination.sync_tuner import Observation, SyncTuner
from trainer.protocol.events import PHASES
from trainer.spec.parallelism import SyncSpec

NUM_REPORTS = 300


@dataclass(frozen=True)
class Job:
    """What a job measures: a sync takes `fixed_s`, and `rows_s` if it moves all rows, of which a
    step touches `touched`."""

    step_s: float = 0.1
    fixed_s: float = 0.1
    rows_s: float = 0.0
    touched: float = 0.1
    losses_per_s: float = 0.0

    def report(self, every_steps: int, step_noise: float = 1, sync_noise: float = 1) -> Any:
        density = 1 - (1 - self.touched) ** every_steps
        sync_s = (self.fixed_s + self.rows_s * density) * sync_noise
        values = dict.fromkeys([f"phase/{phase}_s" for phase in PHASES], 0.0)
        values |= {"phase/dense_s": self.step_s * step_noise, "phase/sync_s": sync_s / every_steps}
        found = Observation.of(values | {"sync/time_s": sync_s, "sync/density": density})
        assert found
        return replace(found, losses_per_s=self.losses_per_s)


def tuned(**tuner: Any) -> SyncTuner:
    return SyncTuner(SyncSpec(every_steps="auto", tuner=tuner))


def moves(tuner: SyncTuner, reports: Iterator[Callable[[int], Any]]) -> list[tuple[int, str]]:
    """(interval, reason) of each move, after the start, while these come in."""
    found = [(tuner.every_steps, "")]
    for report in reports:
        tuner.reported(report(tuner.every_steps))
        tuner.agree(tuner.wanted)
        if moved := tuner.take_effect(0.0, 0):
            found.append((moved.every_steps, moved.reason))
    return found


# Of examples/movielens.yaml on 2 shared cores: (ms of a step, ms of a sync, density), by interval.
RECORDED = {
    1: [(310.3, 19.9, 0.212), (59.5, 18.6, 0.209), (65.3, 23.5, 0.213), (50.7, 15.5, 0.206)],
    2: [(65.0, 14.8, 0.233), (50.2, 15.3, 0.293), (64.9, 14.6, 0.295), (75.6, 23.4, 0.294)],
    4: [(60.8, 15.5, 0.294), (57.9, 20.4, 0.395), (52.9, 18.5, 0.391), (54.5, 13.0, 0.389)],
    8: [
        *[(59.5, 13.8, 0.387), (48.5, 22.5, 0.495), (64.3, 17.3, 0.355), (53.2, 15.3, 0.471)],
        *[(38.4, 12.0, 0.493), (36.5, 12.5, 0.495), (33.7, 4.9, 0.492), (41.4, 6.6, 0.491)],
        *[(37.0, 24.3, 0.496), (37.0, 14.9, 0.488), (50.3, 26.1, 0.489), (44.3, 23.6, 0.49)],
    ],
    16: [
        *[(60.0, 8.0, 0.495), (42.7, 39.2, 1.0), (36.7, 12.7, 1.0), (32.0, 10.3, 1.0)],
        *[(43.9, 13.1, 1.0), (30.5, 15.6, 1.0), (44.3, 7.8, 0.673)],
    ],
}


def test_on_a_recorded_job_it_settles_after_a_few_moves() -> None:
    left = {every_steps: cycle(reports) for every_steps, reports in RECORDED.items()}

    def report(every_steps: int) -> Any:
        step_ms, sync_ms, _ = next(left[min(every_steps, 16)])
        return Job(step_ms / 1e3, sync_ms / 1e3).report(every_steps)

    tuner = tuned()
    assert [each for each, _ in moves(tuner, iter([report] * 60))] == [1, 2, 4, 8]
    assert len(moves(tuner, iter([report] * NUM_REPORTS))) == 1


def intervals(tuner: SyncTuner, job: Job, num_reports: int = NUM_REPORTS) -> list[int]:
    return [each for each, _ in moves(tuner, iter([job.report] * num_reports))]


def num_turns(found: Sequence[int]) -> int:
    """How often a way through intervals changed its direction."""
    directions = [after > before for before, after in pairwise(found)]
    return sum(one != other for one, other in pairwise(directions))


def test_the_interval_grows_until_syncs_take_the_share_that_they_may_and_no_longer() -> None:
    # A sync takes as long as a step: with 16 steps 5.9 % of the time, with 32 of them 3 %.
    assert intervals(tuned(), Job()) == [1, 2, 4, 8, 16, 32]
    assert intervals(tuned(time_share=0.25), Job()) == [1, 2, 4]
    assert intervals(tuned(max_steps=16), Job()) == [1, 2, 4, 8, 16]
    assert intervals(tuned(min_steps=3, max_steps=13), Job()) == [3, 6, 12]
    assert intervals(tuned(), Job(fixed_s=0.001)) == [1]


def test_a_link_that_slows_down_and_recovers_moves_it_there_and_back_with_reasons() -> None:
    calm, slow = Job(fixed_s=0.004), Job(fixed_s=0.1)
    trace = [calm.report] * 50 + [slow.report] * 100 + [calm.report] * 400
    found = moves(tuned(), iter(trace))
    assert [each for each, _ in found] == [1, 2, 4, 8, 16, 32, 16, 8, 4, 2]
    assert found[1][1] == (
        "training waits 50.0% of its time for syncs (100 ms each, a step takes 100 ms); at most "
        "5.0% are wanted"
    )
    assert "with half the steps between them it will hardly be above 0.2%" in found[6][1]


def test_a_longer_interval_that_only_touches_more_rows_is_taken_back_until_syncs_cost_more() -> (
    None
):
    # All of the cost is in rows, of which each step touches others.
    wide = Job(fixed_s=0, rows_s=20, touched=0.001)
    tuner = tuned()
    found = moves(tuner, iter([wide.report] * NUM_REPORTS))
    assert [each for each, _ in found] == [1, 2, 1]
    assert "hardly less than the 20 ms before" in found[-1][1]
    # Now a sync waits for something that does not grow with the rows.
    assert intervals(tuner, Job(fixed_s=0.1), NUM_REPORTS)[-1] == 32


def test_the_more_groups_are_lost_the_less_is_trained_between_syncs() -> None:
    # Steps of a second, syncs of two: with 32 steps 5.9 % of the time, and half of 32 s undone.
    calm, lossy = Job(step_s=1, fixed_s=2), Job(step_s=1, fixed_s=2, losses_per_s=1 / 400)
    assert intervals(tuned(), calm)[-1] == 64
    tuner = tuned()
    assert intervals(tuner, lossy) == [1, 2, 4, 8, 16, 32]
    found = moves(tuner, iter([replace(lossy, losses_per_s=1 / 40).report] * NUM_REPORTS))
    assert [each for each, _ in found] == [32, 16]
    assert found[1][1] == (
        "lost groups undo 40.0% of what is trained, half of which a sync every 16 steps spares, "
        "for 5.2% more of the time"
    )


def test_an_interval_with_which_validation_got_worse_is_not_tried_again() -> None:
    tuner, slow = tuned(), Job()
    tuner.validated(0.80)
    assert intervals(tuner, slow, 9) == [1, 2, 4]
    for error in (0.82, float("nan"), 0.801):
        tuner.validated(error)
    tuner.agree(tuner.wanted)
    moved = tuner.take_effect(0.0, 0)
    assert moved and (moved.every_steps_before, tuner.every_steps) == (4, 1)
    assert moved.reason == "the validation error is 0.82, and was 0.8 with a sync every 1 steps"
    assert intervals(tuner, slow) == [1]
    tuner.validated(0.79)
    assert intervals(tuner, slow) == [1]


def test_a_resumed_run_goes_on_with_the_interval_and_what_is_known_of_longer_ones() -> None:
    first, again = tuned(), tuned()
    wide = Job(fixed_s=0, rows_s=20, touched=0.001)
    assert intervals(first, wide) == [1, 2, 1]
    again.resume(first.state)
    assert intervals(again, wide) == [1]
    intervals(first, Job())
    again.resume(first.state)
    assert again.every_steps == again.wanted == first.every_steps > 1
    fixed = SyncTuner(SyncSpec(every_steps=3))
    fixed.resume(None)
    assert intervals(fixed, Job()) == [3]


def test_ranks_that_are_told_take_the_interval_at_the_same_sync_as_the_rank_that_decides() -> None:
    first, other = tuned(), tuned()
    for _ in range(first.state.num_reports):
        first.reported(Job().report(1))
    for rank in (first, other):
        assert not rank.take_effect(0.0, 0), "what is decided is not agreed on yet"
        rank.agree(first.wanted)
        assert rank.every_steps == 1
    assert first.take_effect(0.0, 0) and not other.take_effect(0.0, 0)
    assert first.every_steps == other.every_steps == 2


seconds = st.floats(1e-4, 10)
jobs = st.builds(
    Job,
    step_s=seconds,
    fixed_s=seconds,
    rows_s=seconds | st.just(0.0),
    touched=st.floats(1e-5, 1),
    losses_per_s=st.just(0.0) | st.floats(1e-6, 1e-2),
)
tuners = st.builds(
    lambda least, factor, share: {
        "min_steps": least, "max_steps": least * factor, "time_share": share
    },
    st.integers(1, 20),
    st.integers(1, 300),
    st.floats(0.01, 0.6),
)  # fmt: skip


@given(job=jobs, tuner=tuners, seed=st.integers(0, 2**32))
def test_measurements_that_are_off_by_a_sixth_never_move_it_to_and_fro(
    job: Job, tuner: dict[str, Any], seed: int
) -> None:
    random = Random(seed)

    def report(every_steps: int) -> Any:
        return job.report(every_steps, random.uniform(0.84, 1.16), random.uniform(0.84, 1.16))

    way = [each for each, _ in moves(tuned(**tuner), iter([report] * 2 * NUM_REPORTS))]
    assert all(tuner["min_steps"] <= each <= tuner["max_steps"] for each in way)
    # Up, and back once if the last was not worth its while.
    assert num_turns(way) <= 1


@given(tuner=tuners, seed=st.integers(0, 2**32))
def test_whatever_is_measured_it_stays_in_its_bounds_and_turns_ever_more_rarely(
    tuner: dict[str, Any], seed: int
) -> None:
    random = Random(seed)

    def report(every_steps: int) -> Any:
        if not random.randrange(20):
            found.validated(random.uniform(0, 1))
        slow, losses_per_s = random.choice([1e-4, 1e3]), random.choice([0.0, 1e3])
        return Job(fixed_s=slow, losses_per_s=losses_per_s).report(every_steps)

    found = tuned(**tuner)
    way = [each for each, _ in moves(found, iter([report] * NUM_REPORTS))]
    assert all(tuner["min_steps"] <= each <= tuner["max_steps"] for each in way)
    # A turn needs twice the reports of the one before: 3 + 6 + 12 + 24 + 48 + 96 + 96 > 280.
    assert num_turns(way) <= 8
