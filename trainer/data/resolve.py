"""Filling in what a spec leaves to the data: the sizes of embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.data.errors import ManifestError
from trainer.spec import EmbeddingTableSpec, JobSpec

if TYPE_CHECKING:
    from trainer.data.manifest import Manifest


def resolve_tables(spec: JobSpec, manifest: Manifest) -> JobSpec:
    """As `size_tables`, with the vocabularies of prepared data."""
    return size_tables(spec, manifest.vocab_sizes)


def size_tables(spec: JobSpec, vocab_sizes: Mapping[str, int]) -> JobSpec:
    """Replace `num_embeddings: auto` by the largest vocabulary that the table's features read.

    `vocab_sizes` maps id columns to numbers of ids. Raises `ManifestError` where one is missing.
    """
    tables = tuple(
        table.model_copy(update={"num_embeddings": _largest_vocabulary(spec, table, vocab_sizes)})
        if table.num_embeddings == "auto"
        else table
        for table in spec.embedding_tables
    )
    return spec.model_copy(update={"embedding_tables": tables})


def _largest_vocabulary(
    spec: JobSpec, table: EmbeddingTableSpec, vocab_sizes: Mapping[str, int]
) -> int:
    sizes = []
    for index, feature in enumerate(spec.features):
        if feature.table != table.name:
            continue
        if feature.source_column not in vocab_sizes:
            raise ManifestError(
                f"features[{index}].column: the manifest has no vocabulary size for "
                f"'{feature.source_column}' (it has {', '.join(vocab_sizes)}); set "
                f"num_embeddings of table '{table.name}' or name another column"
            )
        sizes.append(vocab_sizes[feature.source_column])
    return max(sizes)
