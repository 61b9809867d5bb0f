"""Commands that submit and follow a job (run, submit, plan, follow, cancel), and `spec`."""

from __future__ import annotations

import os
from collections import Counter
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
    HERE,
    Client,
    JobArgument,
    JsonOption,
    SetOption,
    SpecArgument,
    UrlOption,
    console,
    exit_code_of,
    print_answer,
    print_hint,
    print_json,
    print_line,
    read_spec,
)
from service.cli.follow import detached_message, detaching, follow
from service.cli.render import facts_grid, plain_table
from service.client.client import PLAN_LIMIT_S
from service.client.errors import InvalidRequest, ServerFault
from service.domain.timeline import counted
from service.schemas.jobs import JobDetail, JobPlan, LayoutOption
from service.schemas.plans import PlansOut, RecommendedLayout
from service.schemas.wording import (
    MAX_BARS,
    MEMORY_PARTS,
    NOTHING,
    compact,
    estimated,
    fullest,
    latency,
    ratio,
    shape_text,
    size,
    step_phases,
)
from trainer.layout.cost import GPU_NAMES, Cluster, ClusterError, MemoryUse, cluster_of
from trainer.layout.scaling import ScalingRow, scaling_of, scaling_sizes
from trainer.protocol.code_archive import CodeError, pack
from trainer.spec import json_schema, validate_spec
from trainer.spec.job import JobSpec

# More groups than these are counted rather than listed.
_MAX_GROUPS = 16
_DEFAULT_CLUSTER = "8xH100-80GB"
_BAR_WIDTH = 16
_MAX_COLUMNS = 8
_MAX_CANDIDATES = 24


SecretOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Environment variable for the job's processes, kept encrypted and never shown; its "
        "value is taken from the environment, or asked for. Repeatable.",
    ),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Also where the tables do not fit the cluster's workers.")
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
spec_app = typer.Typer(help="The job spec: its schema, and a check.", no_args_is_help=True)


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
    force: ForceOption = False,
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
        secrets = read_secrets(secret or [])
        job = client.submit(document, code=archive, secrets=secrets, force=force)
        with detaching(detached_message(job.id), console()):
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
        bool, typer.Option("--dry-run", help="Check only, and show the layout.")
    ] = False,
    force: ForceOption = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Makes repeated submits one job.")
    ] = None,
    secret: SecretOption = None,
    code: CodeOption = None,
    client: Client = HERE,
    as_json: JsonOption = False,
) -> None:
    """Submit a job and print its id."""
    document = read_spec(spec, overrides)
    if dry_run:
        found = client.plan(document)
        print_answer(found, plan_page(found), as_json=as_json)
        return
    job = client.submit(
        document,
        code=pack_code(code),
        idempotency_key=idempotency_key,
        secrets=read_secrets(secret or []),
        force=force,
    )
    if not wait:
        _print_submitted(job, as_json=as_json)
        return
    print_hint(f"{job.name} is submitted as {job.id}")
    with detaching(detached_message(job.id), common.error_console()):
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
            help="Plan for these hosts instead of the service's: GPUs of a host, their type ("
            + ", ".join(GPU_NAMES)
            + ", or CPU-8GB for workers on CPUs with so much memory), hosts, and what differs, as "
            "in '8xH100-80GB x 128, inter_host_bytes_per_s=25e9'. With --scale "
            f"{_DEFAULT_CLUSTER} by default, as many hosts as needed.",
        ),
    ] = None,
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="Longest wait for a plan.")
    ] = PLAN_LIMIT_S,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check a spec with the service; show its layout, and what others would cost and survive."""
    document = read_spec(spec, overrides)
    if scale is not None:
        _estimate(document, scale, cluster or _DEFAULT_CLUSTER, url, as_json=as_json)
        return
    with common.open_client(url) as client:
        if cluster is not None:
            plans = client.plans(document, cluster=cluster, time_limit_s=time_limit_s)
            print_answer(plans, plans_page(plans), as_json=as_json)
            return
        found = client.plan(document)
        try:
            made, lack = client.plans(document, time_limit_s=time_limit_s), ""
        except (InvalidRequest, ServerFault) as error:
            made, lack = None, str(error)
    if as_json:
        print_json({**found.model_dump(mode="json"), "plans": made})
        return
    console().print(plan_page(found))
    console().print()
    console().print(plans_page(made) if made else Text(f"not estimated: {lack}", style="dim"))


def _estimate(
    document: dict[str, Any], sizes: str, profile: str, url: str | None, *, as_json: bool
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
    try:
        cluster = cluster_of(profile)
        rows = scaling_of(spec, cluster, scaling_sizes(sizes))
    except ClusterError as error:
        raise typer.BadParameter(str(error), param_hint="--scale, --cluster") from None
    if as_json:
        print_json({"table_bytes": spec.table_bytes, "cluster": cluster, "rows": rows})
    else:
        console().print(estimate_page(spec, cluster, scaling_tables(rows, cluster.hbm_bytes)))


def follow_job(job: JobArgument, client: Client = HERE) -> None:
    """Follow a job until it ends; Ctrl-C detaches. The exit code mirrors the job."""
    found = client.get_job(job)
    with detaching(detached_message(found.id), console()):
        code = follow(client, found.id, console())
    raise typer.Exit(code)


def cancel(job: JobArgument, client: Client = HERE, as_json: JsonOption = False) -> None:
    """Stop a job; its checkpoints stay."""
    found = client.cancel(job)
    print_answer(found, f"{found.id} ({found.name}) is being cancelled", as_json=as_json)


def _print_submitted(job: JobDetail, *, as_json: bool) -> None:
    # Only the id goes to standard output, so that scripts can take it from there.
    hint = f"has ended: {job.message or job.status.value}"
    if not job.status.is_terminal:
        hint = f"is submitted; `shardloom follow {job.id}` shows what comes of it"
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
    return Group(Text(plan.spec.name, style="bold"), grid)


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
    text = _lost(layout.num_hosts_survived)
    if plan.num_hosts_needed is None:
        return text
    workers = counted(layout.shard_group_size, "worker")
    return f"{text} (asked for: at least {plan.num_hosts_needed} hosts with {workers} each)"


def _lost(num_hosts: int) -> str:
    return f"the loss of any {counted(num_hosts, 'host')}" if num_hosts else "no lost host"


def _price(layout: LayoutOption) -> str:
    if layout.memory_overhead_bytes is None or layout.sync_bytes is None:
        return "not known before the sizes of the tables are"
    takes = f" in {latency(layout.sync_latency_s)}" if layout.sync_latency_s is not None else ""
    return (
        f"{size(layout.memory_overhead_bytes)} of memory a worker for the other copies; a "
        f"full sync moves {size(layout.sync_bytes)} a worker{takes}"
    )


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
    return Group(
        Text(spec.name, style="bold"), grid, *tables, Text(), Text(estimated(), style="dim")
    )


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
        *(f">{name.capitalize()}" for name, _ in step_phases(rows[0].step)),
        *(">Imbalance", ">Memory"),
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
            *(f"{seconds / total_s:.0%}" for _, seconds in step_phases(row.step)),
            ratio(row.lookup_imbalance),
            f"{row.memory_share:.0%}, {row.mean.total_bytes / hbm_bytes:.0%}",
        )
    return table


# ---- the page of plans: layouts side by side, the recommended one sharded


def plans_page(plans: PlansOut) -> RenderableType:
    cluster, best = plans.cluster, plans.recommended
    grid = facts_grid()
    hosts = counted(len(plans.room), "host")
    each = f"{size(cluster.hbm_bytes)} a {'GPU' if cluster.device == 'cuda' else 'worker'}"
    grid.add_row("cluster", f"{cluster.name}; {hosts}, {each}")
    grid.add_row("tables", f"{size(plans.table_bytes)} a copy")
    grid.add_row("batch", f"{plans.batch_size:,} rows a rank")
    grid.add_row("recommended" if best else "nothing fits", plans.reason)
    for change in plans.changes:
        grid.add_row("would do", change.text)
    parts: list[RenderableType] = [Text(plans.name, style="bold"), grid]
    if best is not None:
        _add_recommended(grid, parts, best, cluster.hbm_bytes)
    parts += [Text(), candidates_table(plans)]
    return Group(*parts, Text(), Text(estimated(plans.calibration), style="dim"))


def _add_recommended(
    grid: Table, parts: list[RenderableType], best: RecommendedLayout, hbm_bytes: int
) -> None:
    each = best.candidate
    shares = ", ".join(f"{name} {latency(seconds)}" for name, seconds in step_phases(each.step))
    grid.add_row("step", f"{latency(each.step.total_s)}: {shares}")
    grid.add_row("imbalance", f"{ratio(each.lookup_imbalance)} of the mean lookups")
    if each.num_replicas > 1:
        overhead, latency_s = size(each.memory_overhead_bytes), latency(each.sync_latency_s)
        grid.add_row("price", f"{overhead} a worker for other copies; a full sync {latency_s}")
        copies = counted(each.num_hosts_per_shard, "host")
        grid.add_row("copies", f"{each.num_replicas} of each shard, on {copies}")
    risk = f"{compact(each.rows_at_risk)} rows at risk"
    grid.add_row("survives", f"{_lost(each.num_hosts_survived)}; {risk}")
    counts = Counter(f"{table.sharding_type}, {table.compute_kernel}" for table in best.tables)
    if counts:
        text = "; ".join(f"{counted(number, 'table')} {how}" for how, number in counts.items())
        grid.add_row("sharding", text)
    parts += [Text(), mesh_table(best)]
    if best.ranks:
        parts += [Text(), memory_table(best.ranks, hbm_bytes)]


def mesh_table(best: RecommendedLayout) -> Table:
    """The 2D grid: a row for each sharding group, a column for each shard; rank and host."""
    width = min(len(best.sharding_groups[0]), _MAX_COLUMNS)
    table = plain_table("Group", *(f"Shard {index}" for index in range(width)), "")
    for index, (group, hosts) in enumerate(zip(best.sharding_groups, best.hosts, strict=True)):
        if index == _MAX_GROUPS:
            table.add_row(f"and {len(best.sharding_groups) - index} more")
            break
        cells = [f"{rank} @{host}" for rank, host in zip(group, hosts, strict=True)][:width]
        rest = len(group) - width
        table.add_row(str(index), *cells, f"and {rest} more" if rest else "")
    return table


def memory_table(ranks: Sequence[MemoryUse], hbm_bytes: int) -> Table:
    """A bar of memory for each rank of a group, or for the fullest where there are many."""
    table = plain_table(">Rank", "", ">Memory", *(f">{name}" for name, _ in MEMORY_PARTS))
    for rank, use in fullest(ranks):
        bar = Bar(hbm_bytes, 0, min(use.needed_bytes, hbm_bytes), width=_BAR_WIDTH)
        table.add_row(
            str(rank),
            bar,
            f"{use.needed_bytes / hbm_bytes:.0%}",
            *(size(getattr(use, field)) for _, field in MEMORY_PARTS),
        )
    if len(ranks) > MAX_BARS:
        table.caption = f"the fullest {MAX_BARS} of {len(ranks)}"
    return table


def candidates_table(plans: PlansOut) -> Table:
    """One row a layout with its syncs, of those that are worth a look."""
    table = plain_table(
        *("", ">Groups", ">Of", "Placement", ">Sync every", ">Samples/s", ">Sync", ">Memory"),
        *("Failure domain", ">Survives", ">Rows at risk"),
    )
    shown = plans.shown[:_MAX_CANDIDATES]
    for each in shown:
        share = each.step.sync_s / each.step.total_s
        mark = "recommended" if each.is_recommended else "chosen" if each.is_chosen else ""
        full = " full" if each.sync_mode == "full" else ""
        table.add_row(
            Text(mark, style="green"),
            *(str(each.num_replicas), str(each.shard_group_size), _word(each.placement)),
            f"{each.sync_every_steps}{full}" if each.num_replicas > 1 else NOTHING,
            compact(each.samples_per_s) if each.fits else Text("does not fit", style="red"),
            *(f"{share:.0%}", f"{each.memory_share:.0%}", _word(each.failure_domain)),
            counted(each.num_hosts_survived, "host"),
            compact(each.rows_at_risk),
        )
    table.caption = f"{len(shown)} of {len(plans.candidates)} layouts and syncs"
    return table
