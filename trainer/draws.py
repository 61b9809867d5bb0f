"""The random numbers that a training step draws (dropout): told by the step, not by the past.

The generator is seeded anew at each step from (seed, rows done at the last sync of groups, step,
rank of the job): a resumed run draws what one without a break does, and no two ranks drop the same
units.
"""

from __future__ import annotations

import numpy as np
import torch

from trainer.spec import JobSpec


def draws_at_random(spec: JobSpec) -> bool:
    """Whether the model of `spec` may draw in its forward pass; one of the user's own may."""
    transformer = spec.model.transformer
    has_dropout = transformer is not None and transformer.dropout > 0
    return has_dropout or spec.model.module is not None


def step_seed(seed: int, rows_agreed: int, step: int, rank: int) -> int:
    """Seed of one step of one rank, from 0 to 2^64 - 1: unlike for any two of them.

    `rows_agreed` tells steps of one number apart where groups train between committed syncs; the
    number of the commit would not do, as a run that goes on begins with one that trains nothing.
    """
    sequence = np.random.SeedSequence((seed, rows_agreed, step, rank))
    return int(sequence.generate_state(1, np.uint64)[0])


def seed_step(seed: int, rows_agreed: int, step: int, rank: int) -> None:
    """Seed the generators of this process for one step."""
    torch.manual_seed(step_seed(seed, rows_agreed, step, rank))
