"""How errors read on the command line, and the exit code of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from service.client_errors import (
    CredentialsUnusable,
    ExportFailed,
    InvalidRequest,
    NotFound,
    NotSignedIn,
    ProblemError,
    ServiceUnreachable,
    ShardloomError,
    TraceLost,
)
from service.commands.context import error_console
from service.commands.exits import REFUSED, UNAVAILABLE
from service.local_state import StackError
from trainer.spec import SpecError


class Fault(Protocol):
    """A faulty field: where it is and what is wrong."""

    @property
    def path(self) -> str:
        """Path of the field in the spec."""

    @property
    def message(self) -> str:
        """What is wrong with it."""


class ErrorReportingGroup(TyperGroup):
    """A group of commands that turns our exceptions into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raises `typer.Exit` where it failed in a way that we know."""
        try:
            return super().invoke(ctx)
        except (ShardloomError, SpecError, StackError) as error:
            error_console().print(describe(error))
            raise typer.Exit(exit_code_of_error(error)) from error


def exit_code_of_error(error: Exception) -> int:
    """2 where the request was refused, 3 where there is nobody to answer it."""
    refused = isinstance(error, SpecError | ExportFailed | TraceLost | CredentialsUnusable) or (
        isinstance(error, ProblemError) and error.status < 500
    )
    return REFUSED if refused else UNAVAILABLE


def describe(error: Exception) -> RenderableType:
    """The message of an error, with what to do about it."""
    if isinstance(error, SpecError):
        return _faults("the spec", error.problems)
    if isinstance(error, InvalidRequest) and error.fields:
        what = "the spec" if error.code == "invalid_spec" else "the request"
        return _faults(what, error.fields)
    if isinstance(error, ServiceUnreachable):
        return _message(
            str(error),
            "start one on this machine with `shardloom up`, or name another with --url "
            "or SHARDLOOM_URL",
        )
    if isinstance(error, NotSignedIn):
        return _message(str(error), "`shardloom login` keeps an API key for this service")
    if isinstance(error, NotFound) and error.code == "job_not_found":
        return _message(str(error), "`shardloom ps --all` lists the jobs")
    return _message(str(error))


def _message(text: str, hint: str = "") -> RenderableType:
    line = Text.assemble(("error  ", "bold red"), text)
    return Group(line, Text(f"       {hint}", style="dim")) if hint else line


def _faults(what: str, faults: Sequence[Fault]) -> RenderableType:
    number = "one fault" if len(faults) == 1 else f"{len(faults)} faults"
    table = Table.grid(padding=(0, 2))
    for fault in faults:
        table.add_row("     ", Text(fault.path, style="bold"), Text(fault.message))
    return Group(_message(f"{what} has {number}:"), table)
