"""The store in which ranks of a generation meet."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.harness.wait import free_port, scaled, wait_for
from trainer.coordination.authentication import NotAuthenticated
from trainer.coordination.client import Identity
from trainer.elastic.peer_copy import DonorServer
from trainer.elastic.rendezvous import RendezvousStore

TOKEN = secrets.token_bytes(32)


@pytest.fixture
def server() -> Iterator[DonorServer]:
    with closing(DonorServer(Identity(0, 0, 0, 1, "127.0.0.1"), [], TOKEN)) as opened:
        yield opened


def enter(
    server: DonorServer, generation: int = 1, token: bytes = TOKEN, is_given_up=lambda: False
) -> RendezvousStore:
    return RendezvousStore(server.address, generation, token, scaled(20), is_given_up)


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


def test_a_generation_that_is_over_is_forgotten(server: DonorServer) -> None:
    enter(server, generation=1).set("key", "value")
    enter(server, generation=2).set("key", "newer")
    assert enter(server, generation=2).get("key") == b"newer"
    late = enter(server, generation=1)
    with pytest.raises(dist.DistStoreError, match="no rank wrote key"):
        late.wait(["key"], timedelta(seconds=0.1))


def test_who_lacks_the_token_neither_reads_nor_writes(server: DonorServer) -> None:
    enter(server).set("address", "secret")
    with pytest.raises(NotAuthenticated, match="refused this rank's token"):
        enter(server, token=bytes(32))
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b'{"generation":1}\n' * 64)
        stranger.settimeout(scaled(20))
        received = b""
        with suppress(ConnectionResetError):
            while data := stranger.recv(1 << 16):
                received += data
    assert b"secret" not in received and len(received) <= 64, "a nonce and a refusal"


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
    with pytest.raises(OSError):
        RendezvousStore(f"127.0.0.1:{free_port()}", 1, TOKEN, scaled(20), lambda: False)


def test_a_rank_that_hangs_up_leaves_no_thread_behind(server: DonorServer) -> None:
    def num_serving() -> int:
        return sum(each.name in ("donor", "rendezvous") for each in threading.enumerate())

    before = num_serving()
    store = enter(server)
    store.set("key", "value")
    store.get("key")
    assert num_serving() == before + 2
    store.close()
    wait_for(lambda: num_serving() == before, "its threads end")
