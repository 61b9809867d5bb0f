"""What a session tells of itself, without processes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from trainer.checkpoint.manager import TrainState
from trainer.data.position import BatchShape
from trainer.training.session import Session


def test_a_session_knows_when_it_ends_once_it_knows_its_speed() -> None:
    state, shape = TrainState(step=4), BatchShape(num_rows=80, world_size=1, batch_size=8)
    session: Any = SimpleNamespace(
        state=state, shape=shape, is_finished=False, total_steps=10, rows_per_s=0.0
    )
    assert math.isnan(Session._progress(session).eta_s)
    session.rows_per_s = 16.0
    assert Session._progress(session).eta_s == 3.0
