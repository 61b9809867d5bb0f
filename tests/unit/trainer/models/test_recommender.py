"""Models against plain tensor arithmetic: pooled, weighted and sequence features, both archs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import KeyedJaggedTensor

from tests.harness.builders import spec_document
from tests.harness.small_model import plain_batch
from trainer.data.batches import Batch
from trainer.models.networks import Recommender, build_model
from trainer.models.sparse import AttentionPooling, History
from trainer.spec import validate_spec
from trainer.spec.data import FeatureSpec
from trainer.spec.job import JobSpec

DIM = 4
NUM_ROWS = 11
CPU = torch.device("cpu")
Lists = list[list[int]]
# Three rows a feature; empty lists and repeated ids among them.
IDS = {
    "user": [[3], [0], [3]],
    "genres": [[1, 2, 2], [], [5]],
    "movies": [[4, 1], [7], []],
    "liked": [[1, 2, 3], [], [9]],
    "seen": [[0, 0], [10, 5], []],
}
WEIGHTS = [[0.5, -2.0, 3.0], [], [0.25]]
POOLED = [
    {"name": "user", "type": "id", "table": "users"},
    {"name": "genres", "type": "id_list", "table": "tags"},
    {"name": "movies", "type": "tokens", "table": "movies"},
]
SEQUENCES = [
    {"name": "liked", "type": "sequence", "table": "recent", "max_length": 3},
    {"name": "seen", "type": "sequence", "table": "recent", "max_length": 5},
]


def make_spec(
    features: list[dict[str, Any]], arch: str = "dlrm", data_type: str = "fp32"
) -> JobSpec:
    names = dict.fromkeys(feature["table"] for feature in features)
    table = {"embedding_dim": DIM, "num_embeddings": NUM_ROWS, "data_type": data_type}
    document = spec_document() | {
        "features": [{"name": "age", "type": "dense"}, *features],
        "embedding_tables": [
            table | {"name": name, "pooling": "mean" if name == "tags" else "sum"} for name in names
        ],
        "model": {
            "arch": arch,
            "dense_arch": {"layer_sizes": [DIM]},
            "over_arch": {"layer_sizes": [6, 1]},
            "tasks": [{"loss": "mse"}],
        },
        "parallelism": {"shard_group_size": 1},
    }
    return validate_spec(document)


def make_model(spec: JobSpec) -> Recommender:
    """The model with its tables on the CPU and every parameter random, the queries too."""
    torch.manual_seed(3)
    model = build_model(spec, CPU)
    arch = model.network.sparse_arch
    for tables in (arch.embedding_bag_collection, arch.embedding_collection):
        if tables is not None:
            tables.to_empty(device=CPU)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
    return model


def jagged(lists: Mapping[str, Lists], weights: list[float] | None = None) -> KeyedJaggedTensor:
    """Ids of each row by feature."""
    rows = [row for feature in lists.values() for row in feature]
    return KeyedJaggedTensor(
        keys=list(lists),
        values=torch.tensor([i for row in rows for i in row], dtype=torch.int64),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int32),
        weights=None if weights is None else torch.tensor(weights),
    )


def make_batch(spec: JobSpec) -> Batch:
    def of(features: Sequence[FeatureSpec], is_weighted: bool) -> KeyedJaggedTensor:
        weights = [w for f in features for row in row_weights(f.name, spec) for w in row]
        return jagged({f.name: IDS[f.name] for f in features}, weights if is_weighted else None)

    sequences = spec.sequence_features
    return plain_batch(
        dense=torch.tensor([[0.5], [-1.0], [2.0]]),
        sparse=of(spec.pooled_features, spec.is_weighted),
        label=torch.tensor([[1.0], [0.0], [1.0]]),
        weight=torch.tensor([1.0, 1.0, 0.0]),
        sequences=of(sequences, spec.has_weighted_sequences) if sequences else None,
    )


def row_weights(name: str, spec: JobSpec) -> list[list[float]]:
    if next(f for f in spec.features if f.name == name).weights_column:
        return WEIGHTS
    return [[1.0] * len(ids) for ids in IDS[name]]


def expected_vector(model: Recommender, spec: JobSpec, name: str, row: int) -> torch.Tensor:
    """One feature's vector of one row, in plain arithmetic."""
    arch = model.network.sparse_arch
    feature = next(f for f in spec.features if f.name == name)
    ids = IDS[name][row]
    if not ids:
        return torch.zeros(DIM)
    if feature.is_sequence:
        vectors = arch.embedding_collection.embeddings[feature.table].weight.float()[ids]
        query = arch.attention[[f.name for f in spec.sequence_features].index(name)].query
        scores = [math.exp(float(query @ vector) / math.sqrt(DIM)) for vector in vectors]
        weights = row_weights(name, spec)[row]
        shares = [w * score / sum(scores) for w, score in zip(weights, scores, strict=True)]
        return sum(share * vector for share, vector in zip(shares, vectors, strict=True))
    vectors = arch.embedding_bag_collection.embedding_bags[feature.table].weight.float()[ids]
    weights = row_weights(name, spec)[row]
    total = sum(weight * vector for weight, vector in zip(weights, vectors, strict=True))
    return total / len(ids) if feature.table == "tags" else total


def expected_crossed(model: Recommender, spec: JobSpec, row: list[torch.Tensor]) -> torch.Tensor:
    """DLRM's dot products, or DCN v2's low-rank cross x0 * (W V x + b) + x, of one row."""
    if spec.model.arch == "dlrm":
        pairs = [row[i] @ row[j] for i in range(len(row)) for j in range(i + 1, len(row))]
        return torch.cat([row[0], torch.stack(pairs)])
    net = model.network.inter_arch.crossnet
    start = crossed = torch.cat(row)
    for w, v, bias in zip(net.W_kernels, net.V_kernels, net.bias, strict=True):
        crossed = start * (w @ (v @ crossed) + bias) + crossed
    return crossed


@torch.no_grad()
def expected_outputs(model: Recommender, spec: JobSpec) -> torch.Tensor:
    batch = make_batch(spec)
    outputs = []
    for row, dense in enumerate(batch.dense):
        linear = model.network.dense_arch.model._mlp[0]._linear
        hidden = torch.relu(linear.weight @ dense + linear.bias)
        names = model.network.sparse_arch.sparse_feature_names
        vectors = [expected_vector(model, spec, name, row) for name in names]
        crossed = expected_crossed(model, spec, [hidden, *vectors])
        layers, last = model.network.over_arch.model
        inner = torch.relu(layers._mlp[0]._linear(crossed))
        outputs.append(last(inner))
    return torch.stack(outputs)


WEIGHTED = [POOLED[0], POOLED[1] | {"weights_column": "w"}, POOLED[2]]
FEATURES = {
    "pooled": POOLED,
    "weighted": WEIGHTED,
    "sequences": SEQUENCES,
    "pooled and sequences": [SEQUENCES[0], *POOLED, SEQUENCES[1]],
    "weighted and sequences": [*WEIGHTED, *SEQUENCES],
    "weighted sequences": [*POOLED, SEQUENCES[0] | {"weights_column": "w"}, SEQUENCES[1]],
}


@pytest.mark.parametrize("arch", ["dlrm", "dcn_v2"])
@pytest.mark.parametrize("features", FEATURES)
def test_a_model_computes_what_plain_arithmetic_does(arch: str, features: str) -> None:
    spec = make_spec(FEATURES[features], arch)
    model = make_model(spec)
    _, outputs = model(make_batch(spec))
    torch.testing.assert_close(outputs, expected_outputs(model, spec), atol=1e-4, rtol=1e-5)


def test_half_precision_tables_reach_the_dense_part_as_float32() -> None:
    spec = make_spec(FEATURES["pooled and sequences"], data_type="fp16")
    model = make_model(spec)
    arch = model.network.sparse_arch
    assert arch.embedding_bag_collection.embedding_bags["tags"].weight.dtype == torch.float16
    assert arch.embedding_collection.embeddings["recent"].weight.dtype == torch.float16
    batch = make_batch(spec)
    assert arch(batch.sparse, batch.sequences).dtype == torch.float32
    _, outputs = model(batch)
    torch.testing.assert_close(outputs, expected_outputs(model, spec), atol=5e-2, rtol=5e-3)


def test_gradients_reach_tables_queries_and_layers() -> None:
    spec = make_spec(FEATURES["weighted and sequences"])
    model = make_model(spec)
    loss, _ = model(make_batch(spec))
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    recent = model.network.sparse_arch.embedding_collection.embeddings["recent"].weight.grad
    looked_up = sorted({i for name in ("liked", "seen") for ids in IDS[name][:2] for i in ids})
    assert recent.abs().sum(dim=1).nonzero().flatten().tolist() == looked_up


def test_a_row_of_weight_0_changes_no_loss_and_no_gradient_whatever_its_label_is() -> None:
    spec = make_spec(FEATURES["pooled"])
    weighted = spec.data.model_copy(update={"weight_column": "w"})
    model, batch = make_model(spec.model_copy(update={"data": weighted})), make_batch(spec)
    found = []
    for label in (1.0, 3e38):  # whose square is infinite
        labels = batch.label.clone()
        labels[2] = label
        loss, _ = model(replace(batch, label=labels))
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    padding=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    scale=st.sampled_from([1.0, 1e4]),
)
def test_attention_ignores_padding_whatever_it_holds(lengths, padding, scale) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    pooling = AttentionPooling(DIM, CPU)
    nn.init.normal_(pooling.query, std=scale, generator=generator)
    vectors = torch.randn(len(lengths), 6, DIM, generator=generator)
    spoilt = vectors.clone()
    for row, length in enumerate(lengths):
        spoilt[row, length:] = padding
    pooled = pooling(History(spoilt, torch.tensor(lengths), None))
    assert torch.equal(pooled, pooling(History(vectors, torch.tensor(lengths), None)))
    for row, length in enumerate(lengths):
        shortened = vectors[row : row + 1, : max(length, 1)]
        alone = pooling(History(shortened, torch.tensor([length]), None))
        torch.testing.assert_close(pooled[row], alone[0], atol=1e-5, rtol=1e-5)


def test_attention_of_an_empty_sequence_is_zero_with_zero_gradient() -> None:
    pooling = AttentionPooling(DIM, CPU)
    vectors = torch.randn(1, 5, DIM)
    # It starts as the mean of the sequence.
    pooled = pooling(History(vectors, torch.tensor([4]), None))
    torch.testing.assert_close(pooled[0], vectors[0, :4].mean(dim=0))
    nn.init.ones_(pooling.query)
    vectors = torch.randn(2, 3, DIM, requires_grad=True)
    pooled = pooling(History(vectors, torch.tensor([0, 2]), None))
    pooled.square().sum().backward()
    assert pooled[0].tolist() == [0.0] * DIM
    assert vectors.grad[0].abs().sum() == 0
    assert vectors.grad[1, 2].abs().sum() == 0
    assert torch.isfinite(pooling.query.grad).all()
