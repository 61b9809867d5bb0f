"""Commands about what a job writes: exports of its model (export, exports, serve), logs, traces.

The CLI imports no torch: `serve` and `export --run-dir` run the trainer's own commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from service.cli import common
from service.cli.common import (
    HERE,
    Client,
    FollowOption,
    JobArgument,
    JsonOption,
    UrlOption,
    YesOption,
    console,
    print_answer,
    print_hint,
    print_json,
    print_line,
)
from service.cli.render import plain_table, traces_table
from service.client.resources import LogFilters
from service.schemas.jobs import ExportOut, LogLevel, LogLine, LogsOut
from service.schemas.wording import age, comparison, size
from trainer.spec.training import DEFAULT_QUANTIZATION, Quantization

_DEFAULT_PORT = 8800


def export(
    job: Annotated[str | None, common.JOB] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write; it must not exist.")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="newest, best, or a step (with --run-dir also a folder).")
    ] = "newest",
    quantize: Annotated[
        Quantization, typer.Option(help="Precision of the tables.")
    ] = DEFAULT_QUANTIZATION,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Export from a job's folder on run storage, without a service."
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Export the model of a checkpoint: unsharded, quantised, ready for `shardloom serve`.

    The export says how far its predictions are from the trainer's on the validation rows.
    """
    if (job is None) == (run_dir is None):
        raise typer.BadParameter("needs either JOB or --run-dir, not both")
    if to is None:
        raise typer.BadParameter("--to says which folder to write")
    if to.exists():
        raise typer.BadParameter(f"--to: {to} exists already; name a folder that does not")
    if run_dir is not None:
        # In a process of its own: the CLI imports no torch.
        options = ["--run-dir", str(run_dir), "--to", str(to)]
        chosen = ["--checkpoint", checkpoint, "--quantize", quantize]
        command = [sys.executable, "-m", "trainer.export", *options, *chosen]
        # Its lines are for people; a program reads the report.
        done = subprocess.run(command, stdout=sys.stderr if as_json else None, check=False)
        if done.returncode:
            raise typer.Exit(done.returncode)
        if as_json:
            print_json(json.loads((to / "report.json").read_text(encoding="utf-8")))
        return
    assert job is not None
    with common.open_client(url) as client:
        # A newer job may get the name while the export is made.
        job = client.get_job(job).id
        asked = client.request_export(job, checkpoint=checkpoint, quantize=quantize)
        if not as_json:
            print_hint(f"export {asked.id} is asked for")
        made = client.wait_for_export(job, asked.id)
        client.download_export(job, asked.id, to)
    if as_json:
        print_json(made)
    else:
        console().print(f"{comparison(made)}\n{to}", soft_wrap=True)


def exports(
    job: JobArgument,
    delete: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Delete this one instead; one being made is given up."),
    ] = None,
    yes: YesOption = False,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """List the exports of a job, or delete one."""
    if delete is not None:
        if not yes:
            # From the list, which tells of damaged ones, too.
            found = [each for each in client.exports(job) if each.id == delete]
            what = "".join(f" ({it.checkpoint}, {it.quantize}, {it.status})" for it in found)
            typer.confirm(f"delete export {delete} of {job}{what}?", abort=True, err=True)
        client.delete_export(job, delete)
        answer = {"id": delete, "deleted": True}
        print_line(answer, f"export {delete} of {job} is deleted", as_json=as_json)
        return
    found = client.exports(job)
    empty = f"no exports yet; `shardloom export {job} --to DIR` makes one"
    print_answer(found, exports_table(found, time.time()), as_json=as_json, empty=empty)


def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an export.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = _DEFAULT_PORT,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one prediction.")] = 1,
) -> None:
    """Score with an export over HTTP: POST /v1/predict. Needs no service and no cluster."""
    for package in ("torch", "fastapi"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(name=package)
    command = ["-m", "trainer.export.server", str(folder), "--host", host, "--port", str(port)]
    # In our place: signals and the exit code are the scorer's.
    os.execv(sys.executable, [sys.executable, *command, "--threads", str(threads)])


def exports_table(found: list[ExportOut], now: float) -> Table:
    table = plain_table("id", "status", "checkpoint", "tables", "size", "age", "")
    for each in found:
        what = each.checkpoint if each.step is None else f"{each.checkpoint} (step {each.step})"
        facts = (each.status, what, each.quantize, size(each.size_bytes), age(each.created, now))
        table.add_row(each.id, *facts, each.message or "")
    return table


# ---- logs

DEFAULT_TAIL = 100
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red"}
SourceOption = Annotated[
    str | None, typer.Option(help="One log only: driver, rank-0, group-1-rank-0, ...")
]
LevelOption = Annotated[LogLevel | None, typer.Option(help="Only lines of this level on.")]
TailOption = Annotated[
    int | None,
    typer.Option(min=0, help="Last lines of each log (100, or all where lines are picked)."),
]


def logs(
    job: JobArgument,
    client: Client = HERE,
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
        typer.Option(metavar="FILE", help="Save the logs of all attempts in a ZIP archive."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print the logs of a job's newest attempt, follow them, or save them all."""
    picked = (follow, source, rank, level, grep, since, until, tail is not None)
    if download is not None and any(picked):
        why = "it saves whole logs: leave out all other options but --attempt"
        raise typer.BadParameter(why, param_hint="--download")
    now_s = time.time()
    if tail is None and not (level or grep or since or until):
        tail = DEFAULT_TAIL
    wanted: LogFilters = {
        "attempt": attempt,
        "source": source,
        "ranks": rank or (),
        "level": level,
        "text": grep,
        "since": moment(since, now_s),
        "until": moment(until, now_s),
        "tail": tail,
    }
    if download is not None:
        path = client.download_logs(job, download, attempt=attempt)
        console().print(str(path), soft_wrap=True)
    elif not follow:
        found = client.read_logs(job, **wanted)
        _check_sources(found, source, rank or ())
        if as_json:
            print_json(found)
        else:
            _print_lines(found.lines)
    else:
        # Ctrl-C is the usual way out of a log that goes on.
        with contextlib.suppress(KeyboardInterrupt):
            lines = client.follow_logs(job, **wanted)
            if as_json:
                for line in lines:
                    typer.echo(line.model_dump_json())
            else:
                _print_lines(lines)


def _print_lines(lines: Iterable[LogLine]) -> None:
    for line in lines:
        style = _STYLES.get(line.level or "", "")
        text = Text.assemble((f"{line.source:<7}", "dim"), " ", (line.text, style))
        console().print(text, soft_wrap=True)


def _check_sources(found: LogsOut, source: str | None, ranks: Sequence[int]) -> None:
    """Raise `typer.BadParameter` for a log that an attempt with logs does not have."""
    wanted = [source] if source else [f"rank-{rank}" for rank in ranks]
    for name in wanted if found.sources and not found.lines else ():
        if not any(f"-{each}".endswith(f"-{name}") for each in found.sources):
            known = ", ".join(found.sources)
            raise typer.BadParameter(f"the attempt has no log {name}; it has: {known}")


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


# ---- profiler traces


def trace(
    job: JobArgument,
    steps: Annotated[int, typer.Option(min=1, max=100, help="How many steps to record.")] = 3,
    rank: Annotated[
        list[int] | None, typer.Option(min=0, help="A rank to record; repeatable (default 0).")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until the trace is written.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Save the files in a folder, once they are written."),
    ] = None,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Record the next steps of a running job with torch.profiler.

    A trace shows training only: it ends early where a checkpoint or a validation begins.

    The files are gzipped traces in Chrome's format: open them at https://ui.perfetto.dev.
    """
    if wait or out is not None:
        # A newer job may get the name while the trace is written.
        job = client.get_job(job).id
    requested = client.request_trace(job, num_steps=steps, ranks=rank or (0,))
    if not wait and out is None:
        hint = f"the trace is asked for; `shardloom traces {job}` lists it once it is written"
        print_line(requested, requested.id, hint, as_json=as_json)
        return
    written = client.wait_for_traces(job, requested)
    if as_json:
        print_json(written)
    elif out is None:
        console().print(traces_table(written, time.time()))
    if out is not None:
        for each in written:
            path = client.download_trace(job, each, out)
            if not as_json:
                console().print(str(path), soft_wrap=True)


def traces(job: JobArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """List the traces of a job."""
    found = client.traces(job)
    empty = f"no traces yet; `shardloom trace {job}` records one"
    print_answer(found, traces_table(found, time.time()), as_json=as_json, empty=empty)
