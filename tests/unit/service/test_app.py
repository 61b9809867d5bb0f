"""The server around the app, and what the health check of the image asks it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from service.app import MAX_SOCKET_MESSAGE_BYTES, bind, server_config
from service.healthcheck import health_url, main
from service.settings import Settings
from tests.harness.wait import free_port


def test_it_asks_where_the_service_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, port, url in (
        ("127.0.0.1", "8700", "http://127.0.0.1:8700/healthz"),
        ("0.0.0.0", "9000", "http://127.0.0.1:9000/healthz"),
        ("fd00::2", "8700", "http://[fd00::2]:8700/healthz"),
    ):
        monkeypatch.setenv("SHARDLOOM_HOST", host)
        monkeypatch.setenv("SHARDLOOM_PORT", port)
        assert health_url() == url
    monkeypatch.setenv("SHARDLOOM_SSL_CERTFILE", "/c.pem")
    assert health_url() == "https://[fd00::2]:8700/healthz"


def test_nobody_there_is_unhealthy_with_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLOOM_PORT", str(free_port()))
    assert main() == 1
    assert "/healthz does not answer" in capsys.readouterr().err


def test_a_message_of_a_websocket_that_is_too_large_ends_it(tmp_path: Path) -> None:
    asyncio.run(_talk(Settings(home=tmp_path)))


async def _talk(settings: Settings) -> None:
    port = free_port()
    with bind("127.0.0.1", port) as listener:
        server = uvicorn.Server(server_config(_echo, settings))
        serving = asyncio.create_task(server.serve([listener]))
        async with connect(f"ws://127.0.0.1:{port}", max_size=None) as socket:
            await socket.send("x" * MAX_SOCKET_MESSAGE_BYTES)
            assert len(await socket.recv()) == MAX_SOCKET_MESSAGE_BYTES
            await socket.send("x" * (MAX_SOCKET_MESSAGE_BYTES + 1))
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
        server.should_exit = True
        await serving


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "websocket":
        return
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})
