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
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist

from tests.benchmarks.quality_data import FloatArray
from tests.benchmarks.report import BenchmarkError
from trainer.data.batches import Batch
from trainer.data.inputs import resolve_inputs
from trainer.data.ragged import IntArray
from trainer.parallel.mesh import build_groups
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec
from trainer.spec.parse import apply_overrides, parse_document
from trainer.training.session import Session
from trainer.training.worker import layout_of, train

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
    return resolve_inputs(validate_spec(document))


@contextmanager
def single_rank() -> Iterator[None]:
    """A process group of this process alone, quiet about what its libraries think."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("torchrec", "torch", "trainer"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def held_out_errors(spec: JobSpec) -> tuple[IntArray, FloatArray]:
    """(user, error in stars) of each held-out rating after training `spec`. Needs `single_rank`.

    A user is its place among all users in ascending order, as every user has fitted ratings.
    """
    with tempfile.TemporaryDirectory(prefix="shardloom-quality-") as folder:
        config = WorkerConfig(spec, Path(folder), "quality-a0", 0)
        groups = build_groups(layout_of(spec), torch.device("cpu"), _GROUP_TIMEOUT_S)
        session = _Measured(config, groups)
        train(session)
    files = sorted((Path(spec.data.path) / spec.data.split.validation).glob("*.parquet"))
    rows = pq.ParquetDataset(files).read(["user_id", "rating"])
    if not np.allclose(rows["rating"].to_numpy(), session.labels, atol=1e-4):
        raise BenchmarkError("the session validated in another order than that of the files")
    measured = session.final_metrics["validation/rmse"]
    if not np.isclose(np.sqrt(np.mean(session.errors**2)), measured, rtol=1e-4):
        raise BenchmarkError("the errors that were kept are not those that the session measured")
    return rows["user_id"].to_numpy() - 1, session.errors


class _Measured(Session):
    """A session that remembers the rows of its last validation."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._rows: list[torch.Tensor] = []
        self._take_in = self.validation_meter.update
        self.validation_meter.update = self._keep

    def validate(self) -> bool:
        self._rows.clear()
        return super().validate()

    def _keep(self, batch: Batch, loss: torch.Tensor, outputs: torch.Tensor) -> None:
        self._take_in(batch, loss, outputs)
        real = batch.weight > 0
        labels = batch.label * batch.label_scale + batch.label_offset
        errors = (batch.label - outputs.detach()) * batch.label_scale
        self._rows.append(torch.stack([labels[real, 0], errors[real, 0]]))

    @property
    def labels(self) -> FloatArray:
        """Stars of the held-out ratings, in the order of validation."""
        return torch.cat(self._rows, dim=1)[0].double().numpy()

    @property
    def errors(self) -> FloatArray:
        """Stars less what was predicted, in the order of validation."""
        return torch.cat(self._rows, dim=1)[1].double().numpy()
