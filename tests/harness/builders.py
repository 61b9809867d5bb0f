"""Small valid specs, jobs, attempts and records of a job."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from service.domain.auth import AuditRecord
from service.domain.membership import apply_event
from service.domain.metrics import MEMORY_PARTS
from service.domain.models import (
    Attempt,
    EndReason,
    Job,
    JobStatus,
    Membership,
    ReportedEnd,
    attempt_id,
    new_job_id,
)
from service.domain.webhooks import Webhook
from trainer.layout.hosts import HostFacts
from trainer.protocol.events import (
    AttemptEnded,
    CheckpointCommitted,
    Divergence,
    Event,
    EventBatch,
    GroupJoined,
    GroupLost,
    GroupMember,
    LayoutChosen,
    MembershipChanged,
    Metrics,
    Prediction,
    Progress,
    Recovered,
    TablePlan,
    TraceWritten,
    WorkersLost,
    WorkersStarted,
)
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

NOW = 1_800_000_000.0
# A finished data folder, as far as the control plane looks at one.
TINY_DATA = Path(__file__).parent / "tiny_data"


# Two to four sharding groups of two, each a failure domain.
ELASTIC = {
    "workers": {"min": 4, "max": 8},
    "shard_group_size": 2,
    "placement": "inter_host",
    "survive": {"hosts": 1},
}


def spec_document(**changes: Any) -> dict[str, Any]:
    """A spec as a user writes it: 4 workers in 2 sharding groups of 2."""
    document: dict[str, Any] = {
        "name": "tiny",
        "data": {"path": str(TINY_DATA), "label": {"column": "rating"}},
        "features": [
            {"name": "user_id", "type": "id", "table": "users"},
            {"name": "age", "type": "dense"},
        ],
        "embedding_tables": [{"name": "users", "num_embeddings": 100, "embedding_dim": 8}],
        "model": {
            "dense_arch": {"layer_sizes": [16, 8]},
            "over_arch": {"layer_sizes": [16, 1]},
            "tasks": [{"loss": "mse"}],
        },
        "parallelism": {"workers": 4, "shard_group_size": 2},
    }
    return {**document, **changes}


def spec(*, max_failures: int = 3, **changes: Any) -> JobSpec:
    return validate_spec(spec_document(retry={"max_failures": max_failures}, **changes))


def hosts(*cpus: float, gpus: float = 0, memory_bytes: int = 8 * 2**30) -> tuple[HostFacts, ...]:
    """Hosts with so many CPUs each."""
    return tuple(HostFacts(f"10.0.0.{n}", c, gpus, memory_bytes) for n, c in enumerate(cpus))


def queued_job(*, now: float = NOW, max_failures: int = 3, **changes: Any) -> Job:
    """A job as it is when it was just submitted; `changes` are those of the spec."""
    job_spec = spec(max_failures=max_failures, **changes)
    return Job(
        id=new_job_id(now),
        name=job_spec.name,
        spec=job_spec,
        status=JobStatus.QUEUED,
        created_at=now,
    )


def attempt_of(job: Job, *, index: int = 0, **fields: Any) -> Attempt:
    return Attempt(
        id=attempt_id(job.id, index), job_id=job.id, index=index, created_at=NOW, **fields
    )


def live_job(status: JobStatus = JobStatus.RUNNING, **changes: Any) -> tuple[Job, Attempt]:
    """A job with a live first attempt that has started; `changes` are those of the job."""
    known = queued_job()
    attempt = attempt_of(known, submitted_at=NOW, started_at=NOW)
    return replace(known, status=status, current_attempt_id=attempt.id, **changes), attempt


def reported(attempt: Attempt, reason: EndReason, message: str = "") -> Attempt:
    """The attempt once its driver has said how it ended."""
    return replace(attempt, reported_end=ReportedEnd(reason, message, NOW))


def batch(*events: Event, stream: str = "rank-0", first_seq: int = 0) -> EventBatch:
    return EventBatch(stream=stream, first_seq=first_seq, events=list(events))


def metrics(step: int, *, time: float = NOW, **values: float) -> Metrics:
    """Values at a step; `train_loss` stands for `train/loss`."""
    named = {name.replace("_", "/", 1): value for name, value in values.items()}
    return Metrics(time=time, step=step, values=named)


def progress(step: int, total_steps: int = 100, **changes: Any) -> Progress:
    """Ten steps a second, of 64 rows."""
    made = Progress(
        time=NOW,
        step=step,
        total_steps=total_steps,
        epoch=0,
        rows=step * 64,
        rows_per_s=640.0,
        eta_s=(total_steps - step) / 10,
    )
    return made.model_copy(update=changes)


def row_wise_plan(name: str = "users", *, num_embeddings: int = 100) -> TablePlan:
    """A table of 8 columns whose rows lie on two positions, the first ones on position 0."""
    rows = (num_embeddings + 1) // 2
    shards = [(0, 0, rows), (1, rows, num_embeddings - rows)]
    return _table_plan(name, "row_wise", num_embeddings, num_embeddings * 36, shards)


def table_wise_plan(name: str, position: int, *, size_bytes: int = 3600) -> TablePlan:
    """A table of 100 x 8 that lies whole on one position."""
    return _table_plan(name, "table_wise", 100, size_bytes, [(position, 0, 100)])


def _table_plan(
    name: str, sharding: str, num_rows: int, size_bytes: int, shards: list[tuple[int, int, int]]
) -> TablePlan:
    """A table of 8 columns; `shards` are position, first row and number of rows."""
    return TablePlan(
        name=name,
        sharding_type=sharding,
        data_type="fp32",
        num_embeddings=num_rows,
        embedding_dim=8,
        size_bytes=size_bytes,
        shards=[
            TablePlan.Shard(
                position=position, row_offset=first, column_offset=0, num_rows=rows, num_columns=8
            )
            for position, first, rows in shards
        ],
    )


def divergence(**changes: Any) -> Divergence:
    """A copy of the second shard of `users` that differs on rank 3."""
    made = Divergence(time=NOW, step=48, table="users", shard=1, ranks=[3], action="fail")
    return made.model_copy(update=changes)


def trace_written(trace_id: str = "spec", rank: int = 0, **changes: Any) -> TraceWritten:
    made = TraceWritten(
        time=NOW,
        step=12,
        num_steps=3,
        rank=rank,
        path=f"/runs/x/attempts/y/traces/{trace_id}-rank{rank}.json.gz",
        size_bytes=1_200_000,
    )
    return made.model_copy(update=changes)


def workers_started(*, total_steps: int = 100, tables: Sequence[TablePlan] = ()) -> WorkersStarted:
    """A worker group of 4 in 2 sharding groups, which told its plan only if there are `tables`."""
    return WorkersStarted(
        time=NOW,
        run_index=0,
        world_size=4,
        shard_group_size=2,
        num_replicas=2,
        placement="intra_host",
        backend="gloo",
        sharding_groups=[[0, 2], [1, 3]],
        replica_groups=[[0, 1], [2, 3]],
        hosts=["a"] * 4,
        table_shards={"users": "row_wise"},
        tables=list(tables),
        total_steps=total_steps,
        resumed_step=0,
    )


def predicted_workers(**changes: Any) -> WorkersStarted:
    """Workers of which the second position of a group takes most: 7 MB."""
    foretold = Prediction(
        cluster="cpu",
        samples_per_s=1000.0,
        lookup_imbalance=1.5,
        step_s={
            "input_dist": 0.01,
            "lookup": 0.02,
            "output_dist": 0.01,
            "dense": 0.03,
            "sync": 0.01,
        },
        memory_bytes={
            **{part: [500_000, 1_000_000] for part in MEMORY_PARTS},
            "reserve": [9_000_000, 9_000_000],
        },
        sync_every_steps=16,
    )
    return workers_started().model_copy(update={"prediction": foretold, **changes})


HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


def layout_chosen(**changes: Any) -> LayoutChosen:
    """Six workers in three sharding groups of two, each on a host of its own."""
    made = LayoutChosen(
        time=NOW,
        world_size=6,
        shard_group_size=2,
        num_replicas=3,
        placement="inter_host",
        failure_domain="replica_group",
        num_hosts=3,
        num_hosts_survived=2,
        memory_overhead_bytes=105_000_000,
        sync_latency_s=0.012,
        reason="three copies on three hosts survive the loss of two",
    )
    return made.model_copy(update=changes)


def group_member(group: int, standing: str = "current", *, incarnation: int = 0) -> GroupMember:
    """A group of two ranks on the host of its number."""
    hosts = [HOSTS[group % len(HOSTS)]] * 2
    return GroupMember(group=group, incarnation=incarnation, hosts=hosts, standing=standing)


def membership_changed(
    *members: GroupMember, generation: int = 1, time: float = NOW, **changes: Any
) -> MembershipChanged:
    """A membership, of groups 0 to 2 if none are named."""
    groups = members or tuple(group_member(group) for group in range(3))
    hosts = {host for member in groups if member.standing == "current" for host in member.hosts}
    made = MembershipChanged(
        time=time,
        generation=generation,
        commit=generation,
        groups=list(groups),
        copies_alive=sum(member.standing == "current" for member in groups),
        host_copies_alive=len(hosts),
    )
    return made.model_copy(update=changes)


def group_lost(group: int = 1, **changes: Any) -> GroupLost:
    made = GroupLost(
        time=NOW,
        group=group,
        incarnation=0,
        reason="host_lost",
        message="",
        hosts=[HOSTS[group % len(HOSTS)]] * 2,
        rows_returned=4096,
    )
    return made.model_copy(update=changes)


def group_joined(group: int = 1, **changes: Any) -> GroupJoined:
    """A group that copied its shards from a peer."""
    made = GroupJoined(
        time=NOW,
        group=group,
        incarnation=1,
        hosts=[HOSTS[group % len(HOSTS)]] * 2,
        how="peer_copy",
        copied_bytes=105_000_000,
        duration_s=0.9,
    )
    return made.model_copy(update=changes)


def recovered(**changes: Any) -> Recovered:
    made = Recovered(
        time=NOW,
        generation=4,
        commit=12,
        cause="host_lost",
        pause_s=0.31,
        syncs_lost=0,
        num_tries=1,
    )
    return made.model_copy(update=changes)


def folded_membership(*events: Event, attempt_id: str = "job-1-a0") -> Membership:
    """The membership after records of one attempt."""
    membership: Membership | None = None
    for event in events:
        membership = apply_event(membership, attempt_id, event)
    assert membership
    return membership


def webhook(**changes: Any) -> Webhook:
    made = Webhook(
        id=f"wh-{secrets.token_hex(8)}",
        project="default",
        url="https://hooks.example/",
        description="",
        kinds=(),
        secret="sealed",
        is_active=True,
        created_at=NOW,
    )
    return replace(made, **changes)


def workers_lost(*, run_index: int = 0) -> WorkersLost:
    return WorkersLost(
        time=NOW, run_index=run_index, reason="killed", message="rank 1", will_restart=True
    )


def attempt_ended(reason: str = "completed") -> AttemptEnded:
    return AttemptEnded(time=NOW, reason=reason, message="done", final_metrics={"train/loss": 0.5})


def checkpoint(step: int, **changes: Any) -> CheckpointCommitted:
    made = CheckpointCommitted(
        time=NOW,
        step=step,
        path=f"checkpoints/step-{step:08d}",
        size_bytes=1000,
        duration_s=0.5,
        metrics={"validation/rmse": 0.9},
    )
    return made.model_copy(update=changes)


def audit_record(**changes: Any) -> AuditRecord:
    record = AuditRecord(
        id=0,
        time=1.0,
        actor="key:ci",
        actor_kind="key",
        action="POST /v1/jobs",
        object="/v1/jobs/a",
        remote="10.0.0.7",
        status=201,
        request_id="req-1",
    )
    return record.model_copy(update=changes)
