"""Commands about trained models: export, exports, serve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from service.api.export_schemas import ExportOut
from service.client import ShardloomClient
from service.commands import context
from service.commands.context import JobArgument, JsonOption, UrlOption, console, print_json
from service.commands.formats import human_age, human_bytes
from service.commands.render import plain_table
from trainer.spec.export import Quantization

_DEFAULT_PORT = 8800
_ANSWERS_WITHOUT_SERVICE = "needs either JOB or --run-dir, not both"


def export(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB]",
            help="Id, unique prefix of it, or name (the newest).",
            autocompletion=context.job_names,
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write; it must not exist.")
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="newest, best, or a step (with --run-dir also a folder).")
    ] = "newest",
    quantize: Annotated[
        Quantization, typer.Option(help="Precision of the tables: int8, fp16 or none.")
    ] = "int8",
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
        raise typer.BadParameter(_ANSWERS_WITHOUT_SERVICE)
    if to is None:
        raise typer.BadParameter("--to says which folder to write")
    if to.exists():
        raise typer.BadParameter(f"--to: {to} exists already; name a folder that does not")
    if run_dir is not None:
        _export_here(run_dir, to, checkpoint, quantize, as_json=as_json)
        return
    assert job is not None
    with context.open_client(url) as client:
        _export_there(client, job, to, checkpoint, quantize, as_json=as_json)


def exports(
    job: JobArgument,
    delete: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Delete this one instead; one being made is given up."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the exports of a job, or delete one."""
    with context.open_client(url) as client:
        if delete is not None:
            _delete(client, job, delete, yes=yes, as_json=as_json)
            return
        found = client.exports(job)
    if as_json:
        print_json(found)
    elif not found:
        console().print(f"no exports yet; `shardloom export {job} --to DIR` makes one")
    else:
        console().print(exports_table(found, time.time()))


def _delete(client: ShardloomClient, job: str, export_id: str, *, yes: bool, as_json: bool) -> None:
    if not yes:
        # From the list, which tells of damaged ones, too.
        found = next((each for each in client.exports(job) if each.id == export_id), None)
        what = "" if found is None else f" ({found.checkpoint}, {found.quantize}, {found.status})"
        typer.confirm(f"delete export {export_id} of {job}{what}?", abort=True, err=True)
    client.delete_export(job, export_id)
    if as_json:
        print_json({"id": export_id, "deleted": True})
    else:
        typer.echo(f"export {export_id} of {job} is deleted")


def serve(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an export.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = _DEFAULT_PORT,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one prediction.")] = 1,
) -> None:
    """Score with an export over HTTP: POST /v1/predict. Needs no service and no cluster."""
    command = ["-m", "trainer.export.serve", str(folder), "--host", host, "--port", str(port)]
    # In our place: signals and the exit code are the scorer's.
    os.execv(sys.executable, [sys.executable, *command, "--threads", str(threads)])


def exports_table(found: list[ExportOut], now: float) -> Table:
    """A row for each export."""
    table = plain_table("id", "status", "checkpoint", "tables", "size", "age", "")
    for each in found:
        what = each.checkpoint if each.step is None else f"{each.checkpoint} (step {each.step})"
        num_bytes = "" if each.size_bytes is None else human_bytes(each.size_bytes)
        since = human_age(each.created, now)
        table.add_row(
            each.id, each.status, what, each.quantize, num_bytes, since, each.message or ""
        )
    return table


def _export_there(
    client: ShardloomClient,
    job: str,
    to: Path,
    checkpoint: str,
    quantize: Quantization,
    *,
    as_json: bool,
) -> None:
    asked = client.request_export(job, checkpoint=checkpoint, quantize=quantize)
    if not as_json:
        context.error_console().print(f"export {asked.id} is asked for", style="dim")
    done = client.wait_for_export(job, asked.id)
    try:
        client.download_export(job, asked.id, to)
    except OSError as error:
        raise typer.BadParameter(f"cannot write to {to}: {error.strerror or error}") from None
    if as_json:
        print_json(done)
        return
    for line in (comparison(done), f"{to}"):
        console().print(line, soft_wrap=True)


def comparison(done: ExportOut) -> str:
    """What the report says of the predictions, in a line for each task."""
    report = done.report or {}
    if report.get("not_measured"):
        return f"predictions were not compared with the trainer's: {report['not_measured']}"
    lines = [
        f"{name}: |export - trainer| mean {task['mean_abs_error']:.2e}, max "
        f"{task['max_abs_error']:.2e}; {task['metric']} {task['trainer_metric']:.6f} (trainer) "
        f"{task['export_metric']:.6f} (export)"
        for name, task in report.get("tasks", {}).items()
    ]
    return "\n".join([f"{report.get('num_rows', 0)} validation rows compared", *lines])


def _export_here(run_dir: Path, to: Path, checkpoint: str, quantize: str, *, as_json: bool) -> None:
    """Run the trainer's own command in a process of its own: the CLI imports no torch."""
    options = ["--run-dir", str(run_dir), "--to", str(to)]
    chosen = ["--checkpoint", checkpoint, "--quantize", quantize]
    command = [sys.executable, "-m", "trainer.export", *options, *chosen]
    # Its lines are for people; a program reads the report.
    code = subprocess.run(command, stdout=sys.stderr if as_json else None, check=False).returncode
    if code:
        raise typer.Exit(code)
    if as_json:
        print(json.dumps(json.loads((to / "report.json").read_text(encoding="utf-8")), indent=2))
