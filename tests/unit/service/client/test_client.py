"""The SDK against scripted answers: retries, errors, paging, streams, resizes and traces."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.views import sweep_detail
from service.client.client import ShardloomClient
from service.client.credentials import write_local_token
from service.client.errors import (
    Conflict,
    ExportFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    NotSignedIn,
    ServerFault,
    ServiceUnreachable,
    TraceLost,
    UnexpectedAnswer,
)
from service.client.transport import DEFAULT_URL, RetryPolicy
from service.domain.models import JobStatus
from service.domain.sweeps import Sweep, SweepStatus
from service.schemas.jobs import ResizeRequestOut, TraceRequested
from tests.harness.builders import NOW, spec_document
from tests.harness.clock import FakeClock
from tests.harness.service import (
    event_body,
    job_body,
    problem_body,
    requested_trace_body,
    trace_body,
)
from trainer.spec import validate_spec
from trainer.spec.base import SpecError


class Script:
    """Answers requests from a list, in turn, and remembers what was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []
        self.clock = FakeClock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, num_retries: int = 4, **options: Any) -> ShardloomClient:
        return ShardloomClient(
            **options,
            transport=httpx.MockTransport(self),
            retry=RetryPolicy(num_retries=num_retries),
            sleep=self.clock.sleep,
            clock=self.clock,
        )


def ok(body: object) -> httpx.Response:
    return httpx.Response(200, json=body)


def sse(*chunks: str) -> httpx.Response:
    return httpx.Response(
        200,
        headers={"content-type": "text/event-stream"},
        content=iter(chunk.encode() for chunk in chunks),
    )


def sse_event(event_id: int) -> str:
    body = httpx.Response(200, json=event_body(event_id)).text
    return f"id: {event_id}\ndata: {body}\n\n"


END = "event: end\ndata: {}\n\n"


def export_body(status: str) -> dict[str, Any]:
    asked = {"id": "x-1", "checkpoint": "newest", "quantize": "int8", "created": NOW}
    return {**asked, "status": status, "message": ""}


def sweep_body(status: SweepStatus) -> dict[str, Any]:
    sweep = Sweep("sweep-1", "ratings", {}, (), "validation/ne", 5, NOW, status=status)
    return sweep_detail(sweep, []).model_dump(mode="json")


def test_a_read_is_repeated_until_somebody_answers():
    refusals = [httpx.Response(status) for status in (408, 503)]
    script = Script(httpx.ConnectError("refused"), *refusals, ok(job_body()))
    assert script.client().get_job("ratings").status is JobStatus.RUNNING
    assert len(script.requests) == 4
    assert script.clock.slept[1] > script.clock.slept[0] * 0.99


def test_a_service_that_was_started_anew_is_shown_its_new_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLOOM_HOME", str(tmp_path))
    write_local_token(tmp_path, DEFAULT_URL, "before")
    refusal = httpx.Response(401, json=problem_body(401, "not_signed_in", "who?"))
    script = Script(ok(job_body()), refusal, ok(job_body()), refusal)
    client = script.client()
    client.get_job("ratings")
    write_local_token(tmp_path, DEFAULT_URL, "now")
    client.get_job("ratings")
    with pytest.raises(NotSignedIn):
        client.get_job("ratings")
    shown = [request.headers["Authorization"] for request in script.requests]
    # The second one is sent again.
    assert shown == [f"Bearer {token}" for token in ("before", "now", "now", "now")]
    script = Script(refusal)
    with pytest.raises(NotSignedIn), script.client(api_key="shl_given") as client:
        client.get_job("ratings")
    elsewhere = Script(ok(job_body()))
    with elsewhere.client(base_url="http://127.0.0.2:8700") as client:
        client.get_job("ratings")
    assert "Authorization" not in elsewhere.requests[0].headers


def test_a_job_whose_spec_newer_checks_refuse_is_still_shown() -> None:
    body = job_body()
    body["spec"]["embedding_tables"][0]["name"] = body["spec"]["features"][0]["table"] = "values"
    with pytest.raises(SpecError):
        validate_spec(body["spec"])
    found = Script(ok(body)).client().get_job("ratings")
    assert found.spec.embedding_tables[0].name == "values"


def test_a_read_gives_up_after_its_retries_and_names_the_url():
    script = Script(*[httpx.ConnectError("refused")] * 3)
    with pytest.raises(ServiceUnreachable, match=r"127\.0\.0\.1:8700 \(refused\)"):
        script.client(num_retries=2).cluster()
    assert len(script.requests) == 3
    distrusted = Script(*[httpx.ConnectError("CERTIFICATE_VERIFY_FAILED: self-signed")] * 2)
    with pytest.raises(ServiceUnreachable, match="not trusted"):
        distrusted.client().cluster()
    assert len(distrusted.requests) == 1


def test_a_submit_is_repeated_with_its_own_idempotency_key():
    lost = httpx.ReadTimeout("too slow")
    under_way = httpx.Response(409, json=problem_body(409, "request_under_way", "ask again"))
    script = Script(lost, under_way, *[httpx.Response(201, json=job_body()) for _ in range(3)])
    with script.client() as client:
        client.submit(spec_document())
        client.submit(spec_document())
        client.submit(spec_document(), idempotency_key="mine")
    first, again, once_more, second, third = (
        request.headers["Idempotency-Key"] for request in script.requests
    )
    assert first == again == once_more != second
    assert third == "mine"


def test_a_change_without_an_answer_says_when_it_may_have_arrived():
    lost, refused = httpx.ReadError("reset"), httpx.ConnectError("refused")

    def told(
        call: Callable[[ShardloomClient], object], *failures: Exception | httpx.Response
    ) -> str:
        client = Script(*failures).client(num_retries=len(failures) - 1)
        with pytest.raises(ServiceUnreachable) as caught:
            call(client)
        return str(caught.value)

    def submit(client: ShardloomClient) -> object:
        return client.submit(spec_document())

    assert "may have arrived" in told(submit, lost, refused)
    assert "may have arrived" not in told(submit, httpx.Response(429), refused)
    assert "may have arrived" in told(lambda client: client.cancel("ratings"), lost)
    assert "arrived" not in told(submit, refused, httpx.ConnectTimeout("slow"))
    assert "arrived" not in told(lambda client: client.get_job("ratings"), lost, refused)
    assert "arrived" not in told(lambda client: client.plan(spec_document()), lost)


@pytest.mark.parametrize("failure", [httpx.ReadTimeout("slow"), httpx.Response(503, json={})])
def test_other_posts_are_never_sent_twice(failure):
    script = Script(failure, failure, failure)
    client = script.client()
    for call in (client.cancel, client.request_trace, client.plan):
        with pytest.raises((ServiceUnreachable, UnexpectedAnswer)):
            call("ratings" if call != client.plan else {})
    assert len(script.requests) == 3


def test_a_problem_becomes_the_exception_of_its_status_and_is_final():
    fields = [{"path": "training.epochs", "code": "greater_than", "message": "must be above 0"}]
    errors = {401: NotSignedIn, 403: Forbidden, 404: NotFound, 409: Conflict, 422: InvalidRequest}
    for status, error in (errors | {500: ServerFault}).items():
        body = problem_body(status, "the_code", "why", fields=fields)
        script = Script(*[httpx.Response(status, json=body)] * 2)
        with pytest.raises(error, match="why") as caught:
            script.client().get_job("ratings")
        assert (caught.value.status, caught.value.code) == (status, "the_code")
        assert [fault.path for fault in caught.value.fields] == ["training.epochs"]
        with pytest.raises(error):
            script.client().resize("ratings", 5)
        assert len(script.requests) == 2


def test_an_answer_of_another_program_is_named_as_such():
    for status, said in ((200, "Shardloom service of the same version"), (418, "HTTP 418")):
        page = httpx.Response(status, text="<html>hello</html>")
        with pytest.raises(UnexpectedAnswer, match=said):
            Script(page).client().get_job("ratings")
    broken, headers = httpx.ByteStream(b"not gzipped"), {"content-encoding": "gzip"}
    answers = [httpx.Response(200, headers=headers, stream=broken) for _ in range(2)]
    client = Script(*answers).client(num_retries=0)
    with pytest.raises(ServiceUnreachable, match="decompressing"):
        client.get_job("ratings")
    assert not client.is_alive()


def test_a_download_is_repeated_until_all_is_there_and_leaves_no_parts(tmp_path: Path) -> None:
    def broken_off() -> Iterator[bytes]:
        yield b"half"
        raise httpx.ReadError("reset")

    whole = httpx.Response(200, content=b"whole")
    answers = [httpx.Response(503), httpx.Response(200, content=broken_off()), whole]
    target = tmp_path / "logs.zip"
    assert Script(*answers).client().download_logs("ratings", target).read_bytes() == b"whole"
    missing = Script(httpx.Response(200, content=broken_off())).client(num_retries=0)
    with pytest.raises(ServiceUnreachable):
        missing.download_logs("ratings", target)
    assert [*tmp_path.iterdir()] == [target]
    assert target.read_bytes() == b"whole"


def test_a_malformed_url_is_refused_at_once():
    for url in ("localhost:8700", "ftp://x", "http://", "http://x:notaport", "http://a..b"):
        with pytest.raises(ServiceUnreachable):
            ShardloomClient(url)


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "localhost:x", "foo://bar"])
def test_a_proxy_that_cannot_be_used_is_told_of(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ServiceUnreachable, match="ALL_PROXY"):
        ShardloomClient("http://service.example")


def test_jobs_are_fetched_page_by_page():
    pages = [{"items": [job_body(id="b")], "next": "b"}, {"items": [job_body(id="a")]}]
    script = Script(*map(ok, pages))
    wanted: Any = {"statuses": [JobStatus.RUNNING], "search": "x", "metrics": ["a<1"]}
    found = [job.id for job in script.client().iter_jobs(after="c", labels={"n": 1}, **wanted)]
    assert found == ["b", "a"]
    assert [request.url.params["after"] for request in script.requests] == ["c", "b"]
    params = script.requests[1].url.params
    assert (params["status"], params["search"], params["metric"]) == ("RUNNING", "x", "a<1.0")
    assert params["label"] == "n=1"
    with pytest.raises(InvalidRequest, match="filters") as refused:
        Script().client().list_jobs(serch="x", labels=["team"])
    assert {fault.path for fault in refused.value.fields} == {"serch", "labels[0]"}


def test_a_job_name_is_quoted_in_the_path():
    script = Script(ok(job_body()))
    script.client().get_job("a b?c")
    assert script.requests[0].url.raw_path == b"/v1/jobs/a%20b%3Fc"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "\udc80"])
def test_nothing_above_what_is_named_is_asked_for_or_deleted(name: str) -> None:
    script = Script(*[httpx.Response(204)] * 3)
    client = script.client()
    for call in (
        lambda: client.delete_export("ratings", name),
        lambda: client.delete_sweep(name),
        lambda: client.remove_quotas(name),
    ):
        with suppress(InvalidRequest):
            call()
    paths = [request.url.raw_path for request in script.requests]
    assert all(path.count(b"/") == number for path, number in zip(paths, (5, 3, 3), strict=False))
    assert len(paths) == (3 if name == "\udc80" else 0)


def test_waiting_outlasts_a_restart_of_the_service_until_its_patience_ends():
    away = [httpx.ConnectError("restarting")] * 10 + [httpx.Response(503)] * 10
    script = Script(ok(job_body()), *away, ok(job_body()), ok(job_body(status="SUCCEEDED")))
    found = script.client(num_retries=2).wait("ratings", poll_s=30.0)
    assert found.status is JobStatus.SUCCEEDED
    assert [script.clock.slept[0], script.clock.slept[-1]] == [30.0, 30.0]
    script = Script(ok(job_body()), *[httpx.ConnectError("gone")] * 100)
    with pytest.raises(ServiceUnreachable):
        script.client(num_retries=2).wait("ratings", patience_s=60.0)
    assert 60.0 <= script.clock.now < 70.0


def test_exports_traces_and_sweeps_are_waited_for_through_a_restart_too() -> None:
    def outlasted(*answers: object) -> ShardloomClient:
        away = [httpx.ConnectError("restarting")] * 10 + [httpx.Response(503)] * 10
        return Script(*[each for body in answers for each in (*away, ok(body))]).client()

    client = outlasted(export_body("running"), export_body("succeeded"))
    assert client.wait_for_export("ratings", "x-1").status == "succeeded"
    client = outlasted(job_body(), {"items": [trace_body(0), trace_body(1)]})
    assert len(client.wait_for_traces("ratings", REQUESTED)) == 2
    statuses = [SweepStatus.RUNNING, SweepStatus.COMPLETED]
    client = outlasted(*(sweep_body(status=status) for status in statuses))
    assert [each.status for each in client.follow_sweep("sweep-1")] == statuses


def test_an_export_is_waited_for_no_longer_than_asked() -> None:
    queued = Script(*[ok(export_body("queued")) for _ in range(3)])
    with pytest.raises(ExportFailed, match="within 1 s"):
        queued.client().wait_for_export("ratings", "x", timeout_s=1.0)
    away = Script(*[httpx.Response(503)] * 100)
    with pytest.raises(UnexpectedAnswer):
        away.client(num_retries=0).wait_for_export("ratings", "x", timeout_s=10.0)
    assert away.clock.now < 10.5


def test_a_wait_is_for_the_job_that_had_the_name_when_it_began() -> None:
    one, traces = job_body(id="job-1"), {"items": [trace_body(0), trace_body(1)]}
    script = Script(ok(one), ok(job_body(id="job-1", status="FAILED")))
    assert script.client().wait("ratings").status is JobStatus.FAILED
    assert [each.url.path for each in script.requests] == ["/v1/jobs/ratings", "/v1/jobs/job-1"]
    script = Script(ok(one), ok({"items": []}), ok(one), ok(traces))
    assert len(script.client().wait_for_traces("ratings", REQUESTED)) == 2
    assert {each.url.path for each in script.requests[1:]} == {
        "/v1/jobs/job-1",
        "/v1/jobs/job-1/traces",
    }


def test_waiting_keeps_to_its_time_limit():
    with pytest.raises(TimeoutError, match="RUNNING"):
        Script(ok(job_body())).client().wait("ratings", timeout_s=0.0)
    live = Script(*[ok(job_body()) for _ in range(2)])
    with pytest.raises(TimeoutError, match="RUNNING"):
        live.client().wait("ratings", timeout_s=5.0, poll_s=30.0)
    assert live.clock.now == 5.0
    for num_retries in (0, 50):
        away = Script(*[httpx.ConnectError("gone")] * 100)
        with pytest.raises(ServiceUnreachable):
            away.client(num_retries=num_retries).wait("ratings", timeout_s=10.0)
        assert away.clock.now < 10.5


@pytest.mark.parametrize(
    ("answers", "error"), [([], ServiceUnreachable), ([ok(job_body())], TimeoutError)]
)
def test_a_service_that_hangs_is_waited_for_no_longer_than_asked(
    answers: list[httpx.Response], error: type[Exception]
) -> None:
    clock, left = FakeClock(), [*answers]

    def answer_or_hang(request: httpx.Request) -> httpx.Response:
        if left:
            return left.pop()
        clock.now += request.extensions["timeout"]["read"]
        raise httpx.ReadTimeout("no answer", request=request)

    transport = httpx.MockTransport(answer_or_hang)
    client = ShardloomClient(transport=transport, sleep=clock.sleep, clock=clock)
    with pytest.raises(error):
        client.wait("ratings", timeout_s=10.0)
    assert clock.now <= 11.0


def test_a_long_log_is_read_piece_by_piece():
    def piece(cursor: str, *texts: str, more: bool = True) -> httpx.Response:
        lines = [{"source": "driver", "text": text} for text in texts]
        body = {"attempt_id": "a", "sources": ["driver"], "lines": lines, "cursor": cursor}
        return ok({**body, "more": more})

    script = Script(piece("1", "a", "b"), piece("2"), piece("3", "c", more=False))
    logs = script.client().read_logs("ratings", tail=9)
    assert [line.text for line in logs.lines] == ["a", "b", "c"]
    asked = [dict(request.url.params) for request in script.requests]
    assert asked == [{"tail": "9"}, {"after": "1"}, {"after": "2"}]


def test_all_metrics_are_answered_however_many_a_job_has() -> None:
    names = [f"table/t{number}/lookups" for number in range(119)] + ["train/loss"]

    def answer(request: httpx.Request) -> httpx.Response:
        some = request.url.params.get_list("name") or names[:100]
        assert request.url.params["max_points"] == "9"
        assert len(str(request.url)) < 8192
        return ok({"names": names, "series": [{"name": name, "points": []} for name in some]})

    with ShardloomClient(transport=httpx.MockTransport(answer)) as client:
        assert [each.name for each in client.metrics("ratings", max_points=9).series] == names
        asked = client.metrics("ratings", names=["train/loss"], max_points=9)
    assert [each.name for each in asked.series] == ["train/loss"]


def test_a_deletion_is_waited_for_as_long_as_the_service_gives_it() -> None:
    script = Script(ok({"id": "job-1"}), httpx.ReadTimeout("slow"))
    client = script.client()
    client.delete("ratings")
    assert script.requests[0].extensions["timeout"]["read"] > 300.0
    with pytest.raises(ServiceUnreachable, match="may have arrived"):
        client.delete("ratings")


def test_events_are_read_until_a_page_is_empty():
    script = Script(
        ok({"items": [event_body(1), event_body(2)], "next": "2"}),
        ok({"items": [event_body(3)]}),
        ok({"items": []}),
    )
    assert [event.id for event in script.client().iter_events("ratings")] == [1, 2, 3]
    assert [request.url.params["after"] for request in script.requests] == ["0", "2", "3"]


def test_a_broken_stream_goes_on_after_the_last_event():
    away = [*[httpx.ConnectError("restarting")] * 20, httpx.Response(503)]
    script = Script(
        *away,
        ok(job_body(id="job-1")),
        sse(sse_event(1)[:20], sse_event(1)[20:], sse_event(2), sse_event(3)[:20]),
        *away,
        sse(sse_event(3), END),
    )
    found = [event.id for event in script.client(num_retries=2).follow_events("ratings")]
    assert found == [1, 2, 3]
    first, last = script.requests[len(away) + 1], script.requests[-1]
    assert first.headers["accept"] == "text/event-stream"
    assert "Last-Event-ID" not in first.headers
    assert (last.url.path, last.headers["Last-Event-ID"]) == ("/v1/jobs/job-1/events", "2")


def test_a_stream_that_breaks_again_and_again_but_brings_something_is_followed():
    pieces = [sse(sse_event(number)) for number in range(1, 10)]
    script = Script(ok(job_body()), *pieces, sse(END))
    found = [event.id for event in script.client(num_retries=2).follow_events("ratings")]
    assert found == list(range(1, 10))
    script = Script(ok(job_body()), *[sse(": keep-alive\n\n") for _ in range(9)], sse(END))
    client = script.client(num_retries=2)
    assert list(client.follow_events("ratings", patience_s=0.0)) == []


def test_a_stream_that_brings_nothing_is_given_up():
    script = Script(ok(job_body()), sse(), sse(), sse())
    with pytest.raises(ServiceUnreachable, match="broke off"):
        list(script.client(num_retries=2).follow_events("ratings", patience_s=0.0))


def test_a_stream_of_an_unknown_job_is_not_found_at_once():
    script = Script(httpx.Response(404, json=problem_body(404, "job_not_found", "no job")))
    with pytest.raises(NotFound):
        list(script.client().follow_logs("nobody"))
    assert script.clock.slept == []


def test_an_export_that_leaves_its_folder_or_is_no_archive_is_not_taken(tmp_path: Path) -> None:
    outside = f"{tmp_path}/escaped"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ("../escaped", "inside/../../escaped", outside):
            archive.writestr(name, b"x")
    for content in (packed.getvalue(), packed.getvalue()[:-9]):
        client = Script(httpx.Response(200, content=content)).client()
        with pytest.raises(ExportFailed, match="the download is not whole"):
            client.download_export("job-1", "x-1", tmp_path / "made" / "to")
        assert [path.name for path in tmp_path.rglob("*")] == ["made"]


def test_a_size_is_sent_until_what_is_wanted_comes_back() -> None:
    wanted = {"id": "r-0000c0de", "workers": 4, "drain_hosts": ["127.0.0.3"]}
    trouble = httpx.Response(503, json=problem_body(503, "storage_unavailable", "no space left"))
    script = Script(trouble, ok(wanted))
    assert script.client().resize("ratings", 4) == ResizeRequestOut(**wanted)
    assert [json.loads(request.content) for request in script.requests] == [{"workers": 4}] * 2


# ---- traces

REQUESTED = TraceRequested(**requested_trace_body())


def test_waiting_ends_when_every_rank_is_written_be_it_as_the_job_ends() -> None:
    one, both = {"items": [trace_body(0)]}, {"items": [trace_body(1), trace_body(0)]}
    script = Script(ok(job_body()), ok(one), ok(job_body(status="SUCCEEDED")), ok(both))
    found = script.client().wait_for_traces("ratings", REQUESTED)
    assert [trace.rank for trace in found] == [0, 1]
    assert script.clock.now == 0.5


def test_waiting_gives_up_when_the_workers_asked_are_gone_or_time_is_over() -> None:
    for change in ({"status": "FAILED"}, {"current_attempt_id": "job-0000000000ab-a1"}):
        script = Script(ok(job_body(**change)), ok({"items": [trace_body(0)]}))
        with pytest.raises(TraceLost, match="t-0000c0de did not come"):
            script.client().wait_for_traces("ratings", REQUESTED)
    answers = [ok(job_body()), ok({"items": []})] * 3
    with pytest.raises(TraceLost, match="within 1 s"):
        Script(*answers).client().wait_for_traces("ratings", REQUESTED, timeout_s=1.0)
