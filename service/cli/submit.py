"""Commands that submit and follow a job (run, submit, plan, follow, cancel), and `spec`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.cli import common, stack
from service.cli.common import (
    ErrorReportingGroup,
    JobArgument,
    JsonOption,
    SetOption,
    SpecArgument,
    UrlOption,
    console,
    exit_code_of,
    print_answer,
    print_json,
    print_line,
    read_spec,
)
from service.cli.follow import detaching, follow
from service.cli.render import facts_grid, plain_table, shape_text
from service.client.client import ShardloomClient
from service.domain.timeline import counted
from service.schemas.jobs import JobDetail, JobPlan, LayoutOption
from service.schemas.wording import size
from trainer.protocol.code_archive import CodeError, pack
from trainer.spec import json_schema, validate_spec
from trainer.spec.parse import set_values

# More groups than these are counted rather than listed.
_MAX_GROUPS = 16


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
spec_app = typer.Typer(
    cls=ErrorReportingGroup, help="The job spec: its schema, and a check.", no_args_is_help=True
)


@spec_app.command()
def schema() -> None:
    """Print the JSON Schema of the spec; editors can use it."""
    print_json(json_schema())


@spec_app.command()
def check(spec: SpecArgument, overrides: SetOption = None) -> None:
    """Check a spec without a service; every fault is named by the path of its field."""
    found = validate_spec(read_spec(spec, overrides))
    console().print(f"{found.name}: the spec is valid")


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
    with common.open_client(url) as client:
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
    with common.open_client(url) as client:
        document = with_code(document, archive, client)
        job = client.submit(
            document, idempotency_key=idempotency_key, secrets=read_secrets(secret or [])
        )
        if not wait:
            _print_submitted(job, as_json=as_json)
            return
        with detaching(job.id, common.error_console()):
            job = client.wait(job.id)
    _print_submitted(job, as_json=as_json)
    raise typer.Exit(exit_code_of(job.status))


def pack_code(folder: Path | None) -> bytes | None:
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
    with common.open_client(url) as client:
        found = client.plan(document)
    print_answer(found, plan_page(found), as_json=as_json)


def follow_job(job: JobArgument, url: UrlOption = None) -> None:
    """Follow a job until it ends; Ctrl-C detaches. The exit code mirrors the job."""
    with common.open_client(url) as client:
        found = client.get_job(job)
        with detaching(found.id, console()):
            code = follow(client, found.id, console())
    raise typer.Exit(code)


def cancel(job: JobArgument, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Stop a job; its checkpoints stay."""
    with common.open_client(url) as client:
        found = client.cancel(job)
    print_answer(found, f"{found.id} ({found.name}) is being cancelled", as_json=as_json)


def _print_submitted(job: JobDetail, *, as_json: bool) -> None:
    # Only the id goes to standard output, so that scripts can take it from there.
    hint = f"has ended: {job.message or job.status.value}"
    if not job.status.is_terminal:
        hint = f"is submitted; `shardloom follow {job.id}` shows it at work"
    print_line(job, job.id, f"{job.name} {hint}", as_json=as_json)


# ---- the page of a plan: layout, its reason and price, what a loss costs


def plan_page(plan: JobPlan) -> RenderableType:
    grid = facts_grid()
    placement = f", {plan.placement}" if plan.placement else ""
    grid.add_row("layout", f"{shape_text(plan)}{placement}")
    grid.add_row("why", plan.reason)
    grid.add_row("cluster", plan.cluster)
    if plan.obstacle:
        grid.add_row("cannot start", Text(plan.obstacle, style="yellow"))
    if plan.layout is not None:
        _add_layout(grid, plan, plan.layout)
    tables = ", ".join(
        f"{table.name} [{_rows(table.num_embeddings)} x {table.embedding_dim}]"
        for table in plan.spec.embedding_tables
    )
    each = f" ({size(plan.table_bytes)} a copy)" if plan.table_bytes is not None else ""
    grid.add_row("tables", f"{tables}{each}")
    batch = plan.spec.data.batch_size
    workers = plan.layout.world_size if plan.layout else plan.world_size
    grid.add_row("batch", f"{batch:,} rows a rank, {batch * workers:,} a step")
    parts: list[RenderableType] = [Text(plan.spec.name, style="bold"), grid]
    if len(plan.options) > 1:
        parts += [Text(), options_table(plan.options)]
    return Group(*parts)


def _add_layout(grid: Table, plan: JobPlan, layout: LayoutOption) -> None:
    grid.add_row("sharding groups", _groups(plan.sharding_groups))
    grid.add_row("replica groups", _groups(plan.replica_groups))
    grid.add_row("failure domain", f"{_word(layout.failure_domain)}: {plan.after_loss}")
    grid.add_row("survives", _survives(plan, layout))
    if layout.num_replicas > 1:
        hosts = counted(layout.num_hosts_per_shard, "host")
        grid.add_row("copies", f"{layout.num_replicas} of each shard, on {hosts}")
        grid.add_row("price", _price(layout))
    if plan.moment_scale is not None:
        grid.add_row("moment scale", f"{plan.moment_scale:g}")


def _survives(plan: JobPlan, layout: LayoutOption) -> str:
    survived = layout.num_hosts_survived
    text = f"the loss of any {counted(survived, 'host')}" if survived else "no lost host"
    if plan.num_hosts_needed is None:
        return text
    workers = counted(layout.shard_group_size, "worker")
    return f"{text} (asked for: at least {plan.num_hosts_needed} hosts with {workers} each)"


def _price(layout: LayoutOption) -> str:
    if layout.memory_overhead_bytes is None or layout.sync_bytes is None:
        return "not known before the sizes of the tables are"
    latency = layout.sync_latency_s
    takes = f" in {latency:.2g} s" if latency is not None else ""
    return (
        f"{size(layout.memory_overhead_bytes)} of memory a worker for the other copies; a "
        f"full sync moves {size(layout.sync_bytes)} a worker{takes}"
    )


def options_table(options: Sequence[LayoutOption]) -> Table:
    """One row a layout that the cluster can hold; the chosen one is marked."""
    table = plain_table(
        "", ">Workers", ">Groups", ">Of", "Placement", "Failure domain", ">Survives", ">Memory"
    )
    for option in options:
        table.add_row(
            Text("chosen", style="green") if option.is_chosen else "",
            str(option.world_size),
            str(option.num_replicas),
            str(option.shard_group_size),
            _word(option.placement),
            _word(option.failure_domain),
            counted(option.num_hosts_survived, "host"),
            size(option.memory_overhead_bytes),
        )
    return table


def _word(value: str) -> str:
    return value.replace("_", " ")


def _rows(num_embeddings: int | str) -> str:
    return num_embeddings if isinstance(num_embeddings, str) else f"{num_embeddings:,}"


def _groups(groups: Sequence[Sequence[int]]) -> str:
    if len(groups) > _MAX_GROUPS:
        return f"{len(groups)} of {len(groups[0])}"
    return "  ".join(f"[{' '.join(str(rank) for rank in ranks)}]" for ranks in groups)
