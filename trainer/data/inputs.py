"""What a job reads, on this node: the folder, and the spec with all that the data tells."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.data.errors import SourceMissingError
from trainer.data.manifest import MANIFEST_NAME, Manifest, load_manifest, parse_manifest
from trainer.data.remote import local_folder
from trainer.data.resolve import check_sizes, fill_statistics, short_histories, size_tables
from trainer.data.source import mean_and_deviation
from trainer.data.storage import Location
from trainer.data.transforms import load_vocabulary, vocabulary_path
from trainer.spec import JobSpec

logger = logging.getLogger(__name__)


def resolve_inputs(spec: JobSpec, warn: Callable[[str], None] = logger.warning) -> JobSpec:
    """The spec with table sizes and statistics from the manifest and the vocabularies.

    A folder of plain Parquet without a manifest will do where nothing is left to it. Raises a
    `DataError`, among others where a vocabulary is larger than its table.
    """
    folder = local_folder(spec.data.path, _vocabulary_parts(spec))
    manifest = _manifest_in(folder, is_whole=Location.parse(spec.data.path).is_local)
    vocab_sizes = manifest.vocab_sizes if manifest else {}
    read_sizes = {
        feature.name: load_vocabulary(
            vocabulary_path(feature, folder), feature.vocabulary.min_count
        ).num_ids
        for feature in spec.features
        if feature.vocabulary
    }
    spec = size_tables(spec, vocab_sizes, read_sizes)
    check_sizes(spec, vocab_sizes, read_sizes)
    for warning in short_histories(spec, manifest.options if manifest else {}):
        warn(warning)
    statistics = manifest.statistics if manifest else {}
    return fill_statistics(spec, _measured(spec, statistics) | statistics)


def _measured(spec: JobSpec, known: Mapping[str, float]) -> dict[str, float]:
    """Means and deviations that nobody knows, of the training part; local data only."""
    location = Location.parse(spec.data.path)
    wanted = {
        feature.source_column
        for feature in spec.features
        if feature.transform == "standardise"
        and (feature.mean is None or feature.std is None)
        and f"{feature.source_column}_std" not in known
    }
    if not location.is_local:
        return {}
    found: dict[str, float] = {}
    for column in sorted(wanted):
        mean, std = mean_and_deviation(
            location.local_path / spec.data.split.train,
            column,
            skip_unreadable=spec.data.on_bad_rows == "quarantine",
        )
        found |= {f"{column}_mean": mean, f"{column}_std": std}
    return found


def _manifest_in(folder: Path, *, is_whole: bool) -> Manifest | None:
    """The manifest, its files compared with it where they are here."""
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise SourceMissingError(f"{folder} does not exist; set data.path to a prepared folder")
    if not path.exists():
        return None
    return load_manifest(folder) if is_whole else parse_manifest(path.read_bytes(), str(path))


def on_this_node(spec: JobSpec) -> JobSpec:
    """The spec with `data.path` on a local disk; remote data is fetched once per node.

    Raises a `DataError`.
    """
    split = spec.data.split
    parts = {part for part in (split.train, split.validation) if part is not None}
    wanted = parts | _vocabulary_parts(spec)
    folder = local_folder(spec.data.path, None if "." in parts else wanted)
    if str(folder) == spec.data.path:
        return spec
    return spec.model_copy(update={"data": spec.data.model_copy(update={"path": str(folder)})})


def _vocabulary_parts(spec: JobSpec) -> set[str]:
    """What of `data.path` holds vocabularies."""
    paths = [feature.vocabulary.path for feature in spec.features if feature.vocabulary]
    return {"vocab"} | {path for path in paths if path}
