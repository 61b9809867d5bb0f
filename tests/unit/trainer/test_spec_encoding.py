"""Encodings of features in a spec: what fits what, and what is refused with its field."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.spec import JobSpec, SpecError, validate_spec

SPARSE = {"name": "f", "type": "id", "table": "t"}
DENSE = {"name": "x", "type": "dense"}


def make_spec(sparse: dict[str, Any] | None = None, dense: dict[str, Any] | None = None) -> JobSpec:
    return validate_spec(
        {
            "name": "job",
            "data": {"path": "unused", "label": {"column": "y"}},
            "features": [DENSE | (dense or {}), SPARSE | (sparse or {})],
            "embedding_tables": [{"name": "t", "embedding_dim": 4, "num_embeddings": 100}],
            "model": {
                "dense_arch": {"layer_sizes": [4]},
                "over_arch": {"layer_sizes": [1]},
                "tasks": [{"loss": "mse"}],
            },
            "parallelism": {"shard_group_size": 1},
        }
    )


HASHING = {"hashing": {"num_buckets": 50}}
BUCKETIZE = {"bucketize": {"boundaries": [1, 2, 3]}}


@pytest.mark.parametrize("sparse", [{}, HASHING, {"hashing": {}}, {"vocabulary": {}}, BUCKETIZE])
def test_a_feature_is_encoded_in_one_way_or_none(sparse: dict[str, Any]) -> None:
    (feature,) = make_spec(sparse).sparse_features
    given = next(iter(sparse), None)
    assert feature.encoding == (getattr(feature, given) if given else None)


@pytest.mark.parametrize(
    ("sparse", "field", "code"),
    [
        (HASHING | BUCKETIZE, "bucketize", "several_encodings"),
        ({"hashing": {"num_buckets": 1}}, "hashing.num_buckets", None),
        ({"hashing": {"num_buckets": 101}}, "hashing.num_buckets", "vocabulary_too_large"),
        ({"hashing": {"seed": -1}}, "hashing.seed", None),
        ({"bucketize": {"boundaries": [2, 1]}}, "bucketize.boundaries", "not_ascending"),
        ({"bucketize": {"boundaries": [1, 1]}}, "bucketize.boundaries", "not_ascending"),
        ({"bucketize": {"boundaries": []}}, "bucketize.boundaries", None),
        ({"vocabulary": {"path": "/etc/passwd"}}, "vocabulary.path", "outside_data_path"),
        ({"vocabulary": {"path": "../other"}}, "vocabulary.path", "outside_data_path"),
        ({"vocabulary": {"path": "s3://b/v"}}, "vocabulary.path", "outside_data_path"),
        (
            {"vocabulary": {"path": "v", "column": "c"}},
            "vocabulary.column",
            "several_vocabularies",
        ),
        ({"transform": "log1p"}, "transform", "unexpected_transform"),
        ({"missing": 0}, "missing", "unexpected_transform"),
    ],
)
def test_a_fault_of_a_sparse_feature_names_its_field(
    sparse: dict[str, Any], field: str, code: str | None
) -> None:
    with pytest.raises(SpecError) as refusal:
        make_spec(sparse)
    (problem,) = refusal.value.problems
    assert problem.path == f"features[1].{field}"
    assert code is None or problem.code == code


@pytest.mark.parametrize(
    ("dense", "field", "code"),
    [
        (HASHING, "hashing", "unexpected_encoding"),
        ({"mean": 1.0}, "mean", "no_effect"),
        ({"transform": "log1p", "std": 1.0}, "std", "no_effect"),
        ({"transform": "standardise", "std": 0.0}, "std", None),
    ],
)
def test_a_fault_of_a_dense_feature_names_its_field(
    dense: dict[str, Any], field: str, code: str | None
) -> None:
    with pytest.raises(SpecError) as refusal:
        make_spec(dense=dense)
    (problem,) = refusal.value.problems
    assert problem.path == f"features[0].{field}"
    assert code is None or problem.code == code
