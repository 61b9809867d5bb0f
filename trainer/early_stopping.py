"""Early stopping (`training.early_stopping`), as pure arithmetic over validations."""

from __future__ import annotations

from trainer.elastic.protocol import Plateau
from trainer.metrics import is_better
from trainer.spec import EarlyStoppingSpec


def after_validation(
    plateau: Plateau | None, metric: str, value: float, spec: EarlyStoppingSpec
) -> Plateau:
    """Where `value` of `metric` leaves the run: at a new best by more than min_delta, or waiting.

    A NaN is no gain, not even as the first value.
    """
    plateau = plateau or Plateau()
    if is_better(metric, value, plateau.best, spec.min_delta):
        return Plateau(best=value)
    return Plateau(best=plateau.best, num_validations=plateau.num_validations + 1)


def is_over(plateau: Plateau | None, spec: EarlyStoppingSpec | None) -> bool:
    """Whether training ends here."""
    return bool(spec and plateau and plateau.num_validations >= spec.patience)
