"""Draining a machine: the wait ends when Ray calls its nodes dead, and not before."""

from __future__ import annotations

from types import SimpleNamespace

from tests.harness.clock import FakeClock
from trainer.driver.drain_node import drain

ALIVE, DEAD = 0, 1
HOST = "10.0.0.2"


class Gcs:
    """Ray's head, which gives one answer after the other, by the text of a node's id."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.drained = []

    def get_all_node_info(self, timeout):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return {name.encode(): node for name, node in answer.items()}

    def drain_node(self, node_id, reason, message, deadline_ms):
        self.drained.append((bytes.fromhex(node_id).decode(), deadline_ms))
        return True, ""


def node(state, address=HOST, *, is_head_node=False):
    return SimpleNamespace(state=state, node_manager_address=address, is_head_node=is_head_node)


def drained(gcs, grace_s=10.0):
    clock = FakeClock(1000.0)
    return drain(gcs, HOST, grace_s, clock, clock.sleep), sum(clock.slept)


def test_an_answer_that_leaves_the_node_out_does_not_end_the_wait():
    others = {"head": node(ALIVE, is_head_node=True), "before": node(DEAD)}
    gcs = Gcs(
        others | {"a": node(ALIVE), "far": node(ALIVE, "10.0.0.3")},
        others | {"a": node(ALIVE)},
        {},
        others | {"a": node(DEAD)},
    )
    assert drained(gcs) == (None, 1.0)
    assert gcs.drained == [("a", 1_010_000)]


def test_a_node_that_stays_is_told_after_the_grace():
    fault, waited_s = drained(Gcs({"a": node(ALIVE)}, {}))
    assert "jobs are still on 10.0.0.2 after 10 s" in fault
    assert waited_s == 10.0


def test_a_machine_without_a_live_worker_node_is_refused():
    gcs = Gcs({"head": node(ALIVE, is_head_node=True), "before": node(DEAD)})
    fault, _ = drained(gcs)
    assert "no worker node" in fault
    assert gcs.drained == []
