"""Commands of sweeps: `sweep` begins a search, `sweeps` shows, cancels and forgets them."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from service.cli.common import (
    HERE,
    JOB_CANCELLED,
    JOB_FAILED,
    Client,
    JsonOption,
    SetOption,
    SpecArgument,
    console,
    error_console,
    print_answer,
    print_hint,
    print_json,
    print_line,
    read_spec,
)
from service.cli.follow import detaching
from service.cli.render import facts_grid, plain_table, toned
from service.cli.submit import (
    CodeOption,
    ForceOption,
    SecretOption,
    pack_code,
    read_secrets,
)
from service.client.client import ShardloomClient
from service.domain.sweeps import Search, SweepStatus
from service.schemas.sweeps import (
    SweepDetail,
    SweepSummary,
    TrialOut,
    parameter_of,
)
from service.schemas.wording import NOTHING, age, metric, setting, trial_state
from trainer.spec import validate_spec

_EXIT_CODES = {SweepStatus.FAILED: JOB_FAILED, SweepStatus.CANCELLED: JOB_CANCELLED}
sweeps_app = typer.Typer(no_args_is_help=True, help="Searches for settings of a spec.")
SweepArgument = Annotated[str, typer.Argument(metavar="SWEEP", help="Its id.")]


def sweep(
    spec: SpecArgument,
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            metavar="KEY=RANGE",
            help="A field to search: values as in parallelism.sync.every_steps=1,4,16, bounds as "
            "in training.epochs=1..4, or log:0.01..0.3, which compares by ratio; repeatable.",
        ),
    ],
    metric: Annotated[
        str | None,
        typer.Option(help="What decides (default: what the model watches, as validation/ne)."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="How many in all.")] = 20,
    parallel: Annotated[int, typer.Option(min=1, help="How many at a time.")] = 4,
    maximize: Annotated[
        bool | None,
        typer.Option(
            "--maximize/--minimize",
            help="Whether more of the metric is better, or less; by default more of auc and the "
            "like, what is nearest to 1 of calibration, less of others.",
        ),
    ] = None,
    search: Annotated[Search, typer.Option(help="tpe, random or grid.")] = "tpe",
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same choices.")] = 0,
    stop_early: Annotated[
        int | None,
        typer.Option(
            metavar="STEPS",
            min=1,
            help="Compare trials after so many steps, and at each threefold of that; the worse "
            "two thirds are paused (ASHA).",
        ),
    ] = None,
    overrides: SetOption = None,
    code: CodeOption = None,
    secret: SecretOption = None,
    force: ForceOption = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until the sweep ends.")] = False,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Search for settings of a spec; every trial is a job of its own.

    Checkpoints to begin from are the spec's checkpoint.warm_start.
    """
    document = read_spec(spec, overrides)
    try:
        parameters = [parameter_of(text) for text in vary]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--vary") from None
    metric = metric or f"validation/{validate_spec(document).model.watched_metric}"
    archive = pack_code(code)
    direction = None if maximize is None else "maximize" if maximize else "minimize"
    found = client.create_sweep(
        client.with_code(document, archive),
        parameters,
        metric=metric,
        direction=direction,
        search=search,
        num_trials=trials,
        num_parallel=parallel,
        seed=seed,
        early_stopping={"min_steps": stop_early} if stop_early else None,
        secrets=read_secrets(secret or []),
        force=force,
    )
    if not wait:
        hint = f"`shardloom sweeps show {found.id}` shows its trials"
        print_line(found, found.id, hint, as_json=as_json)
        return
    print_hint(f"{found.name} is submitted as {found.id}")
    found = _follow(client, found.id, is_quiet=as_json)
    if as_json:
        print_json(found)
    raise typer.Exit(_EXIT_CODES.get(found.status, 0))


def _follow(client: ShardloomClient, sweep_id: str, *, is_quiet: bool) -> SweepDetail:
    """Show the trials until the sweep has ended; Ctrl-C leaves it to itself."""
    output = error_console() if is_quiet else console()
    message = (
        f"detached; the sweep goes on: `shardloom sweeps show {sweep_id}`, and `shardloom "
        f"sweeps cancel {sweep_id}` ends it"
    )
    live = Live(console=output, auto_refresh=False, transient=is_quiet)
    with detaching(message, error_console()), live:
        for found in client.follow_sweep(sweep_id):
            if output.is_terminal or (found.status.is_terminal and not is_quiet):
                live.update(_page(found), refresh=True)
    return found


@sweeps_app.command("list")
def list_sweeps(
    limit: Annotated[int, typer.Option(min=1, help="How many of the newest.")] = 20,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """List sweeps, newest first."""
    found = list(itertools.islice(client.sweeps(), limit))
    empty = "no sweeps; `shardloom sweep SPEC --vary KEY=RANGE` begins one"
    print_answer(found, _sweeps_table(found, time.time()), as_json=as_json, empty=empty)


@sweeps_app.command()
def show(sweep: SweepArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """Show a sweep and its trials, the best ones first."""
    found = client.get_sweep(sweep)
    print_answer(found, _page(found), as_json=as_json)


@sweeps_app.command()
def best(
    sweep: SweepArgument,
    to: Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there.")] = None,
    client: Client = HERE,
) -> None:
    """Print the spec with the values of the best trial so far, as YAML."""
    found = client.get_sweep(sweep)
    if found.best_spec is None:
        raise typer.BadParameter(f"no trial of {sweep} has told {found.metric} yet")
    text = yaml.safe_dump(found.best_spec, sort_keys=False)
    if to is None:
        typer.echo(text, nl=False)
    else:
        to.write_text(text)


@sweeps_app.command()
def cancel(sweep: SweepArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """Start no more trials, and cancel the jobs of those under way."""
    found = client.cancel_sweep(sweep)
    print_line(found, f"sweep {found.id} is being cancelled", as_json=as_json)


@sweeps_app.command()
def delete(sweep: SweepArgument, client: Client = HERE) -> None:
    """Forget a sweep that has ended; the jobs of its trials stay."""
    client.delete_sweep(sweep)


def _sweeps_table(found: list[SweepSummary], now_s: float) -> Table:
    table = plain_table("Sweep", "Name", "Status", ">Trials", "Metric", "Search", "Created")
    for each in found:
        table.add_row(
            each.id,
            each.name,
            each.status,
            str(each.num_trials),
            each.metric,
            each.search,
            age(each.created_at, now_s),
        )
    return table


def _page(found: SweepDetail) -> Group:
    facts = facts_grid()
    facts.add_row("sweep", f"{found.name}  {found.id}")
    facts.add_row("status", f"{found.status} {found.message}".rstrip())
    facts.add_row(
        "search",
        f"{found.search}, {len(found.trials)} of {found.num_trials} trials, "
        f"{found.num_parallel} at a time; {found.direction} {found.metric}",
    )
    return Group(facts, Text(), _trials_table(found))


def _trials_table(found: SweepDetail) -> Table:
    """The trials, best first; those without a value come last."""
    paths = [each.path for each in found.parameters]
    shown = (path.rpartition(".")[2] for path in paths)
    table = plain_table("Trial", "Job", "Status", ">Step", f">{found.metric}", *shown)
    for trial in found.ranked:
        table.add_row(
            str(trial.number),
            trial.job_id or NOTHING,
            _status(trial),
            str(trial.step),
            metric(found.metric, trial.value),
            *(setting(trial.values.get(path)) for path in paths),
            style="bold" if trial.number == found.best else None,
        )
    return table


def _status(trial: TrialOut) -> Text:
    word, tone = trial_state(trial)
    return toned(trial.message if word == "refused" else word, tone)
