"""The parser of server-sent events, whatever way the stream is cut into chunks."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from service.client.transport import SseEvent, parse_events, split_lines


def test_an_event_has_its_name_data_and_id():
    stream = ["id: 7\nevent: end\ndata: one\ndata: two\n\n"]
    assert list(parse_events(stream)) == [SseEvent("end", "one\ntwo", "7")]


def test_comments_and_unknown_fields_are_skipped():
    stream = [": keep-alive\n\nretry: 5\ndata: x\n\n"]
    assert list(parse_events(stream)) == [SseEvent("message", "x")]


def test_the_id_stays_until_another_one_is_sent():
    stream = ["id: 1\ndata: a\n\ndata: b\n\nid: 3\ndata: c\n\n"]
    assert [event.id for event in parse_events(stream)] == ["1", "1", "3"]


def test_an_event_that_is_cut_off_is_dropped():
    assert list(parse_events(["data: whole\n\n", "data: half\n"])) == [SseEvent("message", "whole")]


def test_a_line_separator_inside_the_data_ends_no_line():
    text = "data: a\u2028b\x0bc\n\n"
    assert [event.data for event in parse_events([text])] == ["a\u2028b\x0bc"]


def test_a_crlf_that_is_cut_in_two_is_one_line_end():
    assert list(split_lines(["a\r", "\nb\r", "\n"])) == ["a", "b"]


def test_only_the_first_space_after_the_colon_is_dropped():
    assert [event.data for event in parse_events(["data:  x\n\ndata:y\n\n"])] == [" x", "y"]


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
