"""Dry run: the layout of a job on the cluster's hosts, why, and what the loss of a host would cost.

Pure arithmetic over the spec and what the backend knows of the cluster; the driver chooses for
good when an attempt starts. Where the hosts are not known, each independent group is taken to have
one of its own, and each job to fit on one. Sizes are in bytes, latencies in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from service.backends.base import cluster_text
from service.domain.membership import sizes_of_spec
from service.domain.timeline import counted
from service.jobs.planning import JobPlans
from service.schemas.jobs import JobPlan, LayoutOption
from service.schemas.plans import PlansOut, RecommendedLayout
from trainer.layout.choice import Choice
from trainer.layout.hosts import HostFacts, Site, choose_on, site_of
from trainer.layout.layout import LayoutError
from trainer.spec.base import FieldProblem, SpecError
from trainer.spec.job import JobSpec

_OPEN = "decided when an attempt starts, from the size of the tables and the hosts of the cluster"


def plan_of(
    spec: JobSpec, hosts: Sequence[HostFacts] = (), max_workers: int | None = None
) -> JobPlan:
    """What a dry run answers, for a spec whose table sizes are known as far as they can be.

    A cluster that grows by itself does so to room for `max_workers`.
    Raises `SpecError` where the spec does not allow the layout that would be chosen.
    """
    site = site_of(spec, hosts, max_workers)
    stated = stated_rooms(spec)
    if max_workers is None:
        _check_spares(spec, sum(map(bool, site.room)))
    choice, obstacle = _chosen(spec, site) if site.hosts else (None, "")
    is_stated = choice is None and bool(stated)
    if is_stated:
        choice, _ = _chosen(spec, replace(site, room=stated, worker_bytes=None))
    layout = choice.layout if choice else None
    resolved = spec.with_layout(layout.shard_group_size, layout.placement) if layout else spec
    sizes = sizes_of_spec(resolved)
    return JobPlan(
        spec=spec,
        **vars(sizes),
        num_replicas=sizes.num_replicas,
        sharding_groups=layout.sharding_groups if layout else (),
        replica_groups=layout.replica_groups if layout else (),
        moment_scale=resolved.moment_scale if layout else None,
        cluster=_cluster_text(spec, site.room, len(hosts)),
        obstacle=obstacle,
        reason=_reason(choice, is_stated=is_stated),
        after_loss=after_loss(choice) if choice else "",
        table_bytes=spec.table_bytes,
        num_hosts_needed=spec.parallelism.num_hosts_needed or None,
        layout=_option(choice) if choice else None,
    )


def _check_spares(spec: JobSpec, num_hosts: int) -> None:
    """Raise `SpecError` for more spares than hosts, where the cluster's are known."""
    num_spares = spec.parallelism.spares
    if 0 < num_hosts < num_spares:
        message = f"the cluster has {counted(num_hosts, 'host')} for workers; set at most that"
        raise SpecError([FieldProblem("parallelism.spares", "spares", message)])


def _chosen(spec: JobSpec, site: Site) -> tuple[Choice | None, str]:
    """The choice, or why there is none."""
    try:
        return choose_on(spec, site), ""
    except LayoutError as error:
        return None, str(error)


def _reason(choice: Choice | None, *, is_stated: bool) -> str:
    if choice is None:
        return _OPEN
    if not is_stated:
        return choice.reason
    is_group = choice.failure_domain == "replica_group"
    given = "a host for each group" if is_group else "a host with room for all"
    return f"given {given}, {choice.reason}"


def stated_rooms(spec: JobSpec) -> tuple[int, ...]:
    """Hosts that would suit the numbers that the spec gives; none while those leave it open."""
    parallelism = spec.parallelism
    if parallelism.shard_group_size == "auto":
        return ()
    if parallelism.placement == "inter_host" or parallelism.survive:
        return (parallelism.group_size,) * parallelism.num_replicas
    return (parallelism.world_size,) if parallelism.is_resolved else ()


def after_loss(choice: Choice) -> str:
    num_groups, num_lost = choice.layout.num_replicas, choice.most_groups_per_host
    if choice.failure_domain == "job":
        return "a lost host stops all workers, which restart from the newest checkpoint"
    if num_lost >= num_groups:
        return f"a lost host takes down all {num_groups} groups: they are on one host"
    lost = "one" if num_lost == 1 else f"up to {num_lost}"
    rest = "the other trains on" if num_groups - num_lost == 1 else "the others train on"
    return f"a lost host takes down {lost} of {num_groups} groups; {rest}"


def _cluster_text(spec: JobSpec, room: Sequence[int], num_there: int) -> str:
    is_own = spec.resources.cluster == "own"
    prefix = f"{cluster_text(spec)}: " if is_own else ""
    if not room:
        return f"{prefix}hosts not known"
    num_new = 0 if is_own else len(room) - num_there
    workers = " + ".join(str(number) for number in room)
    to_come = f", {num_new} of them to be added" if num_new > 0 else ""
    return f"{prefix}{len(room)} host(s) with room for {workers} worker(s){to_come}"


def _option(choice: Choice) -> LayoutOption:
    layout, overhead = choice.layout, choice.memory_overhead_bytes
    return LayoutOption(
        **vars(layout),
        num_replicas=layout.num_replicas,
        failure_domain=choice.failure_domain,
        num_hosts=choice.num_hosts,
        num_hosts_survived=choice.num_hosts_survived,
        num_hosts_per_shard=min(len(holders) for holders in choice.copies_by_host),
        memory_overhead_bytes=overhead,
        sync_bytes=None if overhead is None else 2 * overhead,
        sync_latency_s=choice.sync_latency_s,
    )


# ---- layouts side by side


def plans_view(spec: JobSpec, plans: JobPlans) -> PlansOut:
    """What a plan found, as the API answers it."""
    comparison = plans.comparison
    assert spec.table_bytes is not None, "planned with sizes that are known"
    return PlansOut(
        name=spec.name,
        table_bytes=spec.table_bytes,
        batch_size=spec.data.batch_size,
        cluster=plans.site.cluster,
        room=list(plans.site.room),
        reason=comparison.reason,
        recommended=_recommended(plans),
        candidates=list(comparison.candidates),
        changes=list(plans.changes),
        calibration=plans.calibration,
    )


def _recommended(plans: JobPlans) -> RecommendedLayout | None:
    best = plans.comparison.recommended
    if best is None:
        return None
    return RecommendedLayout(
        candidate=best.candidate,
        sharding_groups=[list(group) for group in best.choice.layout.sharding_groups],
        hosts=[list(hosts) for hosts in best.choice.group_hosts],
        tables=list(plans.group.tables) if plans.group else [],
        ranks=list(plans.ranks),
    )
