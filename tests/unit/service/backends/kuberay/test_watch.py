"""The copy of our RayJobs ends up as the server is; how Kubernetes is found, and asked again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.client import Configuration
from kubernetes.config import ConfigException

from service.backends.kuberay.client import RAYJOBS, KubeApi, KubeRefused
from service.backends.kuberay.watch import RayJobWatch
from service.errors import BackendUnreachable
from service.settings import Settings
from tests.harness.http_stub import http_stub
from tests.harness.wait import scaled

Step = tuple[str, Any]


class Server:
    """An API server with a history; `troubles` befall the requests to come, one each."""

    def __init__(self, troubles: list[str]) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.history: list[dict[str, Any]] = []
        self.version = 0
        self.oldest = 0
        self.troubles = troubles
        self.num_lists = 0

    def write(self, name: str, value: int | None) -> None:
        """Change an object, or delete it."""
        self.version += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        found = self._object(name, value)
        if value is None:
            if self.objects.pop(name, None) is None:
                return
            kind = "DELETED"
        else:
            self.objects[name] = found
        self.history.append({"type": kind, "object": found})

    def bookmark(self) -> None:
        """Tell those that follow how far they are."""
        self.history.append({"type": "BOOKMARK", "object": self._object("", None)})

    def compact(self) -> None:
        """Forget what happened so far."""
        self.oldest = self.version

    def _object(self, name: str, value: int | None) -> dict[str, Any]:
        about = {"name": name, "resourceVersion": str(self.version)}
        return {"metadata": about, "value": value}

    def list(self, *_args: Any, **_query: str) -> dict[str, Any]:
        self.num_lists += 1
        if self._trouble() == "away":
            raise BackendUnreachable("nobody is there")
        items = list(self.objects.values())
        return {"metadata": {"resourceVersion": str(self.version)}, "items": items}

    @contextmanager
    def watch(
        self, _resource: object, version: str, *_args: Any
    ) -> Iterator[Iterator[dict[str, Any]]]:
        trouble = self._trouble()
        if trouble == "away":
            raise BackendUnreachable("nobody is there")
        if trouble == "forbidden":
            raise KubeRefused(403, "Forbidden", "no")
        if trouble == "error":
            yield iter([{"type": "ERROR", "object": {"code": 500, "message": "etcd is away"}}])
            return
        if int(version) < self.oldest:
            if trouble == "gone_at_once":
                raise KubeRefused(410, "Expired", "too old")
            yield iter([{"type": "ERROR", "object": {"code": 410, "message": "too old"}}])
            return
        yield self._stream(int(version), cut=trouble == "cut")

    def _stream(self, version: int, *, cut: bool) -> Iterator[dict[str, Any]]:
        news = [
            event
            for event in self.history
            if int(event["object"]["metadata"]["resourceVersion"]) > version
        ]
        if cut:
            yield from news[: len(news) // 2]
            raise BackendUnreachable("the stream broke")
        yield from news

    def _trouble(self) -> str:
        return self.troubles.pop(0) if self.troubles else ""


def _values(objects: list[dict[str, Any]]) -> dict[str, int]:
    return {each["metadata"]["name"]: each["value"] for each in objects}


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.tuples(st.sampled_from("abc"), st.none() | st.integers())),
        st.tuples(st.just("follow"), st.none()),
        st.tuples(st.just("compact"), st.none()),
        st.tuples(st.just("bookmark"), st.none()),
    ),
    max_size=40,
)
_TROUBLES = ["", "away", "cut", "error", "forbidden", "gone_at_once"]
_troubles = st.lists(st.sampled_from(_TROUBLES), max_size=12)


@given(_steps, _troubles)
def test_whatever_befalls_the_streams_the_copy_ends_up_as_the_server_is(
    steps: list[Step], troubles: list[str]
) -> None:
    server = Server(troubles)
    watch = RayJobWatch(server)
    for kind, value in steps:
        if kind == "write":
            server.write(*value)
        elif kind == "follow":
            watch.follow()
        elif kind == "compact":
            server.compact()
        else:
            server.bookmark()
    # Each of the troubles that are left takes one try, and an expired version two more.
    for _ in range(len(server.troubles) + 3):
        watch.follow()
    assert watch.is_live
    assert _values(watch.all()) == _values(list(server.objects.values()))
    for name in "abc":
        assert (watch.find(name) is None) == (name not in server.objects)


def test_after_a_broken_stream_a_list_comes_first() -> None:
    server = Server([])
    watch = RayJobWatch(server)
    server.write("a", 1)
    assert watch.follow()
    server.write("b", 2)
    server.write("c", 3)
    server.troubles = ["cut"]
    assert not watch.follow()
    assert watch.find("b") is None, "while nothing is heard, nothing is known"
    assert watch.follow()
    assert watch.find("c") and server.num_lists == 2


def test_those_who_tidy_up_see_all_objects_at_each_turn() -> None:
    server, seen = Server([]), []
    server.write("a", 1)
    watch = RayJobWatch(server, on_turn=lambda objects: seen.append(_values(objects)))
    watch.follow()
    server.write("b", 2)
    watch.follow()
    assert seen == [{"a": 1}, {"a": 1, "b": 2}]


@pytest.mark.parametrize("is_away", [True, False])
def test_pauses_grow_while_the_server_is_away_and_while_streams_end_at_once(is_away: bool) -> None:
    server = Server(["away"] * 4 if is_away else [])
    pauses: list[float] = []

    def _pause(seconds: float) -> None:
        pauses.append(seconds)
        server.write("a", len(pauses))
        # Every other version is too old by the time it is asked for.
        if len(pauses) % 2:
            server.compact()
        if len(pauses) == 4:
            watch.close()

    watch = RayJobWatch(server, pause=_pause)
    watch.start()
    watch._thread.join(timeout=scaled(10))
    assert pauses == [0.5, 1.0, 2.0, 4.0]


# ---- access


def test_an_empty_kubeconfig_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", "")
    assert Settings(home=tmp_path).kubeconfig is None
    monkeypatch.setenv("KUBECONFIG", "/here/a:/here/b")
    assert str(Settings(home=tmp_path).kubeconfig) == "/here/a:/here/b"


def test_a_kubeconfig_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config"
    context = b"{name: a, context: {cluster: a, user: a}}"
    authority = b"{name: a, cluster: {server: https://a, certificate-authority-data: abcde}}"
    no_base64 = (
        b"{current-context: a, contexts: [%b], clusters: [%b], users: [{name: a, user: {}}]}"
        % (context, authority)
    )
    no_context = b"{current-context: a, contexts: [{name: a, context: a}]}"
    for text in (b"a: [", b"nonsense", b"{}", b"# \xfc\n", no_base64, no_context):
        path.write_bytes(text)
        with pytest.raises(BackendUnreachable, match=r"no access to Kubernetes by .*config"):
            KubeApi.open(path, "shardloom", 1.0)


def test_a_token_that_cannot_be_read_anew_now_is_no_answer() -> None:
    def refresh(_: Configuration) -> None:
        raise ConfigException("Token file exists but empty.")

    configuration = Configuration(host="http://127.0.0.1:1")
    configuration.api_key["BearerToken"], configuration.refresh_api_key_hook = "old", refresh
    with pytest.raises(BackendUnreachable, match="Token file exists but empty"):
        KubeApi(configuration, "shardloom", 1.0).version()


def test_what_a_proxy_refuses_is_not_refused_by_kubernetes() -> None:
    with http_stub(405) as proxy:
        proxy.body = b"<html>Not Allowed</html>"
        api = KubeApi(Configuration(host=proxy.url), "shardloom", scaled(5.0))
        with pytest.raises(BackendUnreachable, match=r"cannot create rayjobs now \(HTTP 405"):
            api.create(RAYJOBS, {})
