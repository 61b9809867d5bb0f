"""What the Ray backend makes of the answers of Ray's Jobs API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import pytest

from service.backends.base import Submission
from service.backends.ray_jobs import RayJobsBackend
from service.domain.models import EndReason, ObservedState
from service.errors import BackendUnreachable, SubmissionRefused
from tests.harness.builders import spec
from trainer.layout.hosts import HostFacts

Handler = Callable[[httpx.Request], httpx.Response]
SUBMISSION = Submission(
    "job-1-a0", "job-1", spec(), "python -m trainer.driver", {"A": "b"}, {"k": "v"}
)


def _backend(handler: Handler, **options: str) -> RayJobsBackend:
    return RayJobsBackend(
        "http://ray:8265/", transport=httpx.MockTransport(handler), timeout_s=1.0, **options
    )


def _answers(status: int, *, text: str = "", body: object = None) -> Handler:
    if body is not None:
        return lambda request: httpx.Response(status, json=body)
    return lambda request: httpx.Response(status, text=text)


def _fails(error: type[httpx.TransportError]) -> Handler:
    def handler(request: httpx.Request) -> httpx.Response:
        raise error("no luck", request=request)

    return handler


def test_a_submission_carries_id_entrypoint_environment_and_token() -> None:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"submission_id": "job-1-a0"})

    _backend(handler, auth_token="secret").submit(SUBMISSION)
    (request,) = seen
    assert str(request.url) == "http://ray:8265/api/jobs/"
    assert request.headers["Authorization"] == "Bearer secret"
    assert json.loads(request.content) == {
        "submission_id": "job-1-a0",
        "entrypoint": "python -m trainer.driver",
        "runtime_env": {"env_vars": {"A": "b"}},
        "metadata": {"k": "v"},
    }


def test_a_repeated_submission_is_accepted() -> None:
    text = "Traceback...\nValueError: Job with submission_id job-1-a0 already exists. Use another."
    for status in (500, 400):
        _backend(_answers(status, text=text)).submit(SUBMISSION)


def test_a_refusal_shows_the_last_line_of_rays_answer() -> None:
    with pytest.raises(SubmissionRefused, match="ValueError: bad runtime_env"):
        _backend(_answers(400, text="Traceback\nValueError: bad runtime_env")).submit(SUBMISSION)


def test_an_answer_that_refuses_nothing_is_unreachable() -> None:
    # A 200 is the page of a proxy that wants to know who asks.
    for status in (200, 302, 401, 404, 405, 407, 408, 425, 429, 500, 503):
        with pytest.raises(BackendUnreachable):
            _backend(_answers(status, text="try later")).submit(SUBMISSION)


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ReadTimeout, httpx.ReadError])
def test_no_answer_is_unreachable_everywhere(error: type[httpx.TransportError]) -> None:
    backend = _backend(_fails(error))
    with pytest.raises(BackendUnreachable, match="SHARDLOOM_RAY_ADDRESS"):
        backend.submit(SUBMISSION)
    with pytest.raises(BackendUnreachable):
        backend.stop("job-1-a0")
    with pytest.raises(BackendUnreachable):
        backend.check()
    assert backend.observe("job-1-a0").state is ObservedState.UNREACHABLE


def test_every_status_of_ray_is_known() -> None:
    verdict = "Job entrypoint command failed with exit code 3"
    for status in ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"):
        body = {"status": status, "message": verdict}
        seen = _backend(_answers(200, body=body)).observe("job-1-a0")
        assert (seen.state, seen.message) == (ObservedState[status], verdict)
    body["message"] = f"{verdict}\nOOM kill reason: 95.0%\nEviction Stats:\n(global lru) used: 0%"
    assert _backend(_answers(200, body=body)).observe("job-1-a0").message == verdict


def test_an_unknown_job_is_not_found() -> None:
    answer = _answers(404, text="Job job-1-a0 does not exist")
    assert _backend(answer).observe("job-1-a0").state is ObservedState.NOT_FOUND
    _backend(answer).stop("job-1-a0")
    _backend(answer).forget("job-1-a0")


def test_nothing_is_concluded_from_a_strange_answer() -> None:
    for answer in (
        _answers(404, text="404: Not Found"),
        _answers(404, text="The page that you look for does not exist."),
        _answers(500, text="oops"),
        _answers(200, text="<html>"),
        _answers(200, text="[" * 100_000),
        lambda request: httpx.Response(
            200, headers={"Content-Encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip")
        ),
        _answers(200, body=["status"]),
        _answers(200, body={"status": "DANCING"}),
    ):
        assert _backend(answer).observe("job-1-a0").state is ObservedState.UNREACHABLE
    seen = _backend(_answers(401, text="no")).observe("job-1-a0")
    assert seen.state is ObservedState.UNREACHABLE
    assert "SHARDLOOM_RAY_AUTH_TOKEN" in seen.message


def test_a_failure_ends_with_the_end_of_the_log_and_no_log_is_asked_for() -> None:
    seen: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.path)
        title = "last available logs (truncated to 20,000 chars):"
        log = "x" * 19_980 + "\nMemoryError\n"
        return httpx.Response(200, json={"status": "FAILED", "message": f"exit 3, {title}\n{log}"})

    message = _backend(answer).observe("job-1-a0").message
    assert message.startswith("exit 3\nxxx")
    assert message.endswith("xxx\nMemoryError")
    assert len(message) == len("exit 3\n") + 2000
    assert seen == ["/api/jobs/job-1-a0"]


def test_a_driver_that_went_with_its_host_was_lost_and_one_that_failed_alone_was_not() -> None:
    died = "Job supervisor actor died: The actor died unexpectedly before finishing this task.\n"
    on_a_dead_node = f"{died}The actor died because its node has died. Node Id: 1"
    of_memory = f"{died}The actor is dead because its worker process has died. OOM"
    log = f"exit 1, last available logs (truncated to 20,000 chars):\n{on_a_dead_node}"
    gone = "Unexpected error occurred: failed to get job supervisor."
    for error_type, message, reason in (
        ("JOB_SUPERVISOR_ACTOR_START_FAILURE", gone, EndReason.HOST_LOST),
        ("JOB_SUPERVISOR_ACTOR_DIED", on_a_dead_node, EndReason.HOST_LOST),
        # Its doing, maybe: it pays for the next attempt.
        ("JOB_SUPERVISOR_ACTOR_DIED", of_memory, None),
        ("JOB_ENTRYPOINT_COMMAND_ERROR", log, None),
        (None, on_a_dead_node, None),
    ):
        body = {"status": "FAILED", "message": message, "error_type": error_type}
        seen = _backend(_answers(200, body=body)).observe("job-1-a0")
        assert (seen.state, seen.reason) == (ObservedState.FAILED, reason)
        assert message.partition(",")[0] in seen.message


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_job_that_ray_calls_running_on_a_dead_node_has_ended(is_listed: bool) -> None:
    """Seen of Ray 2.60 where a head is made again with the state of the one before it."""
    nodes = [{**_node("10.0.0.1", state), "node_id": state} for state in ("ALIVE", "DEAD")]
    names, asked = ["ALIVE", "DEAD", "UNKNOWN"], list[str]()
    jobs = {
        name: {"submission_id": name, "status": "RUNNING", "driver_node_id": name} for name in names
    }

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/api/v0/nodes":
            return httpx.Response(200, json={"data": {"result": {"result": nodes}}})
        name = request.url.path.removeprefix("/api/jobs/")
        return httpx.Response(200, json=jobs[name] if name else [*jobs.values()])

    backend = _backend(answer)
    seen = backend.observe_all(names) if is_listed else {n: backend.observe(n) for n in names}
    assert seen["DEAD"].state is ObservedState.FAILED
    assert seen["DEAD"].reason is EndReason.HOST_LOST
    assert {seen[each].state for each in ("ALIVE", "UNKNOWN")} == {ObservedState.RUNNING}
    assert asked.count("/api/v0/nodes") == 1, "not each time"


def _node(address: str, state: str = "ALIVE", **resources: float) -> dict[str, object]:
    return {"node_ip": address, "state": state, "resources_total": resources}


@pytest.mark.parametrize("num_alive", [0, 3])
def test_live_nodes_of_an_address_are_one_host_and_none_an_empty_cluster(num_alive: int) -> None:
    alive = [
        _node("10.0.0.1", CPU=4.0, memory=1000.0, object_store_memory=5.0),
        _node("10.0.0.2", CPU=8.0, GPU=2.0, memory=2000.0),
        _node("10.0.0.1", CPU=2.0, memory=500.0),
    ]
    nodes = [*alive[:num_alive], _node("10.0.0.3", state="DEAD", CPU=8.0)]
    body = {"result": True, "data": {"result": {"total": 4, "result": nodes}}}
    hosts = HostFacts("10.0.0.1", 6.0, 0.0, 1500), HostFacts("10.0.0.2", 8.0, 2.0, 2000)
    assert _backend(_answers(200, body=body)).hosts() == (hosts if num_alive else ())
    assert _backend(_answers(200, body={"ray_version": "2.60.0"})).check() == "Ray 2.60.0"


def test_an_answer_that_tells_no_hosts_is_no_cluster_without_hosts() -> None:
    node = {"node_ip": "10.0.0.1", "state": "ALIVE", "resources_total": "many"}
    strange = {"data": {"result": {"result": [node]}}}
    for handler in (
        _fails(httpx.ConnectError),
        _answers(404, text="no such page"),
        *(_answers(200, body=body) for body in ({}, {"data": {"result": None}}, strange)),
        *(_answers(status, text="GCS is away") for status in (302, 401, 429, 500, 503)),
    ):
        with pytest.raises(BackendUnreachable):
            _backend(handler).hosts()


def test_one_request_tells_of_many_attempts_and_leaves_out_what_is_unclear() -> None:
    infos = [
        {"submission_id": "a", "status": "RUNNING", "message": "m"},
        {"submission_id": "b", "status": "SUCCEEDED"},
        {"submission_id": "c", "status": "no status of Ray's"},
        {"submission_id": "other", "status": "FAILED"},
        {"submission_id": None, "status": "RUNNING"},
        {"submission_id": ["a"], "status": "FAILED"},
    ]
    seen = _backend(_answers(200, body=infos)).observe_all(["a", "b", "c", "gone"])
    assert {name: found.state for name, found in seen.items()} == {
        "a": ObservedState.RUNNING,
        "b": ObservedState.SUCCEEDED,
    }
    assert _backend(_answers(200, body={"detail": "a proxy"})).observe_all(["a"]) == {}
    away = _backend(_fails(httpx.ReadTimeout)).observe_all(["a", "b"])
    assert {found.state for found in away.values()} == {ObservedState.UNREACHABLE}


def test_where_the_list_takes_too_long_each_attempt_is_asked_for_alone() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/api/jobs/":
            raise httpx.ReadTimeout("it lists all that it ever ran", request=request)
        return httpx.Response(200, json={"ray_version": "2.60.0"})

    assert _backend(answer).observe_all(["a", "b"]) == {}


def test_an_attempt_is_forgotten_that_ray_says_has_ended() -> None:
    asked: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, request.url.path))
        return httpx.Response(200, json={"deleted": True})

    _backend(answer).forget("job-1-a0")
    assert asked == [("DELETE", "/api/jobs/job-1-a0")]
    refusal = "RuntimeError: Attempted to delete it in a non-terminal state RUNNING."
    running = _answers(500, text=f"Traceback:\n{refusal}\n.\n")
    with pytest.raises(BackendUnreachable, match="non-terminal"):
        _backend(running).forget("job-1-a0")


def test_an_answer_without_end_is_none() -> None:
    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            while True:
                yield b" " * (1 << 22)

    backend = _backend(lambda request: httpx.Response(200, stream=Endless()))
    assert backend.observe("job-1-a0").state is ObservedState.UNREACHABLE
    with pytest.raises(BackendUnreachable, match="no end"):
        backend.hosts()
