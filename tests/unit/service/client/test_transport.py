"""The parser of server-sent events, whatever way the stream is cut into chunks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.client.transport import SseEvent, parse_events


@pytest.mark.parametrize(
    ("chunks", "events"),
    [
        (["id: 7\nevent: end\ndata: one\ndata: two\n\n"], [SseEvent("end", "one\ntwo", "7")]),
        ([": keep-alive\n\nretry: 5\ndata: x\n\n"], [SseEvent("message", "x")]),
        (
            ["id: 1\ndata: a\n\ndata: b\n\nid: 3\ndata: c\n\n"],
            [SseEvent("message", data, id) for data, id in (("a", "1"), ("b", "1"), ("c", "3"))],
        ),
        (["data: whole\n\n", "data: half\n"], [SseEvent("message", "whole")]),
        # Neither a line separator in JSON nor half a CRLF ends a line.
        (["data: a\u2028b\x0bc\n\n"], [SseEvent("message", "a\u2028b\x0bc")]),
        (["data: a\r", "\ndata: b\r", "\n\r\n"], [SseEvent("message", "a\nb")]),
        (["data:  x\n\ndata:y\n\n"], [SseEvent("message", " x"), SseEvent("message", "y")]),
    ],
    ids=["fields", "comments", "ids stay", "cut off", "separators", "crlf", "spaces"],
)
def test_events_are_read_as_the_standard_says(chunks, events):
    assert list(parse_events(chunks)) == events


@given(
    events=st.lists(st.text(st.characters(exclude_characters="\r\n\0"), min_size=1), max_size=5),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_the_way_a_stream_is_cut_does_not_matter(events, line_end, cuts):
    text = "".join(f"id: {i}{line_end}data: {e}{line_end}{line_end}" for i, e in enumerate(events))
    # What ends in CR is held back until it is known not to be half a CRLF.
    text += ":\n"
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    chunks = [text[start:end] for start, end in itertools.pairwise(edges)]
    assert [event.data for event in parse_events(chunks)] == events
