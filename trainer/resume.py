"""Where a session starts: its job's newest checkpoint, another job's, or the seed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from trainer.elastic.checkpoint import CommittedCheckpoint
from trainer.elastic.skipped_rows import SkippedRows, without
from trainer.elastic.training_state import METERS, load_packed, load_state
from trainer.elastic.warm_start import warm_start
from trainer.run_dir import RunDir
from trainer.saving import resumed_state

if TYPE_CHECKING:
    from trainer.session import Session

logger = logging.getLogger(__name__)


def restore(session: Session) -> None:
    """Continue from the newest intact checkpoint of the job, else from another job's.

    The latter where `checkpoint.warm_start` names one. Collective over all ranks.
    """
    found = session.checkpoints.newest()
    if found is None:
        _start_warm(session)
    else:
        _resume(session, found)
    _leave_out_rows(session)


def _resume(session: Session, found: CommittedCheckpoint) -> None:
    state = resumed_state(found.commit, session.row_order)
    session.optimizers.init_state()
    group = session.checkpoints.group
    load_state(found.path, session.model, session.optimizers.combined, group=group)
    written_scale = found.commit.moment_scale or session.spec.moment_scale
    session.optimizers.rescale_moments(session.spec.moment_scale / written_scale)
    session.train_meter.load_state(load_packed(found.path, METERS, group))
    session.sync.reset()
    session.state = state
    session.origin = found.path.name
    session.final_metrics = dict(found.commit.metrics)
    logger.info("resumed from %s at step %d", found.path.name, session.state.step)


def _start_warm(session: Session) -> None:
    found = warm_start(session.spec, session.model, session.optimizers, session.checkpoints.group)
    if found is None:
        return
    session.sync.reset()
    session.origin = f"warm-{found.path.name}"
    message = f"warm start from checkpoint {found.path}, at step {found.commit.step}"
    session.note("info", message)


def _leave_out_rows(session: Session) -> None:
    """Take the rows that earlier lives found to spoil the model for done."""
    skipped = SkippedRows.read(RunDir(session.config.run_dir).skipped_rows_path)
    position, num_rows = session.state.position, session.shape.num_rows
    session.state.position = without(position, skipped)
    more = session.state.position.rows_done(num_rows) - position.rows_done(num_rows)
    session.state.rows_skipped += more
    session.finite.begin_at(session.state.position)
    session.total_steps = session.planned_steps()
