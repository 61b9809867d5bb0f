"""A scripted job of three groups on three hosts that loses one and gets it back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.db.jobs import JobStore
from service.domain.models import Job, JobStatus
from tests.harness.builders import (
    attempt_of,
    batch,
    checkpoint,
    group_joined,
    group_lost,
    group_member,
    layout_chosen,
    membership_changed,
    queued_job,
    recovered,
    row_wise_plan,
    table_wise_plan,
    workers_started,
)
from trainer.protocol.events import (
    AttemptStarted,
    Event,
    HostExcluded,
    Metrics,
    Progress,
    TablePlan,
)

ELASTIC = {
    "workers": {"min": 4, "max": 8},
    "shard_group_size": 2,
    "placement": "inter_host",
    "survive": {"hosts": 1},
}


@dataclass
class ElasticJob:
    """The job in a store; times are seconds after its submission, `began` is that in Unix time."""

    store: JobStore
    job: Job
    began: float

    @classmethod
    def start(
        cls, store: JobStore, name: str = "movielens-elastic", age_s: float = 120.0
    ) -> ElasticJob:
        """Submit the job `age_s` ago and let its three groups train."""
        began = time.time() - age_s
        job = store.create_job(
            queued_job(now=began, name=name, parallelism=ELASTIC),
            idempotency_key=None,
            request_hash="",
        )
        attempt = attempt_of(job, submitted_at=began + 1, started_at=began + 2)
        starting = replace(job, status=JobStatus.STARTING, current_attempt_id=attempt.id)
        store.update_job(starting, attempt=attempt)
        scene = cls(store, store.get_job(job.id), began)
        scene.tell(
            AttemptStarted(time=began + 2, world_size=6),
            layout_chosen(time=began + 3),
            membership_changed(group_member(0), time=began + 13),
            membership_changed(group_member(0), group_member(1), time=began + 13.5, generation=2),
            membership_changed(time=began + 14, generation=3),
            _workers(began + 14),
        )
        return scene

    def tell(self, *records: Event) -> None:
        """Send records as the attempt's coordinator would."""
        attempt_id = self.job.current_attempt_id
        assert attempt_id is not None
        first_seq = self.store.stream_positions(attempt_id).get("coordinator-0", 0)
        records_batch = batch(*records, stream="coordinator-0", first_seq=first_seq)
        self.store.append_events(attempt_id, records_batch, time.time())
        self.job = self.store.get_job(self.job.id)

    def train(self, from_step: int, to_step: int, from_s: float, to_s: float) -> None:
        """Report every ten steps, evenly over a time."""
        steps = range(from_step, to_step, 10)
        for index, step in enumerate(steps):
            at = self.began + from_s + (to_s - from_s) * index / max(1, len(steps))
            self.tell(*_report(at, step))

    def save(self, step: int, at_s: float) -> None:
        """Commit a checkpoint."""
        saved = checkpoint(step, is_best=True)
        changes = {"time": self.began + at_s, "size_bytes": 315_000_000}
        self.tell(saved.model_copy(update=changes))

    def lose(self, at_s: float, group: int = 1) -> None:
        """Lose the host of a group; the others recover within a third of a second."""
        at = self.began + at_s
        rest = [group_member(other) for other in range(3) if other != group]
        self.tell(
            group_lost(group, time=at),
            membership_changed(*rest, time=at + 0.05, generation=4, commit=128),
            recovered(time=at + 0.31, commit=129),
        )

    def replace(self, at_s: float, copied_s: float = 9.0, group: int = 1) -> None:
        """Let another life of the group copy from a peer, then train."""
        at = self.began + at_s
        rest = [group_member(other) for other in range(3) if other != group]
        for standing, when, generation in (("listening", at, 5), ("current", at + copied_s, 6)):
            back = group_member(group, standing, incarnation=1)
            members = sorted([*rest, back], key=lambda member: member.group)
            self.tell(membership_changed(*members, time=when, generation=generation, commit=140))
        self.tell(group_joined(group, time=at + copied_s, duration_s=copied_s))

    def exclude(self, at_s: float, host: str) -> None:
        """Leave a host out for ten minutes."""
        at = self.began + at_s
        self.tell(HostExcluded(time=at, host=host, num_failures=3, until=at + 600))


def _workers(at: float) -> Event:
    tables: Sequence[TablePlan] = [row_wise_plan("users"), table_wise_plan("movies", 1)]
    changes = {
        "time": at,
        "world_size": 6,
        "num_replicas": 3,
        "placement": "inter_host",
        "sharding_groups": [[0, 1], [2, 3], [4, 5]],
        "replica_groups": [[0, 2, 4], [1, 3, 5]],
        "hosts": [host for group in range(3) for host in group_member(group).hosts],
    }
    return workers_started(total_steps=1000, tables=tables).model_copy(update=changes)


def _report(at: float, step: int) -> list[Event]:
    values = {
        "train/loss": 0.4 + 2.0 / (step + 4),
        "train/rmse": 0.9 + 1.0 / (step + 2),
        "speed/rows_per_s": 16_540.0,
        "sync/time_s": 0.04,
        "phase/dense_s": 0.011,
        "phase/backward_s": 0.021,
        "goodput/share": 0.968,
        "goodput/lost_s/start": 33.0,
        "goodput/lost_s/recovery": 8.4,
        "goodput/lost_s/redo": 1.2,
        "goodput/lost_s/checkpoint": 0.4,
        "elastic/groups": 3.0,
        "elastic/generation": 3.0,
    }
    progress = Progress(
        time=at,
        step=step,
        total_steps=1000,
        epoch=0,
        rows=step * 6144,
        rows_per_s=16_540.0,
        eta_s=(1000 - step) * 0.37,
    )
    return [Metrics(time=at, step=step, values=values), progress]
