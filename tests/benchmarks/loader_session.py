"""A real training session of one rank, for its wait for data; prints JSON.

python -m tests.benchmarks.loader_session FOLDER

No Ray: the worker's own session and loop on a gloo world of one, from Parquet to optimizer step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist

from tests.benchmarks.loader_data import spec_over
from tests.harness.sessions import open_session, told
from trainer.protocol.events import Metrics
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.training.worker import prepare_process, train

REPORT_EVERY_STEPS = 20
NUM_STEPS = 160
# Reading begins with the first report, whose window also holds the start.
WARMUP_STEPS = REPORT_EVERY_STEPS
DENSE_LAYERS = (512, 256, 64)
OVER_LAYERS = (512, 256, 1)
EMBEDDING_DIM = 64


def model_spec(folder: Path) -> JobSpec:
    """DLRM of the size that its authors train on Criteo, on the rows in `folder`."""
    document = spec_over(folder).model_dump(mode="json", exclude_unset=True)
    for table in document["embedding_tables"]:
        table["embedding_dim"] = EMBEDDING_DIM
    document["model"] |= {
        "dense_arch": {"layer_sizes": DENSE_LAYERS},
        "over_arch": {"layer_sizes": OVER_LAYERS},
    }
    document["training"] = {
        "epochs": 100,
        "max_steps": NUM_STEPS,
        "report_every_steps": REPORT_EVERY_STEPS,
    }
    document["checkpoint"] = {"every_steps": NUM_STEPS}
    return validate_spec(document)


def measure(folder: Path, run_dir: Path) -> dict[str, float]:
    """Train; mean seconds per step and of waiting for data per step, after the warm-up."""
    config = WorkerConfig(model_spec(folder), run_dir, "job-test-a0", 0)
    prepare_process(config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(open_session(config))
    dist.destroy_process_group()
    reports = [
        report.values
        for report in told(run_dir, Metrics)
        if report.step > WARMUP_STEPS and "phase/data_wait_s" in report.values
    ]
    return {
        "step_s": sum(1 / report["speed/steps_per_s"] for report in reports) / len(reports),
        "wait_s": sum(report["phase/data_wait_s"] for report in reports) / len(reports),
    }


if __name__ == "__main__":
    with TemporaryDirectory(prefix="shardloom-bench-session-") as run_dir:
        print(json.dumps(measure(Path(sys.argv[1]), Path(run_dir))))
