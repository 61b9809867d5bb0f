"""What the health check of the image asks, by the settings of its service."""

from __future__ import annotations

import pytest

from service.healthcheck import health_url, main
from service.settings import Settings
from tests.harness.wait import free_port


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


def test_nobody_there_is_unhealthy_with_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLOOM_PORT", str(free_port()))
    assert main() == 1
    assert "/healthz does not answer" in capsys.readouterr().err
