"""What a line of a log says about itself: level and time; and which lines somebody wants. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum

_SOURCE_PATTERN = re.compile(
    r"(?P<single>driver|coordinator)|(?:group-(?P<group>\d{1,6})-)?rank-(?P<rank>\d{1,6})"
)
# As `trainer.process_log` writes lines, Python's logging by itself, MLflow, Ray and its C++ part.
_HEAD = re.compile(
    r"\[?(?P<date>\d{4}([-/])\d\d\2\d\d)[T ](?P<clock>\d\d:\d\d:\d\d)"
    r"(?:[.,](?P<ms>\d{3}))?(?P<zone>Z?)\s"
    r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL|[DIWEF])\b"
)
# Of torch and its C++ part: [W1121 10:11:12.131415 File.cpp:7], [rank0]:W1121 10:11:12.131415 ...
_GLOG = re.compile(r"(?:\[rank\d+\]:)?\[?(?P<letter>[DIWEF])\d{4} \d\d:\d\d:\d\d[.\d]* ")
_LETTERS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
# Last words of a process: nobody dates them or gives them a level.
_LAST_WORDS = re.compile(
    r"Fatal Python error|terminate called|Segmentation fault|Aborted|\*\*\* (?:SIG|Aborted)|"
    r"corrupted |double free|free\(\): |malloc\(\): |std::bad_alloc"
)
_TRACEBACK = "Traceback (most recent call last)"


class Level(IntEnum):
    """How much a line matters; the numbers are those of Python's logging."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40
    CRITICAL = 50


@dataclass(frozen=True)
class Head:
    """Level and time (Unix seconds) of a line, None while no line of its log has said any."""

    level: Level | None = None
    time: float | None = None


def is_source(name: str) -> bool:
    """Whether a log can have this name."""
    return _SOURCE_PATTERN.fullmatch(name) is not None


def source_order(source: str) -> tuple[bool, bool, int, int]:
    """Sort key: driver, coordinator, then groups and ranks by number."""
    match = _SOURCE_PATTERN.fullmatch(source)
    assert match, "the caller has checked the name"
    is_rank = match["single"] is None
    return is_rank, source == "coordinator", int(match["group"] or 0), int(match["rank"] or 0)


def rank_of(source: str) -> int | None:
    """The rank that wrote a log (in its group, where groups are failure domains)."""
    match = _SOURCE_PATTERN.fullmatch(source)
    return int(match["rank"]) if match and match["rank"] else None


def group_of(source: str) -> int | None:
    """The sharding group that wrote a log, where groups are failure domains."""
    match = _SOURCE_PATTERN.fullmatch(source)
    return int(match["group"]) if match and match["group"] else None


def head_of(text: str) -> Head | None:
    """What a line says itself; None for one that only goes on where the last one ended."""
    if match := _HEAD.match(text):
        level = _LETTERS.get(match["level"], match["level"])
        return Head(Level[level], _time_of(match))
    if match := _GLOG.match(text):
        return Head(Level[_LETTERS[match["letter"]]])
    if _LAST_WORDS.match(text):
        return Head(Level.CRITICAL)
    if text.startswith(_TRACEBACK):
        return Head(Level.ERROR)
    return None


def following(before: Head, text: str) -> Head:
    """Level and time of a line behind `before`: the lines of a traceback are as its first."""
    own = head_of(text)
    if own is None:
        return before
    if text.startswith(_TRACEBACK) and before.level is not None:
        # Below the line that announced it the traceback is as bad as that line, or worse.
        return Head(max(before.level, Level.ERROR), before.time)
    return own if own.time is not None else Head(own.level, before.time)


def _time_of(match: re.Match[str]) -> float | None:
    try:
        date = match["date"].replace("/", "-")
        moment = datetime.fromisoformat(f"{date}T{match['clock']}.{match['ms'] or '000'}")
        # Without a zone it is the local time of the host that wrote it: taken as our own.
        return (moment.replace(tzinfo=UTC) if match["zone"] else moment).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


@dataclass(frozen=True)
class LogFilter:
    """Which lines are wanted; what is left away lets everything through.

    `text` is looked for in a line whatever the case, and `*` in it stands for anything. Times are
    Unix seconds.
    """

    ranks: Sequence[int] = ()
    min_level: Level | None = None
    text: str = ""
    since: float | None = None
    until: float | None = None

    @property
    def takes_all(self) -> bool:
        """Whether no line can be refused."""
        return self == LogFilter()

    def takes_source(self, source: str) -> bool:
        """Whether lines of a log are wanted at all."""
        return not self.ranks or rank_of(source) in self.ranks

    def takes(self, head: Head, text: str) -> bool:
        """Whether a line is wanted. A line without a level is as `info`."""
        if self.min_level is not None and (head.level or Level.INFO) < self.min_level:
            return False
        time = -math.inf if head.time is None else head.time
        if self.since is not None and time < self.since:
            return False
        if self.until is not None and time >= self.until:
            return False
        return contains(text, self.text)


def contains(text: str, wanted: str) -> bool:
    """Whether `wanted` is in `text`, whatever the case; `*` stands for anything in between.

    Part by part, from left to right: linear in the text, unlike a regular expression, so that no
    search can hold up the service.
    """
    text, at = text.casefold(), 0
    for part in wanted.casefold().split("*"):
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def last_head(lines: Sequence[str]) -> Head:
    """Level and time at the end of some lines."""
    head = Head()
    for text in lines:
        head = following(head, text)
    return head


def with_heads(before: Head, lines: Sequence[str]) -> Iterator[tuple[str, Head]]:
    """Each line with its level and time."""
    for text in lines:
        before = following(before, text)
        yield text, before
