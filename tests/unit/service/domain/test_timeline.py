"""What a timeline says of a job: a sentence for people, actor and facts for programs."""

from __future__ import annotations

from typing import Any, get_args

from service.dashboard import charts, groups, snapshots, views
from service.domain.timeline import EVENT_KINDS, describe, level_of
from tests.harness.builders import (
    NOW,
    group_joined,
    group_lost,
    group_member,
    layout_chosen,
    membership_changed,
    recovered,
)
from tests.harness.service import Api, House
from trainer.protocol import events


def _left(cause: str) -> events.GroupLeft:
    return events.GroupLeft(time=NOW, group=2, incarnation=0, cause=cause, hosts=["127.0.0.4"])


def test_sentences_count_and_convert() -> None:
    copying = group_member(1, "listening")
    room = {"num_workers": 2, "num_wanted": 3, "num_needed": 2}
    each = {"CPU": 1.0, "GPU": 1.0}
    asked = events.CapacityRequested(time=NOW, resources_per_worker=each, **room)
    skipped = events.RowsSkipped(time=NOW, epoch=0, start=4096, stop=8192, reason="NaN")
    moved = events.SyncIntervalChanged(
        time=NOW, step=64, every_steps_before=4, every_steps=8, reason="the link is slow"
    )
    sizes = {"world_size_before": 8, "world_size": 4, "restarted": False}
    started, shrunk = (events.Resized(time=NOW, **sizes, cause=why) for why in ("start", "drain"))
    for event, sentence in (
        (
            membership_changed(group_member(0), copying, generation=5),
            "generation 5: group 0 trains, group 1 copies from a peer; each shard has 1 copy on "
            "1 host",
        ),
        (
            group_joined(copied_bytes=48_300, duration_s=0.4),
            "group 1 (127.0.0.3) joined: copied 48.3 kB from a live group in 0.4 s",
        ),
        (
            asked,
            "the autoscaler was asked for room for 1 worker (1 CPU, 1 GPU each), to grow from 2 "
            "to 3",
        ),
        (recovered(), "recovered, the commit came 0.31 s late: generation 4, nothing to redo"),
        (skipped, "rows 4,096 to 8,192 of epoch 1 are left out: NaN"),
        (started, "starts with 4 of 8 workers: there is no room for more"),
        (shrunk, "shrank from 8 to 4 workers without a restart, to leave a host"),
        (moved, "sync every 8 steps from step 64 on, not 4: the link is slow"),
    ):
        assert describe(event) == sentence


def test_what_needs_attention_is_a_warning() -> None:
    calm = (recovered(), group_joined(), membership_changed(), layout_chosen(), _left("drain"))
    assert [level_of(event) for event in (group_lost(), _left("poisoned"))] == ["warning"] * 2
    assert {level_of(event) for event in calm} == {None}


def test_no_event_is_told_by_its_kind_alone() -> None:
    """A kind is a word for programs; points and progress never become lines."""
    union, _ = get_args(events.Event)
    told = {kind for kind in get_args(union) if kind not in (events.Metrics, events.Progress)}
    for kind in told:
        fields = {name: _VALUES.get(name, 1) for name in kind.model_fields if name != "kind"}
        assert describe(kind.model_construct(**fields)) != kind.model_fields["kind"].default


_VALUES: dict[str, Any] = {
    "groups": [],
    "hosts": ["h"],
    "ranks": [1],
    "table": "users",
    "action": "fail",
    "cause": "drain",
    "how": "start",
    "reason": "why",
    "message": "what",
    "placement": "inter_host",
    "resources_per_worker": {"CPU": 1.0},
}


# ---- what programs read


def _line(api: Api, job_id: str, kind: str) -> dict[str, Any]:
    lines = api.http.get(f"/v1/jobs/{job_id}/events", params={"kind": kind}).json()["items"]
    return lines[-1]


def test_a_submission_says_who_and_what_and_an_attempt_how_long_it_was_awaited(api: Api) -> None:
    job_id = api.start(labels={"team": "ads"}, priority=7)
    told = _line(api, job_id, "job_submitted")
    assert told["actor"] == "local"
    assert told["data"] == {
        "name": "tiny",
        "project": "default",
        "priority": 7,
        "labels": {"team": "ads"},
        "min_workers": 4,
        "max_workers": 4,
    }
    made = _line(api, job_id, "attempt_created")["data"]
    assert (made["attempt"], made["queued_s"] >= 0) == (0, True)


def test_a_wish_says_who_had_it_and_when_in_the_jobs_life(api: Api) -> None:
    job_id = api.submit()
    api.end(job_id)
    asked = _line(api, job_id, "cancel_requested")
    assert (asked["actor"], asked["data"]) == ("local", {"was": "QUEUED"})
    ended = _line(api, job_id, "job_ended")
    assert ended["data"]["status"] == "CANCELLED"
    assert ended["data"]["reason"] == "cancelled"


def test_a_retry_says_reason_delay_and_what_it_costs(house: House) -> None:
    job = house.submit("running", "failed", max_failures=2)
    house.poll(4)
    [told] = house.store.list_timeline(job.id, kinds=("retry_scheduled",))[:1]
    assert told.data["reason"] == "driver_lost"
    assert (told.data["num_failures"], told.data["max_failures"]) == (1, 2)
    assert told.data["delay_s"] > 0
    assert told.data["is_counted"] is True


def test_kinds_that_pages_read_are_kinds_of_events() -> None:
    read = {*views._EVENT_TONES, *charts._MARKED, *groups.MOMENTS, *snapshots._REWINDS}
    assert read <= EVENT_KINDS
