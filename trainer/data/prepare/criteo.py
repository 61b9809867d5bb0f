"""Raw Criteo files to a prepared folder, in bounded memory.

    count    lines of every file, which say where validation begins and how many buckets there are
    read     parse, transform counts, scatter rows over buckets: runs on disk (`criteo_runs`)
    fit      count the training rows' ids, keep the frequent ones (not with hashing)
    write    gather each bucket from all runs, shuffle it, look its ids up, append to Parquet

Every finished file is noted in a journal, so that a killed preparation goes on where it was; the
result is the same to the byte. Until it is done the disk needs 164 bytes a row besides the result.

Counts become log(1 + count), where nothing given is 0. A negative count is 0 too, as in the DLRM
reference, or keeps its sign: -log(1 - count) with `negatives: keep_sign`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from rich.console import Console
from rich.progress import Progress

from trainer.data.errors import CorruptFileError, TooFewRowsError
from trainer.data.manifest import FileEntry, Manifest, SplitEntry, VocabularyEntry
from trainer.data.prepare.criteo_format import ID_NAMES, parse_lines
from trainer.data.prepare.criteo_ids import (
    HashedIds,
    IdEncoder,
    KnownIds,
    frequent_values,
)
from trainer.data.prepare.criteo_runs import Buckets, Runs, pack, write_run
from trainer.data.prepare.criteo_source import (
    LineBlock,
    check_distinct,
    count_lines,
    find_sources,
    read_blocks,
)
from trainer.data.prepare.criteo_tables import COLUMN_TYPES, PartitionWriter, transform_counts
from trainer.data.prepare.journal import Facts, Part
from trainer.data.prepare.staging import Staging, staged
from trainer.data.prepare.teacher_score import entropy
from trainer.data.storage import Location

_TRAIN, _VALIDATION = "train", "validation"
# Raised when the same options would give other bytes than before.
_METHOD = 1
_WORK_BYTES_PER_ROW = 164


class CriteoOptions(BaseModel):
    """How to prepare Criteo files; recorded in the manifest.

    `ids`: `vocabulary` gives each value seen `min_count` times in training an id of its own, at
    most `max_ids` a column; `hashing` maps values to `num_hash_buckets` ids. `split`: validation is
    the last `validation_fraction` of all rows, or the whole last file (the last day).
    The last three bound memory: bytes of text read at a time, blocks in a run, rows in a bucket.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ids: Literal["vocabulary", "hashing"] = "vocabulary"
    min_count: PositiveInt = 10
    max_ids: PositiveInt = 10_000_000
    num_hash_buckets: Annotated[int, Field(ge=2, le=2**31)] = 1_000_000
    negatives: Literal["zero", "keep_sign"] = "zero"
    split: Literal["last_fraction", "last_file"] = "last_fraction"
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    num_partitions: PositiveInt = 32
    row_group_rows: PositiveInt = 8192
    seed: Annotated[int, Field(ge=0)] = 0
    block_bytes: PositiveInt = 32 * 1024 * 1024
    run_blocks: PositiveInt = 8
    bucket_rows: PositiveInt = 2_000_000


def prepare_criteo(
    sources: Sequence[str | Path],
    out: str | Path | Location,
    *,
    options: CriteoOptions | None = None,
    overwrite: bool = False,
    work_folder: Path | None = None,
) -> Manifest:
    """Read files and folders `sources` in time order and write the prepared folder `out`.

    Either may be local or remote, files may end in .gz, .zst or .bz2. Working files lie in
    `work_folder`, else beside a local `out` or in the folder for temporary files. Shows progress
    on stderr where that is a terminal. Raises a `DataError` that names file and line of a fault.
    """
    options = options or CriteoOptions()
    target, files = Location.parse(out), find_sources([str(source) for source in sources])
    check_distinct(files)
    work = {
        "command": f"prepare criteo, method {_METHOD}",
        "options": options.model_dump(),
        "files": [[str(file), *_version(file)] for file in files],
        "libraries": [np.__version__, pl.__version__, pa.__version__],
    }
    with (
        staged(
            target, work, overwrite=overwrite, sources=files, work_folder=work_folder
        ) as staging,
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress,
    ):
        manifest = _Preparation(files, options, staging, progress).run()
        staging.publish(manifest)
    return manifest


def _version(file: Location) -> tuple[int, int]:
    """What changes when a file does: size in bytes, time of change in nanoseconds."""
    return file.size_bytes(), file.fs.get_file_info(file.path).mtime_ns or 0


@dataclass(frozen=True)
class _Preparation:
    """The steps of one preparation, each in parts of `staging`."""

    files: Sequence[Location]
    options: CriteoOptions
    staging: Staging
    progress: Progress

    def run(self) -> Manifest:
        lines = list(self._counted_lines())
        buckets = plan_buckets(lines, self.options, [str(file) for file in self.files])
        self.staging.check_space("runs", sum(lines) * _WORK_BYTES_PER_ROW)
        runs = self._read(buckets, sum(lines))
        encoders = dict(zip(ID_NAMES, self._encoders(runs, buckets), strict=True))
        writer = PartitionWriter(
            runs, buckets, tuple(encoders.values()), self.options.row_group_rows
        )
        parts = {
            _TRAIN: self._write(writer, _TRAIN, 0, buckets.training_buckets),
            _VALIDATION: self._write(writer, _VALIDATION, buckets.training_buckets, buckets.total),
        }
        return Manifest(
            source="criteo",
            splits={name: _split_entry(found) for name, found in parts.items()},
            columns=COLUMN_TYPES,
            vocab_sizes={name: encoder.size for name, encoder in encoders.items()},
            options=self.options.model_dump(),
            statistics=_statistics(parts),
            vocabularies={
                name: self._vocabulary_entry(name, encoder)
                for name, encoder in encoders.items()
                if isinstance(encoder, KnownIds)
            },
        )

    def _counted_lines(self) -> Iterator[int]:
        for number, file in enumerate(self._tracked(self.files, "counting lines")):

            def count(path: Path, file: Location = file) -> Facts:
                num_lines = count_lines(file, self.options.block_bytes)
                path.write_text(f"{num_lines}\n", "utf-8")
                return {"lines": num_lines}

            yield self.staging.scratch(f"lines/{number:05d}.txt", count)[1]["lines"]

    def _read(self, buckets: Buckets, num_lines: int) -> Runs:
        """Parse every file into runs; those of an earlier try are only skipped over."""
        task = self.progress.add_task("reading", total=num_lines)
        paths: list[Path] = []
        offsets: list[list[int]] = []
        row = 0
        for file in self.files:
            blocks = read_blocks(file, self.options.block_bytes)
            while first := next(blocks, None):
                taken = chain([first], islice(blocks, self.options.run_blocks - 1))
                run = _Run(len(paths), row, str(file))
                path, facts = self.staging.scratch(
                    f"runs/{run.number:06d}.npy", partial(self._write_run, run, taken, buckets)
                )
                # Blocks of a run that is already there are still to be passed over.
                deque(taken, maxlen=0)
                row += facts["rows"]
                paths.append(path)
                offsets.append(facts["offsets"])
                self.progress.advance(task, facts["rows"])
            if row > num_lines:
                break
        if row != num_lines:
            raise CorruptFileError(
                f"{file} changed while it was read: {row} lines so far, {num_lines} were counted "
                "in all files; wait until it is written, then prepare again"
            )
        return Runs(paths, np.array(offsets, dtype=np.int64))

    def _write_run(
        self, run: _Run, blocks: Iterable[LineBlock], buckets: Buckets, path: Path
    ) -> Facts:
        keep_sign = self.options.negatives == "keep_sign"
        parts = []
        for block in blocks:
            clicks = parse_lines(block.lines, run.source, block.first_line)
            parts.append(pack(clicks, transform_counts(clicks.counts, keep_sign=keep_sign)))
        cells = np.concatenate(parts, axis=1)
        bucket = buckets.place(run.number, run.first_row, cells.shape[1])
        offsets = write_run(path, cells, bucket, buckets.total)
        return {"rows": cells.shape[1], "offsets": offsets}

    def _encoders(self, runs: Runs, buckets: Buckets) -> Iterator[IdEncoder]:
        options = self.options
        for column, name in enumerate(self._tracked(ID_NAMES, "fitting vocabularies")):
            if options.ids == "hashing":
                yield HashedIds(options.num_hash_buckets, options.seed)
            else:
                yield self._vocabulary(runs, buckets, column, name)

    def _vocabulary(self, runs: Runs, buckets: Buckets, column: int, name: str) -> KnownIds:
        def fit(path: Path) -> None:
            found = frequent_values(
                lambda: runs.ids(column, buckets.training_buckets),
                min_count=self.options.min_count,
                max_values=self.options.max_ids,
            )
            with path.open("wb") as file:
                np.save(file, np.stack([found.values, found.counts]))

        path, _ = self.staging.scratch(f"vocab/{name}.npy", fit)
        return KnownIds(*np.load(path))

    def _vocabulary_entry(self, name: str, encoder: KnownIds) -> VocabularyEntry:
        path = f"vocab/{name}.parquet"
        part = self.staging.result(path, encoder.write)
        return VocabularyEntry(
            path=path,
            num_values=len(encoder.values),
            size_bytes=part.size_bytes,
            sha256=part.sha256,
        )

    def _write(self, writer: PartitionWriter, split: str, first: int, end: int) -> list[Part]:
        """The partitions of a split, whose buckets are `first` to `end`, each a few of them."""
        each = -(-(end - first) // self.options.num_partitions)
        starts = range(first, end, each)
        return [
            self.staging.result(
                f"{split}/part-{number:05d}.parquet",
                partial(writer.write, range(start, min(start + each, end))),
            )
            for number, start in enumerate(self._tracked(starts, f"writing {split}"))
        ]

    def _tracked(self, items: Sequence[Any], description: str) -> Iterable[Any]:
        return self.progress.track(items, description=description)


@dataclass(frozen=True)
class _Run:
    """A stretch of a file's rows; `number` and `first_row` count over all files."""

    number: int
    first_row: int
    source: str


def plan_buckets(lines: Sequence[int], options: CriteoOptions, names: Sequence[str]) -> Buckets:
    """Where validation begins and how many buckets there are, from the files' numbers of lines.

    Every partition has the same number of buckets. Raises `TooFewRowsError`.
    """
    total = sum(lines)
    if options.split == "last_file":
        if len(lines) < 2:
            raise TooFewRowsError(
                f"{names[0]}: the only file cannot be the validation part; name more files or "
                "choose --split last_fraction"
            )
        num_validation = lines[-1]
    else:
        num_validation = int(total * options.validation_fraction)
    if not 0 < num_validation < total:
        raise TooFewRowsError(
            f"{', '.join(names)}: {total} rows leave no validation or no training rows with "
            f"fraction {options.validation_fraction:g}; use more rows or another fraction"
        )
    return Buckets(
        num_training=total - num_validation,
        num_validation=num_validation,
        training_buckets=_num_buckets(total - num_validation, options),
        validation_buckets=_num_buckets(num_validation, options),
        seed=options.seed,
    )


def _num_buckets(num_rows: int, options: CriteoOptions) -> int:
    """Files are no smaller than a row group and of equally many buckets, none of them too large."""
    num_parts = min(options.num_partitions, max(1, num_rows // options.row_group_rows))
    return num_parts * -(-num_rows // (num_parts * options.bucket_rows))


def _split_entry(parts: Sequence[Part]) -> SplitEntry:
    files = tuple(
        FileEntry(
            path="/".join(Path(part.name).parts[-2:]),
            num_rows=part.facts["rows"],
            num_row_groups=part.facts["row_groups"],
            size_bytes=part.size_bytes,
            sha256=part.sha256,
        )
        for part in parts
    )
    return SplitEntry(num_rows=sum(file.num_rows for file in files), files=files)


def _statistics(parts: Mapping[str, Sequence[Part]]) -> dict[str, float]:
    """Click rates, shares of ids that are unknown, and the log loss of a constant prediction."""
    found: dict[str, float] = {}
    for split, files in parts.items():
        rows = sum(part.facts["rows"] for part in files)
        unknown = sum(part.facts["unknown"] for part in files)
        found[f"{split}_click_rate"] = sum(part.facts["clicks"] for part in files) / rows
        found[f"{split}_unknown_ids"] = unknown / (rows * len(ID_NAMES))
    if 0 < (rate := found["validation_click_rate"]) < 1:
        found["baseline_logloss"] = entropy(rate)
    return found
