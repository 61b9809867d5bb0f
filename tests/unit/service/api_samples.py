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
