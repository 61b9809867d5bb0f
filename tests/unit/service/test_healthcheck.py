"""What the health check of the image asks, by the settings of its service."""

from __future__ import annotations

import pytest

from service.healthcheck import health_url, main
from tests.integration.ports import free_port


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:8700/healthz"),
        ({"HOST": "0.0.0.0", "PORT": "9000"}, "http://127.0.0.1:9000/healthz"),
        ({"HOST": "::"}, "http://[::1]:8700/healthz"),
        ({"HOST": "fd00::2"}, "http://[fd00::2]:8700/healthz"),
        ({"HOST": "127.0.0.2", "SSL_CERTFILE": "/c.pem"}, "https://127.0.0.2:8700/healthz"),
    ],
)
def test_it_asks_where_the_service_listens(
    settings: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOST", "PORT", "SSL_CERTFILE"):
        monkeypatch.delenv(f"SHARDLOOM_{name}", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(f"SHARDLOOM_{name}", value)
    assert health_url() == url


def test_nobody_there_is_unhealthy_with_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDLOOM_PORT", str(free_port()))
    assert main() == 1
    assert "/healthz does not answer" in capsys.readouterr().err
