"""The server around the app, and what the health check of the image asks it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from service import app
from service.app import MAX_SOCKET_MESSAGE_BYTES, bind, server_config
from service.backends.base import ClusterWatch
from service.backends.fake import FakeBackend
from service.errors import BackendUnreachable
from service.healthcheck import health_url, main
from service.settings import Settings
from tests.harness.wait import free_port, scaled, wait_for


def test_it_asks_where_the_service_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, port, url in (
        ("127.0.0.1", "8700", "http://127.0.0.1:8700"),
        ("0.0.0.0", "9000", "http://127.0.0.1:9000"),
        ("::", "8700", "http://[::1]:8700"),
        ("ray-head", "8700", "http://ray-head:8700"),
        ("fd00::2", "8700", "http://[fd00::2]:8700"),
    ):
        monkeypatch.setenv("SHARDLOOM_HOST", host)
        monkeypatch.setenv("SHARDLOOM_PORT", port)
        assert (health_url(), Settings().service_url) == (f"{url}/healthz", url)
    monkeypatch.setenv("SHARDLOOM_SSL_CERTFILE", "/c.pem")
    assert health_url() == "https://[fd00::2]:8700/healthz"


def test_a_certificate_that_drivers_may_not_trust_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for ca_file in (tmp_path / "ca.pem", None):
        assert "SHARDLOOM_DRIVER_CA_FILE" not in caplog.text
        certificate = tmp_path / "cert.pem"
        settings = Settings(home=tmp_path, ssl_certfile=certificate, driver_ca_file=ca_file)
        app._tell_local_token(settings, None)
    assert "SHARDLOOM_DRIVER_CA_FILE is not set" in caplog.text


def test_nobody_there_is_unhealthy_with_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLOOM_PORT", str(free_port()))
    assert main() == 1
    assert "/healthz does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"DATABASE_URL": "postgresql://u:hunter2@127.0.0.1:{port}/d?connect_timeout=5"},
            ("cannot open the database", "127.0.0.1:{port}", "SHARDLOOM_DATABASE_URL"),
        ),
        (
            {"RUNS_DIR": "{folder}/file/runs"},
            ("run storage cannot be written", "{folder}/file", "storage.setOwner"),
        ),
        (
            {"BACKEND": "kuberay", "KUBECONFIG": "{folder}/none"},
            ("no access to Kubernetes", "{folder}/none", "SHARDLOOM_KUBECONFIG"),
        ),
    ],
)
def test_what_cannot_be_reached_at_the_start_is_the_last_line_of_the_log(
    variables: dict[str, str],
    said: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Kubernetes makes it the termination message of the pod."""
    (tmp_path / "file").write_text("no folder")
    known = {"port": str(free_port()), "folder": str(tmp_path)}
    settings = {"HOME": str(tmp_path / "home"), "PORT": str(free_port()), **variables}
    for name, value in settings.items():
        monkeypatch.setenv(f"SHARDLOOM_{name}", value.format(**known))
    monkeypatch.setattr(app.logging_setup, "configure", lambda _: None)
    assert app.main() == 1
    last = caplog.records[-1].getMessage()
    assert last.startswith("the service cannot start: ")
    assert [part for part in said if part.format(**known) not in last] == [], last
    assert "hunter2" not in last


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BACKEND", "x"),
        ("ALLOWED_HOSTS", "shardloom.example"),
        ("ALLOWED_HOSTS[0]", "[1]"),
        ("OIDC_ROLES[ml][*]", '{"ml": {"*": "boss"}}'),
        ("CHECKPOINT_ROOT", "gcs://bucket/checkpoints"),
        ("RUNS_DIR", "s3://bucket/runs"),
    ],
)
def test_of_wrong_settings_only_those_that_were_given_are_told(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app.logging_setup, "configure", lambda _: None)
    monkeypatch.setenv(f"SHARDLOOM_{name.partition('[')[0]}", value)
    assert app.main() == 2
    (told,) = caplog.messages
    assert told.startswith(f"SHARDLOOM_{name}: ")


def test_a_cluster_that_hangs_keeps_no_probe_waiting(tmp_path: Path) -> None:
    released = threading.Event()

    class Hanging(FakeBackend):
        def check(self) -> str:
            released.wait()
            raise BackendUnreachable("no answer")

    watch = ClusterWatch(Hanging(tmp_path), every_s=0)
    assert watch.latest(wait_s=0.01) == (None, "it has not answered yet")
    num_threads = threading.active_count()
    assert watch.latest(wait_s=0.01) == (None, "it has not answered yet")
    assert threading.active_count() == num_threads, "it is asked once at a time"
    released.set()
    wait_for(lambda: watch.latest() == (False, "no answer"), "the answer")


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


def test_connections_on_which_no_request_comes_are_closed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_HEAD_TIMEOUT_S", scaled(0.3))
    asyncio.run(asyncio.wait_for(_keep_silent(Settings(home=tmp_path)), scaled(30)))


async def _keep_silent(settings: Settings) -> None:
    port, are_closed = free_port(), asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await _echo(scope, receive, send)
            return
        if scope["method"] == "GET":
            await are_closed.wait()
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body"})

    async def end_of(begun: bytes, then: bytes = b"") -> bytes:
        """What is answered until the connection ends; `then` is sent after a first answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)
        answered = await reader.readuntil(b"0\r\n\r\n") if then else b""
        writer.write(then)
        answered += await reader.read()
        writer.close()
        return answered

    with bind("127.0.0.1", port) as listener:
        server = uvicorn.Server(server_config(answer, settings))
        serving = asyncio.create_task(server.serve([listener]))
        slow = asyncio.create_task(end_of(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"G"))
        async with connect(f"ws://127.0.0.1:{port}") as socket:
            assert await end_of(b"") == b""
            assert await end_of(b"GET / HTTP/1.1\r\nHost: ") == b""
            odd = b"Upgrade: websocket\r\nConnection: upgrade\r\nContent-Length: 9\r\n\r\n"
            assert await end_of(b"GET / HTTP/1.1\r\nHost: a\r\n" + odd) == b""
            upload = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n"
            assert (await end_of(upload, b"x")).startswith(b"HTTP/1.1 401")
            are_closed.set()
            assert (await slow).startswith(b"HTTP/1.1 401"), "it was at work all the time"
            await socket.send("ping")
            assert await socket.recv() == "ping"
        server.should_exit = True
        await serving


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "websocket":
        return
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": message["text"]})
