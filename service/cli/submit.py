"""Commands that submit and follow a job (run, submit, plan, follow, cancel), and `spec`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.bar import Bar
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
from service.schemas.wording import NOTHING, compact, latency, ratio, size
from trainer.layout.cost import GPU_NAMES, Cluster, ClusterError, cluster_of
from trainer.layout.layout import LayoutError
from trainer.layout.scaling import (
    Candidate,
    ScalingRow,
    candidates_of,
    scaling_of,
    scaling_sizes,
)
from trainer.protocol.code_archive import CodeError, pack
from trainer.spec import json_schema, validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.parse import set_values

# More groups than these are counted rather than listed.
_MAX_GROUPS = 16
_DEFAULT_CLUSTER = "8xH100-80GB"
_BAR_WIDTH = 16


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
        plan(spec, overrides, url=url, as_json=as_json)
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
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST..LAST",
            help="Estimate speed and memory on so many GPUs, doubling, as in 256..4096.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="Estimate on these hosts, alone to compare layouts: GPUs of a host, their type ("
            + ", ".join(GPU_NAMES)
            + "), hosts, and what differs, as in '8xH100-80GB x 128, inter_host_bytes_per_s=25e9'. "
            f"With --scale {_DEFAULT_CLUSTER} by default, as many hosts as needed.",
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a spec with the service and show the layout that the job would have, and why."""
    document = read_spec(spec, overrides)
    if scale is not None or cluster is not None:
        _estimate(document, scale, cluster or _DEFAULT_CLUSTER, url, as_json=as_json)
        return
    with common.open_client(url) as client:
        found = client.plan(document)
    print_answer(found, plan_page(found), as_json=as_json)


def _estimate(
    document: dict[str, Any], sizes: str | None, profile: str, url: str | None, *, as_json: bool
) -> None:
    """Estimate here; the service is asked only for table sizes that the spec leaves to the data."""
    spec = validate_spec(document)
    if spec.table_bytes is None:
        with common.open_client(url) as client:
            spec = client.plan(document).spec
    if spec.table_bytes is None:
        raise typer.BadParameter(
            "tables have no sizes yet: give each its num_embeddings, or prepare the data",
            param_hint="SPEC",
        )
    answer: dict[str, Any] = {"table_bytes": spec.table_bytes}
    try:
        cluster = answer["cluster"] = cluster_of(profile)
        if sizes is not None:
            answer["rows"] = scaling_of(spec, cluster, scaling_sizes(sizes))
            tables = scaling_tables(answer["rows"], cluster.hbm_bytes)
        else:
            answer["reason"], answer["candidates"] = candidates_of(spec, cluster)
            tables = candidate_tables(answer["reason"], answer["candidates"])
    except (ClusterError, LayoutError) as error:
        raise typer.BadParameter(str(error), param_hint="--scale, --cluster") from None
    if as_json:
        print_json(answer)
    else:
        console().print(estimate_page(spec, cluster, tables))


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


# ---- the pages of estimates: sizes of a job, and its layouts, side by side


def estimate_page(
    spec: JobSpec, cluster: Cluster, tables: Sequence[RenderableType]
) -> RenderableType:
    grid = facts_grid()
    grid.add_row("cluster", f"{cluster.name}, {size(cluster.hbm_bytes)} a GPU")
    grid.add_row("tables", f"{size(spec.table_bytes)} a copy")
    grid.add_row("batch", f"{spec.data.batch_size:,} rows a rank")
    note = (
        "Estimated from the spec; nothing was measured. Launches and latencies are left out, so "
        "steps of few milliseconds look too short."
    )
    return Group(Text(spec.name, style="bold"), grid, *tables, Text(), Text(note, style="dim"))


def scaling_tables(rows: Sequence[ScalingRow], hbm_bytes: int) -> list[RenderableType]:
    """Sizes with one copy, then those with groups."""
    parts: list[RenderableType] = []
    most = max((row.samples_per_s or 0.0 for row in rows), default=0.0)
    for title, of_kind in (
        ("one copy (full model parallelism)", [row for row in rows if row.num_replicas == 1]),
        ("sharding groups (2D)", [row for row in rows if row.num_replicas > 1]),
    ):
        if of_kind:
            table = scaling_table(of_kind, most, hbm_bytes)
            parts += [Text(), Text(title, style="bold"), table]
    return parts


def scaling_table(rows: Sequence[ScalingRow], most_per_s: float, hbm_bytes: int) -> Table:
    """One row a size; bars are samples/s of `most_per_s`."""
    table = plain_table(
        *(">GPUs", ">Groups", ">Of", ">Samples/s", "", ">Scaling", ">Step"),
        *(">Input dist", ">Lookup", ">Output dist", ">Dense", ">Sync", ">Imbalance", ">Memory"),
    )
    for row in rows:
        speed: list[RenderableType] = [Text("out of memory", style="red"), "", NOTHING]
        if row.samples_per_s is not None:
            bar = Bar(most_per_s, 0, row.samples_per_s, width=_BAR_WIDTH)
            speed = [compact(row.samples_per_s), bar, ratio(row.scaling_factor)]
        total_s = row.step.total_s
        table.add_row(
            *(str(row.world_size), str(row.num_replicas), str(row.shard_group_size)),
            *speed,
            latency(total_s),
            *(f"{seconds / total_s:.0%}" for seconds in vars(row.step).values()),
            ratio(row.lookup_imbalance),
            f"{row.memory_share:.0%}, {row.mean.total_bytes / hbm_bytes:.0%}",
        )
    return table


def candidate_tables(reason: str, candidates: Sequence[Candidate]) -> list[RenderableType]:
    """The front of speed, memory and survivability, and what the spec and `auto` take."""
    table = plain_table(
        *("", ">Groups", ">Of", "Placement", ">Sync every", ">Samples/s", ">Sync", ">Memory"),
        *("Failure domain", ">Survives", ">Rows at risk"),
    )
    shown = [each for each in candidates if each.is_on_front or each.is_chosen]
    for each in shown:
        share = each.step.sync_s / each.step.total_s
        table.add_row(
            Text("chosen", style="green") if each.is_chosen else "",
            *(str(each.num_replicas), str(each.shard_group_size), _word(each.placement)),
            str(each.sync_every_steps) if each.num_replicas > 1 else NOTHING,
            compact(each.samples_per_s) if each.fits else Text("out of memory", style="red"),
            *(f"{share:.0%}", f"{each.memory_share:.0%}", _word(each.failure_domain)),
            counted(each.num_hosts_survived, "host"),
            compact(each.rows_at_risk),
        )
    rest = f"{len(shown)} of {len(candidates)} layouts and sync intervals: those that no other "
    rest += "beats in speed, memory and what survives at once."
    return [Text(), Text(f"chosen: {reason}"), Text(), table, Text(), Text(rest, style="dim")]
