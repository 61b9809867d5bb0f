"""The store in which ranks of a generation meet."""

from __future__ import annotations

import errno
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from itertools import chain
from typing import Any
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from tests.harness.wait import scaled, wait_for
from trainer.coordination.authentication import NotAuthenticated
from trainer.coordination.client import Identity
from trainer.elastic import rendezvous
from trainer.elastic.peer_copy import DonorServer
from trainer.elastic.rendezvous import RendezvousStore

TOKEN = secrets.token_bytes(32)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[DonorServer]:
    host = getattr(request, "param", "127.0.0.1")
    with closing(DonorServer(Identity(0, 0, 0, 1, host), [], TOKEN)) as opened:
        yield opened


def enter(
    server: DonorServer,
    generation: int = 1,
    token: bytes = TOKEN,
    is_given_up=lambda: False,
    connect_s: float = 20.0,
) -> RendezvousStore:
    limits = {"connect_s": scaled(connect_s), "wait_s": scaled(20)}
    return RendezvousStore(server.address, generation, token, is_given_up, **limits)


@pytest.mark.parametrize("server", ["127.0.0.1", "::1"], indirect=True)
def test_ranks_of_a_generation_read_what_each_has_written_before_and_after_they_came(
    server: DonorServer,
) -> None:
    first = enter(server)
    first.set("early", b"\xff\x00")
    second = enter(server)
    assert second.get("early") == b"\xff\x00"
    assert not second.check(["late"])
    second.set("late", "text")
    first.wait(["early", "late"])
    assert first.multi_get(["late", "early"]) == [b"text", b"\xff\x00"]


def test_a_generation_is_forgotten_once_the_next_but_one_begins(server: DonorServer) -> None:
    stores = [enter(server, generation=1)]
    stores[0].set("key", "value")
    for generation in (2, 3):
        assert enter(server, generation=1).get("key") == b"value"
        stores.append(enter(server, generation=generation))
        stores[-1].set("key", "newer")
        assert stores[-1].get("key") == b"newer"
    with pytest.raises(dist.DistStoreError, match="is gone"):
        stores[0].get("another")
    late = enter(server, generation=1)
    with pytest.raises(dist.DistStoreError, match="no rank wrote key"):
        late.wait(["key"], timedelta(seconds=0.1))


def test_who_lacks_the_token_is_refused_at_once(server: DonorServer) -> None:
    with pytest.raises(NotAuthenticated, match="refused this rank's token"):
        enter(server, token=bytes(32))


def test_what_a_peer_says_that_is_no_request_ends_its_connection_alone(
    server: DonorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("trainer.elastic.rendezvous.line_of", lambda _: b"no request\n")
        unknown = enter(server)
        with pytest.raises(dist.DistStoreError, match="is gone"):
            unknown.get("key")
    enter(server).set("key", "value")
    assert enter(server).get("key") == b"value"


def test_who_waits_for_nothing_hears_that_the_store_is_gone_or_that_it_should_give_up(
    server: DonorServer,
) -> None:
    has_given_up = threading.Event()
    told, left = enter(server, is_given_up=has_given_up.is_set), enter(server)
    has_given_up.set()
    with pytest.raises(dist.DistStoreError, match="give up"):
        told.get("key")
    server.close()
    with pytest.raises(dist.DistStoreError, match="is gone"):
        left.get("key")
    with pytest.raises(ConnectionRefusedError):
        enter(server, connect_s=0.1)
    with pytest.raises(ConnectionRefusedError):
        enter(server, is_given_up=lambda: True)


def test_a_busy_server_that_closes_a_connection_unproven_is_tried_again(
    server: DonorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(server).set("key", "value")
    prove, tries = rendezvous.authenticate, []

    def authenticate(connection: socket.socket, *args: Any) -> None:
        tries.append(connection)
        if len(tries) < 3:
            raise ConnectionError("closed before it was proven")
        prove(connection, *args)

    monkeypatch.setattr(rendezvous, "authenticate", authenticate)
    assert enter(server).get("key") == b"value"
    assert [each.fileno() for each in tries[:2]] == [-1, -1], "they are closed"


def test_a_server_that_has_no_file_left_for_a_connection_goes_on_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Mock(wraps=socket.create_server(("127.0.0.1", 0)))
    listener.accept.side_effect = chain(
        [OSError(errno.EMFILE, "Too many open files")], iter(listener._mock_wraps.accept, None)
    )
    monkeypatch.setattr(socket, "create_server", lambda *_, **__: listener)
    with closing(DonorServer(Identity(0, 0, 0, 1, "127.0.0.1"), [], TOKEN)) as server:
        enter(server).set("key", "value")
        assert enter(server).get("key") == b"value"
    assert "the donor could not accept a connection" in caplog.text


def test_a_rank_that_hangs_up_leaves_no_thread_behind(server: DonorServer) -> None:
    before = set(threading.enumerate())
    store = enter(server)
    store.set("key", "value")
    store.get("key")
    serving = set(threading.enumerate()) - before
    assert [each.name for each in serving if each.is_alive()].count("rendezvous") == 1
    store.close()
    wait_for(lambda: not any(each.is_alive() for each in serving), "its threads end")


def test_what_has_come_is_not_waited_for(
    server: DonorServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = enter(server)
    store.set("key", "value")
    store.wait(["key"])
    monkeypatch.setattr(rendezvous, "_POLL_S", 1e6)
    assert store.get("key") == b"value"
