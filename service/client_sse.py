"""A minimal parser of server-sent events (the HTML standard's event stream format)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerEvent:
    """One event. `id` is the newest id seen on the stream so far, empty if none was sent."""

    name: str
    data: str
    id: str = ""


def split_lines(chunks: Iterable[str]) -> Iterator[str]:
    """Complete lines of a text that arrives in chunks; an unfinished last line is dropped.

    Only CR, LF and CRLF end a line: `str.splitlines` would also cut at U+2028 inside JSON.
    """
    pending = ""
    for chunk in chunks:
        pending += chunk
        # A CR at the end may be the first half of a CRLF whose LF has not arrived yet.
        held_back = "\r" if pending.endswith("\r") else ""
        ready = pending[: len(pending) - len(held_back)]
        *lines, rest = ready.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        yield from lines
        pending = rest + held_back


def parse_events(chunks: Iterable[str], last_id: str = "") -> Iterator[ServerEvent]:
    """Events of a stream that arrives in arbitrary chunks of text.

    Comments (keep-alives) are skipped; an event cut off by the end of the stream is dropped, so
    that it is sent again after a reconnection.
    """
    name, data = "message", list[str]()
    for line in split_lines(chunks):
        if not line:
            if data:
                yield ServerEvent(name, "\n".join(data), last_id)
            name, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id" and "\0" not in value:
            last_id = value
