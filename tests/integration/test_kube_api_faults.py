"""What can be made to go wrong with our API server."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import urllib3
from kubernetes import client, config, watch

from tests.integration.kube.api_server import KubeApiServer
from tests.integration.kube.manifests import ray_job, secret

_JOBS = ("ray.io", "v1", "default", "rayjobs")


def _core(server: KubeApiServer) -> client.CoreV1Api:
    api = server.client()
    api.configuration.retries = False
    return client.CoreV1Api(client.ApiClient(api.configuration))


def test_a_kubeconfig_leads_to_it(api_server: KubeApiServer, tmp_path: Path) -> None:
    path = api_server.kubeconfig(tmp_path / "config")
    api = config.new_client_from_config(path)
    assert client.VersionApi(api).get_code().major == "1"


def test_errors_befall_the_next_requests_that_match(api_server: KubeApiServer) -> None:
    core = _core(api_server)
    api_server.faults.fail(503, verb="list", path="/secrets")
    core.list_namespaced_config_map("default")
    with pytest.raises(client.ApiException) as error:
        core.list_namespaced_secret("default")
    assert error.value.status == 503
    core.list_namespaced_secret("default")


def test_too_many_requests_say_when_to_come_back(api_server: KubeApiServer) -> None:
    core = _core(api_server)
    api_server.faults.fail(429, retry_after_s=7)
    with pytest.raises(client.ApiException) as error:
        core.list_namespaced_secret("default")
    assert (error.value.status, error.value.headers["Retry-After"]) == (429, "7")


def test_a_lost_answer_leaves_the_write_done(api_server: KubeApiServer) -> None:
    core = _core(api_server)
    api_server.faults.lose_answer(verb="create")
    with pytest.raises(urllib3.exceptions.HTTPError):
        core.create_namespaced_secret("default", secret("s"))
    assert core.read_namespaced_secret("s", "default").metadata.name == "s"


def test_a_server_that_is_away_refuses_connections_and_comes_back_with_its_state(
    api_server: KubeApiServer,
) -> None:
    core = _core(api_server)
    core.create_namespaced_secret("default", secret("s"))
    api_server.faults.away()
    with pytest.raises(urllib3.exceptions.HTTPError):
        core.read_namespaced_secret("s", "default")
    api_server.faults.back()
    assert core.read_namespaced_secret("s", "default").metadata.name == "s"


def test_slow_answers_run_into_the_time_out_of_the_client(api_server: KubeApiServer) -> None:
    core = _core(api_server)
    api_server.faults.slow(0.5, verb="list")
    with pytest.raises(urllib3.exceptions.HTTPError):
        core.list_namespaced_secret("default", _request_timeout=0.1)


def test_a_watch_breaks_mid_stream(api_server: KubeApiServer) -> None:
    core = _core(api_server)
    answer = core.list_namespaced_secret("default", watch=True, _preload_content=False)
    core.create_namespaced_secret("default", secret("s"))
    chunks = answer.stream()
    assert b'"ADDED"' in next(chunks)
    threading.Timer(0.1, api_server.faults.drop_watches).start()
    with pytest.raises(urllib3.exceptions.ProtocolError):
        list(chunks)


def test_a_compacted_version_is_gone_for_watches_and_pages(api_server: KubeApiServer) -> None:
    core = _core(api_server)
    custom = client.CustomObjectsApi(api_server.client())
    old = custom.create_namespaced_custom_object(*_JOBS, ray_job("a"))
    custom.create_namespaced_custom_object(*_JOBS, ray_job("b"))
    page = custom.list_namespaced_custom_object(*_JOBS, limit=1)
    core.create_namespaced_secret("default", secret("s"))
    api_server.compact()
    events = watch.Watch().stream(
        custom.list_namespaced_custom_object,
        *_JOBS,
        resource_version=old["metadata"]["resourceVersion"],
        timeout_seconds=1,
    )
    with pytest.raises(client.ApiException) as gone:
        list(events)
    assert gone.value.status == 410
    assert "too old resource version" in gone.value.reason
    with pytest.raises(client.ApiException) as stale:
        custom.list_namespaced_custom_object(
            *_JOBS, limit=1, _continue=page["metadata"]["continue"]
        )
    assert stale.value.status == 410


def test_bookmarks_tell_versions_of_what_a_watch_does_not_show() -> None:
    with KubeApiServer(crds=None, bookmark_every_s=0.1) as server:
        core = _core(server)
        core.create_namespaced_config_map("default", {"metadata": {"name": "c"}, "data": {}})
        events: Any = watch.Watch().stream(
            core.list_namespaced_secret,
            "default",
            resource_version="1",
            allow_watch_bookmarks=True,
            timeout_seconds=1,
        )
        bookmark = next(event for event in events if event["type"] == "BOOKMARK")
        assert bookmark["raw_object"]["metadata"]["resourceVersion"] == str(server.store.revision)


def test_a_definition_can_be_taken_away_with_all_its_objects(api_server: KubeApiServer) -> None:
    custom = client.CustomObjectsApi(api_server.client())
    custom.create_namespaced_custom_object(*_JOBS, ray_job("a"))
    api_server.remove_definition("rayjobs.ray.io")
    with pytest.raises(client.ApiException) as error:
        custom.get_namespaced_custom_object(*_JOBS, "a")
    assert (error.value.status, error.value.body) == (404, "404 page not found\n")


def test_a_revoked_token_is_a_stranger(api_server: KubeApiServer) -> None:
    rule = {"apiGroups": [""], "resources": ["secrets"], "verbs": ["list"]}
    token = api_server.token_for("reader", [rule])
    core = client.CoreV1Api(api_server.client(token))
    core.list_namespaced_secret("default")
    api_server.revoke(token)
    with pytest.raises(client.ApiException) as error:
        core.list_namespaced_secret("default")
    assert error.value.status == 401


def test_writers_that_race_lose_no_update(api_server: KubeApiServer) -> None:
    core = _core(api_server)
    core.create_namespaced_config_map("default", {"metadata": {"name": "c"}, "data": {"n": "0"}})
    conflicts: list[int] = []

    def count_up() -> None:
        for _ in range(10):
            while True:
                found = core.read_namespaced_config_map("c", "default")
                found.data["n"] = str(int(found.data["n"]) + 1)
                try:
                    core.replace_namespaced_config_map("c", "default", found)
                    break
                except client.ApiException as error:
                    conflicts.append(error.status)
                    time.sleep(0.001)

    writers = [threading.Thread(target=count_up) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert core.read_namespaced_config_map("c", "default").data["n"] == "40"
    assert set(conflicts) <= {409}
