"""What goes into an exported program, and what quantising does to what comes out of a table."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from tests.unit.trainer.export.export_case import NUM_IDS, make_spec
from trainer.data.batches import Batch
from trainer.export.artifact import BadRow
from trainer.export.predict import (
    PAD_ROWS,
    program_arrays,
    rows_at_once,
    rows_of_table,
    scoring_layout,
)
from trainer.export.predict import table_of_dicts as table_of
from trainer.export.program import quantized, write_program

SPEC = make_spec(Path("unused"))
LAYOUT = scoring_layout(SPEC, Path("unused"))
NUM_TABLE_ROWS, DIM = 50, 8

ids = st.integers(0, NUM_IDS - 1)


@st.composite
def request_rows(draw: st.DrawFn) -> dict[str, Any]:
    """A row of a request; lists may be empty, sequences longer than counts."""
    tags = draw(st.lists(ids, max_size=4))
    return {
        "age": draw(st.floats(-9, 9)),
        "user": draw(ids),
        "tags": tags,
        "tag_weights": [draw(st.floats(-2, 2, width=32)) for _ in tags],
        "seen": draw(st.lists(ids, max_size=6)),
        "mean": 3.0,
        "spread": 1.0,
    }


@given(st.lists(request_rows(), max_size=5))
def test_a_program_gets_every_id_of_every_row_and_sizes_that_are_never_0_or_1(
    requests: list[dict[str, Any]],
) -> None:
    rows = rows_of_table(table_of(requests, LAYOUT), LAYOUT)
    dense, pooled, lengths, weights, sequences, sequence_lengths = program_arrays(rows, SPEC)
    num_rows = len(requests) + PAD_ROWS
    assert dense.shape == (num_rows, 2)
    assert lengths.shape == (3 * num_rows,)
    assert sequence_lengths.shape == (num_rows,)
    assert len(pooled) == len(weights) == lengths.sum() >= 2
    assert len(sequences) == sequence_lengths.sum() >= 2
    by_feature = np.split(pooled, np.cumsum(lengths.reshape(3, -1).sum(axis=1))[:-1])
    pad = [0] * PAD_ROWS
    assert by_feature[0].tolist() == [row["user"] for row in requests] + pad
    assert by_feature[1].tolist() == [i for row in requests for i in row["tags"]] + pad
    # Of a sequence the last three count.
    assert sequences.tolist() == [i for row in requests for i in row["seen"][-3:]] + pad


@given(st.lists(st.sampled_from([[1], [], None, ["x"], 7, [None], [1.5]]), min_size=1))
def test_the_first_value_that_does_not_fit_is_named(values: list[Any]) -> None:
    row = {"age": 1.0, "user": 1, "mean": 3.0, "spread": 1.0}
    rows = [row | {"seen": value} for value in values]
    fits = [value is None or value in ([1], [], [None]) for value in values]
    if all(fits):
        table_of(rows, LAYOUT)
        return
    with pytest.raises(BadRow) as caught:
        table_of(rows, LAYOUT)
    assert (caught.value.row, caught.value.column) == (fits.index(False), "seen")


def test_fewer_rows_are_scored_at_once_where_their_sequences_are_long() -> None:
    (seen,) = SPEC.sequence_features
    for max_length, num_rows in ((3, 8192), (1000, 262), (10_000, 26)):
        longer = seen.model_copy(update={"max_length": max_length})
        features = tuple(longer if each is seen else each for each in SPEC.features)
        assert rows_at_once(SPEC.model_copy(update={"features": features})) == num_rows


def tables() -> torch.nn.ModuleDict:
    """A table of each kind, with rows of very different ranges."""
    size = {"embedding_dim": DIM, "num_embeddings": NUM_TABLE_ROWS}
    bags = EmbeddingBagCollection([EmbeddingBagConfig(name="a", feature_names=["a"], **size)])
    lists = EmbeddingCollection([EmbeddingConfig(name="b", feature_names=["b"], **size)])
    model = torch.nn.ModuleDict({"bags": bags, "lists": lists})
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
        parameter.data *= torch.logspace(-1, 1, NUM_TABLE_ROWS).unsqueeze(1)
    return model


def vectors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every row of both tables, looked up one by one."""
    every, ones = torch.arange(NUM_TABLE_ROWS), torch.ones(NUM_TABLE_ROWS, dtype=torch.int32)
    with torch.no_grad():
        bags = model["bags"](KeyedJaggedTensor(keys=["a"], values=every, lengths=ones))
        lists = model["lists"](KeyedJaggedTensor(keys=["b"], values=every, lengths=ones))
    return {"bags": bags["a"].float(), "lists": lists["b"].values().float()}


@pytest.mark.parametrize("kind", ["bags", "lists"])
def test_int8_is_off_by_at_most_half_a_step_of_its_row(kind: str) -> None:
    model = tables()
    wanted = vectors(model)[kind]
    small = quantized(model, "int8")
    found = vectors(small)[kind]
    steps = (wanted.max(dim=1).values - wanted.min(dim=1).values) / 255
    # Scale and bias are kept in half precision, 11 bits: off by that much of range and offset.
    rounding = (255 * steps + wanted.abs().max(dim=1).values) * 2**-10
    assert ((found - wanted).abs() <= (steps / 2 + rounding).unsqueeze(1)).all()
    assert not torch.equal(found, wanted)
    # The model that was quantised is as it was.
    assert torch.equal(vectors(model)[kind], wanted)


class Dense(torch.nn.Module):
    """A small model: its predictions are the first dense feature."""

    def forward(self, batch: Batch) -> tuple[None, torch.Tensor]:
        return None, 2 * batch.dense[:, :1]


def test_a_full_disk_is_no_fault_of_the_model(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*model\.pt2'"):
            write_program(Dense(), SPEC, tmp_path / "model.pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
