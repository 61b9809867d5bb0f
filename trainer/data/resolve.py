"""Filling in what a spec leaves to the data: the sizes of embedding tables."""

from __future__ import annotations

from trainer.data.errors import ManifestError
from trainer.data.manifest import Manifest
from trainer.spec import EmbeddingTableSpec, JobSpec


def resolve_tables(spec: JobSpec, manifest: Manifest) -> JobSpec:
    """Replace `num_embeddings: auto` by the largest vocabulary that the table's features read.

    Raises `ManifestError` where the manifest knows no vocabulary of such a column.
    """
    tables = tuple(
        table.model_copy(update={"num_embeddings": _largest_vocabulary(spec, table, manifest)})
        if table.num_embeddings == "auto"
        else table
        for table in spec.embedding_tables
    )
    return spec.model_copy(update={"embedding_tables": tables})


def _largest_vocabulary(spec: JobSpec, table: EmbeddingTableSpec, manifest: Manifest) -> int:
    sizes = []
    for index, feature in enumerate(spec.features):
        if feature.table != table.name:
            continue
        if feature.source_column not in manifest.vocab_sizes:
            raise ManifestError(
                f"features[{index}].column: the manifest has no vocabulary size for "
                f"'{feature.source_column}' (it has {', '.join(manifest.vocab_sizes)}); set "
                f"num_embeddings of table '{table.name}' or name another column"
            )
        sizes.append(manifest.vocab_sizes[feature.source_column])
    return max(sizes)
