"""Commands about the course of a job: pause, resume, clone, restart, delete."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from service.api.schemas import JobDetail
from service.commands import context
from service.commands.context import JobArgument, JsonOption, SetOption, UrlOption, print_json
from service.commands.submit import SecretOption, read_secrets
from trainer.spec import parse_document


def pause(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Let a job save a checkpoint and release its workers; it keeps its place in the queue."""
    with context.open_client(url) as client:
        found = client.pause(job)
    paused = "is paused" if found.status.value == "PAUSED" else "saves a checkpoint and pauses"
    _tell(found, paused, f"`shardloom resume {found.id}` lets it go on", as_json=as_json)


def resume(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Let a paused job go on, with its old place in the queue."""
    with context.open_client(url) as client:
        found = client.resume(job)
    _tell(found, "goes on when it is its turn", "`shardloom queue` shows when", as_json=as_json)


def clone(
    job: JobArgument,
    overrides: SetOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the new job.")] = None,
    secret: SecretOption = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Makes repeated clones one job.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Submit the spec of a job again, with changes, and print the new job's id.

    Its secrets do not come along: name those that the new job needs.
    """
    changes = {}
    for each in overrides or ():
        key, separator, text = each.partition("=")
        if not separator:
            raise typer.BadParameter(f"an override reads KEY=VALUE, not {each!r}")
        changes[key] = parse_document(text)
    with context.open_client(url) as client:
        secrets = read_secrets(secret or [])
        made = client.clone(
            job, name=name, set=changes, secrets=secrets, idempotency_key=idempotency_key
        )
    if as_json:
        print_json(made)
    else:
        typer.echo(made.id)


def restart(
    job: JobArgument,
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint (default: the newest).")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Its path, as `shardloom checkpoints` prints it.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a job that has ended or is paused go on from one of its checkpoints.

    Later checkpoints count no more, and are removed once the new attempt has saved one.
    """
    with context.open_client(url) as client:
        found = client.restart(job, step=step, path=checkpoint)
    hint = f"`shardloom follow {found.id}` shows it at work"
    _tell(found, "goes on from its checkpoint", hint, as_json=as_json)


def delete(
    job: JobArgument,
    keep_files: Annotated[
        bool, typer.Option("--keep-files", help="Keep checkpoints, logs and traces.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a job that has ended, with everything it left."""
    with context.open_client(url) as client:
        found = client.get_job(job)
        if not yes:
            what = "" if keep_files else " with its checkpoints, logs and traces"
            typer.confirm(f"delete {found.id} ({found.name}){what}?", abort=True, err=True)
        deleted = client.delete(found.id, artifacts=not keep_files)
    if as_json:
        print_json({"id": found.id, "deleted": True, "left": deleted.model_dump()["left"]})
    else:
        typer.echo(f"{found.id} ({found.name}) is deleted")
        for each in deleted.left:
            typer.echo(f"its checkpoints stay at {each.path}: {each.why}", err=True)


def recover() -> None:
    """Find jobs again from run storage, after their database was lost; run it where the service is.

    It takes the SHARDLOOM_* settings of the service. A job that still trains trains on.
    """
    # It opens the database, which no other command does.
    from service.recover import main

    raise typer.Exit(main())


def _tell(job: JobDetail, what: str, hint: str, *, as_json: bool) -> None:
    if as_json:
        print_json(job)
        return
    context.console().print(f"{job.id} ({job.name}) {what}")
    context.error_console().print(Text(hint, style="dim"))
