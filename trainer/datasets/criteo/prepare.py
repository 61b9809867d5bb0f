"""Criteo files to a prepared Parquet folder, in bounded memory.

    count    lines of every file, which say where validation begins and how many buckets there are
    read     parse, transform counts, scatter rows over buckets: runs on disk
    fit      count the training rows' ids, keep the frequent ones (not with hashing)
    write    gather each bucket from all runs, shuffle it, encode its ids, append to Parquet

Every finished file is recorded in a journal, so that a killed preparation resumes; the result is
the same to the byte. Until it is done the disk needs 164 bytes a row besides the result. A line
that cannot be read ends it, and what was read before stays: once the file is mended, the same
command reads that file's lines alone anew (all lines, if their number has changed, as each row's
place depends on it).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import polars as pl
from rich.progress import Progress

from trainer.data.manifest import Manifest
from trainer.data.transforms import HashEncoder, VocabularyEncoder
from trainer.datasets.criteo.encode import (
    COLUMN_TYPES,
    Buckets,
    IdEncoder,
    PartitionWriter,
    Runs,
    entropy,
    frequent_values,
    stored_vocabulary,
    with_dense,
    write_run,
)
from trainer.datasets.criteo.options import CriteoOptions
from trainer.datasets.criteo.reader import (
    ID_NAMES,
    BadLines,
    check_bound,
    check_distinct,
    find_sources,
    parse_lines,
)
from trainer.datasets.io.csv_reader import LineBlock, read_blocks
from trainer.datasets.io.journal import Facts, Part, progress_bars
from trainer.datasets.io.staging import Staging, split_entry, staged
from trainer.errors import (
    BadValueError,
    CorruptFileError,
    TooFewRowsError,
    TooManyBadRowsError,
)
from trainer.storage import Location


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


# Raised when the same options would give other bytes or facts than before.
_METHOD = 4
_WORK_BYTES_PER_ROW = 164


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
    `work_folder`, else beside a local `out` or in the folder for temporary files. Raises a
    `DataError` that names file and line of a fault.
    """
    options = options or CriteoOptions()
    target, files = Location.parse(out), find_sources([str(source) for source in sources])
    check_distinct(files)
    work = {
        "command": f"prepare criteo, method {_METHOD}",
        # What was read is the same whatever is done about lines that cannot be.
        "options": options.model_dump(exclude={"on_bad_line", "max_bad_lines"}),
        "files": [str(file) for file in files],
    }
    with (
        staged(
            target, work, overwrite=overwrite, sources=files, work_folder=work_folder
        ) as staging,
        progress_bars() as progress,
    ):
        return staging.publish(_Preparation(files, options, staging, progress).run())


@dataclass(frozen=True)
class _Preparation:
    """The steps of one preparation, each in parts of `staging`."""

    files: Sequence[Location]
    options: CriteoOptions
    staging: Staging
    progress: Progress
    bad: BadLines = field(default_factory=BadLines)
    # What each run was made of: what comes after is made of all of them.
    origins: list[str] = field(default_factory=list)

    def run(self) -> Manifest:
        versions = [f"{file} {file.fingerprint()}" for file in self.files]
        lines = list(self._counted_lines(versions))
        buckets = plan_buckets(lines, self.options, [str(file) for file in self.files])
        self.staging.check_space("runs", sum(lines) * _WORK_BYTES_PER_ROW)
        runs = self._read(buckets, lines, versions)
        num_training = int(runs.offsets[:, buckets.training_buckets].sum())
        num_rows = int(runs.offsets[:, -1].sum())
        if not 0 < num_training < num_rows:
            raise TooFewRowsError(
                f"{num_training} training rows and {num_rows - num_training} validation rows are "
                "left without the bad lines; mend the files or choose another --validation-fraction"
            )
        known = self._vocabularies(runs, buckets)
        encoders = {name: self._encoder(known.get(name)) for name in ID_NAMES}
        writer = PartitionWriter(runs, buckets, encoders, self.options.row_group_rows)
        parts = {
            "train": self._write(writer, "train", 0, buckets.training_buckets),
            "validation": self._write(
                writer, "validation", buckets.training_buckets, buckets.total
            ),
        }
        kinds = {f"bad_lines_{kind}": n for kind, n in sorted(self.bad.num_of_kind.items())}
        bad_lines = {"bad_lines": self.bad.total, **kinds}
        return Manifest(
            source="criteo",
            splits={name: split_entry(found) for name, found in parts.items()},
            columns=COLUMN_TYPES,
            vocab_sizes={name: encoder.num_ids for name, encoder in encoders.items()},
            options=self.options.model_dump(),
            statistics=_statistics(parts),
            counts=bad_lines if self.options.on_bad_line == "skip" else {},
            bad_lines=tuple(self.bad.shown),
            vocabularies={
                name: self.staging.vocabulary(name, stored_vocabulary(own), self._origin)
                for name, own in known.items()
            },
        )

    def _counted_lines(self, versions: Sequence[str]) -> Iterator[int]:
        for number, file in enumerate(
            self.progress.track(self.files, description="counting lines")
        ):

            def count(path: Path, file: Location = file) -> Facts:
                blocks = read_blocks(file, self.options.block_bytes)
                num_lines = sum(block.num_lines for block in blocks)
                path.write_text(f"{num_lines}\n", "utf-8")
                return {"lines": num_lines}

            _, facts = self.staging.scratch(f"lines/{number:05d}.txt", count, versions[number])
            yield facts["lines"]

    def _read(self, buckets: Buckets, lines: Sequence[int], versions: Sequence[str]) -> Runs:
        """Parse every file into runs; those of an earlier try are only skipped over."""
        task = self.progress.add_task("reading", total=sum(lines))
        paths: list[Path] = []
        offsets: list[list[int]] = []
        line = 0
        for file, num_lines, version in zip(self.files, lines, versions, strict=True):
            blocks = read_blocks(file, self.options.block_bytes)
            bad = BadLines()
            while first := next(blocks, None):
                taken = chain([first], islice(blocks, self.options.run_blocks - 1))
                run = _Run(len(paths), line, str(file), version)
                self.origins.append(f"{run} {buckets}")
                make = partial(self._write_run, run, taken, buckets)
                try:
                    path, facts = self.staging.scratch(
                        f"runs/{run.number:06d}.arrow", make, self.origins[-1]
                    )
                    bad.merge(facts["bad"])
                    self._check_bad(run, num_lines, bad)
                except (BadValueError, CorruptFileError, TooManyBadRowsError) as error:
                    if run.number:
                        error.add_note(
                            f"What was read before stays in {self.staging.keep_work()}: mend the "
                            "file and run the same command again, or leave such lines out with "
                            "--on-bad-line skip"
                        )
                    raise
                # Blocks of a run that is already there are still to be passed over.
                deque(taken, maxlen=0)
                line += facts["lines"]
                paths.append(path)
                offsets.append(facts["offsets"])
                self.progress.advance(task, facts["lines"])
            self.bad.merge(vars(bad))
            if line > sum(lines):
                break
        if line != sum(lines):
            raise CorruptFileError(
                f"{file} changed while it was read: {line} lines so far, {sum(lines)} were counted "
                "in all files; wait until it is written, then prepare again"
            )
        return Runs(paths, np.array(offsets, dtype=np.int64))

    def _check_bad(self, run: _Run, num_lines: int, bad: BadLines) -> None:
        """Raise where lines were left out that may not be, be it by an earlier, laxer try."""
        if not bad.total:
            return
        if self.options.on_bad_line == "fail":
            raise CorruptFileError(bad.shown[0])
        check_bound(run.source, num_lines, bad, self.bad.total, self.options.max_bad_lines)

    def _write_run(
        self, run: _Run, blocks: Iterable[LineBlock], buckets: Buckets, path: Path
    ) -> Facts:
        keep_sign = self.options.negatives == "keep_sign"
        parts = []
        bad, num_lines = BadLines(), 0
        for block in blocks:
            skipped = bad if self.options.on_bad_line == "skip" else None
            rows = parse_lines(block.lines, run.source, block.first_line, skipped)
            rows = with_dense(rows, keep_sign=keep_sign)
            parts.append(rows.with_columns(pl.col("line") + num_lines))
            num_lines += block.num_lines
        rows = pl.concat(parts)
        bucket = buckets.place(run.number, run.first_line + rows["line"].to_numpy())
        offsets = write_run(path, rows.drop("line"), bucket, buckets.total)
        return {"lines": num_lines, "offsets": offsets, "bad": vars(bad)}

    @cached_property
    def _origin(self) -> str:
        """What all files that are made of all runs are made of."""
        return hashlib.sha256("\n".join(self.origins).encode()).hexdigest()

    def _vocabularies(self, runs: Runs, buckets: Buckets) -> dict[str, pl.DataFrame]:
        """Values with rows of their own, and their counts, by column; none with hashing."""
        if self.options.ids == "hashing":
            return {}
        known = {}
        tracked = self.progress.track(ID_NAMES, description="fitting vocabularies")
        for name in tracked:

            def fit(path: Path, name: str = name) -> None:
                frequent_values(
                    lambda: runs.ids(name, buckets.training_buckets),
                    min_count=self.options.min_count,
                    max_values=self.options.max_ids,
                ).write_ipc(path)

            path, _ = self.staging.scratch(f"vocab/{name}.arrow", fit, self._origin)
            known[name] = pl.read_ipc(path)
        return known

    def _encoder(self, known: pl.DataFrame | None) -> IdEncoder:
        if known is None:
            return HashEncoder(self.options.num_hash_buckets, self.options.seed)
        return VocabularyEncoder(known["value"], np.arange(1, len(known) + 1), len(known) + 1)

    def _write(self, writer: PartitionWriter, split: str, first: int, end: int) -> list[Part]:
        """The partitions of a split, whose buckets are `first` to `end`, each a few of them."""
        each = -(-(end - first) // self.options.num_partitions)
        starts = self.progress.track(range(first, end, each), description=f"writing {split}")
        return [
            self.staging.result(
                f"{split}/part-{number:05d}.parquet",
                partial(writer.write, range(start, min(start + each, end))),
                self._origin,
            )
            for number, start in enumerate(starts)
        ]


@dataclass(frozen=True)
class _Run:
    """A stretch of a file's lines; `number` and `first_line` (from 0) count over all files."""

    number: int
    first_line: int
    source: str
    version: str


def _statistics(parts: Mapping[str, Sequence[Part]]) -> dict[str, float]:
    """Click rates, shares of ids that are unknown, and the log loss of a constant prediction."""
    found: dict[str, float] = {}
    for split, files in parts.items():
        rows = sum(part.facts["num_rows"] for part in files)
        unknown = sum(part.facts["unknown"] for part in files)
        found[f"{split}_click_rate"] = sum(part.facts["clicks"] for part in files) / rows
        found[f"{split}_unknown_ids"] = unknown / (rows * len(ID_NAMES))
    if 0 < (rate := found["validation_click_rate"]) < 1:
        found["baseline_logloss"] = entropy(rate)
    return found
