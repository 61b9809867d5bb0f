"""Whole training sessions on gloo ranks, without Ray: what the resume tests run on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.conftest import EXAMPLE_SPEC
from tests.harness.files import records_in
from tests.harness.small_model import dense_parameters, local_shards
from trainer.data.manifest import load_manifest
from trainer.protocol import requests
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.worker_config import WorkerConfig
from trainer.spec import load_spec
from trainer.spec.job import JobSpec
from trainer.spec.resolve import fill_statistics, size_tables
from trainer.training.session import Session
from trainer.training.worker import groups_of, layout_of, run_worker, train

TOKEN = bytes(range(32))
"""Of all attempts here: the processes of one do not know what others drew at random."""


def make_config(data: Path, run_dir: Path, *overrides: str, run_index: int = 0) -> WorkerConfig:
    """The demo job on small data, 2 x 2, with `overrides` applied.

    Bandwidths are not measured: that is a quarter of what building a model takes, and plans would
    differ now and then.
    """
    settings = [f"data.path={data}", "data.batch_size=32", "training.report_every_steps=5"]
    settings += ["parallelism.planner.bandwidths=default", *overrides]
    spec = load_spec(EXAMPLE_SPEC.read_text(), settings)
    return config_of(spec, run_dir, run_index, data)


def config_of(
    spec: JobSpec, run_dir: Path, run_index: int = 0, data: Path | None = None
) -> WorkerConfig:
    """A job with table sizes and statistics from the manifest of `data`, by default its own."""
    manifest = load_manifest(data or Path(spec.data.path))
    resolved = fill_statistics(size_tables(spec, manifest.vocab_sizes), manifest.statistics)
    return WorkerConfig(resolved, run_dir, "job-test-a0", run_index, token=TOKEN)


def told(run_dir: Path, *kinds: type[Any]) -> list[Any]:
    """Records of these kinds that the streams of an attempt hold, stream by stream."""
    return records_in(RunDir(run_dir).attempt("job-test-a0"), *kinds)


def open_session(config: WorkerConfig) -> Session:
    """The session of this rank, before its first step. Collective."""
    return Session(config, groups_of(config, layout_of(config.spec), host=None))


def train_session(config: WorkerConfig) -> dict[str, Any]:
    """Train to the end; where this rank stands, its copy of the model and the final metrics.

    `moved` are the tables that are not what they began as.
    """
    session = open_session(config)
    start = [(shard, shard.weight.clone()) for shard in session.model.table_shards()]
    metrics = train(session)
    moved = {shard.table for shard, before in start if not shard.weight.equal(before)}
    return {"state": session.state, "metrics": metrics, "moved": moved, **snapshot(session)}


def load_session(config: WorkerConfig) -> dict[str, Any]:
    """Restore from the newest checkpoint only; where this rank stands and its copy."""
    session = open_session(config)
    session.restore()
    stands = {"state": session.state, "shift": session.schedule_shift}
    return {**stands, "metrics": session.final_metrics, **snapshot(session)}


def snapshot(session: Session) -> dict[str, Any]:
    """Shards of tables and moments by (name, first row), and the dense part with its state."""
    shards = {
        (name, row): shard.detach().clone()
        for name, value in _sharded(session).items()
        for shard, (row, *_) in local_shards(value)
    }
    dense = dense_parameters(session.model) | {
        f"{name}.{key}": value.clone()
        for name, state in session.optimizers.dense.state_dict()["state"].items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    return {"shards": shards, "dense": dense}


def _sharded(session: Session) -> dict[str, Any]:
    state = session.model.state_dict()
    tables = {k: v for k, v in state.items() if {"embedding_bags", "embeddings"} & {*k.split(".")}}
    states = session.model.fused_optimizer.state_dict()["state"]
    return tables | {key: value for state in states.values() for key, value in state.items()}


def assemble(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Whole tables and moments out of all ranks' shards; replicas must agree bitwise."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for rank in ranks:
        for (name, row), shard in rank["shards"].items():
            known = pieces.setdefault(name, {}).setdefault(row, shard)
            assert torch.equal(known, shard), f"replicas of {name} differ at row {row}"
    return {
        name: torch.cat([by_row[row] for row in sorted(by_row)]) for name, by_row in pieces.items()
    }


def assert_alike(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """All tables, moments and the dense part agree to rounding."""
    torch.testing.assert_close(assemble(found), assemble(wanted), atol=2e-6, rtol=0)
    torch.testing.assert_close(found[0]["dense"], wanted[0]["dense"], atol=2e-6, rtol=0)


def crash_after(config: WorkerConfig, step: int) -> None:
    """Run the real loop and die at `step` as a killed worker does: no clean-up, no goodbye."""
    import os
    import signal

    original = Session.train_step

    def dying(self: Session, *args: Any) -> None:
        original(self, *args)
        if self.state.step == step and self.groups.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    Session.train_step = dying  # type: ignore[method-assign]
    run_worker(config)


def ask_to_stop(config: WorkerConfig) -> AttemptDir:
    """Ask the first run of the attempt to stop, before it starts; the attempt's folder."""
    files = RunDir(config.run_dir).attempt(config.attempt_id)
    files.root.mkdir(parents=True)
    requests.ask(files, requests.StopRequest(run_index=0, cause="request"))
    return files


def next_run(config: WorkerConfig) -> WorkerConfig:
    """The worker group run that follows `config`."""
    return replace(config, run_index=config.run_index + 1)
