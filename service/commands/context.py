"""What every command needs: options in one wording, the output, and a client."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console

from service.client import DEFAULT_URL, RetryPolicy, ShardloomClient
from service.client_errors import ShardloomError
from service.local_state import StackHome
from trainer.spec import apply_overrides, parse_document

# A person waits for the answer, and the error says how to go on: give up within two seconds.
CLI_RETRY = RetryPolicy(num_retries=3)
_AT_ONCE = RetryPolicy(num_retries=0)
_MAX_COMPLETIONS = 50
# A table that is piped into a file must not be cut at 80 columns.
PIPED_WIDTH = 200


def job_names(incomplete: str) -> list[tuple[str, str]]:
    """(name or id, what it is) of the newest jobs that begin so, for the shell's completion.

    Empty if the service does not answer at once: somebody waits with a finger on the tab key.
    """
    try:
        with open_client(None, _AT_ONCE) as client:
            jobs = client.list_jobs(limit=_MAX_COMPLETIONS).items
    except ShardloomError:
        return []
    offered = {job.name: f"newest: {job.status.lower()}" for job in reversed(jobs)}
    if incomplete.startswith("job-"):  # else all ids would be in the way
        offered |= {job.id: f"{job.name}, {job.status.lower()}" for job in jobs}
    return [(name, hint) for name, hint in offered.items() if name.startswith(incomplete)]


JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Id, unique prefix of it, or name (the newest).",
        autocompletion=job_names,
    ),
]
SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="Job spec, YAML or JSON; - reads standard input.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a field, as in training.epochs=3; repeatable."
    ),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="SHARDLOOM_URL", help="Service to talk to (default: the local one)."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def console() -> Console:
    """Where answers go: standard output."""
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)


def error_console() -> Console:
    """Where errors and hints go: standard error."""
    width = None if sys.stderr.isatty() else PIPED_WIDTH
    return Console(stderr=True, width=width, highlight=False, markup=False, emoji=False)


def service_url(url: str | None) -> str:
    """URL to use: the one given, that of the head joined, the local stack's, the default.

    What runs comes first: both may have been left by an earlier boot.
    """
    if url:
        return url
    home = StackHome.from_environment()
    joined = home.read_joined()
    if joined is not None and joined.is_running:
        return joined.head_url
    if state := home.read_state():
        return state.url
    return joined.head_url if joined is not None else DEFAULT_URL


def open_client(url: str | None, retry: RetryPolicy = CLI_RETRY) -> ShardloomClient:
    """A client of the service that the command is about."""
    return ShardloomClient(service_url(url), retry=retry)


def print_json(value: BaseModel | Sequence[BaseModel] | dict[str, Any]) -> None:
    """Print one JSON document on standard output."""
    if isinstance(value, BaseModel):
        plain: Any = value.model_dump(mode="json")
    elif isinstance(value, dict):
        plain = value
    else:
        plain = [item.model_dump(mode="json") for item in value]
    typer.echo(json.dumps(plain, indent=2, ensure_ascii=False))


def read_spec(source: str, overrides: Sequence[str] | None) -> dict[str, Any]:
    """The spec document of a file or standard input (`-`), with overrides and an absolute path.

    Raises `SpecError`, or `typer.BadParameter` if the file cannot be read.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise typer.BadParameter(f"cannot read the spec {source!r}: {reason}") from None
    document = apply_overrides(parse_document(text), overrides or ())
    return absolute_data_path(document, Path.cwd())


def absolute_data_path(document: Any, folder: Path) -> Any:
    """The document with a relative `data.path` resolved against `folder`; URLs stay as they are.

    The service and its workers run in folders of their own.
    """
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, dict):
        return document
    path = data.get("path")
    if not isinstance(path, str) or not path or "://" in path:
        return document
    absolute = os.path.normpath(folder / Path(path).expanduser())
    return {**document, "data": {**data, "path": absolute}}
