"""Both ends of a connection prove that they have the token of the same attempt."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from tests.harness.wait import scaled
from trainer.coordination.authentication import (
    AuthenticatedServer,
    NotAuthenticated,
    UnprovenConnections,
    authenticate,
    challenge,
    new_token,
)

ADDRESS, OTHER = "10.0.0.1:4000", "10.0.0.1:4001"
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def _meet(pair: Pair, tokens: tuple[bytes, bytes], addresses: tuple[str, str]) -> list[str | None]:
    """What client and server make of each other: None, or the error."""
    parts = zip((authenticate, challenge), pair, tokens, addresses, strict=True)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(function, *each, scaled(10)) for function, *each in parts]
        errors = [end.exception() for end in ends]
    return [None if error is None else str(error) for error in errors]


def test_ends_with_the_same_token_let_each_other_in(pair: Pair) -> None:
    token = new_token()
    assert _meet(pair, (token, token), (ADDRESS, ADDRESS)) == [None, None]


def test_another_token_or_a_proof_meant_for_another_port_is_refused(pair: Pair) -> None:
    token = new_token()
    for tokens, addresses in (
        ((new_token(), token), (ADDRESS, ADDRESS)),
        ((token, token), (OTHER, ADDRESS)),
    ):
        client, server = _meet(pair, tokens, addresses)
        assert f"{addresses[0]} refused this rank's token" in str(client)
        assert server == "wrong token"


def test_a_client_goes_no_further_with_a_server_that_cannot_prove_itself(pair: Pair) -> None:
    client, impostor = pair
    # Its own challenge, and as the proof what the client has just said: of another role.
    impostor.sendall(bytes(32))
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(authenticate, client, new_token(), ADDRESS, scaled(10))
        response = impostor.recv(64, socket.MSG_WAITALL)
        impostor.sendall(response[32:])
        with pytest.raises(NotAuthenticated, match="could not prove that it has this attempt's"):
            end.result()


def test_who_answers_too_slowly_has_no_more_time_for_it(pair: Pair) -> None:
    client, server = pair
    client.sendall(b"x")
    with pytest.raises(NotAuthenticated, match="in time"):
        challenge(server, new_token(), ADDRESS, timeout_s=0.05)


def test_beyond_the_limit_the_oldest_unproven_connection_gives_way() -> None:
    closed: list[int] = []
    unproven = UnprovenConnections("server", 2, closed.append)
    for connection in range(3):
        unproven.add(connection)
    unproven.discard(1)
    unproven.add(3)
    assert closed == [0]


def test_a_server_that_can_have_no_thread_for_a_connection_answers_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = new_token()
    server = AuthenticatedServer("server", "127.0.0.1", token, lambda connection: None)
    host, _, port = server.address.partition(":")
    with monkeypatch.context() as patched:
        none_left = Mock(side_effect=RuntimeError("can't start new thread"))
        patched.setattr(threading.Thread, "start", none_left)
        with socket.create_connection((host, int(port)), scaled(10)) as ended:
            assert ended.recv(1) == b""
    with socket.create_connection((host, int(port)), scaled(10)) as connection:
        authenticate(connection, token, server.address, scaled(10))
    server.close()
