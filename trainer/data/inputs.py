"""What a job reads: the spec with all that the data tells."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from trainer.data.manifest import MANIFEST_NAME, Manifest, load_manifest
from trainer.data.parquet import mean_and_deviation
from trainer.data.transforms import load_vocabulary
from trainer.errors import SourceMissingError
from trainer.spec.job import JobSpec
from trainer.spec.resolve import check_sizes, fill_statistics, size_tables
from trainer.storage import Location

logger = logging.getLogger(__name__)


def resolve_inputs(spec: JobSpec, warn: Callable[[str], None] = logger.warning) -> JobSpec:
    """The spec with table sizes and statistics from the manifest and the vocabularies.

    A folder of plain Parquet without a manifest will do where nothing is left to it. Raises a
    `DataError`, among others where a vocabulary is larger than its table.
    """
    folder = Location.parse(spec.data.path)
    manifest = _manifest_in(folder)
    vocab_sizes = manifest.vocab_sizes if manifest else {}
    read_sizes = {
        feature.name: load_vocabulary(
            folder / feature.vocabulary_file, feature.vocabulary.min_count
        ).num_ids
        for feature in spec.features
        if feature.vocabulary
    }
    spec = size_tables(spec, vocab_sizes, read_sizes)
    check_sizes(spec, vocab_sizes, read_sizes)
    statistics = manifest.statistics if manifest else {}
    warnings = _short_histories(spec, manifest.options if manifest else {})
    for warning in (*warnings, *_unscaled(spec, statistics)):
        warn(warning)
    return fill_statistics(spec, _measured(spec, statistics) | statistics)


def _short_histories(spec: JobSpec, options: Mapping[str, object]) -> list[str]:
    """Warnings of sequences that may be longer than the histories that prepare kept.

    `options` are those of the manifest; only MovieLens folders have a `history_length`.
    """
    kept = options.get("history_length")
    return [
        f"features[{index}].max_length is {feature.max_length}, but '{feature.source_column}' was "
        f"prepared with at most {kept} movies; prepare with --history-length {feature.max_length} "
        "or lower max_length"
        for index, feature in enumerate(spec.features)
        if isinstance(kept, int)
        and feature.type == "sequence"
        and feature.source_column.startswith("history_")
        and (feature.max_length or 0) > kept
    ]


def _unscaled(spec: JobSpec, statistics: Mapping[str, float]) -> list[str]:
    """A warning of numbers that the manifest could scale; earlier versions stored them scaled."""
    names = [
        feature.name
        for feature in spec.dense_features
        if feature.transform == "none" and f"{feature.source_column}_std" in statistics
    ]
    if not names:
        return []
    return [
        f"dense features are read as they are stored, not scaled: {', '.join(names)}; set their "
        "transform to standardise, which takes mean and deviation from the manifest"
    ]


def _measured(spec: JobSpec, known: Mapping[str, float]) -> dict[str, float]:
    """Means and deviations that nobody knows, of the training part."""
    wanted = {
        feature.source_column
        for feature in spec.features
        if feature.transform == "standardise"
        and (feature.mean is None or feature.std is None)
        and f"{feature.source_column}_std" not in known
    }
    found: dict[str, float] = {}
    for column in sorted(wanted):
        mean, std = mean_and_deviation(
            Location.parse(spec.data.path) / spec.data.split.train,
            column,
            skip_unreadable=spec.data.on_bad_rows == "quarantine",
        )
        found |= {f"{column}_mean": mean, f"{column}_std": std}
    return found


def _manifest_in(folder: Location) -> Manifest | None:
    """The manifest, its files compared with it; None for a folder of plain Parquet."""
    has_manifest = (folder / MANIFEST_NAME).exists()
    if not has_manifest and not folder.is_dir():
        raise SourceMissingError(
            f"{folder} holds no {MANIFEST_NAME} and no Parquet; check data.path"
        )
    return load_manifest(folder) if has_manifest else None
