"""How a feature's raw values become ids of its table, or numbers that a network can take.

Id 0 stands for what is missing (null) or unknown, whichever way ids are made.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt

from trainer.spec.base import Identifier, PathText, SpecModel
from trainer.spec.problems import problem

if TYPE_CHECKING:
    from trainer.spec.data import FeatureSpec
    from trainer.spec.job import JobSpec

DenseTransform = Literal["none", "log1p", "standardise"]


class HashingSpec(SpecModel):
    """Integers or strings by a hash that is the same on every machine.

    Ids are 1 to `num_buckets` - 1; `auto` takes the rows of the table.
    """

    num_buckets: Annotated[int, Field(ge=2, le=2**40)] | Literal["auto"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


def _below_data_path(text: str) -> str:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or "://" in text:
        raise problem("outside_data_path", "must be below data.path: give a relative path")
    return text


class VocabularySpec(SpecModel):
    """Integers or strings by a file of known values, each with its id from 1 on.

    The file is Parquet with columns `value` and `index`, and `count` where `min_count` is set. It
    is `path` (below `data.path`), or the one that `shardloom data prepare` wrote for `column` (the
    feature's own, if neither is given).
    """

    path: Annotated[PathText, AfterValidator(_below_data_path)] | None = None
    column: Identifier | None = None
    min_count: PositiveInt = 1


def _ascending(boundaries: tuple[float, ...]) -> tuple[float, ...]:
    for low, high in pairwise(boundaries):
        if high <= low:
            raise problem("not_ascending", f"must ascend, but {high} follows {low}")
    return boundaries


class BucketizeSpec(SpecModel):
    """Numbers by the interval that they lie in.

    With k boundaries b, id i + 1 says that i of them are not above the number: 1 for x < b[0],
    k + 1 for x >= b[k - 1]. NaN is missing.
    """

    boundaries: Annotated[
        tuple[float, ...], Field(min_length=1, max_length=100_000), AfterValidator(_ascending)
    ]

    @property
    def num_ids(self) -> int:
        """How many ids there are, 0 included."""
        return len(self.boundaries) + 2


Encoding = HashingSpec | VocabularySpec | BucketizeSpec


def check_encoding(feature: FeatureSpec) -> None:
    """A feature is encoded in at most one way, and only in one that fits its type."""
    named = {
        "hashing": feature.hashing,
        "vocabulary": feature.vocabulary,
        "bucketize": feature.bucketize,
    }
    given = [name for name, encoding in named.items() if encoding is not None]
    if len(given) > 1:
        raise problem(
            "several_encodings", f"'{feature.name}' has {given[0]} already; choose one", given[1]
        )
    if given and not feature.is_sparse:
        raise problem("unexpected_encoding", "a dense feature looks up no ids; remove it", given[0])
    vocabulary = feature.vocabulary
    if vocabulary and vocabulary.path and vocabulary.column:
        raise problem("several_vocabularies", "give path or column, not both", "vocabulary.column")


def check_dense(feature: FeatureSpec) -> None:
    """What makes dense numbers is set for dense features only, mean and std with their use."""
    fields = {
        "transform": feature.transform != "none",
        "missing": feature.missing is not None,
        "mean": feature.mean is not None,
        "std": feature.std is not None,
    }
    for name, is_set in fields.items():
        if is_set and feature.is_sparse:
            raise problem("unexpected_transform", "only a dense feature has it; remove it", name)
        if is_set and name in ("mean", "std") and feature.transform != "standardise":
            raise problem("no_effect", "only transform 'standardise' uses it; remove it", name)


def check_encoded_sizes(spec: JobSpec) -> None:
    """No feature makes more ids than its table has rows."""
    tables = {table.name: table for table in spec.embedding_tables}
    for index, feature in enumerate(spec.features):
        table = tables[feature.table] if feature.table else None
        if table is None or table.dynamic is not None or table.num_embeddings == "auto":
            continue
        if feature.hashing and feature.hashing.num_buckets != "auto":
            field, num_ids = "hashing.num_buckets", feature.hashing.num_buckets
        elif feature.bucketize:
            field, num_ids = "bucketize.boundaries", feature.bucketize.num_ids
        else:
            continue
        if num_ids > table.num_embeddings:
            raise problem(
                "vocabulary_too_large",
                f"makes ids 0 to {num_ids - 1}, but table '{table.name}' has "
                f"{table.num_embeddings} rows; lower it or raise num_embeddings",
                f"features[{index}].{field}",
            )
