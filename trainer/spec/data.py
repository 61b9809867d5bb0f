"""`data` and `features`: where rows are, which columns a model reads, how values become ids.

Id 0 stands for what is missing (null) or unknown, whichever way ids are made.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import PurePosixPath
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from trainer.spec.base import Count, Identifier, Label, PathText, ReadsFrom, SpecModel, problem

DenseTransform = Literal["none", "log1p", "standardise"]


class HashingSpec(SpecModel):
    """Integers or strings by a hash that is the same on every machine.

    Ids are 1 to `num_buckets` - 1; `auto` takes the rows of the table, or the `input_hash_size` of
    a dynamic one.
    """

    sized_by: ClassVar[str] = "num_buckets"
    num_buckets: Annotated[int, Field(ge=2, le=2**40)] | Literal["auto"] = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @property
    def num_ids(self) -> int:
        """With `auto` the fewest: that of what is missing, and one for values."""
        return 2 if self.num_buckets == "auto" else self.num_buckets


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

    sized_by: ClassVar[str] = "min_count"
    path: Annotated[PathText, AfterValidator(_below_data_path)] | None = None
    column: Identifier | None = None
    min_count: Count = 1

    num_ids: ClassVar[None] = None  # only the file tells


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

    sized_by: ClassVar[str] = "boundaries"
    boundaries: Annotated[
        tuple[float, ...], Field(min_length=1, max_length=100_000), AfterValidator(_ascending)
    ]

    @property
    def num_ids(self) -> int:
        return len(self.boundaries) + 2


# What makes ids of raw values. `num_ids` says how many it needs rows for, None where the spec alone
# does not tell, and `sized_by` which of its fields decides that.
Encoding = HashingSpec | VocabularySpec | BucketizeSpec
_ENCODINGS = ("hashing", "vocabulary", "bucketize")

DEFAULT_MAX_LENGTH = 50


class LabelSpec(SpecModel):
    """The column to predict and, when it was normalised, how to undo that.

    The model learns `(column - offset_column) / scale_column`; metrics are reported in the
    unit of `column`, so a star rating's RMSE is in stars whatever the normalisation was. Of `bce`
    the result is a class, 0 or 1, and predictions are probabilities of 1.
    """

    column: Identifier
    offset_column: Identifier | None = None
    scale_column: Identifier | None = None


Part = Annotated[Label, AfterValidator(_below_data_path)]


class SplitSpec(SpecModel):
    """Names of the folders under `data.path` that hold each part; `.` is `data.path` itself."""

    train: Part | Literal["."] = "train"
    validation: Part | None = "validation"


class DataSpec(SpecModel):
    """Where the rows are: in Parquet files below `path`, a folder or the URL of one.

    `shardloom data prepare` writes such folders; any other Parquet will do where tables have sizes.
    `weight_column` says how much each row counts in the loss and in the metrics (0 or above).
    Rows that cannot be used end the job, or are left out and counted (`on_bad_rows: quarantine`),
    up to `max_bad_share` of a split.
    """

    format: Literal["parquet"] = "parquet"
    path: ReadsFrom
    label: LabelSpec
    weight_column: Identifier | None = None
    split: SplitSpec = SplitSpec()
    batch_size: Annotated[Count, Field(description="Rows per rank and step.")] = 256
    shuffle: bool = True
    on_bad_rows: Literal["fail", "quarantine"] = "fail"
    max_bad_share: Annotated[
        float,
        Field(gt=0, le=1, description="Share of a split's rows that quarantine may leave out."),
    ] = 0.05

    @property
    def has_row_weights(self) -> bool:
        """Whether rows count unequally: by their weights, or not at all where they are bad."""
        return self.weight_column is not None or self.on_bad_rows == "quarantine"


class FeatureSpec(SpecModel):
    """One model input read from one column.

    `id` is one integer a row; `id_list` and `tokens` are lists of them, pooled to one vector;
    `sequence` is a list whose vectors the model sees one by one, in order; `dense` is one float.
    Sparse features name the embedding table they look up; several may share one.

    `weights_column` holds one float for each id of a list, which its vector is multiplied by
    before pooling. Of a sequence the last `max_length` ids count, and their weights.

    Without `hashing`, `vocabulary` or `bucketize` the column holds ids of the table. Of a dense
    feature `missing` takes the place of null and NaN, then `transform` is applied: `log1p` is
    sign(x) log(1 + |x|), `standardise` (x - mean) / std, by default those of the training part.
    """

    name: Identifier
    type: Literal["id", "id_list", "tokens", "sequence", "dense"]
    column: Identifier | None = None
    table: Identifier | None = None
    weights_column: Identifier | None = None
    max_length: Annotated[PositiveInt, Field(le=10_000)] | None = None
    hashing: HashingSpec | None = None
    vocabulary: VocabularySpec | None = None
    bucketize: BucketizeSpec | None = None
    transform: DenseTransform = "none"
    missing: float | None = None
    mean: float | None = None
    std: PositiveFloat | None = None

    @property
    def source_column(self) -> str:
        """Name of the Parquet column, which is the feature's own name unless `column` is set."""
        return self.column or self.name

    @property
    def vocabulary_file(self) -> str:
        """File of its vocabulary, below `data.path` or where that was exported."""
        vocabulary = self.vocabulary or VocabularySpec()
        return vocabulary.path or f"vocab/{vocabulary.column or self.source_column}.parquet"

    @property
    def _encodings(self) -> dict[str, Encoding]:
        """By field; at most one in a spec that is valid."""
        found = {name: getattr(self, name) for name in _ENCODINGS}
        return {name: encoding for name, encoding in found.items() if encoding is not None}

    @property
    def encoding(self) -> Encoding | None:
        """What makes ids of the column's values; None where they are ids already."""
        return next(iter(self._encodings.values()), None)

    @property
    def ids_field(self) -> str:
        """The field that says which ids there are: that of the encoding, else `column`."""
        return next(iter(self._encodings), "column")

    @property
    def is_sparse(self) -> bool:
        """Whether the feature is looked up in an embedding table."""
        return self.type != "dense"

    @property
    def is_sequence(self) -> bool:
        """Whether the feature's vectors stay apart instead of being pooled."""
        return self.type == "sequence"

    @property
    def length_limit(self) -> int:
        """How many ids of a sequence count, the last ones; an id is a sequence of one."""
        return 1 if self.type == "id" else self.max_length or DEFAULT_MAX_LENGTH

    @model_validator(mode="after")
    def _check_use(self) -> Self:
        if self.is_sparse and self.table is None:
            message = f"feature '{self.name}' needs a 'table' to look up"
            raise problem("missing_table", message, "table")
        if not self.is_sparse and self.table is not None:
            raise problem("unexpected_table", "a dense feature has no 'table'; remove it", "table")
        self._check_encoding()
        self._check_dense()
        if self.weights_column and self.type not in ("id_list", "tokens", "sequence"):
            raise problem(
                "unexpected_weights",
                "only lists (id_list, tokens, sequence) take weights, "
                f"'{self.name}' is {self.type}",
                "weights_column",
            )
        if self.max_length and not self.is_sequence:
            message = "only a sequence has a 'max_length'"
            raise problem("unexpected_max_length", message, "max_length")
        return self

    def _check_encoding(self) -> None:
        """A feature is encoded in at most one way, and only in one that fits its type."""
        given = list(self._encodings)
        if len(given) > 1:
            message = f"'{self.name}' has {given[0]} already; choose one"
            raise problem("several_encodings", message, given[1])
        if given and not self.is_sparse:
            message = "a dense feature looks up no ids; remove it"
            raise problem("unexpected_encoding", message, given[0])
        if self.vocabulary and self.vocabulary.path and self.vocabulary.column:
            message = "give path or column, not both"
            raise problem("several_vocabularies", message, "vocabulary.column")

    def _check_dense(self) -> None:
        """What makes dense numbers is set for dense features only, mean and std with their use."""
        for name in ("transform", "missing", "mean", "std"):
            is_set = getattr(self, name) not in (None, "none")
            if is_set and self.is_sparse:
                message = "only a dense feature has it; remove it"
                raise problem("unexpected_transform", message, name)
            if is_set and name in ("mean", "std") and self.transform != "standardise":
                raise problem("no_effect", "only transform 'standardise' uses it; remove it", name)
