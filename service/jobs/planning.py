"""Plans of a job on a cluster: layouts side by side, their groups sharded by TorchRec's planner.

The planner runs in a process of the trainer's Python (`trainer.parallel.group_planner`), which
loads torch as the service never does, within a time limit. As loading takes seconds one process is
kept from the start of the service on (`keep_planner`), and replaced where it has ended. Two
seconds after a caller has hung up it is killed, if it is not done. What it answered is kept by a
fingerprint of tables, layout, memory and links.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import Any

from pydantic import ValidationError

from service.domain.metrics import compared, measured_against
from service.domain.models import Job
from service.errors import DoesNotFit, PlannerFailed, PlanTimedOut
from service.jobs.export_runner import environment
from service.settings import Settings
from trainer.layout.choice import Need, need_of
from trainer.layout.cost import MemoryUse
from trainer.layout.hosts import Site
from trainer.layout.plans import (
    Calibration,
    Change,
    Comparer,
    Comparison,
    PlanSite,
    does_fit,
    predict,
    smallest_changes,
    why_not_held,
)
from trainer.layout.workload import GroupPlan, GroupTopology
from trainer.spec.job import JobSpec

_POLL_S = 0.1
_MAX_CACHED = 128
# Each takes a core, and some GB for thousands of tables.
_MAX_PROCESSES = 2
# Groups planned at once: the recommended layout's, then others that nothing beats, as long as the
# plan takes no longer for it than this.
_MAX_GROUPS = 4
_OTHERS_S = 1.0
_END_S = 10.0
# So long one process is waited for rather than another one started.
_GRACE_S = 2.0
# A plan may show that what was recommended does not fit, and then the next is planned.
_MAX_ROUNDS = 4
_MAX_SAID = 400
StartProcess = Callable[..., "subprocess.Popen[bytes]"]
Task = tuple[JobSpec, GroupTopology]


@dataclass
class Limit:
    """How long a plan may take, and whether somebody waits for it still."""

    limit_s: float
    cancelled: threading.Event = field(default_factory=threading.Event)
    _began: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        return self.cancelled.is_set() or self.elapsed_s > self.limit_s

    def check(self) -> None:
        """Raise `PlanTimedOut` where it is over."""
        if self.is_over:
            raise PlanTimedOut(self.limit_s)


class GroupPlanner:
    """TorchRec's planner behind processes, which stay for the plans that follow; thread-safe.

    Between `start` and `close` one is always loaded, if the settings say so.
    """

    def __init__(self, settings: Settings, start: StartProcess = subprocess.Popen) -> None:
        self._settings, self._start = settings, start
        self._is_kept = False
        self._cache: OrderedDict[str, GroupPlan] = OrderedDict()
        self._changed = threading.Condition()
        self._idle: list[_PlannerProcess] = []
        self._num_busy = 0

    def start(self) -> None:
        """Begin to load the planner."""
        self._is_kept = self._settings.keep_planner
        self._keep_one()

    def close(self) -> None:
        """End the processes that nobody waits for."""
        self._is_kept = False
        with self._changed:
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()

    def plan(self, tasks: Sequence[Task], limit: Limit) -> list[GroupPlan]:
        """Plans of the first tasks: of one, and of others as long as the whole plan may be expected
        to take `_OTHERS_S` then. Raises `PlanTimedOut` and `PlannerFailed`.
        """
        plans: list[GroupPlan] = []
        longest_s = 0.0
        for spec, topology in tasks:
            key, began = _fingerprint(spec, topology), time.monotonic()
            with self._changed:
                plan = self._cache.get(key)
            if plan is None:
                if plans and limit.elapsed_s + longest_s > _OTHERS_S:
                    break
                plan = self._ask(spec, topology, limit)
                longest_s = max(longest_s, time.monotonic() - began)
            with self._changed:
                self._cache[key] = plan
                self._cache.move_to_end(key)
                if len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
            plans.append(plan)
        return plans

    def _ask(self, spec: JobSpec, topology: GroupTopology, limit: Limit) -> GroupPlan:
        document = {"spec": spec.model_dump(mode="json"), "topology": topology.model_dump()}
        task = json.dumps(document).encode()
        process = self._taken(limit)
        try:
            if process is not None:
                with suppress(PlannerFailed):  # it may have ended meanwhile
                    return process.ask(task, limit)
            process = self._started()
            return process.ask(task, limit)
        finally:
            self._give_back(process)

    def _taken(self, limit: Limit) -> _PlannerProcess | None:
        """One that nobody asks; None where another is to be started."""
        until = time.monotonic() + _GRACE_S
        with self._changed:
            while not self._idle:
                is_late = time.monotonic() > until
                if not self._num_busy or (is_late and self._num_busy < _MAX_PROCESSES):
                    break
                limit.check()
                self._changed.wait(_POLL_S)
            self._num_busy += 1
            return self._idle.pop() if self._idle else None

    def _give_back(self, process: _PlannerProcess | None) -> None:
        """One stays, for whoever comes next."""
        with self._changed:
            self._num_busy -= 1
            if process is not None and process.is_alive and not self._idle:
                self._idle.append(process)
                process = None
            self._changed.notify()
        if process is not None and process.is_alive:
            process.close()
        self._keep_one()

    def _keep_one(self) -> None:
        with self._changed, suppress(PlannerFailed):  # as the next plan will tell
            if self._is_kept and not self._idle and not self._num_busy:
                self._idle.append(self._started())

    def _started(self) -> _PlannerProcess:
        return _PlannerProcess(self._settings.trainer_python, self._start, stays=self._is_kept)


class _PlannerProcess:
    """A process of the trainer's planner, which says a line when it is loaded and then answers each
    line with one. It ends with the service and, unless it `stays`, when it is asked nothing for a
    while. Raises `PlannerFailed` where it cannot be started."""

    def __init__(self, python: str, start: StartProcess, *, stays: bool) -> None:
        command = [python, "-m", "trainer.parallel.group_planner"]
        with ExitStack() as files:
            self._log = files.enter_context(TemporaryFile())
            try:
                self._process = start(
                    [*command, "--stay"] if stays else command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    env=environment(os.environ),
                    start_new_session=True,
                )
            except OSError as error:
                raise PlannerFailed(f"{python} cannot be started ({error})") from error
            self._files = files.pop_all()
        self._is_loaded = threading.Event()
        threading.Thread(target=self._load, daemon=True).start()

    def _load(self) -> None:
        assert self._process.stdout is not None, "started with pipes"
        with suppress(OSError, ValueError):  # closed meanwhile
            self._process.stdout.readline()
        self._is_loaded.set()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, task: bytes, limit: Limit) -> GroupPlan:
        """The answer; raises `PlanTimedOut` and `PlannerFailed`, and has ended then, unless it was
        being loaded still."""
        while not self._is_loaded.wait(_POLL_S):
            limit.check()
        answers: list[bytes] = []
        asking = threading.Thread(target=self._exchange, args=(task, answers), daemon=True)
        asking.start()
        while asking.is_alive() and not limit.is_over:
            asking.join(_POLL_S)
        if limit.cancelled.is_set():
            asking.join(_GRACE_S)
        with suppress(ValidationError):  # nothing, or cut off in the midst
            plan = GroupPlan.model_validate_json(b"".join(answers))
            # It writes where we do; what it says of one plan after the other would add up.
            self._log.seek(0)
            self._log.truncate()
            return plan
        why = self.close(0.0 if limit.is_over else _END_S)
        asking.join()
        limit.check()
        raise PlannerFailed(why)

    def _exchange(self, task: bytes, answers: list[bytes]) -> None:
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None and received is not None, "started with pipes"
        with suppress(OSError):  # it has ended
            sent.write(task + b"\n")
            sent.flush()
            answers.append(received.readline())

    def close(self, ends_within_s: float = 0.0) -> str:
        """End it, if it does not do so itself; why it did."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ends_within_s)
        if self._process.poll() is None:
            # Not the process alone: compilers and the like may be its children.
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        for each in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert each is not None, "started with pipes"
                each.close()
        self._files.close()
        said = lines[-1] if lines else "it said nothing"
        return f"it ended with code {code}: {said[:_MAX_SAID]}"


def _fingerprint(spec: JobSpec, topology: GroupTopology) -> str:
    """Of all that a plan depends on."""
    document: dict[str, Any] = spec.model_dump(
        mode="json",
        include={"features", "embedding_tables", "optimizer", "parallelism", "model", "resources"},
    )
    document |= {
        "batch_size": spec.data.batch_size,
        "asynchronous": spec.checkpoint.asynchronous,
        "topology": topology.model_dump(mode="json"),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class JobPlans:
    """What a plan answers: `group` and `ranks` (memory by position) are of the recommended layout;
    `changes` are what would do where nothing fits."""

    site: PlanSite
    comparison: Comparison
    group: GroupPlan | None
    ranks: tuple[MemoryUse, ...]
    changes: tuple[Change, ...]
    calibration: Calibration | None = None


def plan_job(spec: JobSpec, site: PlanSite, planner: GroupPlanner, limit: Limit) -> JobPlans:
    """Compare the layouts of a spec whose table sizes are known.

    The recommended one is always planned by TorchRec, others on the front as far as time allows.
    Raises `LayoutError`, `PlanTimedOut` and `PlannerFailed`.
    """
    comparer, made = Comparer(spec, site, check=limit.check), dict[GroupTopology, GroupPlan]()
    for _ in range(_MAX_ROUNDS):
        tasks = _tasks(comparer.result(), made)
        if not tasks:
            break
        for (_, topology), plan in zip(tasks, planner.plan(tasks, limit), strict=False):
            made[topology] = plan
            comparer.add(topology, plan)
    comparison = comparer.result()
    best = comparison.recommended
    if best is None:
        device = site.cluster.device
        changes = smallest_changes(
            spec, lambda changed: does_fit(changed, site.grown_for(changed), limit.check), device
        )
        return JobPlans(site, comparison, None, (), changes)
    group = made.get(best.topology)
    layout = best.choice.layout
    ranks = predict(best.spec, layout, group, site.cluster).ranks if group else ()
    return JobPlans(site, comparison, group, ranks, ())


def _tasks(comparison: Comparison, made: dict[GroupTopology, GroupPlan]) -> list[Task]:
    """What to plan next; nothing once the recommended layout is."""
    best = comparison.recommended
    if best is None or best.topology in made:
        return []
    others = [each for each in comparison.options if each.candidate.is_on_front]
    tasks = {each.topology: each.spec for each in (best, *others) if each.topology not in made}
    return [(spec, topology) for topology, spec in tasks.items()][:_MAX_GROUPS]


def calibration_of(jobs: Iterable[Job], fingerprint: str) -> Calibration | None:
    """What jobs of a cluster measured against what was predicted of them."""
    ratios, extra_bytes = [], []
    for job in jobs:
        foretold = job.membership.prediction if job.membership else None
        if foretold is None or foretold.cluster != fingerprint:
            continue
        measured = measured_against(compared(foretold, job.latest_metrics))
        if measured is not None:
            ratios.append(measured[0])
            extra_bytes += [measured[1]] if measured[1] is not None else []
    return Calibration.of(ratios, extra_bytes)


def check_fit(tried: Iterable[tuple[JobSpec, Site]]) -> None:
    """Raise `DoesNotFit`, about the first, where of all these specs none fits its cluster: the
    workers that it gives can never hold the tables.

    What is not known refuses nothing: table sizes, memory, and GPUs of an unknown type.
    """
    refused, seen = None, set[Need]()
    for spec, site in tried:
        if spec.table_bytes is None or site.worker_bytes is None or not any(site.room):
            return
        need = need_of(spec, (), site.worker_bytes)
        if need in seen:
            continue
        seen.add(need)
        why = why_not_held(spec, site.worker_bytes)
        if why is None:
            return
        refused = refused or (spec, site.use_gpu, site.worker_bytes, why)
    if refused:
        spec, use_gpu, worker_bytes, why = refused
        device = "cuda" if use_gpu else "cpu"
        changes = smallest_changes(
            spec, lambda changed: why_not_held(changed, worker_bytes) is None, device
        )
        raise DoesNotFit(why, changes)
