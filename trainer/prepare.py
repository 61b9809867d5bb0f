"""From the spec as it was submitted to what an attempt trains: table sizes, layout, room for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trainer import events, failures
from trainer.attempt import PAUSED_EARLY, DriverContext
from trainer.autoscale import Need, Wish
from trainer.cluster import Host
from trainer.data.inputs import resolve_inputs
from trainer.failures import Failure
from trainer.parallel.layout import LayoutError
from trainer.parallel.layout_choice import Choice, choose, need_of
from trainer.room import Room
from trainer.spec import JobSpec, load_spec

_POLL_S = 1.0


def prepare_spec(context: DriverContext, warn: Callable[[str], None]) -> JobSpec:
    """The attempt's spec with table sizes taken from the data; raises SpecError or DataError.

    `warn` is told what the data lacks, though the attempt can do without.
    """
    spec = load_spec(context.files.spec_path.read_text())
    return resolve_inputs(spec, warn)


class NoLayout(Exception):
    """No layout that the job asks for can be had; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def choose_layout(
    spec: JobSpec,
    read_hosts: Callable[[], Sequence[Host]],
    tell: Callable[[str], None],
    wait: Callable[[float], None] = time.sleep,
) -> Choice | None:
    """The layout for the hosts that there are; None where it is given and waits for room itself.

    A layout that only lacks room is waited for (`tell` says so once) as long as groups wait for
    each other at the start. Raises `NoLayout`.
    """
    needs_choice = not spec.parallelism.is_resolved or spec.parallelism.survive is not None
    grace_s = spec.recovery.start_grace_s
    waited_s = 0.0
    while True:
        hosts = read_hosts()
        try:
            return choose_on(spec, hosts)
        except LayoutError as error:
            if not needs_choice:
                return None
            reason = failures.NO_ROOM if is_possible(spec, hosts) else failures.BAD_SPEC
            if reason == failures.BAD_SPEC or waited_s >= grace_s:
                raise NoLayout(Failure(reason, str(error))) from None
            if not waited_s:
                tell(f"{error}; waiting up to {grace_s:.0f} s for more")
        wait(_POLL_S)
        waited_s += _POLL_S


def await_host(
    spec: JobSpec, context: DriverContext, room: Room, wait: Callable[[float], None] = time.sleep
) -> None:
    """Wait until there is a host for a worker, where layout or device depend on the hosts.

    The autoscaler is asked for one; those that follow are taken to be like it. Raises `NoLayout`
    where the job is to pause first.
    """
    parallelism = spec.parallelism
    is_layout_given = parallelism.is_resolved and parallelism.survive is None
    if is_layout_given and spec.resources.device != "auto":
        return
    while not any(host.num_slots for host in room.read_hosts()):
        room.seek(Need(0, 1, 1, (Wish(1),)), room.read_free_hosts())
        if context.is_pause_wanted:
            raise NoLayout(PAUSED_EARLY)
        wait(_POLL_S)


def choose_on(spec: JobSpec, hosts: Sequence[Host]) -> Choice:
    """The best layout on these hosts, were they empty; raises `LayoutError`."""
    usable = [host for host in hosts if host.num_slots and not host.is_draining]
    return choose(need_of(spec, [host.num_slots for host in usable], _worker_bytes(spec, usable)))


def _worker_bytes(spec: JobSpec, hosts: Sequence[Host]) -> int | None:
    """Memory of the poorest worker, where tables are kept in the memory of hosts."""
    if spec.resources.device == "cuda":
        return None
    most = spec.parallelism.world_size
    shares = [host.memory_bytes // min(host.num_slots, most) for host in hosts if host.memory_bytes]
    return min(shares, default=None)


def is_possible(spec: JobSpec, hosts: Sequence[Host]) -> bool:
    """Whether more hosts would help, each as large as the largest of these or the whole job."""
    survived = spec.parallelism.survive.hosts if spec.parallelism.survive else 0
    num_workers = spec.parallelism.world_size
    roomy = [num_workers] * (survived + num_workers)
    usable = [host for host in hosts if host.num_slots]
    try:
        choose(need_of(spec, roomy, _worker_bytes(spec, usable)))
    except LayoutError:
        return False
    return True


def layout_chosen(choice: Choice) -> events.LayoutChosen:
    """The event of a choice."""
    layout = choice.layout
    return events.LayoutChosen(
        time=time.time(),
        world_size=layout.world_size,
        shard_group_size=layout.shard_group_size,
        num_replicas=layout.num_replicas,
        placement=layout.placement,
        failure_domain=choice.failure_domain,
        num_hosts=choice.num_hosts,
        num_hosts_survived=choice.num_hosts_survived,
        memory_overhead_bytes=choice.memory_overhead_bytes or 0,
        sync_latency_s=choice.sync_latency_s,
        reason=choice.reason,
    )
