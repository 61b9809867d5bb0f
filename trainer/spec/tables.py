"""`embedding_tables`: sizes, data types, and limits on how the planner may shard each one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trainer.spec.base import Identifier, SpecModel
from trainer.spec.dynamic import DynamicSpec

ShardingTypeName = Literal[
    "data_parallel",
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
]
_WHOLE_SHARDING_TYPES = frozenset({"table_wise", "data_parallel"})
# Unpooled vectors have no other sharding in TorchRec that works on every device.
SEQUENCE_SHARDING_TYPES = ("table_wise", "row_wise", "column_wise")
Precision = Literal["fp32", "fp16", "bf16"]
NUM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


class TableConstraints(SpecModel):
    """Limits on how the planner may shard one table inside a sharding group.

    `min_partition` is the fewest columns that a column shard may have; `pooling_factor` tells the
    planner how many ids a row looks up on average.
    """

    sharding_types: Annotated[tuple[ShardingTypeName, ...], Field(min_length=1)] = (
        "row_wise",
        "table_wise",
    )
    min_partition: Annotated[PositiveInt, Field(multiple_of=4)] | None = None
    pooling_factor: PositiveFloat | None = None

    @property
    def is_whole(self) -> bool:
        """Whether each worker that holds the table holds all of it."""
        return _WHOLE_SHARDING_TYPES.issuperset(self.sharding_types)


class EmbeddingTableSpec(SpecModel):
    """One embedding table of shape [num_embeddings, embedding_dim].

    `num_embeddings: auto` takes the vocabulary size from the manifest of the prepared data. `mean`
    divides by the number of ids that a row looks up, also where they have weights. With `dynamic`
    ids are given rows as they turn up.
    """

    name: Identifier
    num_embeddings: Annotated[PositiveInt, Field(le=2**40)] | Literal["auto"] = "auto"
    embedding_dim: Annotated[PositiveInt, Field(multiple_of=4)]
    pooling: Literal["sum", "mean"] = "sum"
    data_type: Precision = "fp32"
    constraints: TableConstraints = TableConstraints()
    dynamic: DynamicSpec | None = None

    @property
    def num_ids(self) -> int | None:
        """How many ids the data may hold for this table; None while that is `auto`."""
        if self.dynamic is not None:
            return self.dynamic.input_hash_size
        return None if self.num_embeddings == "auto" else self.num_embeddings

    def size_bytes(self, state_bytes_per_row: int) -> int | None:
        """Bytes of weights, optimizer state and ids; None while the number of rows is `auto`."""
        if self.num_embeddings == "auto":
            return None
        ids_bytes = self.dynamic.state_bytes_per_row if self.dynamic else 0
        weights_bytes = self.embedding_dim * NUM_BYTES[self.data_type]
        return self.num_embeddings * (weights_bytes + state_bytes_per_row + ids_bytes)
