"""Learning-rate schedules: the factor of each step, as pure arithmetic.

factor
  1 |    /\\__              warm-up: k / warmup_steps at step k
    |   /    \\__           decay: a line or half a cosine from the peak
    |  /        \\__        down to min_ratio at the last step
  0 +-------------------- step
"""

from __future__ import annotations

import math

from trainer.spec import ScheduleSpec


def factor(step: int, total_steps: int, spec: ScheduleSpec | None) -> float:
    """What the learning rates are multiplied by at `step`, counted from 1 to `total_steps`.

    Between min_ratio (or 1 / warmup_steps) and 1; 1 without a schedule. A run that is shorter
    than its warm-up never decays, and steps past the last one keep its factor.
    """
    if spec is None:
        return 1.0
    if step <= spec.warmup_steps:
        return step / spec.warmup_steps
    if spec.decay == "constant":
        return 1.0
    peak = max(spec.warmup_steps, 1)
    progress = min((step - peak) / max(total_steps - peak, 1), 1.0)
    left = 1.0 - progress if spec.decay == "linear" else _half_cosine(progress)
    return spec.min_ratio + (1.0 - spec.min_ratio) * left


def _half_cosine(progress: float) -> float:
    return (1.0 + math.cos(math.pi * progress)) / 2.0
