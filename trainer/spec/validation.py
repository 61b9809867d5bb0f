"""Checks across sections of a spec: references, shapes, sharding, dynamic tables, memory.

Each check takes the sections and raises a `problem` that names the faulty field.
"""

from __future__ import annotations

from collections.abc import Callable

from trainer.spec.base import problem
from trainer.spec.parallelism import AllToAllSpec
from trainer.spec.sections import JobSections
from trainer.spec.tables import (
    MODULE_ATTRIBUTES,
    SEQUENCE_SHARDING_TYPES,
    DynamicSpec,
    EmbeddingTableSpec,
    has_empty_block,
)
from trainer.spec.training import RecoverySpec

_ADAM_BETA2 = 0.999  # torch's default, which the dense part takes


def check_tables(spec: JobSections) -> None:
    """What each table can be by itself, whatever the layout."""
    sparse, exports = spec.optimizer.sparse, spec.export is not None and spec.export.on_success
    sequence_tables = spec.sequence_tables
    for index, table in enumerate(spec.embedding_tables):
        at, name = f"embedding_tables[{index}]", table.name
        if name in MODULE_ATTRIBUTES or name.startswith("_"):
            raise problem(
                "reserved_name",
                f"torch has a use of its own for the name '{name}'; call the table "
                f"'{name.strip('_') or 'ids'}_table', say",
                f"{at}.name",
            )
        if table.data_type == "bf16":
            raise problem(
                "unsupported_data_type",
                f"FBGEMM 1.8 has no kernels that train a bf16 table (table '{name}'); "
                "use fp16 or fp32",
                f"{at}.data_type",
            )
        # A half-precision weight times (1 - lr * weight_decay) would round back to itself.
        if sparse.weight_decay and table.data_type != "fp32":
            raise problem(
                "weight_decay",
                f"optimizer.sparse.weight_decay would have no effect on table '{name}': its "
                f"steps are smaller than {table.data_type} can tell apart; use fp32 or no decay",
                f"{at}.data_type",
            )
        fewest = table.constraints.min_partition
        if fewest and table.embedding_dim % fewest:
            raise problem(
                "min_partition",
                f"must divide embedding_dim ({table.embedding_dim}), so that column shards of "
                f"table '{name}' are equally wide",
                f"{at}.constraints.min_partition",
            )
        # FBGEMM clips the tables that it updates, which data-parallel ones are not among.
        if sparse.max_gradient is not None and "data_parallel" in table.constraints.sharding_types:
            raise problem(
                "max_gradient",
                f"optimizer.sparse.max_gradient does not reach table '{name}' where it is "
                "sharded data_parallel; allow other types only",
                f"{at}.constraints.sharding_types",
            )
        if name in sequence_tables:
            _check_sequence_table(table, at)
        if table.dynamic is not None:
            _check_dynamic_table(table, table.dynamic, at)
            if exports:
                raise problem(
                    "not_exportable",
                    f"table '{name}' is dynamic, and torch.export cannot trace the module that "
                    "knows which id has which row; set export.on_success: false",
                    f"{at}.dynamic",
                )


def _check_sequence_table(table: EmbeddingTableSpec, at: str) -> None:
    for sharding_type in table.constraints.sharding_types:
        if sharding_type not in SEQUENCE_SHARDING_TYPES:
            raise problem(
                "unsupported_sharding",
                f"'{sharding_type}' is not possible for table '{table.name}': it is looked up by a "
                "sequence feature, and TorchRec shards an EmbeddingCollection only "
                f"{', '.join(SEQUENCE_SHARDING_TYPES)}",
                f"{at}.constraints.sharding_types",
            )
    if table.pooling == "mean":
        raise problem(
            "no_effect",
            f"table '{table.name}' is looked up by a sequence, whose vectors are not pooled; "
            "remove it",
            f"{at}.pooling",
        )


def _check_dynamic_table(table: EmbeddingTableSpec, dynamic: DynamicSpec, at: str) -> None:
    num_rows, fault = table.num_embeddings, None
    if num_rows == "auto":
        fault = (
            f"table '{table.name}' is dynamic: its rows are given to ids as they come, so that the "
            "data does not say how many there should be; give a number"
        )
    elif num_rows % dynamic.num_buckets:
        fault = (
            f"must be a multiple of dynamic.num_buckets ({dynamic.num_buckets}), so that each "
            f"bucket of table '{table.name}' has equally many rows"
        )
    elif num_rows < 2 * dynamic.num_buckets:
        fault = (
            f"each of the {dynamic.num_buckets} buckets of table '{table.name}' needs a row for "
            "ids that have none and at least one more; raise it, or lower dynamic.num_buckets"
        )
    if fault is not None:
        raise problem("dynamic_size", fault, f"{at}.num_embeddings")
    if "row_wise" not in table.constraints.sharding_types:
        raise problem(
            "unsupported_sharding",
            f"table '{table.name}' is dynamic, and TorchRec shards managed collision row_wise "
            "only; allow that",
            f"{at}.constraints.sharding_types",
        )


def check_dynamic_layout(spec: JobSections) -> None:
    """Dynamic tables are in one copy, whose shards hold whole buckets."""
    parallelism = spec.parallelism
    largest = parallelism.world_size
    for name, dynamic in spec.dynamic_tables.items():
        # One worker has one copy, also while L is `auto`.
        if parallelism.is_elastic or largest not in (1, parallelism.shard_group_size):
            raise problem(
                "dynamic_copies",
                f"table '{name}' is dynamic, which is possible with one copy of the tables only: "
                "each copy would give rows to ids by what its own workers see, so that row r would "
                "be another id in each, and their mean nothing. TorchRec syncs the ids of its "
                "HashZch modules alone, whose kernel trains on CUDA only. Set workers to one "
                "number and shard_group_size to the same",
                "parallelism.shard_group_size",
            )
        if dynamic.num_buckets % largest:
            raise problem(
                "dynamic_buckets",
                f"must divide dynamic.num_buckets ({dynamic.num_buckets}) of table '{name}', so "
                "that each shard holds whole buckets",
                "parallelism.shard_group_size",
            )


def check_encoded_sizes(spec: JobSections) -> None:
    """No feature makes more ids than its table has rows."""
    tables = {table.name: table for table in spec.embedding_tables}
    for index, feature in enumerate(spec.features):
        table = tables[feature.table] if feature.table else None
        if table is None or table.num_ids is None:
            continue
        encoding = feature.encoding
        needed = encoding.num_ids if encoding else None
        if encoding and needed is not None and needed > table.num_ids:
            what, field = "rows", "num_embeddings"
            if table.dynamic is not None:
                what, field = "ids", "dynamic.input_hash_size"
            raise problem(
                "vocabulary_too_large",
                f"makes ids 0 to {needed - 1}, but table '{table.name}' has "
                f"{table.num_ids} {what}; lower it or raise {field}",
                f"features[{index}].{feature.ids_field}.{encoding.sized_by}",
            )


def check_references(spec: JobSections) -> None:
    """Names are unique, features name tables and all of these, and no feature is a label."""
    tables = [table.name for table in spec.embedding_tables]
    features = [feature.name for feature in spec.features]
    for section, names in (("features", features), ("embedding_tables", tables)):
        seen: set[str] = set()
        for index, name in enumerate(names):
            if name in seen:
                message = f"'{name}' is defined more than once"
                raise problem("duplicate_name", message, f"{section}[{index}].name")
            seen.add(name)
    known = set(tables)
    labels = {(task.label or spec.data.label).column for task in spec.model.tasks}
    for index, feature in enumerate(spec.features):
        if feature.is_sparse and feature.table not in known:
            message = f"'{feature.table}' is not in embedding_tables ({', '.join(tables)})"
            raise problem("unknown_table", message, f"features[{index}].table")
        if feature.source_column in labels:
            raise problem(
                "label_as_feature",
                f"'{feature.source_column}' is the label, which the model would read instead of "
                "predicting it; remove the feature, or name another column",
                f"features[{index}].column",
            )
    used = {feature.table for feature in spec.sparse_features}
    for index, name in enumerate(tables):
        if name not in used:
            message = f"no feature looks up table '{name}'"
            raise problem("unused_table", message, f"embedding_tables[{index}].name")


def check_lookups(spec: JobSections) -> None:
    """A list is pooled or a sequence, with a table of its own; an id may share that of a sequence.

    A feature of a dynamic table has no weights, unless it is a sequence.
    """
    pooled = {f.table for f in spec.sparse_features if f.type in ("id_list", "tokens")}
    for index, feature in enumerate(spec.features):
        if feature.is_sequence and feature.table in pooled:
            raise problem(
                "shared_table",
                f"table '{feature.table}' is looked up by pooled lists and by the sequence "
                f"'{feature.name}', which TorchRec keeps in different collections; give the "
                "sequence a table of its own, or one that only ids share",
                f"features[{index}].table",
            )
        # The weights of a sequence never travel: they meet its vectors where the rows are.
        is_pooled = feature.weights_column and not feature.is_sequence
        if is_pooled and feature.table in spec.dynamic_tables:
            raise problem(
                "dynamic_weights",
                "TorchRec's managed collision drops the weights of ids on their way to the shards "
                f"(table '{feature.table}'); remove it, or dynamic",
                f"features[{index}].weights_column",
            )


def check_shapes(spec: JobSections) -> None:
    """Layer sizes fit the embeddings that they meet; a user's module has layers of its own."""
    if spec.model.module is not None:
        return
    model, dims = spec.model, {table.embedding_dim for table in spec.embedding_tables}
    if not spec.dense_features:
        raise problem(
            "no_dense_feature", f"arch '{model.arch}' needs at least one dense one", "features"
        )
    if len(dims) > 1:
        message = f"arch '{model.arch}' needs one embedding_dim for all, got {sorted(dims)}"
        raise problem("mixed_dims", message, "embedding_tables")
    if model.dense_arch.layer_sizes[-1] not in dims:
        raise problem(
            "dense_arch_width",
            f"the last ({model.dense_arch.layer_sizes[-1]}) must equal embedding_dim "
            f"({dims.pop()})",
            "model.dense_arch.layer_sizes",
        )
    num_tasks = len(model.tasks)
    if model.over_arch.layer_sizes[-1] != num_tasks:
        message = f"the last must be {num_tasks}, one output for each task"
        raise problem("over_arch_width", message, "model.over_arch.layer_sizes")


def check_transformer(spec: JobSections) -> None:
    """The history and the candidate of arch `movielens` exist, and heads share the dimension."""
    transformer = spec.model.transformer
    if transformer is None:
        return
    for field, wanted in (("sequence", "sequence"), ("candidate", "id")):
        name = getattr(transformer, field)
        names = [feature.name for feature in spec.features if feature.type == wanted]
        if name not in names:
            raise problem(
                "unknown_feature",
                f"'{name}' is no feature of type {wanted} ({', '.join(names) or 'there is none'})",
                f"model.transformer.{field}",
            )
    dim = spec.embedding_tables[0].embedding_dim
    if dim % transformer.num_heads:
        message = f"must divide embedding_dim ({dim}), which the heads share"
        raise problem("num_heads", message, "model.transformer.num_heads")


def check_accumulation(spec: JobSections) -> None:
    """What looks at the dense part comes where its accumulated gradients are used up."""
    every = spec.training.accumulate_steps
    fields = {
        "training.report_every_steps": spec.training.report_every_steps,
        "training.validate_every_steps": spec.training.validate_every_steps or every,
        "checkpoint.every_steps": spec.checkpoint.every_steps,
    }
    parallelism = spec.parallelism
    if parallelism.dense == "at_sync" or parallelism.has_independent_groups:
        sync = parallelism.sync
        field = "tuner.min_steps" if sync.is_tuned else "every_steps"
        fields[f"parallelism.sync.{field}"] = sync.intervals[0]
    for path, steps in fields.items():
        if steps % every:
            raise problem(
                "accumulate_steps",
                f"must be a multiple of training.accumulate_steps ({every}), which is how often "
                "the dense part takes a step",
                path,
            )


def check_warm_start(spec: JobSections) -> None:
    """The tables to take from another job exist in this one."""
    warm_start = spec.checkpoint.warm_start
    names = [table.name for table in spec.embedding_tables]
    for index, name in enumerate((warm_start and warm_start.tables) or ()):
        if name not in names:
            message = f"'{name}' is not in embedding_tables ({', '.join(names)})"
            raise problem("unknown_table", message, f"checkpoint.warm_start.tables[{index}]")


def check_settings(spec: JobSections) -> None:
    """What a user sets must do something; what cannot is refused rather than ignored."""
    parallelism, recovery = spec.parallelism, spec.recovery
    sparse, schedule = spec.optimizer.sparse, spec.optimizer.schedule
    if parallelism.moment_scale != "auto" and not sparse.has_growing_moments:
        raise problem(
            "moment_scale",
            f"optimizer.sparse.name '{sparse.name}' keeps no second moments to scale; remove it "
            "or use an AdaGrad",
            "parallelism.moment_scale",
        )
    if spec.training.early_stopping and spec.data.split.validation is None:
        raise problem(
            "no_validation",
            "it looks at validations, but data.split.validation is null; name that part or "
            "remove it",
            "training.early_stopping",
        )
    # Only independent groups do so. What they are may hang on an `auto` that is not known yet.
    is_whole = parallelism.is_resolved and parallelism.failure_domain == "job"
    is_timed = recovery.exchange_timeout_s != RecoverySpec().exchange_timeout_s
    for path, is_set, what in (
        ("recovery.exchange_timeout_s", is_timed, "exchange what they learned this way"),
        ("parallelism.min_groups", parallelism.min_groups > 1, "come and go one by one"),
    ):
        if is_whole and is_set:
            if parallelism.num_replicas == 1:
                why = "there is one copy of the tables; raise workers"
            else:
                is_intra = parallelism.placement == "intra_host"
                placement = "placement is intra_host; use inter_host" if is_intra else ""
                why = "; ".join(filter(None, (placement, parallelism.tied_by)))
            raise problem(
                "no_effect",
                f"only independent sharding groups {what}, but all workers of this job restart "
                f"together: {why}, or remove it",
                path,
            )
    if parallelism.sync.optimizer_state != "every" and not sparse.has_state:
        message = f"optimizer.sparse.name '{sparse.name}' has no state to sync; remove it"
        raise problem("no_effect", message, "parallelism.sync.optimizer_state")
    if schedule and schedule.decay == "constant" and schedule.min_ratio:
        message = "a constant rate never falls; set decay to linear or cosine, or remove it"
        raise problem("no_effect", message, "optimizer.schedule.min_ratio")
    if parallelism.shard_group_size == 1 and parallelism.all_to_all != AllToAllSpec():
        message = "a sharding group of one worker sends no embeddings; remove it"
        raise problem("no_effect", message, "parallelism.all_to_all")
    if spec.training.dense_precision == "tf32" and spec.resources.device == "cpu":
        message = "only CUDA has TF32, and resources.device is cpu; take fp32 or bf16"
        raise problem("no_effect", message, "training.dense_precision")


def check_kernels(spec: JobSections) -> None:
    """Caches in GPU memory can be had as asked for."""
    planner = spec.parallelism.planner
    for index, table in enumerate(spec.embedding_tables):
        limits, at = table.constraints, f"embedding_tables[{index}].constraints"
        where = at if limits.compute_kernel else "parallelism.planner"
        if limits.cache_load_factor is not None and spec.kernel_of(table) == "fused":
            message = f"table '{table.name}' is not cached, as its compute_kernel is fused"
            raise problem("no_effect", message, f"{at}.cache_load_factor")
        if spec.kernel_of(table) != "fused_uvm_caching":
            continue
        if spec.resources.device == "cpu":
            raise problem(
                "needs_cuda",
                f"table '{table.name}' is to be cached in GPU memory (fused_uvm_caching), and "
                "resources.device is cpu, where all tables are in host memory; take auto or fused",
                f"{where}.compute_kernel",
            )
        if set(limits.sharding_types) == {"data_parallel"}:
            raise problem(
                "unsupported_sharding",
                f"TorchRec cannot cache table '{table.name}' (fused_uvm_caching) where it is "
                "sharded data_parallel; allow other types",
                f"{at}.sharding_types",
            )
    if planner.cache_load_factor is not None and not spec.may_cache:
        message = "no table is cached; set compute_kernel to auto or fused_uvm_caching"
        raise problem("no_effect", message, "parallelism.planner.cache_load_factor")


def check_overlap(spec: JobSections) -> None:
    """Adam's second moments, averaged late as a difference, stay well above zero.

    In k steps they fall to b^k of what they were. Their mean over M copies is at least 1/M of that,
    so that at least 1 - M (1 - b^k) of the mean is left. An AdaGrad's only grow: late is harmless.
    """
    parallelism = spec.parallelism
    if not parallelism.is_resolved or parallelism.dense_policy != "at_sync":
        return
    steps = parallelism.sync.overlap_steps
    left = 1 - parallelism.num_replicas * (1 - _ADAM_BETA2**steps)
    if spec.optimizer.dense.name == "adam" and left < 0.5:
        raise problem(
            "overlap",
            f"in {steps} step(s) Adam's second moments of the dense part change by too much to be "
            f"averaged late over {parallelism.num_replicas} copies; take fewer or false, or use "
            "parallelism.dense every_step or another optimizer.dense.name",
            "parallelism.sync.overlap",
        )


def check_memory(spec: JobSections) -> None:
    """Tables fit into what the workers have; where sizes and memory are known.

    The same is checked by the planner at the start for sizes that only the data tells, and for
    tables that may be in host memory. While L is `auto`, all workers may be one group.
    """
    memory_bytes, parallelism = spec.resources.memory_bytes_per_worker, spec.parallelism
    if memory_bytes is None:
        return
    is_auto = parallelism.shard_group_size == "auto"
    size = parallelism.world_size if is_auto else parallelism.group_size
    worker_bytes = int(memory_bytes * (1 - parallelism.planner.storage_reservation))
    worker = ("one worker", worker_bytes)
    group = (f"a sharding group of {size} workers", worker_bytes * size)
    tables = spec.embedding_tables
    known_bytes = [spec.size_bytes(table) for table in tables]
    sizes_bytes = [
        0
        if size_bytes is None or spec.kernel_of(table) != "fused"
        else size_bytes + spec.sync_bytes(table)
        for table, size_bytes in zip(tables, known_bytes, strict=True)
    ]
    cases = [
        (f"table '{t.name}'", sizes_bytes[i], worker if t.constraints.is_whole else group, i)
        for i, t in enumerate(tables)
    ]
    largest = sizes_bytes.index(max(sizes_bytes))
    cases.append((f"the {len(tables)} tables together", sum(sizes_bytes), group, largest))
    for what, needed_bytes, (holder, room_bytes), index in cases:
        if needed_bytes > room_bytes:
            raise problem(
                "table_too_large",
                f"{what} with optimizer state and sync buffers: {needed_bytes / 2**30:.3g} GiB; "
                f"{holder} holds {room_bytes / 2**30:.3g} GiB (resources.memory_bytes_per_worker "
                "less parallelism.planner.storage_reservation); raise parallelism.shard_group_size "
                "(or workers, where it is auto), or allow row_wise where a table must be whole",
                f"embedding_tables[{index}].num_embeddings",
            )


def check_rows(spec: JobSections) -> None:
    """Every worker of a sharding group gets rows of a table that is `row_wise` only.

    The same is checked by the planner at the start for sizes that only the data tells.
    """
    size = spec.parallelism.shard_group_size
    for index, table in enumerate(spec.embedding_tables):
        num_rows = table.num_embeddings
        if size == "auto" or num_rows == "auto" or not has_empty_block(num_rows, size):
            continue
        if set(table.constraints.sharding_types) == {"row_wise"}:
            raise problem(
                "unsupported_sharding",
                f"row_wise would leave some of {size} workers without any of the {num_rows} rows "
                f"of table '{table.name}'; allow table_wise, or lower parallelism.shard_group_size",
                f"embedding_tables[{index}].constraints.sharding_types",
            )


# What a layout that was chosen later must be checked for again.
OF_LAYOUT: tuple[Callable[[JobSections], None], ...] = (
    check_accumulation,
    check_overlap,
    check_memory,
    check_dynamic_layout,
    check_rows,
)
ALL: tuple[Callable[[JobSections], None], ...] = (
    check_references,
    check_tables,
    check_encoded_sizes,
    check_lookups,
    check_shapes,
    check_transformer,
    check_warm_start,
    check_settings,
    check_kernels,
    *OF_LAYOUT,
)
