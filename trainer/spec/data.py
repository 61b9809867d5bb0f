"""`data` and `features`: where the rows are and which columns the model reads."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from trainer.spec.base import Identifier, Label, PathText, SpecModel
from trainer.spec.encoding import (
    BucketizeSpec,
    DenseTransform,
    Encoding,
    HashingSpec,
    VocabularySpec,
    check_dense,
    check_encoding,
)
from trainer.spec.problems import problem

DEFAULT_MAX_LENGTH = 50


class LabelSpec(SpecModel):
    """The column to predict and, when it was normalised, how to undo that.

    The model learns `(column - offset_column) / scale_column`; metrics are reported in the
    unit of `column`, so a star rating's RMSE is in stars whatever the normalisation was.
    """

    column: Identifier
    offset_column: Identifier | None = None
    scale_column: Identifier | None = None


def _inside(name: str) -> str:
    if ".." in name.split("/"):
        raise problem("outside_data_path", "must be below data.path: leave '..' out")
    return name


Part = Annotated[Label, AfterValidator(_inside)]


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
    path: PathText
    label: LabelSpec
    weight_column: Identifier | None = None
    split: SplitSpec = SplitSpec()
    batch_size: Annotated[PositiveInt, Field(description="Rows per rank and step.")] = 256
    shuffle: bool = True
    on_bad_rows: Literal["fail", "quarantine"] = "fail"
    max_bad_share: Annotated[
        float,
        Field(gt=0, le=1, description="Share of a split's rows that quarantine may leave out."),
    ] = 0.05


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
    def encoding(self) -> Encoding | None:
        """What makes ids of raw values; None where the column holds ids, or numbers."""
        return self.hashing or self.vocabulary or self.bucketize

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
    def _check_table(self) -> Self:
        if self.is_sparse and self.table is None:
            raise problem(
                "missing_table", f"feature '{self.name}' needs a 'table' to look up", "table"
            )
        if not self.is_sparse and self.table is not None:
            raise problem("unexpected_table", "a dense feature has no 'table'; remove it", "table")
        return self

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        check_encoding(self)
        check_dense(self)
        return self

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        if self.weights_column and self.type not in ("id_list", "tokens", "sequence"):
            raise problem(
                "unexpected_weights",
                "only lists (id_list, tokens, sequence) take weights, "
                f"'{self.name}' is {self.type}",
                "weights_column",
            )
        if self.max_length and not self.is_sequence:
            raise problem(
                "unexpected_max_length", "only a sequence has a 'max_length'", "max_length"
            )
        return self
