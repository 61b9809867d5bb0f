"""Following a job: what is shown, when it ends, and a service that goes away meanwhile."""

from __future__ import annotations

import io
from functools import partial

import pytest
from rich.console import Console
from rich.live import Live

from service.cli.follow import PlainView, end_page, live_page, show_live, watch
from service.client.errors import ServerFault, ServiceUnreachable
from service.client.transport import PATIENCE_S
from tests.harness.clock import FakeClock
from tests.harness.service import FakeService, job_body, problem_body


def watched(service: FakeService, show, clock: FakeClock, console: Console | None = None):
    """The job `ratings` once it was watched to its end."""
    console = console or Console(file=io.StringIO())
    return watch(service.client(), "ratings", console, show, sleep=clock.sleep, clock=clock)


def at_step(step: int, **changes):
    body = job_body(**changes)
    return {**body, "progress": {**body["progress"], "step": step}}


def plain_output(service: FakeService, clock: FakeClock | None = None) -> str:
    output, clock = io.StringIO(), clock or FakeClock()
    console = Console(file=output, width=200)
    watched(service, PlainView(console, clock=clock).show, clock, console)
    return output.getvalue()


def rendered(page) -> str:
    output = io.StringIO()
    Console(file=output, width=120).print(page)
    return output.getvalue()


@pytest.mark.parametrize(
    ("trouble", "value", "said"),
    [
        ("is_down", True, "trying again"),
        ("refusal", problem_body(503, "store_unavailable", "it is locked"), "it is locked"),
    ],
)
def test_a_service_that_comes_back_is_waited_for(trouble, value, said):
    service, troubles = FakeService(), []
    clock = FakeClock(
        meanwhile=lambda _: setattr(service, trouble, value if clock.now < 30.0 else None)
    )
    service.states = [job_body(), job_body(), job_body(status="SUCCEEDED")]
    ended = watched(service, lambda _, trouble: troubles.append(trouble), clock)
    assert ended.status == "SUCCEEDED"
    assert any(said in each for each in troubles)
    assert troubles[-1] == ""


@pytest.mark.parametrize(
    ("trouble", "value", "error", "least_s", "most_s"),
    [
        ("refusal", problem_body(500, "internal_error", "it failed"), ServerFault, 0.0, 2.0),
        ("is_down", True, ServiceUnreachable, PATIENCE_S, PATIENCE_S + 2.0),
    ],
    ids=["a bug at once", "silence after the patience"],
)
def test_what_does_not_mend_ends_the_following(trouble, value, error, least_s, most_s):
    service = FakeService()
    clock = FakeClock(meanwhile=lambda _: setattr(service, trouble, value))
    with pytest.raises(error):
        watched(service, lambda *_: None, clock)
    assert least_s < clock.now < most_s


def test_plain_lines_tell_once_that_the_cluster_or_the_service_does_not_answer():
    service = FakeService()
    clock = FakeClock(meanwhile=lambda _: setattr(service, "is_down", 5.0 < clock.now < 30.0))
    away = job_body(status="STARTING", message="no answer from Ray")
    service.states = [*[away] * 3, *[job_body()] * 10, job_body(status="SUCCEEDED")]
    told = plain_output(service, clock)
    assert (told.count("no answer from Ray"), told.count("trying again")) == (1, 1)


def test_plain_lines_tell_events_status_and_progress_now_and_then():
    service = FakeService()
    steps = [at_step(step) for step in range(1, 31)]
    service.states = [job_body(status="QUEUED"), *steps, at_step(200, status="SUCCEEDED")]
    lines = plain_output(service).splitlines()
    assert [line.split()[-1] for line in lines if " line " in line] == ["1", "2"]
    assert [line for line in lines if line.startswith("ratings")] == ["ratings  RUNNING"]
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 4
    assert steps[0].endswith("2.13k rows/s, 1m 12s to go, validation/rmse 0.9340")


def test_the_live_page_shows_status_progress_and_metrics():
    service = FakeService()
    page = rendered(live_page(service.client().get_job("ratings"), ""))
    for text in ("RUNNING", "50/200", "25.0 %", "2.13k rows/s", "ETA 1m 12s", "loss 0.4100"):
        assert text in page
    service.states[0]["progress"].update(step=0, total_steps=0, percent=0.0)
    page = rendered(live_page(service.client().get_job("ratings"), ""))
    assert "waiting for the first step" in page
    assert "0/0" not in page


def test_events_stay_above_the_live_display():
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    service, clock = FakeService(), FakeClock()
    service.states = [job_body(), job_body(), job_body(status="SUCCEEDED")]
    with Live(console=console, auto_refresh=False, transient=True) as live:
        watched(service, partial(show_live, live), clock, console)
    text = output.getvalue()
    assert text.count("line 1") == 1
    assert text.index("line 2") < text.index("50/200")


def test_a_failed_job_ends_with_its_message_and_a_way_to_its_evidence_and_logs():
    service = FakeService()
    service.states = [job_body(status="FAILED", message="rank 1 met a NaN")]
    page = rendered(end_page(service.client().get_job("ratings")))
    assert "FAILED: rank 1 met a NaN" in page
    for command in ("show", "logs"):
        assert f"shardloom {command} job-0000000000ab" in page
