"""What a timeline says of groups that come, go and recover."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from service.sentences import describe, level_of
from tests.unit.service.builders import (
    NOW,
    group_joined,
    group_lost,
    group_member,
    layout_chosen,
    membership_changed,
    recovered,
)
from trainer import events


def _left(cause: str) -> events.GroupLeft:
    return events.GroupLeft.model_validate(
        {"time": NOW, "group": 2, "incarnation": 0, "cause": cause, "hosts": ["127.0.0.4"]}
    )


def _resized(
    before: int, after: int, *, restarted: bool = False, cause: str = "request"
) -> events.Resized:
    return events.Resized(
        time=NOW, world_size_before=before, world_size=after, cause=cause, restarted=restarted
    )


def _room_asked(has: int, wants: int, needed: int) -> events.RoomAsked:
    return events.RoomAsked(
        time=NOW,
        num_workers=has,
        num_wanted=wants,
        num_needed=needed,
        resources_per_worker={"CPU": 1.0, "GPU": 1.0},
    )


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            layout_chosen(),
            "layout: 6 workers on 3 hosts as 3 sharding groups of 2, inter-host; three copies on "
            "three hosts survive the loss of two",
        ),
        (
            membership_changed(generation=4),
            "generation 4: groups 0, 1, 2 train; each shard has 3 copies on 3 hosts",
        ),
        (
            membership_changed(group_member(0), group_member(1, "listening"), generation=5),
            "generation 5: group 0 trains, group 1 copies from a peer; each shard has 1 copy on "
            "1 host",
        ),
        (
            membership_changed(group_member(0, "initial"), group_member(1, "initial")),
            "generation 1: groups 0, 1 start",
        ),
        (
            group_lost(reason="connection", message="rank 1 on 127.0.0.3 ended", rows_returned=0),
            "group 1 (127.0.0.3) was lost: rank 1 on 127.0.0.3 ended; no other group trains",
        ),
        (
            group_joined(),
            "group 1 (127.0.0.3) joined: copied 105.0 MB from a live group in 0.9 s",
        ),
        (
            group_joined(copied_bytes=48_300, duration_s=0.4),
            "group 1 (127.0.0.3) joined: copied 48.3 kB from a live group in 0.4 s",
        ),
        (group_joined(how="start"), "group 1 (127.0.0.3) joined from the start"),
        (
            _room_asked(0, 3, needed=2),
            "waits for room: there is room for 0 of at least 2 workers; the autoscaler was asked "
            "for room for 3 workers (1 CPU, 1 GPU each)",
        ),
        (
            _room_asked(2, 3, needed=2),
            "the autoscaler was asked for room for 1 worker (1 CPU, 1 GPU each), to grow from 2 "
            "to 3",
        ),
        (_left("resize"), "group 2 (127.0.0.4) left in good order: fewer workers are wanted"),
        (_left("drain"), "group 2 (127.0.0.4) left in good order: its host is drained"),
        (recovered(), "recovered in 0.31 s: generation 4, nothing to redo"),
        (
            recovered(syncs_lost=1, num_tries=3),
            "recovered in 0.31 s: generation 4, 1 sync interval to redo, at try 3",
        ),
        (_resized(4, 6), "grew from 4 to 6 workers without a restart, as asked"),
        (
            _resized(6, 4, restarted=True, cause="host_lost"),
            "shrank from 6 to 4 workers by a restart from a checkpoint, after a loss",
        ),
        (
            events.StragglerFound(
                time=NOW, group=1, rank=0, host="h3", slowdown=1.83, action="replace"
            ),
            "rank 0 of group 1 (h3) is 1.8 times as slow as the others; its group is replaced",
        ),
        (
            events.HangFound(time=NOW, group=1, rank=0, host="h3", phase="lookup", idle_s=62.4),
            "rank 0 of group 1 (h3) hangs: nothing done for 62 s in phase lookup",
        ),
        (
            events.HostExcluded(time=NOW, host="h3", num_failures=3, until=NOW + 600),
            "host h3 failed 3 times: no worker is placed on it for 10 min",
        ),
        (
            events.RowsSkipped(time=NOW, epoch=0, start=4096, stop=8192, reason="the loss is NaN"),
            "rows 4,096 to 8,192 of epoch 1 are left out: the loss is NaN",
        ),
        (
            events.RowsQuarantined(
                time=NOW, file="/d/part-1.parquet", reason="column 'y' is not a value", count=3
            ),
            "3 rows of /d/part-1.parquet left out: column 'y' is not a value",
        ),
    ],
)
def test_each_event_is_a_sentence(event: Any, sentence: str) -> None:
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
