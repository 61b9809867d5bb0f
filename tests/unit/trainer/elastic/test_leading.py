"""What the leader of the groups owes: due until some leader has done it, whoever that is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.data.position import DataPosition
from trainer.elastic.group_session import GroupSession
from trainer.elastic.protocol import Led, Ledger, Report
from trainer.elastic.syncs import Syncs
from trainer.saving import State


def leader(ledger: Ledger, step: int, epoch: int, validate_every: int | None) -> GroupSession:
    """A session that stands at `step` of 100 and holds `ledger`; what trains is left out."""
    session: Any = GroupSession.__new__(GroupSession)
    training = SimpleNamespace(validate_every_steps=validate_every, early_stopping=None)
    session.spec = SimpleNamespace(
        training=training, checkpoint=SimpleNamespace(every_steps=10), data=None
    )
    session.ledger, session.total_steps = ledger, 100
    session.validation_source, session._has_finished = object(), False
    session.state = State(step=step, position=DataPosition(epoch))
    session._before = State(step=step - 1, position=DataPosition(epoch))
    return session


@pytest.mark.parametrize("validate_every", [None, 10])
def test_what_a_lost_leader_did_not_do_is_due_for_the_next(validate_every: int | None) -> None:
    undone = leader(Ledger(led=Led(step=38, epoch=0)), 41, 1, validate_every)
    assert undone.is_validation_step() and undone.is_checkpoint_step()
    done = leader(Ledger(led=Led(step=40, epoch=1)), 41, 1, validate_every)
    assert not done.is_validation_step() and not done.is_checkpoint_step()


def test_the_ledger_keeps_up_to_where_somebody_led() -> None:
    syncs: Any = Syncs.__new__(Syncs)
    syncs._ledger, syncs._report = Ledger(commit=4), Report(led=Led(step=7, epoch=1))
    ended: Any = SimpleNamespace(commit=5, number=6, means={})
    syncs._ledger = syncs._next_ledger(ended)
    assert syncs._ledger.led == Led(step=7, epoch=1)
    syncs._report = Report()
    assert syncs._next_ledger(ended).led == Led(step=7, epoch=1)


def test_a_resumed_run_owes_nothing_for_what_its_checkpoint_holds() -> None:
    assert State(step=40, position=DataPosition(2, 5)).ledger.led == Led(step=40, epoch=2)
