"""The command `logs`: read, search, follow and save what a job's processes wrote."""

from __future__ import annotations

import contextlib
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from service.api.schemas import LogLine
from service.client import ShardloomClient
from service.client_logs import LogQuery
from service.commands import context
from service.commands.context import JobArgument, JsonOption, UrlOption, console, print_json

DEFAULT_TAIL = 100

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red"}

FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")]
SourceOption = Annotated[
    str | None, typer.Option(help="One log only: driver, rank-0, group-1-rank-0, ...")
]
LevelOption = Annotated[
    Literal["debug", "info", "warning", "error", "critical"] | None,
    typer.Option(help="Only lines of this level on."),
]
TailOption = Annotated[
    int | None,
    typer.Option(min=0, help="Last lines of each log (100, or all where lines are picked)."),
]


def logs(
    job: JobArgument,
    url: UrlOption = None,
    follow: FollowOption = False,
    source: SourceOption = None,
    rank: Annotated[list[int] | None, typer.Option(min=0, help="Only ranks; repeatable.")] = None,
    level: LevelOption = None,
    grep: Annotated[
        str | None, typer.Option(help="Only lines with this text; * stands for anything.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="As in 10m (ago), or 2026-11-21T10:00.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="As --since.")] = None,
    attempt: Annotated[str | None, typer.Option(help="Attempt id (the newest).")] = None,
    tail: TailOption = None,
    download: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the logs of all attempts: .zip, or text as .gz."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the logs of a job's newest attempt, follow them, or save them all."""
    now_s = time.time()
    query = LogQuery(
        attempt=attempt,
        source=source,
        ranks=rank or (),
        level=level,
        text=grep,
        since=moment(since, now_s),
        until=moment(until, now_s),
    )
    query = LogQuery(**{**vars(query), "tail": _tail(tail, query)})
    with context.open_client(url) as client:
        if download is not None:
            _save(client, job, download, attempt)
        elif follow:
            _follow(client, job, query, as_json=as_json)
        else:
            _print(client, job, query, as_json=as_json)


def _tail(wanted: int | None, query: LogQuery) -> int | None:
    picks = bool(query.level or query.text or query.since or query.until)
    return wanted if wanted is not None or picks else DEFAULT_TAIL


def moment(text: str | None, now_s: float) -> float | None:
    """Unix seconds of a time: an ISO date and time (local), or how long ago, as in `10m`.

    Raises `typer.BadParameter`.
    """
    if text is None:
        return None
    if match := _AGO.fullmatch(text):
        return max(0.0, now_s - float(match[1]) * _UNITS_S[match[2]])
    try:
        return max(0.0, datetime.fromisoformat(text).timestamp())
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no time; write 10m, 2h or 2026-11-21T10:00"
        ) from None


def _print(client: ShardloomClient, job: str, query: LogQuery, *, as_json: bool) -> None:
    answer = client.read_logs(job, query=query)
    if as_json:
        print_json(answer)
        return
    for line in answer.lines:
        _print_line(line)


def _follow(client: ShardloomClient, job: str, query: LogQuery, *, as_json: bool) -> None:
    # Ctrl-C is the usual way out of a log that goes on.
    with contextlib.suppress(KeyboardInterrupt):
        for line in client.follow_logs(job, query=query):
            if as_json:
                typer.echo(line.model_dump_json())
            else:
                _print_line(line)


def _save(client: ShardloomClient, job: str, target: Path, attempt: str | None) -> None:
    try:
        path = client.download_logs(job, target, attempt=attempt)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {target}: {error.strerror}") from None
    console().print(str(path), soft_wrap=True)


def _print_line(line: LogLine) -> None:
    style = _STYLES.get(line.level or "", "")
    text = Text.assemble((f"{line.source:<7}", "dim"), " ", (line.text, style))
    console().print(text, soft_wrap=True)
