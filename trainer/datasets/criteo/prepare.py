"""Criteo files to a prepared Parquet folder, in bounded memory.

Rows are scattered over buckets, the ids of the training rows counted and the frequent ones kept
(not with hashing), then buckets are written (`shuffle.py`). Until it is done the disk needs 164
bytes a row besides the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from trainer.data.manifest import Manifest
from trainer.data.transforms import HashEncoder, VocabularyEncoder
from trainer.datasets.criteo.encode import (
    COLUMN_TYPES,
    IdEncoder,
    entropy,
    frequent_values,
    ids_of,
    stored_vocabulary,
)
from trainer.datasets.criteo.options import CriteoOptions
from trainer.datasets.criteo.reader import ID_NAMES
from trainer.datasets.criteo.shuffle import LineShuffle, Runs
from trainer.datasets.io.journal import Part, progress_bars
from trainer.datasets.io.sources import check_distinct, find_sources
from trainer.datasets.io.staging import split_entry, staged
from trainer.storage import Location

# Raised whenever the same input would give other bytes or facts: older work is not resumed.
_VERSION = 5


def prepare_criteo(
    sources: Sequence[str | Path | Location],
    out: str | Path | Location,
    *,
    options: CriteoOptions | None = None,
    overwrite: bool = False,
    work_folder: Path | None = None,
) -> Manifest:
    """Read files and folders `sources` in time order and write the prepared folder `out`.

    Either may be local or remote, files may end in .gz, .zst or .bz2. Working files lie in
    `work_folder`, else beside a local `out` or in the folder for temporary files. Raises a
    `DataError` that names file and line of a fault.
    """
    options = options or CriteoOptions()
    target, files = Location.parse(out), find_sources(sources)
    check_distinct(files)
    work = {
        "command": "prepare criteo",
        "version": _VERSION,
        # What was read is the same whatever is done about lines that cannot be.
        "options": options.model_dump(exclude={"on_bad_line", "max_bad_lines"}),
        "files": {str(file): file.fingerprint() for file in files},
    }
    with (
        staged(
            target, work, overwrite=overwrite, sources=files, work_folder=work_folder
        ) as staging,
        progress_bars() as progress,
    ):
        shuffle = LineShuffle(files, options, staging, progress)
        runs = shuffle.scatter()
        known = {} if options.ids == "hashing" else _vocabularies(shuffle, options, runs)
        encoders: dict[str, IdEncoder] = {
            name: VocabularyEncoder.of(known[name]["value"])
            if name in known
            else HashEncoder(options.num_hash_buckets, options.seed)
            for name in ID_NAMES
        }
        parts = shuffle.write(runs, encoders)
        manifest = Manifest(
            source="criteo",
            splits={name: split_entry(found) for name, found in parts.items()},
            columns=COLUMN_TYPES,
            vocab_sizes={name: encoder.num_ids for name, encoder in encoders.items()},
            options=options.model_dump(),
            statistics=_statistics(parts),
            counts=shuffle.bad.counts if options.on_bad_line == "skip" else {},
            bad_lines=tuple(shuffle.bad.shown),
            vocabularies={
                name: staging.vocabulary(name, stored_vocabulary(own))
                for name, own in known.items()
            },
        )
        return staging.publish(manifest)


def _vocabularies(
    shuffle: LineShuffle, options: CriteoOptions, runs: Runs
) -> dict[str, pl.DataFrame]:
    """Values with rows of their own, and their counts, by column."""
    known = {}
    for name in shuffle.progress.track(ID_NAMES, description="fitting vocabularies"):

        def fit(path: Path, name: str = name) -> None:
            frequent_values(
                lambda: map(ids_of, runs.training(name)),
                min_count=options.min_count,
                max_values=options.max_ids,
            ).write_ipc(path)

        path, _ = shuffle.staging.scratch(f"vocab/{name}.arrow", fit)
        known[name] = pl.read_ipc(path)
    return known


def _statistics(parts: Mapping[str, Sequence[Part]]) -> dict[str, float]:
    """Click rates, shares of ids that are unknown, and the log loss of a constant prediction."""
    found: dict[str, float] = {}
    for split, files in parts.items():
        rows = sum(part.facts["num_rows"] for part in files)
        # A file may be without rows.
        unknown = sum(part.facts.get("unknown", 0) for part in files)
        found[f"{split}_click_rate"] = sum(part.facts.get("clicks", 0) for part in files) / rows
        found[f"{split}_unknown_ids"] = unknown / (rows * len(ID_NAMES))
    if 0 < (rate := found["validation_click_rate"]) < 1:
        found["baseline_logloss"] = entropy(rate)
    return found
