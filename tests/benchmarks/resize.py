"""How long running workers pause when a host joins and when one leaves, over elastic Ray Train.

python -m tests.benchmarks.resize --json FILE

Both sides train the same model and data on emulated hosts of a local Ray cluster, two workers on
each. Ours is a job of replica groups, through the driver: a third host comes, on which a group
starts and joins; then that host is drained, as before a maintenance, and its group leaves. A pause
is the longest wait for a committed sync beyond the usual wait, from the moment that the host comes,
or the drain is asked for, until the group has joined or left. The peer is an elastic TorchTrainer
with tuned time-outs and durable checkpoints on three hosts, of which one is shut down and comes
again; a pause of it ends with the first step after the restart. The longer of our two pauses is
compared with the shorter of the peer's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
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
from tests.benchmarks.report import BenchmarkReport, Goal, Values, main, run_pairs
from tests.benchmarks.workload import prepared_ratings
from trainer.protocol import events
from trainer.protocol.requests import ResizeRequest

NAME = "resize"
PAIRS = 3
GOALS = [Goal("pause_over_ray", "pause_s", "s", 0.1, "lower", "elastic Ray Train, tuned")]


def run(num_pairs: int) -> BenchmarkReport:
    with prepared_ratings() as data:
        document = elastic_document(NAME, data)
        runs = run_pairs(num_pairs, lambda: measure_ours(document), lambda: measure_peer(document))
    return BenchmarkReport(NAME, settings(), GOALS, runs)


def measure_ours(document: Mapping[str, Any]) -> Values:
    """A group joins on a new host, and leaves before the host does."""
    with our_job(document, len(HOSTS) - 1) as job:
        job.wait_for_groups(len(HOSTS) - 1)
        join_s = _pause_of_join(job)
        leave_s = _pause_of_leave(job)
        lost = job.driver.told(events.GroupLost)
        return {
            "pause_s": max(join_s, leave_s),
            "join_pause_s": join_s,
            "leave_pause_s": leave_s,
            "groups_lost": float(len(lost)),
        }


def _pause_of_join(job: OurJob) -> float:
    job.wait_for_commits(20)
    began = time.time()
    job.hosts.start({HOSTS[-1]: RANKS_PER_HOST})
    joined = job.first(events.GroupJoined, began)
    job.wait_for_groups(len(HOSTS))
    return pause_s(job.commit_times(), began, joined.time + 1.0)


def _pause_of_leave(job: OurJob) -> float:
    job.wait_for_commits(20)
    began = time.time()
    request = ResizeRequest(id="drain", drain_hosts=frozenset({HOSTS[-1]}))
    job.driver.context.files.resize_request_path.write_text(request.model_dump_json())
    left = job.first(events.GroupLeft, began)
    job.wait_for_groups(len(HOSTS) - 1)
    return pause_s(job.commit_times(), began, left.time + 1.0)


def measure_peer(document: Mapping[str, Any]) -> Values:
    """A host is shut down, and another one comes."""
    left, joined = ray_elastic(document, ["leave", "join"])
    return {
        "pause_s": min(left["pause_s"], joined["pause_s"]),
        "join_pause_s": joined["pause_s"],
        "leave_pause_s": left["pause_s"],
        "steps_again": float(left["steps_again"] + joined["steps_again"]),
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))
