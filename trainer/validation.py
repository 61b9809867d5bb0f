"""Validation of a session: the metrics of all held-out rows, and what they say about going on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.announcement import progress
from trainer.data.batches import validation_batches
from trainer.early_stopping import after_validation, is_over

if TYPE_CHECKING:
    from trainer.session import Session


def measure(session: Session) -> dict[str, float]:
    """Metrics over every validation row once. Collective over all ranks.

    The copies are averaged first, as at any sync, so that all ranks measure one model.
    """
    assert session.validation_source is not None
    session.synchronise()
    session.sync.finish()
    session.model.eval()
    for batch in validation_batches(
        session.validation_source,
        session.spec,
        rank=session.groups.rank,
        world_size=session.groups.layout.world_size,
    ):
        session.pulse.enter("validation", session.state.step)
        on_device = session.on_device(batch)
        session.left_out.add_held_out(batch.quarantined)
        session.validation_meter.update(on_device, *session.model(on_device))
    session.left_out.end_validation()
    session.model.train()
    return session.validation_meter.compute("validation")


def watch_plateau(session: Session, value: float) -> None:
    """Early stopping: count a validation that found `value`; say so where it ends the run."""
    spec, state = session.spec.training.early_stopping, session.state
    if spec is None:
        return
    plateau = after_validation(state.plateau, session.watched_metric, value, spec)
    state.plateau = plateau
    if is_over(plateau, spec) and state.step < session.total_steps:
        best = "any number" if plateau.best is None else f"{plateau.best:.5g}"
        session.note(
            "info",
            f"early stopping at step {state.step}: {plateau.num_validations} validations in a row "
            f"without a better validation/{session.watched_metric} than {best}",
        )
        session.emit(progress(session, session.rows_per_s))
