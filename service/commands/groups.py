"""The groups of a job in the terminal: who trains, copies alive, recoveries, time lost."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from service.api.schemas import (
    GoneGroupOut,
    JobDetail,
    JobSummary,
    MemberOut,
    MembershipOut,
    TimelineEventOut,
)
from service.commands.formats import human_age, human_bytes, human_count, human_duration
from service.domain import JobStatus
from service.goodput import goodput_of, steps_at_risk
from service.resizing import newest_wish

Fact = tuple[str, Text | str]

_DOMAINS = {
    "replica_group": "a lost host takes down its groups; the others train on",
    "job": "a lost worker restarts all of them from the newest checkpoint",
}
_STANDING_STYLES = {"current": "green", "listening": "cyan", "initial": "dim"}
_STANDING_WORDS = {"current": "trains", "listening": "copies from a peer", "initial": "starts"}


def groups_text(job: JobSummary) -> str:
    """How many groups train, as in `2 of 3 groups`; empty while all do or nothing is known."""
    current, wanted = job.num_current_groups, job.num_wanted_groups
    if current is None or wanted is None or current >= wanted:
        return ""
    return f"{current} of {wanted} groups"


def groups_facts(job: JobDetail, timeline: Sequence[TimelineEventOut], now_s: float) -> list[Fact]:
    """(subject, text) about groups and lost time, in reading order, as far as known."""
    facts: list[Fact] = []
    membership = job.membership
    if membership is not None:
        facts += _membership_facts(job, membership, now_s)
    wish = newest_wish(timeline)
    if wish.id and not job.status.is_terminal:
        parts = [f"{wish.num_workers} workers"] if wish.num_workers else []
        parts += [f"without {host}" for host in wish.drain_hosts]
        if parts:
            facts.append(("wanted", ", ".join(parts)))
    return facts + _time_facts(job)


def _membership_facts(job: JobDetail, membership: MembershipOut, now_s: float) -> list[Fact]:
    facts: list[Fact] = []
    layout = membership.layout
    if layout is not None:
        facts.append(("domain", f"{layout.failure_domain}: {_DOMAINS[layout.failure_domain]}"))
        facts.append(("chosen", _layout_text(membership)))
    if membership.changed_at and job.status is JobStatus.RUNNING:
        facts.append(("groups", _counts_text(membership)))
        facts.append(("copies", _copies_text(membership)))
    if membership.last_recovery is not None:
        facts.append(("recovered", _recovery_text(membership, now_s)))
    excluded = [host for host in membership.excluded_hosts if host.until > now_s]
    if excluded and not job.status.is_terminal:
        named = (f"{host.host} (for {human_duration(host.until - now_s)})" for host in excluded)
        facts.append(("left out", Text(", ".join(named), style="yellow")))
    return facts


def _layout_text(membership: MembershipOut) -> str:
    layout = membership.layout
    assert layout is not None
    price = f"{human_bytes(layout.memory_overhead_bytes)} more memory a worker"
    if layout.sync_latency_s is not None:
        price += f", {layout.sync_latency_s * 1000:.3g} ms a full sync"
    return f"{layout.reason} ({price})"


def _counts_text(membership: MembershipOut) -> Text:
    is_whole = membership.num_current >= membership.num_wanted
    counts = f"{membership.num_current} of {membership.num_wanted} train"
    rest = f", generation {membership.generation}, commit {membership.commit:,}"
    return Text.assemble((counts, "green" if is_whole else "yellow"), rest)


def _copies_text(membership: MembershipOut) -> Text:
    copies, hosts = membership.copies_alive, membership.host_copies_alive
    text = (
        f"{copies} {'copy' if copies == 1 else 'copies'} of each shard on "
        f"{hosts} {'host' if hosts == 1 else 'hosts'}"
    )
    needed = membership.host_copies_needed
    if not needed:
        return Text(text)
    if hosts >= needed:
        return Text(f"{text}; the loss of {needed - 1} more is survived", style="green")
    return Text(f"{text}; survive needs {needed}", style="yellow")


def _recovery_text(membership: MembershipOut, now_s: float) -> str:
    recovery = membership.last_recovery
    assert recovery is not None
    redo = f"{recovery.syncs_lost} sync interval(s) to redo"
    losses = membership.num_losses
    so_far = f"; {losses} {'group' if losses == 1 else 'groups'} lost so far" if losses else ""
    return (
        f"{human_age(recovery.time, now_s)}, after a pause of {recovery.pause_s:.2f} s, "
        f"{redo if recovery.syncs_lost else 'nothing to redo'}{so_far}"
    )


def _time_facts(job: JobDetail) -> list[Fact]:
    facts: list[Fact] = []
    steps = steps_at_risk(job.latest_metrics)
    if steps is not None and not job.status.is_terminal:
        rows = steps * job.world_size * job.spec.data.batch_size
        facts.append(
            ("at risk", f"{steps:,} steps ({human_count(rows)} rows) since the newest checkpoint")
        )
    goodput = goodput_of(job.latest_metrics)
    if goodput is not None:
        lost = ", ".join(f"{cause} {share:.1%}" for cause, share in goodput.lost_shares)
        facts.append(("goodput", f"{goodput.share:.1%}" + (f"; lost: {lost}" if lost else "")))
    return facts


def groups_table(membership: MembershipOut, now_s: float) -> Table:
    """One row a group, those that are awaited included."""
    table = Table(box=None, header_style="dim", padding=(0, 3, 0, 0), pad_edge=False)
    for heading in ("Group", "Standing", "Life", "Hosts"):
        table.add_column(heading)
    groups: list[MemberOut | GoneGroupOut] = [*membership.members, *membership.missing]
    for group in sorted(groups, key=lambda each: each.group):
        hosts = ", ".join(dict.fromkeys(group.hosts))
        table.add_row(str(group.group), _standing(group, now_s), str(group.incarnation), hosts)
    return table


def _standing(group: MemberOut | GoneGroupOut, now_s: float) -> Text:
    if isinstance(group, MemberOut):
        word = _STANDING_WORDS.get(group.standing, group.standing)
        return Text(word, style=_STANDING_STYLES.get(group.standing, ""))
    reason = group.reason.replace("_", " ")
    return Text(f"gone {human_age(group.time, now_s)} ({reason})", style="yellow")
