"""How long the other workers pause when a host dies, over elastic Ray Train and torchft.

python -m tests.benchmarks.recovery --json FILE

Three emulated hosts of a local Ray cluster, two workers on each. Ours is a job of three replica
groups, through the driver: first both workers of one group are killed in the middle of an averaging
between groups, later all processes of a host in the middle of a step. Its pause is the wait for the
next committed sync beyond the usual wait, the longer of the two; it writes no checkpoint, so there
is nothing on storage to read. The peer is the same model and data in an elastic TorchTrainer over
all workers, with tuned time-outs and durable checkpoints, of which a host is killed midway between
two of them; its pause ends with the first step after the restart. How long a lost group is missed
is measured on two groups and a third host: until one has taken its place, a spare there, over the
same job without a spare, which starts a group there. Where torchft installs from the package index,
groups that average through it are killed likewise, with time-outs like ours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.elastic_jobs import (
    HOSTS,
    RANKS_PER_HOST,
    OurJob,
    elastic_document,
    our_job,
    pause_s,
    ray_elastic,
    settings,
)
from tests.benchmarks.peers.torchft_lab import NoTorchftError, TorchftLab, install_torchft
from tests.benchmarks.report import BenchmarkReport, Goal, Values, log, main, run_pairs
from tests.benchmarks.workload import prepared_ratings
from trainer.fault_injection import Fault
from trainer.protocol import events

NAME = "recovery"
PAIRS = 3
FAULT_COMMIT = 25
VICTIM_GROUP = 1
_WATCH_S = 1.0

GOALS = [
    Goal("pause_over_ray_tuned", "pause_s", "s", 0.1, "lower", "elastic Ray Train, tuned"),
    Goal("pause_s", "pause_in_s", "s", 1.5, "lower", "1 s"),
    Goal("syncs_lost", "syncs_lost", "syncs", 1.0, "lower", "1 sync of one group"),
    Goal("storage_bytes_read", "storage_bytes_read", "bytes", 0.0, "lower", "1 byte"),
    Goal("missed_over_no_spare", "missed_s", "s", 0.5, "lower", "the same job without a spare"),
]
TORCHFT_GOAL = Goal("pause_over_torchft", "torchft_pause_s", "s", 1.0, "lower", "torchft, tuned")


def run(num_pairs: int) -> BenchmarkReport:
    with prepared_ratings() as data, optional_torchft() as (torchft, why_not):
        document = elastic_document(NAME, data)
        runs = run_pairs(
            num_pairs, lambda: measure_ours(document), lambda: measure_peers(document, torchft)
        )
    goals = [*GOALS, TORCHFT_GOAL] if torchft else GOALS
    ended_by = {
        "heartbeat_timeout_s": 1.0,
        "torchft": why_not or "0.2.0, heartbeat and operations time out after 1 and 2 s",
    }
    return BenchmarkReport(NAME, settings() | ended_by, goals, runs)


@contextmanager
def optional_torchft() -> Iterator[tuple[TorchftLab | None, str]]:
    """torchft in a folder of its own that is gone afterwards, or why it cannot run here."""
    with TemporaryDirectory(prefix="shardloom-bench-torchft-") as folder:
        try:
            yield install_torchft(Path(folder)), ""
        except NoTorchftError as reason:
            log(f"without torchft: {reason}")
            yield None, str(reason)


def measure_ours(document: Mapping[str, Any]) -> Values:
    """Kill a group in an averaging, then a host."""
    armed = [
        Fault(kind="sigkill", group=VICTIM_GROUP, rank=rank, step=FAULT_COMMIT, phase="exchange")
        for rank in range(RANKS_PER_HOST)
    ]
    with our_job(document, len(HOSTS), armed) as job:
        job.wait_for_groups(len(HOSTS))
        mid_exchange_s = _pause_after(job, since=0.0)
        job.wait_for_groups(len(HOSTS))
        began = time.time()
        job.hosts.kill(HOSTS[-1])
        mid_step_s = _pause_after(job, since=began)
        recoveries = job.driver.told(events.Recovered)
        pause = max(mid_exchange_s, mid_step_s)
        return {
            "pause_s": pause,
            "pause_in_s": pause,
            "torchft_pause_s": pause,
            "pause_mid_exchange_s": mid_exchange_s,
            "pause_mid_step_s": mid_step_s,
            "syncs_lost": float(max(each.syncs_lost for each in recoveries)),
            "storage_bytes_read": float(_checkpoint_bytes(job)),
            "missed_s": _missed_s(document, num_spares=1),
        }


def _missed_s(document: Mapping[str, Any], num_spares: int) -> float:
    """From the loss of a host until another group has taken the place of its own."""
    sizes = {"workers": 2 * RANKS_PER_HOST, "spares": num_spares}
    job_of_two = {**document, "parallelism": {**document["parallelism"], **sizes}}
    with our_job(job_of_two, len(HOSTS)) as job:
        job.wait_for_groups(2)
        if num_spares:
            job.wait_for(job.has_spare, "a spare")
        began = time.time()
        job.hosts.kill(HOSTS[1])
        lost, joined = job.first(events.GroupLost, began), job.first(events.GroupJoined, began)
        return float(joined.time - lost.time)


def _pause_after(job: OurJob, since: float) -> float:
    lost = job.first(events.GroupLost, since)
    recovered = job.first(events.Recovered, since)
    job.wait_for_commits(3)
    # The wait in which it was lost ends after that.
    return pause_s(job.commit_times(), since or lost.time, recovered.time + _WATCH_S)


def _checkpoint_bytes(job: OurJob) -> int:
    """All that a group could have read; it must have copied from a peer then."""
    folder = job.driver.context.run_dir / "checkpoints"
    return sum(path.stat().st_size for path in folder.glob("**/*") if path.is_file())


def measure_peers(document: Mapping[str, Any], torchft: TorchftLab | None) -> Values:
    """Kill a host of elastic Ray Train, and a group of torchft's."""
    (killed,) = ray_elastic(document, ["kill"])
    values = {
        "pause_s": killed["pause_s"],
        "steps_again": float(killed["steps_again"]),
        "checkpoint_bytes": float(killed["read_bytes"]),
        "pause_in_s": 1.0,
        "syncs_lost": 1.0,
        "storage_bytes_read": 1.0,
        "missed_s": _missed_s(document, num_spares=0),
    }
    if torchft:
        values["torchft_pause_s"] = torchft.measure(document)
    return values


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))
