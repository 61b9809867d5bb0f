"""Commands about job specs that need no service: `spec schema` and `spec check`."""

from __future__ import annotations

import typer

from service.commands.context import SetOption, SpecArgument, console, print_json, read_spec
from service.commands.failures import ErrorReportingGroup
from trainer.spec import json_schema, validate_spec

app = typer.Typer(
    cls=ErrorReportingGroup, help="The job spec: its schema, and a check.", no_args_is_help=True
)


@app.command()
def schema() -> None:
    """Print the JSON Schema of the spec; editors can use it."""
    print_json(json_schema())


@app.command()
def check(spec: SpecArgument, overrides: SetOption = None) -> None:
    """Check a spec without a service; every fault is named by the path of its field."""
    found = validate_spec(read_spec(spec, overrides))
    console().print(f"{found.name}: the spec is valid")
