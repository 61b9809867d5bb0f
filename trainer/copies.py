"""The divergence guard of a session: whether there is one, and what follows from what it finds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainer import events
from trainer.parallel.divergence import DivergenceError, DivergenceGuard

if TYPE_CHECKING:
    from trainer.session import Session


def open_guard(session: Session) -> DivergenceGuard | None:
    """The guard that the spec asks for, if any."""
    parallelism = session.spec.parallelism
    if parallelism.divergence_check is None:
        return None
    return DivergenceGuard(
        session.model,
        parallelism.divergence_check,
        session.optimizers.combined,
        compare_state=parallelism.sync.optimizer_state == "every",
    )


def check_copies(session: Session, guard: DivergenceGuard) -> None:
    """Compare what a sync has made equal. Collective over all ranks.

    Raises `DivergenceError` where the copies have come apart and the job is to fail then.
    """
    found = guard.check()
    for each in found:
        session.emit(
            events.Divergence(
                time=time.time(),
                step=session.state.step,
                table=each.table,
                shard=each.shard,
                ranks=list(each.ranks),
                action=guard.action,
            )
        )
    if found and guard.action == "fail":
        raise DivergenceError(found)
    if found:
        session.sync.renew()
