"""Commands that change something: run, submit, plan, follow, cancel."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from service.api.schemas import JobDetail
from service.client import ShardloomClient
from service.commands import context, stack
from service.commands.context import (
    JobArgument,
    JsonOption,
    SetOption,
    SpecArgument,
    UrlOption,
    console,
    print_json,
    read_spec,
)
from service.commands.exits import exit_code_of
from service.commands.follow import detaching, follow
from service.commands.plan_page import plan_page
from trainer.code_archive import CodeError, pack
from trainer.spec import set_values, validate_spec

SecretOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Environment variable for the job's processes, kept encrypted and never shown; its "
        "value is taken from the environment, or asked for. Repeatable.",
    ),
]

CodeOption = Annotated[
    Path | None,
    typer.Option(
        "--code",
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="Folder with the code of model.module; all its files travel with the job.",
    ),
]


def run(
    spec: SpecArgument,
    overrides: SetOption = None,
    secret: SecretOption = None,
    code: CodeOption = None,
    url: UrlOption = None,
) -> None:
    """Start what is needed, submit a job and follow it; the exit code mirrors the job.

    0 succeeded, 1 failed, 130 cancelled, 4 detached by Ctrl-C while the job goes on.
    """
    document = read_spec(spec, overrides)
    archive = pack_code(code)
    # A typing error should not cost the start of a cluster.
    validate_spec(document)
    if url is None:
        stack.ensure_running()
    with context.open_client(url) as client:
        document = with_code(document, archive, client)
        job = client.submit(document, secrets=read_secrets(secret or []))
        with detaching(job.id, console()):
            console().print(Text.assemble("submitted ", (job.id, "bold")))
            exit_code = follow(client, job.id, console())
    raise typer.Exit(exit_code)


def submit(
    spec: SpecArgument,
    overrides: SetOption = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until the job ends; the exit code mirrors it.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check only, as `shardloom plan` does.")
    ] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Makes repeated submits one job.")
    ] = None,
    secret: SecretOption = None,
    code: CodeOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit a job and print its id."""
    if dry_run:
        plan(spec, overrides, url, as_json)
        return
    document = read_spec(spec, overrides)
    archive = pack_code(code)
    with context.open_client(url) as client:
        document = with_code(document, archive, client)
        job = client.submit(
            document, idempotency_key=idempotency_key, secrets=read_secrets(secret or [])
        )
        if not wait:
            _print_submitted(job, as_json=as_json)
            return
        with detaching(job.id, context.error_console()):
            job = client.wait(job.id)
    _print_submitted(job, as_json=as_json)
    raise typer.Exit(exit_code_of(job.status))


def pack_code(folder: Path | None) -> bytes | None:
    """The archive of a folder, if one is given."""
    if folder is None:
        return None
    try:
        return pack(folder)
    except (CodeError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="--code") from None


def with_code(
    document: dict[str, Any], archive: bytes | None, client: ShardloomClient
) -> dict[str, Any]:
    """The spec with the id of its code, which the service has then."""
    if archive is None:
        return document
    named: dict[str, Any] = set_values(document, {"model.code": client.upload_code(archive).id})
    return named


def read_secrets(names: Sequence[str]) -> dict[str, str]:
    """Values of secrets: from the environment, else asked for without echo."""
    return {
        name: os.environ[name]
        if name in os.environ
        else typer.prompt(name, hide_input=True, err=True)
        for name in names
    }


def plan(
    spec: SpecArgument,
    overrides: SetOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a spec with the service and show the layout that the job would have, and why."""
    document = read_spec(spec, overrides)
    with context.open_client(url) as client:
        found = client.plan(document)
    if as_json:
        print_json(found)
    else:
        console().print(plan_page(found))


def follow_job(job: JobArgument, url: UrlOption = None) -> None:
    """Follow a job until it ends; Ctrl-C detaches. The exit code mirrors the job."""
    with context.open_client(url) as client:
        found = client.get_job(job)
        with detaching(found.id, console()):
            code = follow(client, found.id, console())
    raise typer.Exit(code)


def cancel(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Stop a job; its checkpoints stay."""
    with context.open_client(url) as client:
        found = client.cancel(job)
    if as_json:
        print_json(found)
    else:
        console().print(f"{found.id} ({found.name}) is being cancelled")


def _print_submitted(job: JobDetail, *, as_json: bool) -> None:
    # Only the id goes to standard output, so that scripts can take it from there.
    if as_json:
        print_json(job)
        return
    typer.echo(job.id)
    hint = f"has ended: {job.message or job.status.value}"
    if not job.status.is_terminal:
        hint = f"is submitted; `shardloom follow {job.id}` shows it at work"
    context.error_console().print(Text(f"{job.name} {hint}", style="dim"))
