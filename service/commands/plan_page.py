"""What a job would look like, in the terminal: layout, its reason and price, what a loss costs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from service.api.schemas import JobPlan, LayoutOption
from service.commands.formats import human_bytes, human_number
from service.commands.render import facts_grid, plain_table, shape_text

# More groups than these are counted rather than listed.
_MAX_GROUPS = 16


def plan_page(plan: JobPlan) -> RenderableType:
    """What `shardloom plan` prints."""
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
    size = f" ({human_bytes(plan.table_bytes)} a copy)" if plan.table_bytes is not None else ""
    grid.add_row("tables", f"{tables}{size}")
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
        hosts = _counted(layout.num_hosts_per_shard, "host")
        grid.add_row("copies", f"{layout.num_replicas} of each shard, on {hosts}")
        grid.add_row("price", _price(layout))
    if plan.moment_scale is not None:
        grid.add_row("moment scale", human_number(plan.moment_scale))


def _survives(plan: JobPlan, layout: LayoutOption) -> str:
    survived = layout.num_hosts_survived
    text = f"the loss of any {_counted(survived, 'host')}" if survived else "no lost host"
    if plan.num_hosts_needed is None:
        return text
    workers = _counted(layout.shard_group_size, "worker")
    return f"{text} (asked for: at least {plan.num_hosts_needed} hosts with {workers} each)"


def _price(layout: LayoutOption) -> str:
    if layout.memory_overhead_bytes is None or layout.sync_bytes is None:
        return "not known before the sizes of the tables are"
    latency = layout.sync_latency_s
    takes = f" in {latency:.2g} s" if latency is not None else ""
    return (
        f"{human_bytes(layout.memory_overhead_bytes)} of memory a worker for the other copies; a "
        f"full sync moves {human_bytes(layout.sync_bytes)} a worker{takes}"
    )


def options_table(options: Sequence[LayoutOption]) -> Table:
    """One row a layout that the cluster can hold; the chosen one is marked."""
    table = plain_table(
        "", ">Workers", ">Groups", ">Of", "Placement", "Failure domain", ">Survives", ">Memory"
    )
    for option in options:
        overhead = option.memory_overhead_bytes
        table.add_row(
            Text("chosen", style="green") if option.is_chosen else "",
            str(option.world_size),
            str(option.num_replicas),
            str(option.shard_group_size),
            _word(option.placement),
            _word(option.failure_domain),
            _counted(option.num_hosts_survived, "host"),
            "" if overhead is None else human_bytes(overhead),
        )
    return table


def _word(value: str) -> str:
    return value.replace("_", " ")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _rows(num_embeddings: int | str) -> str:
    return num_embeddings if isinstance(num_embeddings, str) else f"{num_embeddings:,}"


def _groups(groups: Sequence[Sequence[int]]) -> str:
    if len(groups) > _MAX_GROUPS:
        return f"{len(groups)} of {len(groups[0])}"
    return "  ".join(f"[{' '.join(str(rank) for rank in ranks)}]" for ranks in groups)
