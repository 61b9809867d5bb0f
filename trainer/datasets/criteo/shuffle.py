"""Files of clicks to Parquet in random order, in bounded memory.

    count    lines of every file, which say where validation begins and how many buckets there are
    scatter  parse lines, transform counts, scatter rows over buckets at random: runs on disk
    write    gather each bucket from all runs, shuffle it, encode its ids, append to Parquet

Every finished file is recorded in a journal, so that a killed preparation resumes; the result is
the same to the byte.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from rich.progress import Progress

from trainer.data.ragged import IntArray, offsets_of
from trainer.datasets.criteo.encode import SCHEMA, IdEncoder, encode_rows, with_dense
from trainer.datasets.criteo.options import CriteoOptions
from trainer.datasets.criteo.reader import BadLines, parse_lines
from trainer.datasets.io.csv_reader import LineBlock, read_blocks
from trainer.datasets.io.journal import Facts, Part
from trainer.datasets.io.staging import (
    Staging,
    gather_rows,
    map_rows,
    write_columns,
    write_partition,
)
from trainer.errors import (
    BadValueError,
    CorruptFileError,
    TooFewRowsError,
    TooManyBadRowsError,
)
from trainer.storage import Location


@dataclass(frozen=True)
class Buckets:
    """Where rows go: of the first `num_training` lines to random buckets, of later ones in order.

    Training buckets come first. A run's draws depend on `seed` and the run's number alone.
    """

    num_training: int
    num_validation: int
    training_buckets: int
    validation_buckets: int
    seed: int

    @property
    def total(self) -> int:
        return self.training_buckets + self.validation_buckets

    def place(self, run: int, line: IntArray) -> IntArray:
        """Bucket [n] of the rows of a run, whose lines are `line` [n], counted over all files."""
        drawn = np.random.default_rng([self.seed, 0, run]).integers(
            0, self.training_buckets, len(line)
        )
        later = (line - self.num_training) * self.validation_buckets // self.num_validation
        return np.where(line < self.num_training, drawn, self.training_buckets + later)


def _plan_buckets(lines: Sequence[int], options: CriteoOptions, names: Sequence[str]) -> Buckets:
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


@dataclass(frozen=True)
class Runs:
    """All runs of a preparation, in input order; rows are read from disk as they are asked for.

    `offsets` [runs, buckets + 1] say where in each run the buckets begin.
    """

    paths: Sequence[Path]
    offsets: IntArray
    buckets: Buckets

    def training(self, column: str) -> Iterator[pl.Series]:
        """A column of the training rows, run by run."""
        ends = self.offsets[:, self.buckets.training_buckets]
        for path, end in zip(self.paths, ends, strict=True):
            yield pl.Series(map_rows(path)[column][:end])

    def bucket(self, number: int) -> pl.DataFrame:
        """All rows of a bucket: of a training one in random order, else in input order."""
        rows = pl.DataFrame(gather_rows(self.paths, self.offsets[:, number : number + 2]))
        if number >= self.buckets.training_buckets:
            return rows
        rng = np.random.default_rng([self.buckets.seed, 1, number])
        return rows[rng.permutation(len(rows))]


_RUN_BYTES_PER_ROW = 164
_ENCODED_ROWS = 131_072


@dataclass(frozen=True)
class LineShuffle:
    """The steps, each in parts of `staging`."""

    files: Sequence[Location]
    options: CriteoOptions
    staging: Staging
    progress: Progress
    bad: BadLines = field(default_factory=BadLines)

    def scatter(self) -> Runs:
        """Count and read all files; raises a `DataError` that names file and line of a fault."""
        lines = list(self._counted_lines())
        buckets = _plan_buckets(lines, self.options, [str(file) for file in self.files])
        self.staging.check_space("runs", sum(lines) * _RUN_BYTES_PER_ROW)
        runs = self._read(buckets, lines)
        num_training = int(runs.offsets[:, buckets.training_buckets].sum())
        num_rows = int(runs.offsets[:, -1].sum())
        if not 0 < num_training < num_rows:
            raise TooFewRowsError(
                f"{num_training} training rows and {num_rows - num_training} validation rows are "
                "left without the bad lines; mend the files or choose another --validation-fraction"
            )
        return runs

    def write(self, runs: Runs, encoders: Mapping[str, IdEncoder]) -> dict[str, list[Part]]:
        """The partitions of each split, of equally many buckets."""
        first, total = runs.buckets.training_buckets, runs.buckets.total
        parts: dict[str, list[Part]] = {}
        for split, own in (("train", range(first)), ("validation", range(first, total))):
            each = -(-len(own) // self.options.num_partitions)
            starts = self.progress.track(range(0, len(own), each), description=f"writing {split}")
            parts[split] = [
                self.staging.result(
                    f"{split}/part-{number:05d}.parquet",
                    partial(self._write_buckets, runs, own[start : start + each], encoders),
                )
                for number, start in enumerate(starts)
            ]
        return parts

    def _write_buckets(
        self, runs: Runs, buckets: range, encoders: Mapping[str, IdEncoder], path: Path
    ) -> Facts:
        """Memory is that of one bucket twice. Row groups are full, but for the last of a bucket."""
        counts: Counter[str] = Counter()
        size = self.options.row_group_rows
        step = max(1, _ENCODED_ROWS // size) * size

        def encoded() -> Iterator[pa.Table]:
            for number in buckets:
                for rows in runs.bucket(number).iter_slices(step):
                    table, found = encode_rows(encoders, rows)
                    counts.update(found)
                    yield table

        return write_partition(path, SCHEMA, encoded(), size) | counts

    def _counted_lines(self) -> Iterator[int]:
        tracked = self.progress.track(self.files, description="counting lines")
        for number, file in enumerate(tracked):

            def count(path: Path, file: Location = file) -> Facts:
                blocks = read_blocks(file, self.options.block_bytes)
                num_lines = sum(block.num_lines for block in blocks)
                path.write_text(f"{num_lines}\n", "utf-8")
                return {"lines": num_lines}

            _, facts = self.staging.scratch(f"lines/{number:05d}.txt", count)
            yield facts["lines"]

    def _read(self, buckets: Buckets, lines: Sequence[int]) -> Runs:
        """Parse every file into runs; those of an earlier try are only skipped over."""
        task = self.progress.add_task("reading", total=sum(lines))
        paths: list[Path] = []
        offsets: list[list[int]] = []
        line = 0
        for file, num_lines in zip(self.files, lines, strict=True):
            blocks = read_blocks(file, self.options.block_bytes)
            bad = BadLines()
            while first := next(blocks, None):
                taken = chain([first], islice(blocks, self.options.run_blocks - 1))
                make = partial(self._write_run, len(paths), line, str(file), taken, buckets)
                try:
                    path, facts = self.staging.scratch(f"runs/{len(paths):06d}.arrow", make)
                    bad.merge(facts["bad"])
                    self._check_bad(file, num_lines, bad)
                except (BadValueError, CorruptFileError, TooManyBadRowsError) as error:
                    # A file that is wholly bad has to change, with which all starts anew.
                    if paths and bad.total < num_lines:
                        is_skipping = self.options.on_bad_line == "skip"
                        with_what = "more --max-bad-lines" if is_skipping else "--on-bad-line skip"
                        error.add_note(
                            f"What was read before stays in {self.staging.keep_work()}: run the "
                            f"same command with {with_what} to go on without such lines"
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
        return Runs(paths, np.array(offsets, dtype=np.int64), buckets)

    def _check_bad(self, file: Location, num_lines: int, bad: BadLines) -> None:
        """Raise where more lines are left out than may be, be it by an earlier, laxer try.

        `bad` is of `file`, which has `num_lines`. A bound below 1 is a share of each file's lines,
        another the number in all files. A file without a good line is refused whatever the bound.
        """
        bound, others = self.options.max_bad_lines, self.bad.total
        if not bad.total:
            return
        if self.options.on_bad_line == "fail":
            raise CorruptFileError(bad.shown[0])
        if bad.total == num_lines:
            wanted = "not one can be read; is it of this data set?"
        elif bound < 1 and bad.total > bound * num_lines:
            wanted = f"more than the share {bound:g} that --max-bad-lines lets be left out"
        elif bound >= 1 and bad.total + others > bound:
            wanted = f"with {others} of other files more than the {bound:.0f} of --max-bad-lines"
        else:
            return
        raise TooManyBadRowsError(
            f"{file}: {bad.total} of its {num_lines} lines are bad ({bad}), {wanted}. "
            f"The first: {bad.shown[0]}"
        )

    def _write_run(
        self,
        number: int,
        first_line: int,
        source: str,
        blocks: Iterable[LineBlock],
        buckets: Buckets,
        path: Path,
    ) -> Facts:
        """Parse lines of `source`; `number` and `first_line` (from 0) count over all files."""
        parts = []
        bad, num_lines = BadLines(), 0
        for block in blocks:
            skipped = bad if self.options.on_bad_line == "skip" else None
            rows = parse_lines(block.lines, source, block.first_line, skipped)
            rows = with_dense(rows, keep_sign=self.options.negatives == "keep_sign")
            parts.append(rows.with_columns(pl.col("line") + num_lines))
            num_lines += block.num_lines
        rows = pl.concat(parts)
        bucket = buckets.place(number, first_line + rows["line"].to_numpy())
        ordered = rows.drop("line")[np.argsort(bucket, kind="stable")]
        write_columns(path, {column.name: column.to_arrow() for column in ordered})
        offsets = offsets_of(np.bincount(bucket, minlength=buckets.total)).tolist()
        return {"lines": num_lines, "offsets": offsets, "bad": vars(bad)}
