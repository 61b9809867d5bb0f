"""`embedding_tables`: sizes, data types, sharding limits, and dynamic tables.

Without `dynamic` the id in the data *is* the row. With it the data may hold any id (hashes, ids of
a growing catalogue): TorchRec's managed collision gives each admitted id a row of its own and
evicts ids when the table is full. See `trainer.models.managed_collision`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from trainer.spec.base import FITS_64_BITS, Bounds, Identifier, SpecModel

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
    input_hash_size: Annotated[
        PositiveInt, Field(le=MAX_INPUT_HASH_SIZE), Bounds("one beside id 0", least=2)
    ] = MAX_INPUT_HASH_SIZE
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


# Reserved table names, as torch keeps tables as attributes of a module: the public attributes of
# torch.nn.ModuleDict (a unit test compares them to the installed torch's). "_..." is refused, too.
_MODULE_WORDS = """
    T_destination add_module apply bfloat16 buffers call_super_init children clear compile cpu
    cuda double dump_patches eval extra_repr float forward get_buffer get_extra_state
    get_parameter get_submodule half ipu items keys load_state_dict modules mtia named_buffers
    named_children named_modules named_parameters parameters pop register_backward_hook
    register_buffer register_forward_hook register_forward_pre_hook register_full_backward_hook
    register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state
    set_submodule share_memory state_dict to to_empty train training type update values xpu
    zero_grad
"""
MODULE_ATTRIBUTES = frozenset(_MODULE_WORDS.split())

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
ComputeKernel = Literal["auto", "fused", "fused_uvm_caching"]
LoadFactor = Annotated[float, Field(gt=0, lt=1)]


class TableConstraints(SpecModel):
    """Limits on how the planner may shard one table inside a sharding group.

    `min_partition` is the fewest columns that a column shard may have; `pooling_factor` tells the
    planner how many ids of an id_list a row looks up on average. Without `compute_kernel` and
    `cache_load_factor` those of `parallelism.planner` hold.
    """

    sharding_types: Annotated[tuple[ShardingTypeName, ...], Field(min_length=1)] = (
        "row_wise",
        "table_wise",
    )
    min_partition: Annotated[PositiveInt, Field(multiple_of=4), FITS_64_BITS] | None = None
    pooling_factor: Annotated[PositiveFloat, Bounds("more than rows hold", most=1e6)] | None = None
    compute_kernel: ComputeKernel | None = None
    cache_load_factor: LoadFactor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether each worker that holds the table holds all of it."""
        return _WHOLE_SHARDING_TYPES.issuperset(self.sharding_types)


def has_empty_block(num_rows: int, num_blocks: int) -> bool:
    """Whether rows that `row_wise` divides into so many blocks leave one without any."""
    return -(-num_rows // num_blocks) * (num_blocks - 1) >= num_rows


class EmbeddingTableSpec(SpecModel):
    """One embedding table of shape [num_embeddings, embedding_dim].

    `num_embeddings: auto` takes the vocabulary size from the manifest of the prepared data. `mean`
    divides by the number of ids that a row looks up, also where they have weights. With `dynamic`
    ids are given rows as they turn up.
    """

    name: Identifier
    num_embeddings: Annotated[PositiveInt, Field(le=2**40)] | Literal["auto"] = "auto"
    embedding_dim: Annotated[PositiveInt, Field(multiple_of=4), FITS_64_BITS]
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
