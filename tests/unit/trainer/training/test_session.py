"""What a session tells of itself, without processes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from trainer.checkpoint.manager import TrainState
from trainer.coordination.messages import EarlyStoppingState
from trainer.data.position import BatchShape
from trainer.spec.training import EarlyStoppingSpec
from trainer.training.session import Session


def test_a_session_knows_when_it_ends_once_it_knows_its_speed() -> None:
    state, shape = TrainState(step=4), BatchShape(num_rows=80, world_size=1, batch_size=8)
    session: Any = SimpleNamespace(
        state=state, shape=shape, is_finished=False, total_steps=10, rows_per_s=0.0
    )
    assert math.isnan(Session._progress(session).eta_s)
    session.rows_per_s = 16.0
    assert Session._progress(session).eta_s == 3.0


def test_the_end_by_early_stopping_names_the_difference_that_was_too_small() -> None:
    said: list[str] = []
    stopping = EarlyStoppingSpec(patience=1, min_delta=0.01)
    session: Any = SimpleNamespace(
        spec=SimpleNamespace(training=SimpleNamespace(early_stopping=stopping)),
        state=TrainState(step=4, plateau=EarlyStoppingState(best=0.5)),
        total_steps=10,
        note=lambda level, message: said.append(message),
        emit=said.append,
        _progress=lambda: "",
    )
    Session._update_early_stopping(session, "ne", 0.495)
    assert "better validation/ne than 0.5 by more than 0.01" in said[0]
