"""Records: what an earlier trainer wrote is read."""

from __future__ import annotations

from typing import Any, get_args

from trainer.protocol.events import EVENT_ADAPTER, Event

# What a trainer wrote: a field that is new since then needs a default.
GROUP = {"group": 0, "incarnation": 0, "hosts": ["a"]}
RECORDS: dict[str, dict[str, Any]] = {
    "note": {"message": "x"},
    "attempt_started": {"world_size": 2},
    "workers_started": {
        **{"run_index": 0, "world_size": 2, "shard_group_size": 2, "num_replicas": 1},
        **{"placement": "intra_host", "backend": "gloo", "hosts": ["a", "a"]},
        **{"sharding_groups": [[0, 1]], "replica_groups": [[0], [1]]},
        **{"table_shards": {"users": "row_wise"}, "total_steps": 9, "resumed_step": 0},
        "tables": [
            {
                **{"name": "users", "sharding_type": "row_wise", "data_type": "fp32"},
                **{"num_embeddings": 8, "embedding_dim": 4, "size_bytes": 160},
                "shards": [
                    {
                        **{"position": 0, "row_offset": 0, "column_offset": 0},
                        **{"num_rows": 4, "num_columns": 4},
                    }
                ],
            }
        ],
        "prediction": {
            **{"cluster": "c", "samples_per_s": 1.0, "lookup_imbalance": 1.0},
            **{"step_s": {"lookup": 0.1}, "memory_bytes": {"tables": [80, 80]}},
        },
    },
    "metrics": {"step": 1, "values": {"train/loss": "NaN"}},
    "progress": {
        **{"step": 1, "total_steps": 9, "epoch": 0, "rows": 64},
        **{"rows_per_s": 10.0, "eta_s": 2.0},
    },
    "checkpoint_committed": {"step": 1, "path": "/c/step-1", "size_bytes": 9, "duration_s": 0.1},
    "checkpoint_deleted": {"step": 1, "path": "/c/step-1"},
    "divergence": {"step": 1, "table": "users", "shard": 0, "ranks": [1], "action": "fail"},
    "sync_interval_changed": {"step": 1, "every_steps_before": 1, "every_steps": 2, "reason": "x"},
    "layout_chosen": {
        **{"world_size": 2, "shard_group_size": 1, "num_replicas": 2, "placement": "inter_host"},
        **{"failure_domain": "replica_group", "num_hosts": 2, "num_hosts_survived": 1},
        **{"memory_overhead_bytes": 1024, "reason": "x"},
    },
    "membership_changed": {
        **{"generation": 1, "commit": 1, "groups": [{**GROUP, "standing": "current"}]},
        **{"copies_alive": 1, "host_copies_alive": 1},
    },
    "group_lost": {**GROUP, "reason": "host_lost", "message": "x", "rows_returned": 0},
    "group_joined": {**GROUP, "how": "peer_copy"},
    "group_left": {**GROUP, "cause": "drain"},
    "recovered": {
        **{"generation": 1, "commit": 1, "cause": "host_lost"},
        **{"pause_s": 0.5, "syncs_lost": 1, "num_tries": 1},
    },
    "room_asked": {"num_workers": 2, "num_wanted": 4, "num_needed": 2},
    "resized": {"world_size_before": 2, "world_size": 4, "cause": "x", "restarted": True},
    "straggler_found": {"group": 0, "rank": 0, "host": "a", "slowdown": 2.0, "action": "none"},
    "hang_found": {"group": 0, "rank": 0, "host": "a", "phase": "lookup", "idle_s": 60.0},
    "host_excluded": {"host": "a", "num_failures": 3, "until": 9.0},
    "rows_skipped": {"epoch": 0, "start": 0, "stop": 64, "reason": "x"},
    "rows_quarantined": {"file": "part-0.parquet", "reason": "x", "count": 1},
    "trace_written": {"step": 3, "num_steps": 3, "rank": 0, "path": "/t.json", "size_bytes": 9},
    "workers_lost": {"run_index": 0, "reason": "host_lost", "message": "x", "will_restart": True},
    "attempt_ended": {"reason": "completed", "message": "x"},
}


def test_a_record_of_each_kind_stays_readable() -> None:
    read = [
        EVENT_ADAPTER.validate_python({"kind": kind, "time": 1.0, **held})
        for kind, held in RECORDS.items()
    ]
    assert {type(each) for each in read} == {*get_args(get_args(Event)[0])}
