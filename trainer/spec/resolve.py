"""Filling in what a spec leaves to the data: table sizes, and statistics of dense columns."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.errors import DataError, ManifestError
from trainer.spec.data import FeatureSpec
from trainer.spec.job import JobSpec
from trainer.spec.tables import EmbeddingTableSpec


def size_tables(
    spec: JobSpec, vocab_sizes: Mapping[str, int], read_sizes: Mapping[str, int] | None = None
) -> JobSpec:
    """Replace `num_embeddings: auto` by the most ids that any of the table's features makes.

    `vocab_sizes` maps id columns to numbers of ids, `read_sizes` does so for features whose
    vocabulary was read. Raises `ManifestError` where a number is missing.
    """
    tables = tuple(
        table.model_copy(
            update={"num_embeddings": _largest_vocabulary(spec, table, vocab_sizes, read_sizes)}
        )
        if table.num_embeddings == "auto"
        else table
        for table in spec.embedding_tables
    )
    return spec.model_copy(update={"embedding_tables": tables})


def _largest_vocabulary(
    spec: JobSpec,
    table: EmbeddingTableSpec,
    vocab_sizes: Mapping[str, int],
    read_sizes: Mapping[str, int] | None,
) -> int:
    sizes = []
    for index, feature in enumerate(spec.features):
        if feature.table != table.name or (
            feature.hashing and feature.hashing.num_buckets == "auto"
        ):
            continue
        size = _num_ids(feature, vocab_sizes, read_sizes or {})
        if size is None:
            raise ManifestError(
                f"features[{index}].{feature.ids_field}: the manifest has no vocabulary size for "
                f"'{feature.source_column}' (it has {', '.join(vocab_sizes) or 'none'}); set "
                f"num_embeddings of table '{table.name}' or name another column"
            )
        sizes.append(size)
    if not sizes:
        raise ManifestError(
            f"nothing says how large table '{table.name}' is: its features are hashed to as many "
            "ids as it has rows; set its num_embeddings, or hashing.num_buckets of a feature"
        )
    return max(sizes)


def _num_ids(
    feature: FeatureSpec, vocab_sizes: Mapping[str, int], read_sizes: Mapping[str, int]
) -> int | None:
    """How many ids a feature makes, or at least; None where nothing tells."""
    if feature.encoding and feature.encoding.num_ids is not None:
        return feature.encoding.num_ids
    if feature.name in read_sizes:
        return read_sizes[feature.name]
    if feature.vocabulary is None:
        return vocab_sizes.get(feature.source_column)
    if feature.vocabulary.path or feature.vocabulary.min_count > 1:
        return None
    return vocab_sizes.get(feature.vocabulary.column or feature.source_column)


def check_sizes(
    spec: JobSpec, vocab_sizes: Mapping[str, int], read_sizes: Mapping[str, int]
) -> None:
    """Raise `DataError` for a table with fewer rows than its features make ids."""
    rows = {table.name: table.num_ids for table in spec.embedding_tables}
    for index, feature in enumerate(spec.features):
        num_rows = rows[feature.table] if feature.table else None
        size = _num_ids(feature, vocab_sizes, read_sizes) if feature.table else None
        if num_rows is not None and size is not None:
            check_size(feature, f"features[{index}]", size, num_rows)


def check_size(feature: FeatureSpec, path: str, num_ids: int, num_rows: int) -> None:
    """Raise `DataError` where a feature, which is at `path`, has more ids than rows."""
    if num_ids > num_rows:
        raise DataError(
            f"{path}.{feature.ids_field}: '{feature.source_column}' has ids 0 to {num_ids - 1}, "
            f"but table '{feature.table}' has {num_rows} rows; set its num_embeddings to 'auto' or "
            f"at least {num_ids} (of a dynamic table dynamic.input_hash_size to at least that), or "
            f"hash the feature ({path}.hashing)"
        )


def fill_statistics(spec: JobSpec, statistics: Mapping[str, float]) -> JobSpec:
    """Give features to be standardised the mean and deviation of their column.

    `statistics` holds them as `COLUMN_mean` and `COLUMN_std`. Raises `ManifestError` where they are
    neither there nor in the spec.
    """
    features = tuple(
        _standardised(feature, index, statistics) if feature.transform == "standardise" else feature
        for index, feature in enumerate(spec.features)
    )
    return spec.model_copy(update={"features": features})


def _standardised(feature: FeatureSpec, index: int, statistics: Mapping[str, float]) -> FeatureSpec:
    mean, std = (
        given if given is not None else statistics.get(f"{feature.source_column}_{name}")
        for name, given in (("mean", feature.mean), ("std", feature.std))
    )
    if std == 0:
        raise ManifestError(
            f"features[{index}].transform: column '{feature.source_column}' is {mean} everywhere, "
            "so that it cannot be standardised and tells a model nothing; remove the feature, or "
            f"set features[{index}].std"
        )
    if mean is None or std is None or std <= 0:
        raise ManifestError(
            f"features[{index}].transform: nothing tells a mean and a deviation above 0 of column "
            f"'{feature.source_column}'; set features[{index}].mean and std"
        )
    return feature.model_copy(update={"mean": mean, "std": std})
