"""The commands about logs and webhooks, against an in-memory service."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import typer

from service.commands.logs import moment
from service.commands.webhooks import app
from tests.unit.service.fake_service import FakeService, shardloom

NOW = 1_800_000_000.0


def _params(service: FakeService) -> list[tuple[str, str]]:
    return service.requests[0].url.params.multi_items()


def test_without_a_wish_the_last_lines_are_printed(service: FakeService) -> None:
    done = shardloom("logs", "ratings")
    assert "step 50 [loss 0.41]" in done.stdout
    assert _params(service) == [("tail", "100")]


def test_wishes_are_passed_on(service: FakeService) -> None:
    shardloom(
        "logs", "ratings", "--rank", "0", "--rank", "3", "--level", "warning", "--grep", "x*y"
    )
    assert _params(service) == [("rank", "0"), ("rank", "3"), ("level", "warning"), ("q", "x*y")]


def test_times_are_dates_or_ages() -> None:
    assert moment("10m", NOW) == NOW - 600
    assert moment("1.5h", NOW) == NOW - 5400
    assert moment("1970-01-02T00:00:00+00:00", NOW) == 86_400
    assert moment(None, NOW) is None
    with pytest.raises(typer.BadParameter, match="is no time"):
        moment("soon", NOW)


def test_all_logs_are_saved_to_a_file(service: FakeService, tmp_path: Path) -> None:
    target = tmp_path / "logs.zip"
    done = shardloom("logs", "ratings", "--download", str(target))
    assert (done.exit_code, target.exists()) == (0, True)
    assert service.requests[0].url.path == "/v1/jobs/ratings/logs:download"
    assert list(tmp_path.glob("*.partial")) == []


def test_logs_of_nobody_leave_no_file(service: FakeService, tmp_path: Path) -> None:
    done = shardloom("logs", "nobody", "--download", str(tmp_path / "logs.zip"))
    assert done.exit_code != 0
    assert list(tmp_path.glob("logs*")) == []


HOOK = {
    "id": "wh-1",
    "project": "default",
    "url": "https://hooks.example/",
    "description": "",
    "kinds": [],
    "is_active": False,
    "note": "switched off",
    "num_dead_in_a_row": 5,
    "created_at": NOW,
}
DELIVERY = {
    "id": 7,
    "message_id": "msg-1-7",
    "job_id": "job-0000000000ab",
    "event_id": 3,
    "kind": "job_ended",
    "body": "{}",
    "created_at": NOW,
    "state": "dead",
    "num_tries": 10,
    "next_try_at": NOW,
    "ended_at": NOW,
    "status_code": 500,
    "message": "answered 500",
}


class _Hooks(FakeService):
    """Answers what is asked about webhooks."""

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if request.method == "DELETE":
            return httpx.Response(204)
        path = request.url.path.removeprefix("/v1/webhooks")
        if path.endswith((":test", ":redeliver")):
            return httpx.Response(202, json=DELIVERY)
        if path.endswith("/deliveries"):
            return httpx.Response(200, json={"items": [DELIVERY], "next": None})
        if path.endswith(":rotate") or request.method == "POST":
            return httpx.Response(201, json={**HOOK, "secret": "whsec_x"})
        return httpx.Response(200, json={"items": [HOOK]} if path == "" else HOOK)


@pytest.fixture
def hooks(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> _Hooks:
    from service.commands import context

    found = _Hooks()
    monkeypatch.setattr(context, "open_client", found.client)
    return found


def test_a_new_webhooks_secret_goes_to_standard_output_alone(hooks: _Hooks) -> None:
    done = shardloom("webhooks", "create", "https://hooks.example/", "--kind", "job_ended")
    assert done.stdout == "whsec_x\n"
    assert json.loads(hooks.requests[0].content)["kinds"] == ["job_ended"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["list"], "switched off"),
        (["change", "wh-1", "--on"], "wh-1"),
        (["rotate", "wh-1"], "whsec_x"),
        (["test", "wh-1"], "queued as 7"),
        (["deliveries", "wh-1"], "answered 500"),
        (["redeliver", "wh-1", "7"], "msg-1-7 goes out again"),
        (["delete", "wh-1"], ""),
    ],
)
def test_webhooks_are_managed(hooks: _Hooks, arguments: list[str], shown: str) -> None:
    done = shardloom("webhooks", *arguments)
    assert (done.exit_code, shown in done.stdout) == (0, True), done.output


def test_every_command_about_webhooks_that_answers_speaks_json(hooks: _Hooks) -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        if command.name == "delete":
            continue
        names = command.callback.__annotations__
        arguments = {"webhook": "wh-1", "target": "https://h/", "delivery": "7"}
        given = [text for name, text in arguments.items() if name in names]
        if command.name == "change":
            given = ["wh-1"]
        done = shardloom("webhooks", str(command.name), *given, "--json")
        assert done.exit_code == 0, done.output
        json.loads(done.stdout)
