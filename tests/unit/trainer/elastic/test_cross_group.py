"""The process group between groups: what it tells of its progress, and of peers that fail."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from tests.harness.wait import free_port, scaled
from trainer.coordination.client import Identity
from trainer.coordination.messages import Round, RoundMember
from trainer.elastic import group_session, group_sync
from trainer.elastic.group_sync import (
    CrossGroupProcessGroup,
    ExchangeError,
    GroupSync,
    ReplicaRank,
    new_nccl,
)
from trainer.elastic.peer_copy import DonorServer
from trainer.elastic.rendezvous import RendezvousStore
from trainer.spec.training import RecoverySpec

CPU = torch.device("cpu")


def form(
    store: dist.Store, index: int, size: int, address: str, advance=lambda: None, timeout_s=20.0
) -> CrossGroupProcessGroup:
    return CrossGroupProcessGroup(
        ReplicaRank(1, index, size),
        store,
        CPU,
        scaled(timeout_s),
        lambda: False,
        advance,
        address,
    )


def test_each_part_of_an_exchange_is_progress_and_a_peer_that_takes_no_connection_is_named():
    parts: list[int] = []
    out = torch.ones(3)
    donor = DonorServer(Identity(0, 0, 0, 1, "127.0.0.1"), [], bytes(32))
    with closing(donor), ThreadPoolExecutor(3) as pool:
        stores = [
            RendezvousStore(
                donor.address, 1, bytes(32), lambda: False, connect_s=scaled(20), wait_s=scaled(20)
            )
            for _ in range(3)
        ]
        addresses = [donor.address, donor.address, "127.0.0.1:1"]
        forming = [
            pool.submit(form, stores[index], index, 3, addresses[index], lambda: parts.append(1))
            for index in range(3)
        ]
        groups = [each.result() for each in forming]
        sums = [pool.submit(group.all_gather, out.clone()) for group in groups]
        for each in sums:
            each.result()
        assert len(parts) == 3
        failing = [pool.submit(group.all_gather, out.clone()) for group in groups[:2]]
        groups[2].drop()
        found = [each.exception() for each in failing]
    assert all(isinstance(each, ExchangeError) for each in found)
    assert [each.suspects for each in found] == [(2,), (2,)]
    assert not any(each.gave_up for each in found)
    for group in groups:
        group.drop()


def test_peers_that_do_not_come_are_named():
    with pytest.raises(ExchangeError, match="did not meet") as failed:
        form(dist.HashStore(), 1, 3, "", timeout_s=0.05)
    assert failed.value.suspects == (0, 2)


def test_the_group_is_named_whose_store_cannot_be_reached():
    members = [
        RoundMember(group=group, incarnation=0, standing=standing)
        for group, standing in ((0, "listening"), (4, "current"), (5, "current"))
    ]
    round_ = Round(
        round=1,
        generation=1,
        commit=1,
        members=tuple(members),
        stores=(f"127.0.0.1:{free_port()}",),
    )
    client = SimpleNamespace(identity=SimpleNamespace(rank=0), token=bytes(32))
    rank: Any = SimpleNamespace(
        _client=client, _timeout_s=0.1, _stream=None, _is_aborted=lambda: False
    )
    with pytest.raises(ExchangeError, match="group 4 cannot be reached") as failed:
        GroupSync._store_of(rank, round_)
    assert failed.value.suspects == (1,)


@pytest.mark.parametrize("error", [None, dist.DistStoreError("it is gone")])
def test_where_the_store_does_not_answer_its_host_is_named_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    class Store(dist.HashStore):
        def check(self, keys: list[str]) -> bool:
            if error:
                raise error
            return False

    monkeypatch.setattr(group_sync, "_PROBE_S", 0.01)
    with pytest.raises(ExchangeError, match="could not meet") as failed:
        CrossGroupProcessGroup(ReplicaRank(1, 0, 3), Store(), CPU, 0.01, lambda: False, host=2)
    assert failed.value.suspects == (2,)


@pytest.mark.parametrize(("given_up_after_s", "timeout_s"), [(0.0, 20.0), (0.15, 0.2)])
def test_who_is_told_to_give_up_names_who_is_absent_only_after_having_waited_long(
    given_up_after_s: float, timeout_s: float
) -> None:
    started = time.monotonic()
    with pytest.raises(ExchangeError, match="given up") as failed:
        CrossGroupProcessGroup(
            ReplicaRank(1, 0, 2),
            dist.HashStore(),
            CPU,
            timeout_s,
            lambda: time.monotonic() >= started + given_up_after_s,
        )
    is_long = bool(given_up_after_s)
    assert (failed.value.gave_up, failed.value.suspects) == (not is_long, (1,) * is_long)


class FakeNccl:
    """A backend, and the work that it starts, of which one `call` fails as `how` says.

    Until it is aborted `hang` and `late` do not return; then `hang` is an error, and `late` looks
    like a success.
    """

    def __init__(self, call: str = "", how: str = "") -> None:
        self.call, self.how = call, how
        self.has_begun, self.aborted, self.end = (threading.Event() for _ in range(3))

    def _do(self, call: str) -> None:
        if call != self.call:
            return
        self.has_begun.set()
        if self.how == "error":
            raise RuntimeError(f"NCCL failed to {call}")
        self.aborted.wait()
        if self.how == "hang":
            raise RuntimeError("NCCL was aborted")

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._do("connect")

    def start(self, *args: object) -> FakeNccl:
        self._do("start")
        return self

    barrier = _allgather_base = alltoall_base = start

    def is_completed(self) -> bool:
        if self.call == "complete":
            self.has_begun.set()
        return self.call != "complete" or self.how == "error" or self.aborted.is_set()

    def exception(self) -> RuntimeError | None:
        is_failed = self.call == "complete" and self.how in ("error", "hang")
        return RuntimeError("NCCL: remote error") if is_failed else None

    def wait(self) -> None:
        self._do("wait")

    def abort(self) -> None:
        self.aborted.set()
        if self.call == "abort":
            self.end.wait()


def form_fake(
    monkeypatch: pytest.MonkeyPatch, fake: FakeNccl, timeout_s: float, is_aborted=lambda: False
) -> CrossGroupProcessGroup:
    monkeypatch.setattr(group_sync, "new_nccl", lambda *_: fake)
    replica, device = ReplicaRank(1, 0, 1), torch.device("cuda", 0)
    return CrossGroupProcessGroup(replica, dist.HashStore(), device, timeout_s, is_aborted)


def exchange(group: CrossGroupProcessGroup) -> None:
    group.all_gather(torch.ones(1))


@pytest.mark.parametrize("how", ["hang", "error", "late"])
@pytest.mark.parametrize("call", ["connect", "start", "complete", "wait"])
def test_whatever_call_of_nccl_fails_or_hangs_the_group_is_not_formed_and_aborted(
    monkeypatch: pytest.MonkeyPatch, call: str, how: str
) -> None:
    monkeypatch.setattr(group_sync, "_ABORT_S", 0.01)
    monkeypatch.setattr(group_sync, "_CONNECT_S", 0.1)
    fake = FakeNccl(call, how)
    with pytest.raises(ExchangeError, match="no replica group was formed"):
        form_fake(monkeypatch, fake, timeout_s=0.1)
    assert fake.aborted.is_set()


@pytest.mark.parametrize("how", ["hang", "error", "late"])
@pytest.mark.parametrize("call", ["start", "complete", "wait"])
def test_whatever_call_of_nccl_fails_or_hangs_an_exchange_fails_in_time(
    monkeypatch: pytest.MonkeyPatch, call: str, how: str
) -> None:
    monkeypatch.setattr(group_sync, "_ABORT_S", 0.01)
    fake = FakeNccl()
    group = form_fake(monkeypatch, fake, timeout_s=20.0 if how == "error" else 0.5)
    exchange(group)
    fake.call, fake.how = call, how
    cause = "NCCL" if how == "error" else "did not answer in time .* is 0.5 s"
    with pytest.raises(ExchangeError, match=cause) as failed:
        exchange(group)
    assert not failed.value.gave_up
    with pytest.raises(ExchangeError):
        group.drop()
        exchange(group)
    assert fake.aborted.is_set()


@pytest.mark.parametrize("call", ["connect", "complete", "wait"])
def test_who_is_told_to_give_up_leaves_a_call_of_nccl_that_hangs(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fake = FakeNccl(call, "hang")
    with pytest.raises(ExchangeError, match="given up") as failed:
        form_fake(monkeypatch, fake, 1e6, is_aborted=fake.has_begun.is_set)
    assert failed.value.gave_up


def test_nccl_is_not_aborted_while_it_takes_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_sync, "_ABORT_S", 0.01)
    fake, has_begun, may_end = FakeNccl(), threading.Event(), threading.Event()
    group = form_fake(monkeypatch, fake, timeout_s=20.0)

    def start(*_: object) -> FakeNccl:
        has_begun.set()
        may_end.wait(scaled(20))
        return fake

    fake._allgather_base = start  # type: ignore[method-assign]
    with ThreadPoolExecutor() as pool:
        exchanging = pool.submit(exchange, group)
        assert has_begun.wait(scaled(20))
        group.drop()
        assert not fake.aborted.is_set(), "torch looks at what an abort frees"
        may_end.set()
        assert fake.aborted.wait(scaled(20))
        error = exchanging.exception()
    assert isinstance(error, ExchangeError), "what was aborted is no success"


def test_an_abort_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_sync, "_ABORT_S", 0.01)
    fake = FakeNccl("abort")
    form_fake(monkeypatch, fake, 1e6).drop()
    assert fake.aborted.is_set() and not fake.end.is_set()
    fake.end.set()


@pytest.mark.parametrize("how", ["hang", "error", "late"])
def test_gloo_that_does_not_form_a_group_holds_up_nobody_who_is_told_to_give_up(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def form_gloo(*_: object) -> SimpleNamespace:
        has_begun.set()
        if how == "error":
            raise RuntimeError("gloo: connection refused")
        may_end.wait()
        return SimpleNamespace(abort=lambda: None)

    monkeypatch.setattr(dist, "ProcessGroupGloo", form_gloo)
    is_aborted = has_begun.is_set if how == "hang" else lambda: False
    if how == "late":
        threading.Timer(0.1, may_end.set).start()
        CrossGroupProcessGroup(ReplicaRank(1, 0, 1), dist.HashStore(), CPU, 1e6, is_aborted)
        return
    with pytest.raises(ExchangeError, match="given up" if how == "hang" else "refused") as failed:
        CrossGroupProcessGroup(ReplicaRank(1, 0, 1), dist.HashStore(), CPU, 1e6, is_aborted)
    assert failed.value.gave_up == (how == "hang")
    may_end.set()


def test_torch_never_ends_the_process_for_the_sake_of_a_free_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, made = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []

    class Nccl:
        Options = staticmethod(lambda: SimpleNamespace(config=SimpleNamespace()))

        def __init__(self, store: Any, index: int, size: int, options: Any) -> None:
            made.append((options, dict(os.environ)))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv(name, "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    new_nccl(dist.HashStore(), ReplicaRank(1, 0, 1))
    ((options, environment),) = made
    assert options.config.blocking == 0
    assert options._timeout > timedelta(hours=1), "the exchange's own limit comes first"
    assert environment[name] == environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ[name] == "3", "groups that nobody watches keep torch's watchdog"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


def test_how_long_nccl_may_block_is_said_before_the_first_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCH_NCCL_NONBLOCKING_TIMEOUT"
    monkeypatch.setenv(name, "")  # so that it is put back
    monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(group_session, "run_group", Mock())
    config: Any = SimpleNamespace(
        spec=SimpleNamespace(recovery=RecoverySpec(exchange_timeout_s=99.5)), token=b""
    )
    group: Any = SimpleNamespace(group=0, incarnation=0, actor_name="")
    said = []

    @contextmanager
    def connect(*_: object) -> Iterator[Any]:
        said.append(os.environ[name])
        yield Mock()

    monkeypatch.setattr(group_session, "connect", connect)
    group_session.run_group_worker(config, group, "host")
    assert said == ["100"]
