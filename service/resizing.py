"""Another size of a running job, or hosts that it should leave: asked for by people.

What is wanted is told in the timeline, where the newest line holds all of it: the number of
workers and every host to leave. A file of the attempt says the same to its driver, and a new
attempt is given it again. To ask twice for the same thing changes nothing.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from service.domain import Job, JobStatus, TimelineEvent
from service.errors import StorageUnavailable
from service.job_errors import HostUnknown, JobNotRunning, LayoutUnknown, SizeRefused, StaleVersion
from service.membership import copies_needed, layout_of_attempt
from service.sharding import STARTED, Line, newest_workers
from service.store.base import JobStore
from trainer.run_dir import RunDir

RESIZE, DRAIN = "resize_requested", "drain_requested"
WISH_KINDS = (RESIZE, DRAIN)
_MAX_TRIES = 5
_PAGE = 1000


@dataclass(frozen=True)
class Wish:
    """What is wanted of the workers; `num_workers` is None while nobody asked for a size."""

    id: str = ""
    num_workers: int | None = None
    drain_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """A wish as a request leaves it, and the line that tells of it."""

    wish: Wish
    kind: str
    message: str


def request_resize(
    store: JobStore, run_dir: RunDir, job_id: str, num_workers: int, actor: str = "user"
) -> Wish:
    """Ask a running job for another number of workers.

    Raises `JobNotFound`, `SizeRefused`, and as conflicts `JobNotRunning` and `LayoutUnknown`;
    `StaleVersion` only if others kept writing the job meanwhile, and `StorageUnavailable`.
    """

    def change(job: Job, known: Wish) -> Change:
        check_size(job, num_workers)
        wish = replace(known, num_workers=num_workers)
        return Change(wish, RESIZE, f"resize to {num_workers} workers requested")

    return _ask(store, run_dir, job_id, change, actor)


def request_drain(
    store: JobStore,
    run_dir: RunDir,
    job_id: str,
    host: str,
    *,
    undo: bool = False,
    actor: str = "user",
) -> Wish:
    """Ask a running job to leave a host, or with `undo` to use it again.

    Raises as `request_resize`, with `HostUnknown` for a host that has none of the job's workers.
    """

    def change(job: Job, known: Wish) -> Change:
        others = tuple(each for each in known.drain_hosts if each != host)
        if undo:
            wish = replace(known, drain_hosts=others)
            return Change(wish, DRAIN, f"host {host} may be used again")
        if host not in known.drain_hosts:
            check_host(host, known_hosts(job, _read_lines(store, job.id, (STARTED,))))
        wish = replace(known, drain_hosts=tuple(sorted({*others, host})))
        return Change(wish, DRAIN, f"drain of host {host} requested")

    return _ask(store, run_dir, job_id, change, actor)


def legal_sizes(job: Job) -> list[int]:
    """The numbers of workers that a job can train with; raises `LayoutUnknown`."""
    sizes = job.spec.parallelism
    group = _group_size(job)
    fewest = max(sizes.min_workers, copies_needed(job) * group)
    return [size for size in range(group, sizes.world_size + 1, group) if size >= fewest]


def check_size(job: Job, num_workers: int) -> None:
    """Raise `SizeRefused` if a job cannot train with so many workers, and `LayoutUnknown`."""
    legal, sizes = legal_sizes(job), job.spec.parallelism
    if num_workers in legal:
        return
    if not sizes.is_elastic:
        raise SizeRefused(
            "fixed_size",
            f"the job was submitted with {sizes.world_size} workers and keeps them; submit it with "
            "parallelism.workers: {min, max} to change its size while it trains",
        )
    why = f"it trains with {sizes.min_workers} to {sizes.world_size} workers"
    why += f" in groups of {_group_size(job)}"
    if copies_needed(job):
        why += f", and survive needs {copies_needed(job)} groups"
    listed = ", ".join(str(size) for size in legal)
    raise SizeRefused("size", f"{num_workers} workers do not fit: {why}; possible: {listed}")


def _group_size(job: Job) -> int:
    chosen = layout_of_attempt(job)
    if chosen is not None:
        return chosen.shard_group_size
    wanted = job.spec.parallelism.shard_group_size
    if wanted == "auto":
        raise LayoutUnknown(job.id)
    return wanted


def known_hosts(job: Job, lines: Iterable[TimelineEvent]) -> list[str]:
    """Hosts that workers of the job's newest attempt are or were on."""
    own = [line for line in lines if line.attempt_id == job.current_attempt_id]
    workers, membership = newest_workers(own), job.membership
    hosts = set(workers.hosts if workers else ())
    if membership is not None and membership.attempt_id == job.current_attempt_id:
        hosts.update(host for member in membership.members for host in member.hosts)
        hosts.update(host for gone in membership.gone for host in gone.hosts)
    return sorted(hosts)


def check_host(host: str, known: Iterable[str]) -> None:
    """Raise `HostUnknown` if no worker is on a host."""
    hosts = list(known)
    if host not in hosts:
        raise HostUnknown(host, hosts)


def newest_wish(lines: Iterable[Line]) -> Wish:
    """What the newest of some timeline lines wants."""
    told = [line for line in lines if line.kind in WISH_KINDS]
    if not told:
        return Wish()
    data = told[-1].data
    hosts, workers = data["drain_hosts"], data["workers"]
    assert isinstance(hosts, list)
    assert workers is None or isinstance(workers, int)
    return Wish(str(data["id"]), workers, tuple(hosts))


def carry_over(store: JobStore, run_dir: RunDir, job_id: str, attempt_id: str) -> None:
    """Tell a new attempt what is wanted of the job already; raises OSError."""
    wish = _read_wish(store, job_id)
    if wish.id:
        _write(run_dir.attempt(attempt_id).resize_request_path, wish)


def _ask(
    store: JobStore,
    run_dir: RunDir,
    job_id: str,
    change: Callable[[Job, Wish], Change],
    actor: str,
) -> Wish:
    for tries_left in reversed(range(_MAX_TRIES)):
        job = store.get_job(job_id)
        if job.status is not JobStatus.RUNNING or job.current_attempt_id is None:
            raise JobNotRunning(job.id, job.status, "to place anew")
        known = _read_wish(store, job_id)
        changed = change(job, known)
        try:
            if changed.wish != known:
                # The version of the job lets one of two requests through, and a stopping job none.
                store.update_job(job, timeline=[_line(job, changed, actor)])
            return _place(store, run_dir, job)
        except StaleVersion:
            if not tries_left:
                raise
    raise AssertionError("the last try returns or raises")


def _line(job: Job, changed: Change, actor: str) -> TimelineEvent:
    wish = replace(changed.wish, id=f"r-{secrets.token_hex(4)}")
    return TimelineEvent(
        id=0,
        job_id=job.id,
        attempt_id=job.current_attempt_id,
        time=time.time(),
        kind=changed.kind,
        message=changed.message,
        actor=actor,
        data=_document(wish),
    )


def _place(store: JobStore, run_dir: RunDir, job: Job) -> Wish:
    """Show the driver what the timeline wants, until nobody has changed it meanwhile."""
    assert job.current_attempt_id is not None
    path = run_dir.attempt(job.current_attempt_id).resize_request_path
    wish = _read_wish(store, job.id)
    for _ in range(_MAX_TRIES if wish.id else 0):
        try:
            _write(path, wish)
        except OSError as error:
            raise StorageUnavailable(str(error)) from error
        placed, wish = wish, _read_wish(store, job.id)
        if placed == wish:
            break
    return wish


def _write(path: Path, wish: Wish) -> None:
    partial = path.with_suffix(f".{secrets.token_hex(4)}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.write_text(json.dumps(_document(wish)), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _document(wish: Wish) -> dict[str, object]:
    return {"id": wish.id, "workers": wish.num_workers, "drain_hosts": list(wish.drain_hosts)}


def _read_wish(store: JobStore, job_id: str) -> Wish:
    return newest_wish(_read_lines(store, job_id, WISH_KINDS))


def _read_lines(store: JobStore, job_id: str, kinds: tuple[str, ...]) -> list[TimelineEvent]:
    lines: list[TimelineEvent] = []
    after = 0
    while page := store.list_timeline(job_id, after=after, limit=_PAGE, kinds=kinds):
        lines += page
        after = page[-1].id
    return lines
