"""Bodies as the service sends them, for tests of the client and the CLI."""

from __future__ import annotations

from typing import Any

from trainer.spec import validate_spec


def spec_document(**changes: Any) -> dict[str, Any]:
    """A small valid spec: 4 workers as 2 replicas x 2 shards."""
    return {
        "name": "ratings",
        "data": {"path": "/data/ratings", "label": {"column": "rating"}},
        "features": [
            {"name": "year", "type": "dense"},
            {"name": "user", "type": "id", "table": "users"},
        ],
        "embedding_tables": [{"name": "users", "num_embeddings": 100, "embedding_dim": 8}],
        "model": {
            "dense_arch": {"layer_sizes": [8]},
            "over_arch": {"layer_sizes": [4, 1]},
            "tasks": [{"loss": "mse"}],
        },
        "parallelism": {"workers": 4, "shard_group_size": 2},
        **changes,
    }


def job_body(**changes: Any) -> dict[str, Any]:
    """A `JobDetail` in the middle of its training."""
    return {
        "id": "job-0000000000ab",
        "name": "ratings",
        "project": "default",
        "labels": {},
        "status": "RUNNING",
        "reason": None,
        "message": "",
        "created_at": 1000.0,
        "started_at": 1002.0,
        "ended_at": None,
        "min_workers": 4,
        "world_size": 4,
        "shard_group_size": 2,
        "num_replicas": 2,
        "num_attempts": 1,
        "num_failures": 0,
        "progress": {
            "step": 50,
            "total_steps": 200,
            "epoch": 0,
            "rows": 51200,
            "rows_per_s": 21300.0,
            "eta_s": 72.0,
            "percent": 25.0,
        },
        "latest_metrics": {"train/loss": 0.41, "validation/rmse": 0.934},
        "version": 3,
        "spec": validate_spec(spec_document()).model_dump(mode="json"),
        "run_dir": "/runs/job-0000000000ab",
        "current_attempt_id": "job-0000000000ab-1",
        **changes,
    }


def membership_body(**changes: Any) -> dict[str, Any]:
    """Three groups of which one was lost twelve seconds before `now` = 2000."""
    members = [
        {"group": group, "incarnation": 0, "hosts": [f"127.0.0.{group + 2}"] * 2}
        for group in (0, 2)
    ]
    return {
        "attempt_id": "job-0000000000ab-1",
        "layout": {
            "world_size": 6,
            "shard_group_size": 2,
            "num_replicas": 3,
            "placement": "inter_host",
            "failure_domain": "replica_group",
            "num_hosts": 3,
            "num_hosts_survived": 2,
            "memory_overhead_bytes": 105_000_000,
            "sync_latency_s": 0.012,
            "reason": "three copies on three hosts survive the loss of two",
        },
        "generation": 4,
        "commit": 128,
        "changed_at": 1988.0,
        "num_current": 2,
        "num_wanted": 3,
        "copies_alive": 2,
        "host_copies_alive": 2,
        "host_copies_needed": 3,
        "members": [{**member, "standing": "current"} for member in members],
        "missing": [
            {
                "group": 1,
                "incarnation": 0,
                "hosts": ["127.0.0.3"] * 2,
                "time": 1988.0,
                "reason": "host_lost",
                "message": "",
            }
        ],
        "num_losses": 1,
        "num_recoveries": 1,
        "last_recovery": {
            "time": 1988.4,
            "generation": 4,
            "cause": "host_lost",
            "pause_s": 0.31,
            "syncs_lost": 0,
            "num_tries": 1,
        },
        "excluded_hosts": [{"host": "127.0.0.9", "num_failures": 3, "until": 2600.0}],
        **changes,
    }


def event_body(event_id: int, **changes: Any) -> dict[str, Any]:
    """One line of a timeline."""
    return {
        "id": event_id,
        "attempt_id": None,
        "time": 1000.0 + event_id,
        "kind": "note",
        "message": f"line {event_id}",
        "actor": "service",
        "data": {},
        **changes,
    }


def requested_trace_body() -> dict[str, Any]:
    """The answer to a request for a trace of ranks 0 and 1."""
    return {
        "id": "t-0000c0de",
        "attempt_id": "job-0000000000ab-1",
        "num_steps": 3,
        "ranks": [0, 1],
        "names": ["t-0000c0de-rank0.json.gz", "t-0000c0de-rank1.json.gz"],
    }


def trace_body(rank: int) -> dict[str, Any]:
    """A trace that answers that request."""
    return {
        "name": f"t-0000c0de-rank{rank}.json.gz",
        "attempt_id": "job-0000000000ab-1",
        "rank": rank,
        "step": 1203,
        "num_steps": 3,
        "size_bytes": 1_200_000,
        "time": 1000.0,
    }


def problem_body(status: int, code: str, detail: str, **changes: Any) -> dict[str, Any]:
    """An RFC 9457 problem."""
    return {"title": "Problem", "status": status, "detail": detail, "code": code, **changes}
