"""How the service finds Kubernetes, and what it says where it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.backends.kuberay_api import KubeApi
from service.errors import BackendUnreachable
from service.settings import Settings


def test_an_empty_kubeconfig_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", "")
    assert Settings(home=tmp_path).kubeconfig is None
    monkeypatch.setenv("KUBECONFIG", "/here/a:/here/b")
    assert str(Settings(home=tmp_path).kubeconfig) == "/here/a:/here/b"


@pytest.mark.parametrize("text", ["a: [", "nonsense", "{}"])
def test_a_kubeconfig_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(BackendUnreachable, match=r"no access to Kubernetes by .*config"):
        KubeApi.open(path, "shardloom", 1.0)
