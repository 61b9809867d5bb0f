"""Rows per second of a job that is struck 20 times, over the same job left alone.

python -m tests.benchmarks.goodput --json FILE

Three replica groups, each a failure domain, train DCN v2 on generated clicks, once. On one side 20
faults strike at random, evenly over the run: workers exit, are killed or stopped, raise, wait, get
a NaN loss, a full disk or a torn copy, at any point of a step, sync, checkpoint or join, and the
coordinator is killed. Each lost group is started again and joins by copying from a peer. The time
of everything counts, from the first committed sync to the last; so does the final normalised
entropy on held-out rows. Ranks and coordinator are bare processes here, without Ray: a group is
back within a second or two, where a cluster also has to start a worker.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.report import BenchmarkReport, Goal, Values, log, main, run_pairs
from tests.harness.chaos import Campaign
from tests.harness.elastic import ElasticHarness
from tests.harness.elastic_checks import check_copies
from trainer.datasets.criteo.prepare import CriteoOptions, prepare_criteo
from trainer.datasets.criteo.reader import DENSE_NAMES, ID_NAMES, LABEL, NUM_CATEGORICAL
from trainer.datasets.criteo.synthetic import CriteoGeneratorOptions, generate_criteo, table_sizes
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec import validate_spec

NAME = "goodput"
PAIRS = 1
NUM_FAULTS = 20
NUM_GROUPS = 3
NUM_RANKS = 1
BATCH_SIZE = 64
SYNC_EVERY_STEPS = 4
# Ten minutes: a fault about every half minute.
NUM_TRAIN_ROWS = 2_400_000
NUM_ROWS = NUM_TRAIN_ROWS * 10 // 9  # the rest is held out
MAX_TABLE_ROWS = 2000
EMBEDDING_DIM = 8
# Stands for an accelerator's work: cores that the groups share must not be what they wait for.
PACE_S = 0.12
HEARTBEAT_TIMEOUT_S = 3.0
TIMEOUT_S = 1800.0
GOALS = [
    Goal("goodput_share", "rows_per_s", "rows/s", 0.95, "higher", "the same job without faults"),
    Goal("ne_over_fault_free", "ne", "NE", 1.002, "lower", "the same job without faults"),
]


def spec_document(data: Path) -> dict[str, Any]:
    """The job, with everything said that the two sides share."""
    dense = [{"name": name, "type": "dense"} for name in DENSE_NAMES]
    ids = [{"name": name, "type": "id", "table": name} for name in ID_NAMES]
    tables = [
        {
            "name": name,
            "num_embeddings": size + 1,  # and the unknown id, 0
            "embedding_dim": EMBEDDING_DIM,
            "constraints": {"sharding_types": ["table_wise"]},
        }
        for name, size in zip(ID_NAMES, table_sizes(MAX_TABLE_ROWS), strict=True)
    ]
    return {
        "name": NAME,
        "data": {"path": str(data), "label": {"column": LABEL}, "batch_size": BATCH_SIZE},
        "features": dense + ids,
        "embedding_tables": tables,
        "model": {
            "arch": "dcn_v2",
            "dense_arch": {"layer_sizes": [32, EMBEDDING_DIM]},
            "interaction_arch": {"num_layers": 2, "low_rank_dim": 16},
            "over_arch": {"layer_sizes": [64, 32, 1]},
            "tasks": [{"name": "click", "loss": "bce", "metrics": ["ne"]}],
        },
        "optimizer": {
            "sparse": {"name": "row_wise_adagrad", "lr": 0.08, "eps": 5e-4},
            "dense": {"name": "adam", "lr": 0.002},
        },
        "parallelism": {
            "workers": NUM_GROUPS * NUM_RANKS,
            "shard_group_size": NUM_RANKS,
            "placement": "inter_host",
            "sync": {"every_steps": SYNC_EVERY_STEPS},
        },
        "training": {"epochs": 1, "report_every_steps": 100, "on_non_finite": "skip"},
        "checkpoint": {"every_steps": 100, "keep_best": False, "keep_last": 2},
        # Deaths show at once by closed connections; only who is stopped is found by its silence.
        "recovery": {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S},
        "resources": {"device": "cpu"},
    }


def run(num_pairs: int) -> BenchmarkReport:
    with TemporaryDirectory(prefix="shardloom-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        raw, data = folder / "raw", folder / "data"
        generate_criteo(raw, CriteoGeneratorOptions(num_rows=NUM_ROWS, max_ids=MAX_TABLE_ROWS))
        prepare_criteo([raw], data, options=CriteoOptions(min_count=1))
        spec = validate_spec(spec_document(data))
        configs = (WorkerConfig(spec, folder / f"run-{n}", "job-bench-a0", 0) for n in count())
        runs = run_pairs(
            num_pairs,
            lambda: measure(next(configs), NUM_FAULTS),
            lambda: measure(next(configs), 0),
        )
    return BenchmarkReport(NAME, settings(), GOALS, runs)


def measure(config: WorkerConfig, num_faults: int) -> Values:
    """Run the job to its end under so many faults."""
    with ElasticHarness(config, config.run_dir / "harness", NUM_GROUPS, pace_s=PACE_S) as harness:
        campaign = Campaign(harness, Random(1), pace_s=PACE_S, stretches=False)
        campaign.begin()
        strikes = _strike_all(harness, campaign, num_faults)
        harness.wait_to_end(TIMEOUT_S)
        check_copies(harness.records())
        committed = harness.of("committed")
        ledger = committed[-1]
        ended = next(each["time"] for each in committed if each["commit"] == ledger["commit"])
        return {
            "rows_per_s": ledger["rows_trained"] / (ended - committed[0]["time"]),
            "ne": ledger["metrics"]["validation/ne"],
            "num_faults": float(strikes),
        }


def _strike_all(harness: ElasticHarness, campaign: Campaign, num_faults: int) -> int:
    """Strike evenly over the rows; how many faults there were."""
    for number in range(num_faults):
        due = NUM_TRAIN_ROWS * (number + campaign.random.random()) / (num_faults + 1)
        harness.wait_for(lambda due=due: _rows(harness) >= due, TIMEOUT_S, f"{due:.0f} rows")
        campaign.strike_at_random()
        log(campaign.struck[-1])
    return len(campaign.struck)


def _rows(harness: ElasticHarness) -> int:
    committed: Sequence[Any] = harness.of("committed")
    return committed[-1]["rows_trained"] if committed else 0


def settings() -> dict[str, Any]:
    return {
        "num_groups": NUM_GROUPS,
        "workers_per_group": NUM_RANKS,
        "batch_size_per_rank": BATCH_SIZE,
        "sync_every_steps": SYNC_EVERY_STEPS,
        "num_rows": NUM_TRAIN_ROWS,
        "num_faults": NUM_FAULTS,
        "pause_per_lease_s": PACE_S,
        "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "model": f"DCN v2, {NUM_CATEGORICAL} tables of at most {MAX_TABLE_ROWS} rows",
        "processes": "bare ranks and coordinator, without Ray",
    }


if __name__ == "__main__":
    sys.exit(main(run, default_pairs=PAIRS, description=__doc__))
