"""The sections of a job spec put together, unchecked across sections."""

from __future__ import annotations

from functools import cached_property
from math import ceil
from typing import Annotated, Self

from pydantic import Field

from trainer.spec.base import NAME_PATTERN, Label, SpecModel
from trainer.spec.data import DataSpec, FeatureSpec
from trainer.spec.model import ModelSpec
from trainer.spec.parallelism import ParallelismSpec
from trainer.spec.tables import NUM_BYTES, ComputeKernel, DynamicSpec, EmbeddingTableSpec
from trainer.spec.training import (
    CheckpointSpec,
    ExportSpec,
    OptimizerSpec,
    RecoverySpec,
    ResourcesSpec,
    RetrySpec,
    SinksSpec,
    TrainingSpec,
)

DEFAULT_PROJECT = "default"
MAX_PRIORITY = 1000


class JobSections(SpecModel):
    """The sections of a training job, and what follows from several of them."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    project: Annotated[str, Field(pattern=NAME_PATTERN)] = DEFAULT_PROJECT
    priority: Annotated[int, Field(ge=0, le=MAX_PRIORITY)] = 0
    preemptible: bool = True
    labels: Annotated[dict[Label, Label], Field(default_factory=dict)]
    data: DataSpec
    features: Annotated[tuple[FeatureSpec, ...], Field(min_length=1)]
    embedding_tables: Annotated[tuple[EmbeddingTableSpec, ...], Field(min_length=1)]
    model: ModelSpec
    optimizer: OptimizerSpec = OptimizerSpec()
    parallelism: ParallelismSpec = ParallelismSpec()
    training: TrainingSpec = TrainingSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    retry: RetrySpec = RetrySpec()
    recovery: RecoverySpec = RecoverySpec()
    resources: ResourcesSpec = ResourcesSpec()
    sinks: SinksSpec = SinksSpec()
    export: ExportSpec | None = None

    @property
    def dense_features(self) -> tuple[FeatureSpec, ...]:
        return tuple(feature for feature in self.features if not feature.is_sparse)

    @property
    def pooled_features(self) -> tuple[FeatureSpec, ...]:
        """Sparse features whose vectors are pooled, in spec order: the keys of `Batch.sparse`."""
        tables = self.sequence_tables
        return tuple(f for f in self.sparse_features if f.table not in tables)

    @property
    def sequence_features(self) -> tuple[FeatureSpec, ...]:
        """Features whose vectors stay apart, in spec order: the keys of `Batch.sequences`.

        An `id` feature is one of them, a sequence of one, where its table is also that of a
        sequence: TorchRec cannot have one table in two collections.
        """
        tables = self.sequence_tables
        return tuple(f for f in self.sparse_features if f.table in tables)

    @property
    def is_weighted(self) -> bool:
        """Whether any pooled feature has weights; the others then weigh 1."""
        return any(feature.weights_column for feature in self.pooled_features)

    @property
    def has_weighted_sequences(self) -> bool:
        """Whether any sequence has weights; the others then weigh 1."""
        return any(feature.weights_column for feature in self.sequence_features)

    @property
    def sequence_tables(self) -> frozenset[str]:
        return frozenset(f.table for f in self.features if f.is_sequence and f.table)

    @property
    def dynamic_tables(self) -> dict[str, DynamicSpec]:
        """How the tables with ids of their own give them rows, by table name."""
        return {t.name: t.dynamic for t in self.embedding_tables if t.dynamic is not None}

    @property
    def moment_scale(self) -> float:
        """c of the paper's algorithm 1, by default M; 1 where no moments grow."""
        if not self.optimizer.sparse.has_growing_moments:
            return 1.0
        scale = self.parallelism.moment_scale
        return float(self.parallelism.num_replicas) if scale == "auto" else scale

    @property
    def syncs_every_row(self) -> bool:
        """Whether syncs average every row, as asked or because decay changes them all."""
        is_full = self.parallelism.sync.mode == "full"
        return is_full or self.optimizer.sparse.changes_untouched_rows

    @property
    def table_bytes(self) -> int | None:
        """S: one whole copy of the tables with optimizer state; None while a size is `auto`."""
        sizes = [self.size_bytes(table) for table in self.embedding_tables]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    @property
    def whole_table_bytes(self) -> tuple[int, ...]:
        """Sizes of the tables that may not be split, as far as they are known."""
        sizes = [self.size_bytes(t) for t in self.embedding_tables if t.constraints.is_whole]
        return tuple(size for size in sizes if size is not None)

    def size_bytes(self, table: EmbeddingTableSpec) -> int | None:
        """Bytes of one table with optimizer state; None while its number of rows is `auto`.

        Of a dynamic table with the ids that wait for their admission.
        """
        if table.num_embeddings == "auto":
            return None
        row_bytes = self.optimizer.sparse.state_bytes_per_row(table.embedding_dim)
        row_bytes += table.embedding_dim * NUM_BYTES[table.data_type]
        if table.dynamic is None:
            return table.num_embeddings * row_bytes
        waiting_bytes = table.dynamic.waiting_bytes(
            self.lookups_per_step(table), table.num_embeddings, self.parallelism.world_size
        )
        row_bytes += table.dynamic.state_bytes_per_row
        return table.num_embeddings * row_bytes + waiting_bytes

    def sync_bytes(self, table: EmbeddingTableSpec) -> int:
        """Bytes that a sync holds at most beside one table of known size: r (k_w w + k_m m), or 0
        where there is one copy.

        r are the rows that a sync may be about: in mode full all, else at most one for each lookup
        of `every_steps` steps, the most where it is tuned, and all where fp32 would then move all.
        A row has w bytes of weights and m of optimizer state. Where the sync overlaps k_w = k_m =
        2, a snapshot and its means; of `delayed` state k_m = 2 whatever overlaps. Groups that are
        failure domains hold all means until they have voted: k_w = k_m = 1 without overlap, and
        where state is averaged `never` but before a save, that of all rows at once. Half precision
        adds 1 to both, what the copies last agreed on; of touched rows 2: saved before they change,
        and gathered for the exchange; 3 where such groups overlap: what was saved is kept in case
        the round fails.
        Each row has a mark of 1 byte where touched ones are averaged, another one where moments may
        differ between the copies (`never`, or such groups), and in half precision the place of what
        was saved, 4 bytes, twice where such groups overlap. Buffers of the chunks that are under
        way are left to `planner.storage_reservation`.
        """
        assert isinstance(table.num_embeddings, int), "num_embeddings must be resolved first"
        parallelism, optimizer = self.parallelism, self.optimizer.sparse
        if parallelism.is_single_copy:
            return 0
        sync, num_rows, is_full = parallelism.sync, table.num_embeddings, self.syncs_every_row
        num_lookups = sync.intervals[-1] * self.lookups_per_step(table)
        if not is_full and (sync.dtype != "fp32" or num_lookups <= sync.full_above * num_rows):
            num_rows = min(num_rows, num_lookups)
        votes = parallelism.has_independent_groups
        of_rows = 3 if votes and sync.overlap else 2
        half = 0 if sync.dtype == "fp32" else 1 if is_full else of_rows
        of_weights = half + (2 if sync.overlap else int(votes))
        of_state = half + 2 if sync.optimizer_state == "delayed" else of_weights
        weight_bytes = table.embedding_dim * NUM_BYTES[table.data_type]
        state_bytes = optimizer.state_bytes_per_row(table.embedding_dim)
        mark_bytes = 0
        if not is_full:
            place_bytes = 4 * (of_rows - 1) if half else 0
            mark_bytes = 1 + (votes or sync.optimizer_state == "never") + place_bytes
        marks_bytes = table.num_embeddings * mark_bytes
        if votes and sync.optimizer_state == "never":
            rows_bytes = num_rows * of_weights * weight_bytes
            return rows_bytes + table.num_embeddings * state_bytes + marks_bytes
        return num_rows * (of_weights * weight_bytes + of_state * state_bytes) + marks_bytes

    def kernel_of(self, table: EmbeddingTableSpec) -> ComputeKernel:
        """Where the weights of a table are to be, as far as that is not for the planner to say."""
        kernel = table.constraints.compute_kernel or self.parallelism.planner.compute_kernel
        return "fused" if kernel == "auto" and self.resources.device == "cpu" else kernel

    @property
    def may_cache(self) -> bool:
        """Whether a table may be in host memory, of which a spec does not say how much there is."""
        return any(self.kernel_of(table) != "fused" for table in self.embedding_tables)

    def lookups_per_step(self, table: EmbeddingTableSpec) -> int:
        """Ids that a step looks up in a table over all workers, as far as the spec can tell.

        Sequences count in full, pooled lists with the table's `pooling_factor`.
        """
        per_row = sum(self.lookups_per_row(table))
        return ceil(self.data.batch_size * self.parallelism.world_size * per_row)

    def lookups_per_row(self, table: EmbeddingTableSpec) -> list[float]:
        """What each feature of a table looks up for one row of data, counted likewise."""
        factor = table.constraints.pooling_factor or 1.0
        return [
            float(each.length_limit) if each.type in ("id", "sequence") else factor
            for each in self.features_of_tables.get(table.name, ())
        ]

    @cached_property
    def features_of_tables(self) -> dict[str, list[FeatureSpec]]:
        """The features that look up each table, in spec order; there may be thousands."""
        found: dict[str, list[FeatureSpec]] = {}
        for feature in self.features:
            if feature.table is not None:
                found.setdefault(feature.table, []).append(feature)
        return found

    def __copy__(self) -> Self:
        # `model_copy` gives the copy other fields: it must not keep what followed from these.
        copied = super().__copy__()
        copied.__dict__.pop("features_of_tables", None)
        return copied

    @property
    def sparse_features(self) -> tuple[FeatureSpec, ...]:
        return tuple(feature for feature in self.features if feature.is_sparse)
