"""Random numbers of training steps: the same again, and unlike those of any other step or rank."""

from __future__ import annotations

from itertools import product

import torch

from trainer.draws import seed_step, step_seed


def draw(*key: int) -> torch.Tensor:
    """Numbers of one step, whatever was drawn before."""
    torch.rand(7)
    seed_step(*key)
    return torch.rand(4)


def test_a_step_draws_what_it_drew_before() -> None:
    assert torch.equal(draw(3, 0, 17, 2), draw(3, 0, 17, 2))


def test_no_two_seeds_syncs_steps_or_ranks_draw_the_same() -> None:
    keys = list(product(range(2), range(3), range(50), range(4)))
    seeds = {step_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert not torch.equal(draw(0, 0, 1, 0), draw(0, 0, 1, 1))
