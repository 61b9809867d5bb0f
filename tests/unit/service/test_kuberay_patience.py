"""How often a submission that cannot be taken is tried again."""

from __future__ import annotations

import pytest

from service.backends.kuberay_patience import Patience
from service.errors import BackendUnreachable, SubmissionRefused


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def _tries(clock: Clock, patience: Patience, seconds: int) -> list[float]:
    """When it was really tried, by somebody who looks every second."""
    made = []
    for _ in range(seconds):
        with pytest.raises(BackendUnreachable, match="quota"), patience.trying("a"):
            made.append(clock.now)
            raise BackendUnreachable("the quota is used up")
        clock.now += 1
    return made


def test_the_pauses_double_up_to_half_a_minute() -> None:
    clock = Clock()
    made = _tries(clock, Patience(clock), 130)
    assert made == [0, 1, 3, 7, 15, 31, 61, 91, 121]


def test_other_attempts_and_what_worked_are_not_kept_waiting() -> None:
    clock = Clock()
    patience = Patience(clock)
    _tries(clock, patience, 10)
    assert not patience.is_over("a") and patience.is_over("b")
    with patience.trying("b"):
        pass
    clock.now = 1000
    with patience.trying("a"):
        pass
    assert _tries(clock, patience, 2) == [1000, 1001]


def test_a_refusal_is_no_reason_to_wait() -> None:
    patience = Patience(Clock())
    for _ in range(3):
        with pytest.raises(SubmissionRefused), patience.trying("a"):
            raise SubmissionRefused("no")
