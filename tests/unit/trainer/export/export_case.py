"""A small run folder with a checkpoint, as training would have left it, and its data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from trainer.checkpoint.files import Commit, RowOrder, write_marker
from trainer.export.load import materialize
from trainer.models.networks import build_model
from trainer.protocol.run_dir import RunDir, file_record
from trainer.spec import validate_spec
from trainer.spec.job import JobSpec

NUM_IDS = 40
NUM_TAGS = 40_000
NUM_ROWS = 90
CPU = torch.device("cpu")
WORDS = ("red", "green", "blue")


def spec_document(data: Path, **changes: Any) -> dict[str, Any]:
    """A job with every kind of feature: pooled with weights, a sequence, hashed strings, dense."""
    document: dict[str, Any] = {
        "name": "tiny",
        "data": {
            "path": str(data),
            "label": {"column": "stars", "offset_column": "mean", "scale_column": "spread"},
        },
        "features": [
            {"name": "age", "type": "dense"},
            {"name": "price", "type": "dense", "transform": "log1p", "missing": 1.0},
            {"name": "user", "type": "id", "table": "users"},
            {"name": "tags", "type": "id_list", "table": "tags", "weights_column": "tag_weights"},
            {"name": "colour", "type": "id", "table": "colours", "hashing": {"num_buckets": 16}},
            {"name": "seen", "type": "sequence", "table": "movies", "max_length": 3},
        ],
        "embedding_tables": [
            {"name": "users", "embedding_dim": 8, "num_embeddings": NUM_IDS},
            {"name": "tags", "embedding_dim": 8, "num_embeddings": NUM_TAGS, "pooling": "mean"},
            {"name": "colours", "embedding_dim": 8, "num_embeddings": 16},
            {"name": "movies", "embedding_dim": 8, "num_embeddings": NUM_IDS},
        ],
        "model": {
            "arch": "dlrm",
            "dense_arch": {"layer_sizes": [16, 8]},
            "over_arch": {"layer_sizes": [8, 1]},
            "tasks": [{"name": "stars", "loss": "mse"}],
        },
        "parallelism": {"workers": 1, "shard_group_size": 1},
    }
    return document | changes


def make_spec(data: Path, **changes: Any) -> JobSpec:
    return validate_spec(spec_document(data, **changes))


def rows(num_rows: int = NUM_ROWS, seed: int = 3) -> pa.Table:
    """Rows for that spec; empty lists and sequences longer than counts among them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 6, size=(2, num_rows))
    tags = [rng.integers(0, NUM_IDS, n).tolist() for n in lengths[0]]
    return pa.table(
        {
            "age": rng.normal(size=num_rows),
            "price": rng.uniform(0, 9, num_rows),
            "user": rng.integers(0, NUM_IDS, num_rows),
            "tags": pa.array(tags, pa.list_(pa.int64())),
            "tag_weights": pa.array(
                [rng.normal(size=len(each)).tolist() for each in tags], pa.list_(pa.float64())
            ),
            "colour": [WORDS[k] for k in rng.integers(0, len(WORDS), num_rows)],
            "seen": pa.array(
                [rng.integers(0, NUM_IDS, n).tolist() for n in lengths[1]], pa.list_(pa.int64())
            ),
            "stars": rng.integers(1, 6, num_rows).astype(np.float64),
            "mean": rng.uniform(2, 4, num_rows),
            "spread": rng.uniform(0.5, 1.5, num_rows),
            "liked": rng.choice([-1.0, 1.0], num_rows),
            "low": np.full(num_rows, -1.0),
            "gap": np.full(num_rows, 2.0),
        }
    )


def write_data(folder: Path) -> Path:
    """A folder of plain Parquet with both splits."""
    for part in ("train", "validation"):
        (folder / part).mkdir(parents=True)
        pq.write_table(rows(), folder / part / "part-0.parquet", row_group_size=50)
    return folder


def random_model(spec: JobSpec, seed: int = 5) -> nn.Module:
    """The spec's model with weights that matter: of tables about 0.3, others as initialised."""
    torch.manual_seed(seed)
    model = build_model(spec, CPU)
    tables = {name: each.dtype for name, each in model.named_parameters() if each.is_meta}
    materialize(model)
    for name, parameter in model.named_parameters():
        if name in tables:
            nn.init.normal_(parameter, std=0.3)
            parameter.copy_(parameter.to(tables[name]))
    return model.eval()


def write_checkpoint(run_dir: RunDir, spec: JobSpec, step: int) -> Path:
    """A committed checkpoint of random weights, in the form and precision that training writes."""
    folder = run_dir.checkpoints_dir / f"step-{step:08d}-a0-r0"
    kinds = {name: each.dtype for name, each in build_model(spec, CPU).state_dict().items()}
    weights = random_model(spec, seed=step).state_dict().items()
    state = {f"model.{name}": each.to(kinds[name]) for name, each in weights}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    files = {path.name: file_record(path) for path in folder.iterdir()}
    order = RowOrder(90, "")
    commit = Commit(step, 0, 0, step, 1, 1, "intra_host", float(step), 1.0, order, files=files)
    write_marker(folder, commit)
    return folder


def write_run(folder: Path, spec: JobSpec, *steps: int) -> RunDir:
    """A run folder with checkpoints of random weights at `steps`."""
    run_dir = RunDir(folder)
    path = run_dir.attempt("job-x-a0").spec_path
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(spec.model_dump(mode="json")))
    for step in steps:
        write_checkpoint(run_dir, spec, step)
    return run_dir
