"""`shardloom leave`: whom it asks, how often, and what it says of a head that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from service import join as joining
from service.join import JoinedMachine
from service.local_process import ProcessId
from service.local_state import StackHome
from service.machine_ray import RayNode
from tests.unit.service.test_machines import THIS_PROCESS, TOKEN, joined


@pytest.fixture
def home(tmp_path: Path) -> StackHome:
    return StackHome(tmp_path / "home")


class Head:
    """A head of Ray that gives the answers of a list, the last one for ever."""

    def __init__(self, nodes, num_actors=(0,)):
        self.nodes, self.num_actors = list(nodes), list(num_actors)
        self.drained = []

    def live_nodes(self):
        return self.nodes.pop(0) if len(self.nodes) > 1 else self.nodes[0]

    def num_actors_on(self, node_id):
        return self.num_actors.pop(0) if len(self.num_actors) > 1 else self.num_actors[0]

    def drain(self, machine, state, node_id, grace_s, report):
        self.drained.append(node_id)
        return True


@pytest.fixture
def leave(home, monkeypatch):
    """Leaves with a head; what was said, and whether the node has ended."""
    monkeypatch.setattr(joining, "_POLL_S", 0.0)
    ended: list[ProcessId] = []
    monkeypatch.setattr(joining, "_end", ended.append)

    def act(head: Head, grace_s: int = 120) -> list[str]:
        monkeypatch.setattr(joining, "RayState", lambda *_: head)
        monkeypatch.setattr(
            JoinedMachine, "_ask_to_drain", lambda *arguments: head.drain(*arguments)
        )
        said: list[str] = []
        assert JoinedMachine(home).leave(grace_s, said.append)
        assert ended == [THIS_PROCESS]
        assert home.read_joined() is None
        return said

    return act


def node(node_id: str) -> RayNode:
    return RayNode(node_id, "10.0.0.7", False, 1, 0, 1)


def test_a_head_that_does_not_answer_for_a_while_is_asked_again(home, leave):
    joined(home, THIS_PROCESS)
    home.keep_cluster_token(TOKEN)
    head = Head([None, None, [node("n")]], [None, 2, None, 0])
    assert leave(head)[0].startswith("no job is on this machine any more")
    assert head.drained == ["n"]


def test_a_head_that_never_says_is_not_taken_for_one_without_jobs(home, leave):
    joined(home, THIS_PROCESS)
    home.keep_cluster_token(TOKEN)
    monotonic = iter(range(1000))
    joining_time = joining.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining_time, "monotonic", lambda: next(monotonic))
        said = leave(Head([[node("n")]], [None]), grace_s=30)
    assert said[0] == "the head has not said within 30 s whether jobs are still here"


def test_a_machine_whose_token_is_gone_leaves_all_the_same(home, leave):
    joined(home, THIS_PROCESS)
    head = Head([[node("n")]])
    assert "the node ends without a word to its jobs" in leave(head)[0]
    assert head.drained == []


def test_of_two_nodes_with_this_address_the_own_one_is_drained(home, leave):
    joined(home, THIS_PROCESS, node_id="new")
    home.keep_cluster_token(TOKEN)
    head = Head([[node("dead"), node("new")]])
    leave(head)
    assert head.drained == ["new"]


def test_a_node_that_the_head_has_given_up_is_not_drained(home, leave):
    joined(home, THIS_PROCESS, node_id="given-up")
    home.keep_cluster_token(TOKEN)
    head = Head([[node("other")]])
    assert "counts this node no more" in leave(head)[0]
    assert head.drained == []
