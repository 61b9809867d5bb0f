"""What a group asks the coordinator, by what its ranks ask their agent."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import ray
from ray.exceptions import RayActorError, RaySystemError

from tests.harness.wait import free_port, scaled, wait_for
from trainer.coordination import client
from trainer.coordination.agent import Disagreement, GroupAgent, merged
from trainer.coordination.client import CoordinatorClient, Dismissed, Identity, Refused
from trainer.coordination.messages import (
    Arrive,
    Hello,
    Ledger,
    RankProcess,
    Rejection,
    Report,
    Vote,
)
from trainer.elastic.group_session import locate


def hello(rank: int, commit: int = 0) -> Hello:
    process = RankProcess(rank=rank, host=f"host-{rank}", pid=7 + rank, donor=f"donor-{rank}")
    facts = {"group": 3, "incarnation": 1, "ranks": (process,)}
    return Hello(**facts, origin="seed", standing="initial", ledger=Ledger(commit=commit))


def test_a_group_greets_with_the_processes_of_all_its_ranks() -> None:
    said = merged({0: hello(0), 1: hello(1)})
    assert isinstance(said, Hello)
    assert [(each.rank, each.pid, each.donor) for each in said.ranks] == [
        (0, 7, "donor-0"),
        (1, 8, "donor-1"),
    ]


def arrival(**values: object) -> Arrive:
    return Arrive.model_validate({"commit": 4} | values)


def test_a_group_arrives_with_what_holds_for_all_of_its_ranks() -> None:
    report = Report(best=0.5)
    first = arrival(may_overlap=True, has_copied=True, report=report, num_quarantined=1)
    second = arrival(copied_bytes=8, num_quarantined=2, train_s=0.5)
    sums = {"copied_bytes": 8, "num_quarantined": 3}
    assert merged({0: first, 1: second}) == arrival(**sums, train_s=0.5, report=report)
    copied = arrival(has_copied=True)
    assert merged({0: copied, 1: copied}) == copied
    poisoned = arrival(is_poisoned=True, needs_exact=True)
    both = merged({0: arrival(), 1: poisoned})
    assert isinstance(both, Arrive) and both.is_poisoned and both.needs_exact


def vote(**values: object) -> Vote:
    return Vote.model_validate({"round": 5, "commit": 2, "ok": True} | values)


def test_a_group_agrees_where_all_its_ranks_do_with_the_checksums_of_each() -> None:
    votes = [vote(checksums=[[["users", rank]]]) for rank in range(2)]
    assert merged(dict(enumerate(votes))) == vote(checksums=[[["users", 0]], [["users", 1]]])


def test_a_group_refuses_with_the_cause_of_the_rank_that_knows_one_and_all_suspects() -> None:
    gave_up = vote(ok=False, error="given up", gave_up=True)
    failed = vote(ok=False, error="no answer", suspects=[4])
    also = vote(ok=False, error="reset", suspects=[1])
    refusal = vote(ok=False, error="rank 2: no answer", suspects=[1, 4])
    assert merged({0: vote(), 1: gave_up, 2: failed, 3: also}) == refusal
    assert merged({0: vote(), 1: gave_up}) == vote(ok=False, error="rank 1: given up", gave_up=True)


@pytest.mark.parametrize(
    "asked",
    [
        (hello(0), hello(1, commit=1)),
        (arrival(leases=(1,)), arrival(leases=(2,))),
        (vote(), vote(round=6)),
        (arrival(), vote()),
    ],
    ids=lambda asked: asked[0].kind,
)
def test_a_group_whose_ranks_contradict_each_other_asks_nothing(asked) -> None:
    with pytest.raises(Disagreement):
        merged(dict(enumerate(asked)))


FIRST, TOKEN = Identity(group=3, incarnation=1, rank=0, num_ranks=1, host="127.0.0.1"), bytes(32)


def nowhere() -> str:
    raise ConnectionError("there is no coordinator")


def test_a_rank_looks_for_its_agent_until_it_finds_it_and_ends_with_it(monkeypatch) -> None:
    agent = GroupAgent(FIRST, nowhere, 1.0, TOKEN)
    tries: list[str] = []

    def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
        tries.append(address[0])
        if len(tries) < 3:
            raise TimeoutError("timed out")
        return create_connection(address, timeout_s)

    create_connection = socket.create_connection
    monkeypatch.setattr(client.socket, "create_connection", connect)
    rank = CoordinatorClient(FIRST, lambda: agent.address, 1.0, TOKEN, is_agent=True)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(rank.join, "initial", "seed", Ledger(), "")
        wait_for(lambda: agent._links, "the rank is connected")
        agent.close()
        with pytest.raises(Refused, match="the agent of this group, its first rank, has ended"):
            joining.result(scaled(10))
    rank.close()
    assert len(tries) == 3


def test_the_agent_of_a_spare_that_is_dismissed_lets_its_other_ranks_end_first(monkeypatch) -> None:
    members = [replace(FIRST, rank=rank, num_ranks=2) for rank in range(2)]
    agent = GroupAgent(members[0], nowhere, 1.0, TOKEN)
    ranks = [
        CoordinatorClient(member, lambda: agent.address, 1.0, TOKEN, is_agent=True)
        for member in members
    ]
    given_up: list[str] = []
    ranks[1].on_refusal = given_up.append
    left: list[list[int]] = []
    close = agent._server.close
    monkeypatch.setattr(agent._server, "close", lambda: (left.append([*agent._links]), close()))
    with ThreadPoolExecutor(2) as pool:
        joining = [pool.submit(rank.join, "spare", "", Ledger(), "") for rank in ranks]
        wait_for(lambda: len(agent._links) == 2, "the ranks are connected")
        agent.reject(Rejection(reason="dismissed", message="not wanted"))
        for each in joining:
            with pytest.raises(Dismissed, match="not wanted"):
                each.result(scaled(10))
        ranks[0].close()
        closing = pool.submit(agent.close)
        ranks[1].close()
        closing.result(scaled(10))
    assert (left, given_up) == ([[]], [])


def test_a_rank_that_finds_no_agent_says_so(monkeypatch) -> None:
    monkeypatch.setattr(client, "_AGENT_S", 0.2)
    address = f"127.0.0.1:{free_port()}"
    rank = CoordinatorClient(FIRST, lambda: address, 1.0, TOKEN, is_agent=True)
    with pytest.raises(Refused, match=r"took no connection for \d+ s \(.*refused"):
        rank.join("initial", "seed", Ledger(), "")
    rank.close()


STARTING = """
import ctypes, sys, threading
from trainer.coordination.client import CoordinatorClient, Identity, end_unless_joined
from trainer.coordination.messages import Ledger
end_unless_joined(1e10)
end_unless_joined(limit_s := float(sys.argv[2]))
if sys.argv[1] == "hangs":
    ctypes.PyDLL(None).sleep(600)  # with the GIL
rank = CoordinatorClient(Identity(0, 0, 0, 1, "host"), lambda: "127.0.0.1:1", 1.0, b"")
join = lambda: rank.join("initial", "seed", Ledger(), "")
threading.Thread(target=join, daemon=True).start()
threading.Event().wait(1.2 * limit_s)
"""


@pytest.mark.parametrize(("start", "code", "limit_s"), [("hangs", 1, 0.1), ("joins", 0, 1.0)])
def test_a_worker_that_hangs_before_it_joins_ends_with_its_stacks(
    start: str, code: int, limit_s: float
) -> None:
    command = [sys.executable, "-c", STARTING, start, str(scaled(limit_s))]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=scaled(60))
    assert ended.returncode == code, ended.stderr
    assert ("Timeout" in ended.stderr and "<string>" in ended.stderr) is (start == "hangs")


def test_a_worker_that_is_given_up_logs_what_nccl_is_doing(monkeypatch, caplog) -> None:
    recorder = SimpleNamespace(ProcessGroupNCCL=object, _dump_fr_trace_json=lambda **_: b"{}")
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", recorder)
    client._log_collectives()
    assert "NCCL's flight recorder, active collectives: {}" in caplog.text


def test_a_group_that_comes_when_its_run_is_over_ends_and_waits_while_ray_is_away(
    monkeypatch,
) -> None:
    answers = [RaySystemError("GCS is away"), RayActorError(), ValueError("no such actor")]
    monkeypatch.setattr(ray, "get_actor", Mock(side_effect=answers))
    agent = GroupAgent(FIRST, lambda: locate("coordinator-a0-0"), 1.0, TOKEN)
    rank = CoordinatorClient(FIRST, lambda: agent.address, 1.0, TOKEN, is_agent=True)
    with pytest.raises(Refused, match="the driver has ended the run that this group is of"):
        rank.join("initial", "seed", Ledger(), "")
    rank.close()
    agent.close()
