"""Tables whose rows are given to ids as they turn up, and taken back from those that went away.

Without `dynamic` the id in the data *is* the row. With it the data may hold any id (hashes, ids
of a growing catalogue): TorchRec's managed collision gives each id that it admits a row of its
own, so that no two ids share one, and evicts ids when a table is full. See
`trainer.parallel.dynamic_ids` for how, and for what is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from trainer.spec.base import SpecModel
from trainer.spec.problems import problem

if TYPE_CHECKING:
    from trainer.spec.job import JobSpec
    from trainer.spec.tables import EmbeddingTableSpec

MAX_INPUT_HASH_SIZE = 2**62
DEFAULT_NUM_BUCKETS = 16
# Lookups that a shard holds one by one before it folds those of the same id into one.
MAX_SEEN = 2**20
# A lookup, or an id, that waits for its admission: id, count, step.
_WAITING_BYTES = 3 * 8


class DynamicSpec(SpecModel):
    """How ids of a table get rows.

    Every `eviction_interval` steps the ids seen since are admitted: to free rows, then in place
    of ids that the policy ranks lower. `lru` keeps what was seen last, `lfu` what was seen most
    often, `distance_lfu` weighs counts by their age. Until it is admitted an id shares the row of
    all ids that are not. Ids are 0 to `input_hash_size` - 1.

    Rows are divided into `num_buckets` equal parts by a hash of the id; the shard group size must
    divide their number, so that each shard holds whole buckets and a checkpoint fits any of those
    sizes.
    """

    eviction: Literal["lru", "lfu", "distance_lfu"] = "lru"
    input_hash_size: Annotated[PositiveInt, Field(le=MAX_INPUT_HASH_SIZE)] = MAX_INPUT_HASH_SIZE
    eviction_interval: Annotated[PositiveInt, Field(le=100_000)] = 10
    num_buckets: Annotated[PositiveInt, Field(le=1024)] = DEFAULT_NUM_BUCKETS

    @property
    def state_bytes_per_row(self) -> int:
        """What is kept for each row beside its weights: id, row, and what the policy remembers."""
        return 8 * (4 if self.eviction == "distance_lfu" else 3)

    def waiting_bytes(self, lookups_per_step: int, num_rows: int, num_shards: int) -> int:
        """Most bytes of what was looked up since the last admission, over all shards.

        Lookups of the same id are held as one beyond `MAX_SEEN` of a shard; as many ids are assumed
        to turn up between two admissions as the table has rows at most.
        """
        num_lookups = lookups_per_step * self.eviction_interval
        num_held = max(num_shards * MAX_SEEN, 2 * num_rows) + lookups_per_step
        return _WAITING_BYTES * min(num_lookups, num_held)


def check_dynamic_tables(spec: JobSpec) -> None:
    """What a dynamic table can be, whatever the layout."""
    for index, table in enumerate(spec.embedding_tables):
        if table.dynamic is not None:
            at = f"embedding_tables[{index}]"
            _check_rows(table, table.dynamic, at)
            _check_sharding(table, at)
            _check_lookups(spec, table)


def _check_rows(table: EmbeddingTableSpec, dynamic: DynamicSpec, at: str) -> None:
    if table.num_embeddings == "auto":
        raise problem(
            "dynamic_size",
            f"table '{table.name}' is dynamic: its rows are given to ids as they come, so that the "
            "data does not say how many there should be; give a number",
            f"{at}.num_embeddings",
        )
    if table.num_embeddings % dynamic.num_buckets:
        raise problem(
            "dynamic_size",
            f"must be a multiple of dynamic.num_buckets ({dynamic.num_buckets}), so that each "
            f"bucket of table '{table.name}' has equally many rows",
            f"{at}.num_embeddings",
        )
    if table.num_embeddings < 2 * dynamic.num_buckets:
        raise problem(
            "dynamic_size",
            f"each of the {dynamic.num_buckets} buckets of table '{table.name}' needs a row for "
            "ids that have none and at least one more; raise it, or lower dynamic.num_buckets",
            f"{at}.num_embeddings",
        )


def _check_sharding(table: EmbeddingTableSpec, at: str) -> None:
    if "row_wise" not in table.constraints.sharding_types:
        raise problem(
            "unsupported_sharding",
            f"table '{table.name}' is dynamic, and TorchRec shards managed collision row_wise "
            "only; allow that",
            f"{at}.constraints.sharding_types",
        )


def _check_lookups(spec: JobSpec, table: EmbeddingTableSpec) -> None:
    for index, feature in enumerate(spec.features):
        if feature.table != table.name:
            continue
        # The weights of a sequence never travel: they meet its vectors where the rows are.
        if feature.weights_column and not feature.is_sequence:
            raise problem(
                "dynamic_weights",
                "TorchRec's managed collision drops the weights of ids on their way to the shards "
                f"(table '{table.name}'); remove it, or dynamic",
                f"features[{index}].weights_column",
            )


def check_dynamic_layout(spec: JobSpec) -> None:
    """Dynamic tables are in one copy, whose shards hold whole buckets."""
    tables = [table for table in spec.embedding_tables if table.dynamic is not None]
    if not tables:
        return
    parallelism = spec.parallelism
    largest = parallelism.world_size
    if parallelism.shard_group_size != largest or parallelism.is_elastic:
        raise problem(
            "dynamic_copies",
            f"table '{tables[0].name}' is dynamic, which is possible with one copy of the tables "
            "only: each copy would give rows to ids by what its own workers see, so that row r "
            "would be another id in each, and their mean nothing. TorchRec syncs the ids of its "
            "HashZch modules alone, whose kernel trains on CUDA only. Set workers to one number "
            "and shard_group_size to the same",
            "parallelism.shard_group_size",
        )
    for table in tables:
        assert table.dynamic is not None
        if table.dynamic.num_buckets % largest:
            raise problem(
                "dynamic_buckets",
                f"must divide dynamic.num_buckets ({table.dynamic.num_buckets}) of table "
                f"'{table.name}', so that each shard holds whole buckets",
                "parallelism.shard_group_size",
            )
