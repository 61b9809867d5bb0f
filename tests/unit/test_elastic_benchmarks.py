"""What the benchmarks of lost hosts compute: a pause out of the times of commits."""

from __future__ import annotations

import pytest

from tests.benchmarks.elastic_jobs import pause_s
from tests.benchmarks.report import BenchmarkError

STEADY = [float(second) for second in range(30)]


def test_a_pause_is_what_a_wait_is_longer_than_usual() -> None:
    times = [*STEADY, 33.5, 34.5, 35.5]
    assert pause_s(times, began=29.5, ended=35.0) == pytest.approx(3.5)


def test_waits_outside_the_time_looked_at_do_not_count() -> None:
    times = [*STEADY, 30.0, 31.0, 41.0]
    assert pause_s(times, began=29.5, ended=32.0) == 0.0


def test_a_pause_without_syncs_around_it_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="before and after"):
        pause_s(STEADY, began=29.5, ended=99.0)
