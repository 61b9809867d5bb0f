"""What every command shares: options, exit codes, error reports, a client, JSON, times and curves.

Exit codes are told in docs/reference/cli.md. Detaching has one of its own, so that a script never
takes an unfinished job for a success.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic_core import to_jsonable_python
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from service.client import errors
from service.client.client import ShardloomClient, absolute_data_path
from service.client.transport import RetryPolicy
from service.domain.models import JobStatus
from service.local.state import StackError
from shardloom import usual_url
from trainer.spec.base import FieldProblem, SpecError
from trainer.spec.parse import apply_overrides, parse_document

JOB_FAILED = 1
REFUSED = 2
UNAVAILABLE = 3
DETACHED = 4
JOB_CANCELLED = 130
_BY_STATUS = {
    JobStatus.SUCCEEDED: 0,
    JobStatus.FAILED: JOB_FAILED,
    JobStatus.CANCELLED: JOB_CANCELLED,
}
_REFUSALS = (SpecError, errors.ExportFailed, errors.TraceLost, errors.CredentialsUnusable)
# Extras of packages that commands import; of all others `service`.
_EXTRAS = {"numpy": "data", "polars": "data", "pyarrow": "data", "torch": "service,trainer-cpu"}
# What to do about what is not found, by the code of the problem, which names a request.
_COMMANDS = {
    "job_not_found": "`shardloom ps --all` lists the jobs",
    "project_not_found": "`shardloom projects set` sets some",
    "sweep_not_found": "`shardloom sweeps list` lists the sweeps",
    "webhook_not_found": "`shardloom webhooks list` lists the webhooks",
}
# A person waits for the answer, and the error says how to go on: give up within two seconds.
_RETRY = RetryPolicy(num_retries=3)
_AT_ONCE: dict[str, Any] = {"retry": RetryPolicy(num_retries=0), "timeout_s": 1.0}
_MAX_COMPLETIONS = 50
# A table that is piped into a file must not be cut at 80 columns.
PIPED_WIDTH = 200


def job_names(incomplete: str) -> list[tuple[str, str]]:
    """(name or id, what it is) of the newest jobs that begin so, for the shell's completion.

    Empty if the service does not answer at once: completion must not block the shell.
    """
    try:
        with open_client(None, **_AT_ONCE) as client:
            jobs = client.list_jobs(limit=_MAX_COMPLETIONS).items
    except (errors.ShardloomError, StackError):
        return []
    offered = {job.name: f"newest: {job.status.lower()}" for job in reversed(jobs)}
    if incomplete.startswith("job-"):  # else all ids would be in the way
        offered |= {job.id: f"{job.name}, {job.status.lower()}" for job in jobs}
    return [(name, hint) for name, hint in offered.items() if name.startswith(incomplete)]


JOB: Any = typer.Argument(
    metavar="JOB", help="Id, unique prefix of it, or name (the newest).", autocompletion=job_names
)
JobArgument = Annotated[str, JOB]
SpecArgument = Annotated[
    str, typer.Argument(metavar="SPEC", help="Job spec, YAML or JSON; - reads standard input.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a field, as in training.epochs=3 or parallelism.sync=null; repeatable.",
    ),
]
_URL: dict[str, Any] = {
    "envvar": "SHARDLOOM_URL",
    "help": "Service to talk to (default: the local one).",
}
UrlOption = Annotated[str | None, typer.Option("--url", **_URL)]


def _connect(context: typer.Context, url: str | None) -> ShardloomClient:
    """A client of the service at a URL, which is closed when the command ends."""
    return context.with_resource(open_client(url))


Client = Annotated[
    ShardloomClient, typer.Option("--url", **_URL, metavar="<str>", parser=str, callback=_connect)
]
# The default of an option that is a client.
HERE: Any = None
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")]


# Controls of terminals, but for line feeds and tabs, and what reverses the order of letters.
_HIDDEN = (*range(32), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SHOWN = {
    code: 0x2400 + code if code < 32 else "\N{REPLACEMENT CHARACTER}"
    for code in _HIDDEN
    if chr(code) not in "\n\t"
}


class _PlainConsole(Console):
    """Shows control characters in texts, which jobs write, and lets none steer the terminal."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """The segments of what is printed; styles and cursor movements are Rich's own."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(text.translate(_SHOWN), style)


def console(*, stderr: bool = False) -> Console:
    """Where answers go: standard output."""
    stream = sys.stderr if stderr else sys.stdout  # None where it is closed
    width = None if stream and stream.isatty() else PIPED_WIDTH
    return _PlainConsole(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def error_console() -> Console:
    """Where errors and hints go: standard error."""
    return console(stderr=True)


def service_url(url: str | None) -> str:
    """URL to use: the one given, else the SDK's."""
    return url or usual_url()


def open_client(url: str | None, **options: Any) -> ShardloomClient:
    return ShardloomClient(service_url(url), **{"retry": _RETRY, **options})


def print_json(value: object) -> None:
    """Print one JSON document on standard output, with models at any depth; NaN is null there."""
    document = to_jsonable_python(value, inf_nan_mode="null")
    encoding = getattr(sys.stdout, "encoding", None) or ""
    shows_all = encoding.lower().startswith("utf")
    typer.echo(json.dumps(document, indent=2, ensure_ascii=not shows_all))


def print_answer(value: object, page: RenderableType, *, as_json: bool, empty: str = "") -> None:
    """Print an answer as JSON or as a page; a sequence without items as the sentence `empty`."""
    if as_json:
        print_json(value)
    elif empty and not value:
        console().print(empty)
    else:
        console().print(page)


def print_line(value: object, line: str, hint: str = "", *, as_json: bool) -> None:
    """Print an answer as JSON, or a line that scripts can take and a hint on standard error."""
    if as_json:
        print_json(value)
        return
    typer.echo(line)
    if hint:
        print_hint(hint)


def print_hint(text: str) -> None:
    """Print a hint on standard error, out of the way of scripts."""
    print_dim(text, error_console())


def print_dim(text: str, output: Console | None = None) -> None:
    """Print what is less prominent than an answer."""
    (output or console()).print(Text(text, style="dim"))


def read_spec(source: str, overrides: Sequence[str] | None) -> dict[str, Any]:
    """The spec document of a file or standard input (`-`), with overrides and an absolute path.

    Raises `SpecError`, or `typer.BadParameter` if the file cannot be read.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise typer.BadParameter(f"cannot read the spec {source!r}: {reason}") from None
    document = parse_document(text)
    if not isinstance(document, dict):
        what = "is empty" if document is None else "is no mapping of fields"
        message = f"{what}; one begins as in `name: my-job`"
        raise SpecError([FieldProblem("spec", "type", message)])
    changed: dict[str, Any] = absolute_data_path(apply_overrides(document, overrides or ()))
    return changed


def exit_code_of(status: JobStatus) -> int:
    """Exit code that mirrors a job; one that has not ended counts as detached."""
    return _BY_STATUS.get(status, DETACHED)


class ErrorReportingGroup(TyperGroup):
    """A group of commands that turns our exceptions into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; raises `typer.Exit` where it failed in a way that we know."""
        try:
            return super().invoke(ctx)
        except (errors.ShardloomError, SpecError, StackError) as error:
            error_console().print(describe(error))
            is_refused = isinstance(error, _REFUSALS) or (
                isinstance(error, errors.ProblemError) and error.status < 500
            )
            raise typer.Exit(REFUSED if is_refused else UNAVAILABLE) from error
        except typer.Abort as error:
            print_hint("aborted")
            raise typer.Exit(JOB_CANCELLED) from error
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if package in ("service", "trainer"):
                raise
            hint = f"pip install 'shardloom[{_EXTRAS.get(package, 'service')}]'"
            error_console().print(_message(f"{package} is needed and not installed here", hint))
            raise typer.Exit(UNAVAILABLE) from error
        except OSError as error:
            if isinstance(error, ConnectionError):  # of a reader of our output that has gone
                raise
            # What fails as it is written, as where a disk is full, has no name.
            told = (error.filename, error.strerror or str(error))
            error_console().print(_message(": ".join(str(each) for each in told if each)))
            raise typer.Exit(REFUSED) from error


def describe(error: Exception) -> RenderableType:
    """The message of an error, with what to do about it."""
    if isinstance(error, SpecError):
        return _faults("the spec", error.problems)
    if isinstance(error, errors.InvalidRequest) and error.fields:
        what = "the spec" if error.code == "invalid_spec" else "the request"
        return _faults(what, error.fields)
    if isinstance(error, errors.ServiceUnreachable) and error.is_distrusted:
        hint = (
            "use the name that the certificate is for, or name those (PEM) by which to check it "
            "with SHARDLOOM_CA_FILE"
        )
        return _message(str(error), hint)
    if isinstance(error, errors.ServiceUnreachable):
        return _message(
            str(error),
            "start one on this machine with `shardloom up`, or name another with --url "
            "or SHARDLOOM_URL",
        )
    if isinstance(error, errors.NotSignedIn):
        hint = (
            "`shardloom login` keeps an API key for it; for your own one name its SHARDLOOM_HOME, "
            "or its URL as `shardloom status` prints it"
        )
        return _message(str(error), hint)
    if isinstance(error, errors.NotFound) and error.code in _COMMANDS:
        return _message(str(error).partition(";")[0], _COMMANDS[error.code])
    return _message(str(error))


def _message(text: str, hint: str = "") -> RenderableType:
    line = Text.assemble(("error  ", "bold red"), text)
    return Group(line, Text(f"       {hint}", style="dim")) if hint else line


def _faults(what: str, faults: Sequence[FieldProblem]) -> RenderableType:
    number = "one fault" if len(faults) == 1 else f"{len(faults)} faults"
    table = Table.grid(padding=(0, 2))
    for fault in faults:
        table.add_row("     ", Text(fault.path, style="bold"), Text(fault.message))
    return Group(_message(f"{what} has {number}:"), table)


# ---- times and curves for people

BLOCKS = "▁▂▃▄▅▆▇█"


def clock(time_s: float) -> str:
    """Local time of day of a Unix time, as in `14:03:59`."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A curve of block characters; at most `width` of them, each the mean of its share of values.

    Values that are not finite leave a gap.
    """
    num_buckets = min(width, len(values))
    edges = [index * len(values) // max(1, num_buckets) for index in range(num_buckets + 1)]
    buckets = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    finite = [value for value in buckets if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        if span == 0:
            return BLOCKS[len(BLOCKS) // 2]
        return BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))]

    return "".join(block(value) for value in buckets)
