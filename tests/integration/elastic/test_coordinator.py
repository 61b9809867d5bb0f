"""Coordinator and job watch over real sockets: lost, hung and restarted processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import Mock

import pytest
import torch.distributed as dist
import uvloop
from ray.exceptions import ActorDiedError, GetTimeoutError

from tests.harness.files import records_in
from tests.harness.processes import die_with_parent
from tests.harness.ranks import FORK_SERVER
from tests.harness.sessions import TOKEN, make_config
from tests.harness.wait import free_port, scaled, wait_for
from trainer.coordination.authentication import authenticate
from trainer.coordination.client import (
    CoordinatorClient,
    CoordinatorLost,
    Identity,
    end_process,
)
from trainer.coordination.messages import (
    Answer,
    Answered,
    Arrive,
    Hello,
    Ledger,
    Numbered,
    RankProcess,
    Request,
    Roster,
    Round,
    RoundResult,
    Vote,
)
from trainer.driver import coordinator_actor, ray_train
from trainer.driver.attempt import Attempt, AttemptFailed, DriverContext
from trainer.driver.coordinator_actor import CoordinatorActor, RayCoordinator
from trainer.driver.job_runner import HangMonitor
from trainer.driver.ray_train import Evicted
from trainer.elastic import group_session
from trainer.elastic.coordinator.interface import MembershipPolicy
from trainer.elastic.coordinator.leases import LeaseBook
from trainer.elastic.coordinator.membership import Membership
from trainer.elastic.coordinator.server import Coordinator, CoordinatorConfig
from trainer.failures import EndReason
from trainer.protocol.events import HangFound, Note, read_record
from trainer.protocol.outbox import EventWriter
from trainer.protocol.worker_config import GroupConfig, WorkerConfig
from trainer.spec.training import RecoverySpec

# Longer than a test takes: whatever is noticed was not noticed by silence.
_NEVER_S = scaled(60)


def coordinate(port: int, folder: Path, pipe: Connection) -> None:
    """A process that coordinates two groups until it is killed, with the event loop of Ray."""
    die_with_parent()
    uvloop.install()
    coordinator = start(port, _NEVER_S, 2, folder)
    pipe.send(coordinator.address)
    pipe.recv()


def start(port: int, timeout_s: float, num_groups: int, folder: Path):
    """A coordinator on a thread; its events go to `folder`."""
    limits = RecoverySpec(heartbeat_timeout_s=timeout_s, start_grace_s=scaled(60))
    policy = MembershipPolicy(num_groups, recovery=limits)
    return Coordinator(CoordinatorConfig(policy, LeaseBook(400, 2, 5), folder, TOKEN, port=port))


def identity(group: int, incarnation: int = 0, rank: int = 0, num_ranks: int = 1) -> Identity:
    return Identity(group, incarnation, rank, num_ranks, f"127.0.0.{group + 2}")


wait_until = partial(wait_for, poll_s=0.005)


def exit_codes(ranks: Sequence[multiprocessing.process.BaseProcess]) -> list[int | None]:
    for rank in ranks:
        rank.join(scaled(60))
    return [rank.exitcode for rank in ranks]


def ask(lines: BinaryIO, body: Request, kind: str) -> list[Answer]:
    """What a connection is told from a request to its answer of this kind."""
    lines.write(Numbered(id=1, body=body).model_dump_json().encode() + b"\n")
    lines.flush()
    told: list[Answer] = []
    while not told or told[-1].kind != kind:
        told.append(Answered.model_validate_json(lines.readline()).body)
    return told


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), scaled(30))


def hello_of(rank: Identity) -> Hello:
    return Hello(
        group=rank.group,
        incarnation=rank.incarnation,
        ranks=(RankProcess(rank=rank.rank, host=rank.host, pid=1, donor=""),),
        origin="seed",
        standing="initial",
        ledger=Ledger(),
    )


@contextmanager
def with_members(
    folder: Path, num_groups: int, timeout_s: float = _NEVER_S, token: bytes = TOKEN
) -> Iterator[tuple[Coordinator, list[CoordinatorClient]]]:
    """A coordinator on a thread of this process, and clients of it: groups of one rank."""
    coordinator = start(0, timeout_s, num_groups, folder)
    members = [
        CoordinatorClient(identity(g), lambda: coordinator.address, timeout_s, token)
        for g in range(num_groups)
    ]
    try:
        yield coordinator, members
    finally:
        for member in members:
            member.close()
        coordinator.stop()


def test_who_has_not_proven_the_token_fences_nobody_and_votes_on_nothing(tmp_path: Path):
    with (
        with_members(tmp_path, 2) as (coordinator, members),
        ThreadPoolExecutor(2) as pool,
    ):
        first, _ = meet(members, pool)
        known = coordinator.status().groups
        vote = Vote(round=first.round, commit=1, ok=False, error="of another job")
        for lines in ([hello_of(identity(0, 1))], [hello_of(identity(0)), vote]):
            with connect(coordinator.address) as stranger:
                said = (Numbered(id=1, body=line).model_dump_json().encode() for line in lines)
                # At once: what the refusal leaves unread would reset the connection.
                stranger.sendall(b"".join(said))
                told = stranger.makefile("rb").read()  # to its end
            assert len(told) == 64 and told.endswith(bytes(32)), "a nonce and a refusal"
        assert coordinator.status().groups == known
        votes = [pool.submit(each.vote, vote.model_copy(update={"ok": True})) for each in members]
        assert all(each.result(scaled(30)).committed for each in votes)


def test_an_actor_that_cannot_start_ends_for_ray_to_start_it_again(tmp_path: Path, monkeypatch):
    config = CoordinatorConfig(MembershipPolicy(1), LeaseBook(1, 1, 1), tmp_path, TOKEN)
    for name in ("start_log", "prepare_process"):
        monkeypatch.setattr(coordinator_actor, name, Mock())
    is_away = Mock(side_effect=OSError(errno.ESTALE, "stale file handle"))
    monkeypatch.setattr("trainer.elastic.coordinator.server.open_stream", is_away)
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    with pytest.raises(SystemExit):
        CoordinatorActor(config)


def test_a_coordinator_that_does_not_start_costs_a_try_and_no_job(
    small_movielens: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(coordinator_actor, "ray", Mock())
    ray: Any = coordinator_actor.ray
    ray.util.get_node_ip_address.return_value = "127.0.0.1"
    ray.get.side_effect = GetTimeoutError("Get timed out")
    attempt = attempt_of(make_config(small_movielens, tmp_path, "parallelism.placement=inter_host"))
    with pytest.raises(AttemptFailed, match="did not start within 300 s") as caught:
        RayCoordinator(attempt, 0)
    assert caught.value.failure.reason == EndReason.DRIVER_LOST


def test_a_coordinator_that_goes_with_the_cluster_ends_the_attempt_without_a_failure(
    small_movielens: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(coordinator_actor, "ray", Mock())
    ray: Any = coordinator_actor.ray
    ray.util.get_node_ip_address.return_value = "127.0.0.1"
    ray.get.side_effect = ActorDiedError()
    monkeypatch.setattr(ray_train, "CLUSTER_LOSS_GRACE_S", 0.0)
    attempt = attempt_of(make_config(small_movielens, tmp_path, "parallelism.placement=inter_host"))
    with socket.create_server(("127.0.0.1", 0)) as gcs:
        context = Mock(gcs_address=f"127.0.0.1:{gcs.getsockname()[1]}")
        monkeypatch.setattr("ray.get_runtime_context", lambda: context)
        monkeypatch.setattr("ray.nodes", lambda: [{"Alive": False}])
        with pytest.raises(Evicted, match="the cluster is gone"):
            RayCoordinator(attempt, 0)


def test_a_coordinator_that_has_not_answered_for_long_is_started_again_and_given_time_anew(
    small_movielens: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(coordinator_actor, "ray", Mock())
    ray: Any = coordinator_actor.ray
    ray.util.get_node_ip_address.return_value = "127.0.0.1"
    clock = Mock(return_value=0.0)
    monkeypatch.setattr(coordinator_actor, "time", Mock(monotonic=clock))
    attempt = attempt_of(make_config(small_movielens, tmp_path, "parallelism.placement=inter_host"))
    driver = RayCoordinator(attempt, 0)
    num_kills = []
    for at_s, answers in ((30, True), (85, False), (95, False), (150, False), (160, False)):
        clock.return_value = float(at_s)
        ray.get.side_effect = None if answers else GetTimeoutError("Get timed out")
        assert bool(driver.status()) is answers
        num_kills.append(ray.kill.call_count)
    assert num_kills == [0, 0, 1, 1, 2]
    assert ray.kill.call_args.kwargs == {"no_restart": False}
    told = records_in(attempt.context.files, Note)
    assert ["has not answered for 60 s" in note.message for note in told] == [True, True]


def test_only_the_driver_of_its_attempt_steers_a_coordinator_that_all_jobs_can_call(
    small_movielens: Path, tmp_path: Path, monkeypatch
):
    actors: list[CoordinatorActor] = []

    def start_actor(config: CoordinatorConfig) -> Mock:
        actors.append(actor := CoordinatorActor(config))
        return Mock(get_address=Mock(remote=actor.get_address), call=Mock(remote=actor.call))

    for name in ("ray", "start_log", "prepare_process"):
        monkeypatch.setattr(coordinator_actor, name, Mock())
    ray: Any = coordinator_actor.ray
    ray.util.get_node_ip_address.return_value = "127.0.0.1"
    ray.remote.return_value.options.return_value.remote = start_actor
    ray.get = lambda answer, timeout: answer
    attempt = attempt_of(make_config(small_movielens, tmp_path, "parallelism.placement=inter_host"))
    driver, (actor,) = RayCoordinator(attempt, 0), actors
    member = CoordinatorClient(identity(0), actor.get_address, _NEVER_S, TOKEN)
    try:
        member.join("initial", "seed-0", Ledger(), "")
        for step in (("status",), ("request", "drop", 0, 0, "hang")):
            with pytest.raises(PermissionError, match="of another attempt"):
                actor.call(bytes(32), *step)
        found = driver.status()
        assert found and [group.group for group in found.groups] == [0]
        driver.request("drop", 0, 0, "hang")
        found = driver.status()
        assert found and not found.groups
    finally:
        member.close()
        driver.stop()
    assert actor._coordinator.is_over, "what it had to tell is written before its process ends"


def test_a_client_with_another_token_is_told_so(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("trainer.coordination.client._LOST_AFTER_S", scaled(0.5))
    monkeypatch.setattr("trainer.coordination.client.finding_s", lambda _: 0.0)
    with with_members(tmp_path, 1, token=bytes(32)) as (coordinator, (member,)):
        with pytest.raises(CoordinatorLost, match="refused this rank's token"):
            member.join("initial", "seed-0", Ledger(), "")
        assert not coordinator.status().groups


@pytest.mark.parametrize(("timeout_s", "unconfirmed_ms"), [(2.0, 2000), (9e8, 86_400_000)])
def test_a_connection_of_which_nobody_confirms_anything_ends_within_the_heartbeat_timeout(
    tmp_path: Path, monkeypatch, timeout_s: float, unconfirmed_ms: int
):
    opened: list[socket.socket] = []

    def open_connection(*args: Any) -> socket.socket:
        opened.append(connection := socket.create_connection(*args))
        return connection

    module = SimpleNamespace(**vars(socket) | {"create_connection": open_connection})
    monkeypatch.setattr("trainer.coordination.client.socket", module)
    monkeypatch.setattr("trainer.coordination.client._LOST_AFTER_S", scaled(10))
    with with_members(tmp_path, 1, timeout_s=timeout_s) as (_, (member,)):
        member.join("initial", "seed-0", Ledger(), "")
        (connection,) = opened
        # Else TCP waits as long as the network was away before it tries again.
        found_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert found_ms == unconfirmed_ms


def test_connections_that_never_prove_anything_are_closed_in_time_and_hold_nobody_up(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("trainer.elastic.coordinator.server.PROOF_TIMEOUT_S", scaled(0.5))
    with with_members(tmp_path, 1) as (coordinator, members), ExitStack() as stack:
        silent = [stack.enter_context(connect(coordinator.address)) for _ in range(20)]
        with ThreadPoolExecutor(1) as pool:
            (first,) = meet(members, pool)
        assert members[0].vote(Vote(round=first.round, commit=1, ok=True)).committed
        for each in silent:
            assert len(each.makefile("rb").read()) == 32, "a nonce, and then its end"
        assert [group.group for group in coordinator.status().groups] == [0]
        assert len(caplog.records) == 1 and "no proof came in time" in caplog.text


def test_members_travel_once_per_connection_and_their_weights_with_every_round(tmp_path: Path):
    coordinator = start(0, _NEVER_S, 1, tmp_path)
    hello = hello_of(identity(0))
    with connect(coordinator.address) as connection:
        authenticate(connection, TOKEN, coordinator.address, scaled(10))
        lines = connection.makefile("rwb")
        ask(lines, hello, "welcome")
        roster, first = ask(lines, Arrive(commit=0), "round")
        assert isinstance(roster, Roster) and isinstance(first, Round)
        assert [each.hosts for each in roster.members] == [("127.0.0.2",)]
        (result,) = ask(lines, Vote(round=1, commit=1, ok=True), "verdict")
        assert isinstance(result, RoundResult) and result.committed
        arrival = Arrive(commit=1, leases=(result.leases[0].id,), num_rows=5)
        # It is current now, which is a change; from here on its weight alone differs.
        current, second = ask(lines, arrival, "round")
        assert isinstance(current, Roster) and current.gone == ()
        (result,) = ask(lines, Vote(round=2, commit=2, ok=True), "verdict")
        arrival = arrival.model_copy(update={"commit": 2, "leases": (result.leases[0].id,)})
        (third,) = ask(lines, arrival.model_copy(update={"num_rows": 3}), "round")
        assert (second.weights, third.weights) == ((5.0,), (3.0,))
        assert current.members[0].standing == "current"
        # The same rank on a new connection is told anew.
        with connect(coordinator.address) as again:
            authenticate(again, TOKEN, coordinator.address, scaled(10))
            lines = again.makefile("rwb")
            ask(lines, hello.model_copy(update={"round": 3}), "welcome")
            assert ask(lines, arrival, "round") == [current.after(roster), third]
    coordinator.stop()


def test_who_connects_anew_has_one_connection_and_is_not_missed(tmp_path: Path):
    coordinator = start(0, _NEVER_S, 1, tmp_path)
    with connect(coordinator.address) as old, connect(coordinator.address) as new:
        for connection in (old, new):
            authenticate(connection, TOKEN, coordinator.address, scaled(10))
            ask(connection.makefile("rwb"), hello_of(identity(0)), "welcome")
        assert old.recv(1) == b"", "it is closed"
        assert [group.group for group in coordinator.status().groups] == [0]
    coordinator.stop()


@contextmanager
def coordinating(port: int, folder: Path) -> Iterator[None]:
    """A coordinator in a process of its own, killed at the end."""
    ours, theirs = FORK_SERVER.Pipe()
    process = FORK_SERVER.Process(target=coordinate, args=(port, folder, theirs), daemon=True)
    process.start()
    assert ours.poll(scaled(60)), "the coordinator does not start"
    ours.recv()
    try:
        yield
    finally:
        process.kill()
        process.join()


def meet(members: list[CoordinatorClient], pool: ThreadPoolExecutor):
    """The first round of `members`, each a group of one rank."""
    for member in members:
        member.join("initial", "seed-0", Ledger(), "")
    arrivals = [pool.submit(m.arrive, Arrive(commit=0)) for m in members]
    return [arrival.result(scaled(30)) for arrival in arrivals]


def test_a_rank_whose_connection_ends_is_missed_at_once_and_its_round_fails(tmp_path: Path):
    with (
        with_members(tmp_path, 2) as (coordinator, members),
        ThreadPoolExecutor(2) as pool,
    ):
        first, _ = meet(members, pool)
        members[1].close()
        (lost,) = wait_until(lambda: coordinator.status().departures, "the loss is noticed")
        vote = Vote(round=first.round, commit=1, ok=True)
        assert not members[0].vote(vote).committed
    assert (lost.group, lost.reason) == (1, "connection")
    assert lost.message.startswith("rank 0 on 127.0.0.3 ended")


def test_who_waits_for_its_welcome_says_that_it_lives(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Membership, "_welcome", lambda _: None)  # as while a run is recovered
    heard = Mock(return_value=[])
    monkeypatch.setattr(Membership, "on_heartbeats", heard)
    monkeypatch.setattr("trainer.coordination.client._LOST_AFTER_S", 0.0)
    with with_members(tmp_path, 1) as (_, (member,)), ThreadPoolExecutor(1) as pool:
        joining = pool.submit(member.join, "initial", "seed-0", Ledger(), "")
        wait_until(lambda: heard.called, "a heartbeat")
        assert not joining.done(), "all may take as long to find the coordinator"
        member.close()


def test_a_vote_that_its_coordinator_did_not_live_to_count_fails(tmp_path: Path):
    port = free_port()
    members = [
        CoordinatorClient(identity(g), lambda: f"127.0.0.1:{port}", _NEVER_S, TOKEN)
        for g in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        with coordinating(port, tmp_path):
            first = meet(members, pool)
            vote = Vote(round=first[0].round, commit=1, ok=True)
            early = pool.submit(members[0].vote, vote)
            time.sleep(0.1)  # the vote travels; whether it gets there makes no difference
            assert not early.done()
        with coordinating(port, tmp_path):
            verdicts = [members[1].vote(vote), early.result(scaled(30))]
            arrive = Arrive(commit=0)
            second = [pool.submit(m.arrive, arrive).result for m in members]
            rounds = [result(scaled(30)) for result in second]
        for member in members:
            member.close()
    assert [verdict.committed for verdict in verdicts] == [False, False]
    assert rounds[0].round > first[0].round
    assert rounds[0].generation > first[0].generation


def test_a_coordinator_with_an_error_in_it_ends_for_another_one(tmp_path: Path, monkeypatch):
    has_crashed = threading.Event()
    config = CoordinatorConfig(MembershipPolicy(1), LeaseBook(1, 1, 1), tmp_path, TOKEN)
    coordinator = Coordinator(config, on_crash=has_crashed.set)
    member = CoordinatorClient(identity(0), lambda: coordinator.address, _NEVER_S, TOKEN)
    try:
        member.join("initial", "seed-0", Ledger(), "")
        server = "trainer.elastic.coordinator.server"
        monkeypatch.setattr(f"{server}.Membership.on_arrive", lambda *_: [][0])
        with ThreadPoolExecutor(1) as pool:
            arrival = pool.submit(member.arrive, Arrive(commit=0))
            assert has_crashed.wait(scaled(30))
            member.close()
            assert isinstance(arrival.exception(), CoordinatorLost | None)
    finally:
        coordinator.stop()


def test_whatever_silence_is_allowed_the_start_does_not_wait_for_ever_and_hangs_are_found(
    tmp_path: Path,
):
    limits = RecoverySpec(heartbeat_timeout_s=1e6, start_grace_s=0.1, min_hang_s=1.0)
    policy = MembershipPolicy(2, recovery=limits, holds_suspicions=False)
    coordinator = Coordinator(CoordinatorConfig(policy, LeaseBook(1, 1, 1), tmp_path, TOKEN))
    member = CoordinatorClient(identity(0), lambda: coordinator.address, 1e6, TOKEN)
    with ThreadPoolExecutor(1) as pool:
        try:
            member.join("initial", "seed-0", Ledger(), "")
            arrival = pool.submit(member.arrive, Arrive(commit=0))
            arrival.result(scaled(20))
            member.reporter.enter("train")
            wait_until(lambda: coordinator.status().departures, "the hang")
            assert coordinator.status().departures[0].reason == "hang"
        finally:
            member.close()
            coordinator.stop()


def attempt_of(config: WorkerConfig) -> Attempt:
    context = DriverContext("job-test", config.attempt_id, config.run_dir, None, 0)
    context.files.outbox_dir.mkdir(parents=True)
    writer = EventWriter(context.files.stream_path("driver"))
    return Attempt(context, config.spec, writer, token=TOKEN)


def take_steps(
    log: Path, address: str, run_index: int, rank: int, num_steps: int, hangs_after: int
) -> None:
    """A worker's process whose main thread stands still after some steps, if they come to that."""
    die_with_parent()
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    identity = Identity(0, run_index, rank, 2, "127.0.0.2")
    member = CoordinatorClient(identity, lambda: address, scaled(1.0), TOKEN)
    member.on_refusal = end_process
    member.join("initial", f"run-{run_index}", Ledger(), donor="")
    for step in range(1, num_steps + 1):
        if step <= hangs_after:
            member.reporter.enter("train")
        time.sleep(0.05)
    member.close()


def log_of(attempt: Attempt, rank: int) -> Path:
    return attempt.context.files.root / f"rank-{rank}.log"


@contextmanager
def watched(attempt: Attempt, run_index: int, *steps: tuple[int, int]) -> Iterator[tuple]:
    """Who watches the job, and its workers: for each (how many steps, after how many it hangs)."""
    watch = HangMonitor(attempt, "127.0.0.1")
    workers = [
        FORK_SERVER.Process(
            target=take_steps,
            args=(log_of(attempt, rank), watch.address, run_index, rank, *each),
            daemon=True,
        )
        for rank, each in enumerate(steps)
    ]
    try:
        for worker in workers:
            worker.start()
        yield watch, workers
    finally:
        watch._coordinator.stop()
        for worker in workers:
            worker.kill()


def test_a_worker_that_hangs_is_found_and_ends_with_its_peers(
    small_movielens: Path, tmp_path: Path
) -> None:
    config = make_config(small_movielens, tmp_path, f"recovery.min_hang_s={scaled(1.5)}")
    attempt = attempt_of(config)
    with watched(attempt, 4, (1000, 1000), (1000, 3)) as (watch, workers):
        failure = wait_until(lambda: watch.check(4), "the hang", 60)
        assert (failure.reason, failure.facts) == (EndReason.HANG, {"host": "127.0.0.2"})
        assert watch.processes == {"127.0.0.2": {worker.pid for worker in workers}}
        assert not watch.is_nobody_there
        assert watch.check(5) is None  # the next life has nothing to do with it
        assert watch.is_nobody_there
        assert exit_codes(workers) == [70, 70]
    assert "in take_steps" in log_of(attempt, 1).read_text(), "the stack of what hangs is logged"
    lines = attempt.context.files.stream_path("coordinator-0").read_bytes().splitlines()
    (found,) = [read_record(line, now=0.0) for line in lines]
    assert isinstance(found, HangFound)
    assert (found.rank, found.phase) == (1, "train")


def test_workers_are_watched_again_after_an_error_in_the_watch(
    small_movielens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = attempt_of(make_config(small_movielens, tmp_path))
    with watched(attempt, 1, (1000, 1000)) as (watch, _):
        wait_until(lambda: watch.check(1) or watch.processes, "the worker", 60)
        failed, address = watch._coordinator, watch.address
        with monkeypatch.context() as patch:
            patch.setattr(Membership, "tick", lambda *_: [][0])
            wait_until(lambda: failed.is_over, "its end", 60)
        host, _, port = address.rpartition(":")
        with socket.create_server((host, int(port))):
            assert watch.check(1) is None
        assert len(attempt.context.files.stream_paths()) == 1, "none of a watch that did not start"
        assert watch.check(1) is None
        watch.processes.clear()
        wait_until(lambda: watch.check(1) or watch.processes, "the worker again", 60)
        assert (watch._coordinator is failed, watch.address) == (False, address)


def hang_in_training(log: Path, address: str) -> None:
    """A process of the first rank of a group, as on Ray, but that it joins and stands still."""
    die_with_parent()
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)

    def join_and_hang(config: Any, client: CoordinatorClient, host: str) -> None:
        client.join("initial", "seed-0", Ledger(), "")
        os.write(2, b"it has joined\n")
        threading.Event().wait()

    vars(group_session).update(locate=lambda _: address, run_group=join_and_hang)
    recovery = SimpleNamespace(heartbeat_timeout_s=_NEVER_S, exchange_timeout_s=5.0)
    config: Any = SimpleNamespace(spec=SimpleNamespace(recovery=recovery), token=TOKEN)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group_session.run_group_worker(config, GroupConfig(0, 0, "coordinator"), "127.0.0.2")


def test_a_rank_of_a_group_that_is_given_up_logs_its_stacks_as_it_ends(tmp_path: Path) -> None:
    coordinator, log = start(0, _NEVER_S, 1, tmp_path), tmp_path / "rank.log"
    args = (log, coordinator.address)
    rank = FORK_SERVER.Process(target=hang_in_training, args=args, daemon=True)
    rank.start()
    wait_until(lambda: log.exists() and "has joined" in log.read_text(), "it joins", 60)
    coordinator.request("drop", 0, 0, "hang")
    assert exit_codes([rank]) == [70]
    assert "in join_and_hang" in log.read_text()
    coordinator.stop()


def test_a_worker_that_has_ended_does_not_end_its_peers(
    small_movielens: Path, tmp_path: Path
) -> None:
    attempt = attempt_of(make_config(small_movielens, tmp_path))
    with watched(attempt, 0, (10, 10), (50, 50)) as (watch, workers):
        assert exit_codes(workers) == [0, 0]
        assert watch.check(0) is None
