"""What the reconciler costs: a pass over many live jobs, and the CPU of a service that idles.

A part of `tests.benchmarks.control_plane`, in a process of its own:
python -m tests.benchmarks.control_plane_tick FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from service.backends.fake import FakeBackend
from service.db.jobs import JobStore
from service.domain.models import JobStatus, Observation, ObservedState
from service.observability.metrics import ServiceMetrics
from service.reconciler.loop import Reconciler
from service.settings import Settings
from tests.harness.builders import NOW, queued_job
from tests.harness.databases import store_attempt
from tests.harness.wait import wait_for

NUM_LIVE_JOBS = 1000
NUM_IDLE_JOBS = 100
NUM_PASSES = 5
IDLE_S = 10.0
_RUNNING = Observation(ObservedState.RUNNING)


class _Scripted(FakeBackend):
    """Answers from memory that everything runs: what is measured is the service alone."""

    def observe(self, attempt_id: str) -> Observation:
        return _RUNNING

    def observe_all(self, attempt_ids: Sequence[str]) -> Mapping[str, Observation]:
        return dict.fromkeys(attempt_ids, _RUNNING)


def reconciler_of(folder: Path, num_jobs: int) -> Reconciler:
    """A reconciler with so many running jobs, all of which it has leased and seen once."""
    folder.mkdir()
    store = JobStore.open(f"sqlite:///{folder / 'shardloom.db'}")
    for number in range(num_jobs):
        # A second apart: among a thousand ids of one millisecond two are often the same.
        job = queued_job(now=NOW + number)
        store_attempt(store, replace(job, started_at=time.time()), JobStatus.RUNNING)
    settings = Settings(home=folder, runs_dir=folder / "runs", backend="fake")
    reconciler = Reconciler(store, _Scripted(folder / "fake"), settings, ServiceMetrics())
    leased = 0
    while leased < num_jobs:
        pass_s(reconciler)
        leased = len(
            store.claim_live_jobs(
                settings.replica_id, lease_s=settings.lease_s, now=time.time(), limit=64
            )
        )
    return reconciler


def pass_s(reconciler: Reconciler) -> float:
    began = time.perf_counter()
    reconciler._dispatch()
    wait_for(lambda: not reconciler._busy, "a pass", poll_s=0.005)
    return time.perf_counter() - began


def measure(folder: Path) -> dict[str, float]:
    """Seconds of the quickest pass over `NUM_LIVE_JOBS`; share of a core that `NUM_IDLE_JOBS` take.

    The jobs run and report nothing.
    """
    busy = reconciler_of(folder / "busy", NUM_LIVE_JOBS)
    tick_s = min(pass_s(busy) for _ in range(NUM_PASSES))
    busy.close()
    idle = reconciler_of(folder / "idle", NUM_IDLE_JOBS)
    idle.start()
    began, cpu_s = time.perf_counter(), time.process_time()
    time.sleep(IDLE_S)
    share = (time.process_time() - cpu_s) / (time.perf_counter() - began)
    idle.close()
    return {"tick_s": tick_s, "idle_cpu_share": share}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
