"""What a rank says of how it gets on."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.pulse import Pulse

Beat = tuple[str, int, float, float]


class Heart:
    """Remembers what was said."""

    def __init__(self) -> None:
        self.beats: list[Beat] = []

    def progress(
        self, phase: str, step: int, step_time_s: float = 0.0, local_s: float = 0.0
    ) -> None:
        self.beats.append((phase, step, step_time_s, local_s))


def test_a_step_takes_the_time_between_its_begin_and_its_end() -> None:
    times: Iterator[float] = iter([0.0, 1.0, 5.0, 6.0, 6.0, 20.0])
    heart = Heart()
    pulse = Pulse(heart, clock=lambda: next(times))
    for step in (1, 2, 3):
        pulse.begin_step()
        pulse.end_step(step)
        pulse.local_s = 0.25
    # What lies between two steps is not theirs, and the median shrugs one slow step off.
    assert heart.beats == [
        ("train", 1, 1.0, 0.0),
        ("train", 2, 1.0, 0.25),
        ("train", 3, 1.0, 0.25),
    ]


def test_another_phase_is_told_with_the_steps_time() -> None:
    heart = Heart()
    Pulse(heart).enter("validation", 7)
    assert heart.beats == [("validation", 7, 0.0, 0.0)]


def test_without_a_heart_nothing_happens() -> None:
    pulse = Pulse()
    pulse.begin_step()
    pulse.end_step(1)
    pulse.enter("validation", 1)
