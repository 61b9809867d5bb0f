"""Our side of the quality benchmark: a real training session of a job spec, on one rank.

The session is the one that Ray workers run, with the example's spec; only what concerns the
machine (workers, checkpoints, reports) is set for a single process. `validation` of the session is
whatever part the fold holds out.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.data.manifest import load_manifest
from trainer.data.resolve import resolve_tables
from trainer.parallel.groups import build_groups
from trainer.ray_worker import WorkerConfig
from trainer.session import Session
from trainer.spec import JobSpec, apply_overrides, parse_document, validate_spec
from trainer.worker import layout_of, train

_GROUP_TIMEOUT_S = 600.0
_NEVER = 10**9
_SINGLE_PROCESS = (
    "parallelism.workers=1",
    "parallelism.shard_group_size=1",
    "parallelism.sync={every_steps: 1}",
    "parallelism.divergence_check=null",
    "resources.device=cpu",
    "retry.max_failures=0",
    "training.validate_every_steps=null",
    f"training.report_every_steps={_NEVER}",
    f"checkpoint.every_steps={_NEVER}",
    "checkpoint.keep_best=false",
)


def job_spec(path: Path, prepared: Path, overrides: Sequence[str]) -> JobSpec:
    """The job of the spec file `path` on `prepared` data, cut down to one process."""
    document = apply_overrides(
        parse_document(path.read_text()),
        [*_SINGLE_PROCESS, f"data.path={prepared}", *overrides],
    )
    return resolve_tables(validate_spec(document), load_manifest(prepared))


@contextmanager
def single_rank() -> Iterator[None]:
    """A process group of this process alone, quiet about what its libraries think."""
    warnings.simplefilter("ignore")
    for name in ("torchrec", "torch", "trainer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="shardloom-quality-") as folder:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def rmse_by_epoch(spec: JobSpec) -> list[float]:
    """Held-out RMSE in stars after each epoch of training `spec`. Needs `single_rank`."""
    with tempfile.TemporaryDirectory(prefix="shardloom-quality-") as folder:
        config = WorkerConfig(spec, Path(folder), "quality-a0", 0)
        groups = build_groups(layout_of(spec), torch.device("cpu"), _GROUP_TIMEOUT_S)
        session = _Measured(config, groups)
        train(session)
    return session.held_out_rmse


class _Measured(Session):
    """A session that remembers what each validation found."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.held_out_rmse: list[float] = []

    def validate(self) -> bool:
        is_best = super().validate()
        self.held_out_rmse.append(self.final_metrics["validation/rmse"])
        return is_best
