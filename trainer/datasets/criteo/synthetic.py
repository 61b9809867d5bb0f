"""Synthetic clicks in Criteo's format, with known click probabilities.

The clicks come from a *teacher*, a logistic model with one effect per id, low-rank interactions
between ids and a curved dense part. As the probability of every click is known, so is the best
normalised entropy that any model can reach: `teacher.json` holds what the true probabilities score
on the very rows written. Ids follow a Zipf law over tables as large as Criteo's, up to a cap. Rows
are drawn block by block, each from its own seed: bounded memory, and the same seed gives the same
bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from trainer.datasets.criteo.encode import entropy, hex_texts, transform_counts
from trainer.datasets.criteo.options import CriteoGeneratorOptions
from trainer.datasets.criteo.reader import (
    CARDINALITIES,
    DENSE_NAMES,
    ID_NAMES,
    MISSING,
    NUM_DENSE,
    by_column,
)
from trainer.datasets.io.journal import progress_bars
from trainer.datasets.io.staging import cut_rows, staged_folder
from trainer.errors import TooFewRowsError

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]
_NUM_FACTORS = 4
_EFFECT_STD = 0.2
_FACTOR_STD = 0.08
_DENSE_STD = 0.18
_BIAS = -1.5


@dataclass(frozen=True)
class ClickRows:
    """N rows: dense [N, 13], ids [N, 26] below the table sizes, label [N] of 0 and 1.

    `probability` [N] is that of label 1.
    """

    dense: FloatArray
    ids: IntArray
    label: FloatArray
    probability: FloatArray

    def __len__(self) -> int:
        return len(self.label)

    def __getitem__(self, rows: slice | IntArray) -> ClickRows:
        return ClickRows(*(values[rows] for values in vars(self).values()))


def table_sizes(max_rows: int) -> tuple[int, ...]:
    """Rows of the 26 tables: Criteo's own numbers, at most `max_rows` each."""
    return tuple(min(cardinality, max_rows) for cardinality in CARDINALITIES)


class Teacher:
    """The logistic model that decides the clicks; the same seed gives the same model."""

    def __init__(self, sizes: Sequence[int], zipf_exponent: float, seed: int) -> None:
        rng = np.random.default_rng([seed, 1])
        self._sizes = tuple(sizes)
        self._zipf = [_zipf_cdf(size, zipf_exponent) for size in sizes]
        self._effects = [rng.normal(0, _EFFECT_STD, size) for size in sizes]
        self._factors = [rng.normal(0, _FACTOR_STD, (size, _NUM_FACTORS)) for size in sizes]
        self._slopes, self._bends = rng.normal(0, _DENSE_STD, (2, NUM_DENSE))

    def draw(self, num_rows: int, seed: Sequence[int]) -> ClickRows:
        """`num_rows` independent rows, always the same ones for the same `seed`."""
        rng = np.random.default_rng(seed)
        counts = rng.lognormal(1.0, 1.5, (num_rows, NUM_DENSE)).astype(np.int64)
        dense = transform_counts(counts, keep_sign=False)
        uniforms = rng.random((len(self._sizes), num_rows))
        drawn = [
            np.searchsorted(cdf, uniform, side="right")
            for cdf, uniform in zip(self._zipf, uniforms, strict=True)
        ]
        ids = np.stack(drawn, axis=1)
        probability = self.probability(dense, ids)
        label = (rng.random(num_rows) < probability).astype(np.float32)
        return ClickRows(dense, ids, label, probability)

    def probability(self, dense: FloatArray, ids: IntArray) -> FloatArray:
        logit = _BIAS + (dense - np.float32(1.5)) @ self._slopes + np.cos(dense) @ self._bends
        total = np.zeros((len(ids), _NUM_FACTORS))
        own = np.zeros(len(ids))
        for column, (effects, factors) in enumerate(zip(self._effects, self._factors, strict=True)):
            rows = factors[ids[:, column]]
            logit += effects[ids[:, column]]
            total += rows
            own += np.square(rows).sum(axis=1)
        # Half of (square of the sum - sum of the squares) is the sum over all pairs.
        logit += (np.square(total).sum(axis=1) - own) / 2
        return (1 / (1 + np.exp(-logit))).astype(np.float32)


def _zipf_cdf(size: int, exponent: float) -> NDArray[np.float64]:
    weights = np.arange(1, size + 1, dtype=np.float64) ** -exponent
    cdf = np.cumsum(weights) / weights.sum()
    cdf[-1] = 1.0
    return cdf


# Probabilities in one bin count as equal, which moves the AUC by less than one in a million.
_NUM_BINS = 1 << 20


class TeacherScore:
    """Log loss, normalised entropy and AUC of known probabilities, gathered part by part.

    Normalised entropy is log loss over that of always predicting the mean click rate (He et al.
    2014, "Practical Lessons from Predicting Clicks on Ads at Facebook").
    """

    def __init__(self) -> None:
        self._clicks = np.zeros(_NUM_BINS, dtype=np.int64)
        self._views = np.zeros(_NUM_BINS, dtype=np.int64)
        self._loss = 0.0

    def add(self, rows: ClickRows) -> None:
        """Count rows, whose probabilities are inside of (0, 1)."""
        exact = rows.probability.astype(np.float64)
        self._loss -= float(np.log(np.where(rows.label > 0, exact, 1 - exact)).sum())
        bins = np.minimum((exact * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        self._views += np.bincount(bins, minlength=_NUM_BINS)
        self._clicks += np.bincount(bins, rows.label, minlength=_NUM_BINS).astype(np.int64)

    def as_dict(self) -> dict[str, float | None]:
        """`rows`, `click_rate`, `logloss`, `ne`, `auc`; None without clicks or others."""
        rows, clicks = int(self._views.sum()), int(self._clicks.sum())
        rate, logloss = clicks / rows, self._loss / rows
        has_both = 0 < clicks < rows
        return {
            "rows": rows,
            "click_rate": rate,
            "logloss": logloss,
            "ne": logloss / entropy(rate) if has_both else None,
            "auc": self._auc() if has_both else None,
        }

    def _auc(self) -> float:
        others = self._views - self._clicks
        below = np.cumsum(others) - others
        won = (self._clicks * (below + others / 2)).sum()
        return float(won / (float(self._clicks.sum()) * float(others.sum())))


TEACHER_NAME = "teacher.json"
_BLOCK_ROWS = 65_536
_VALIDATION_FRACTION = 0.1
# Of the counts that are 0 to the teacher, these parts are written as empty and as -1, as Criteo
# has both; in every third categorical column the most frequent id is an empty cell.
_EMPTY_COUNTS, _NEGATIVE_COUNTS = 0.5, 0.05
_EMPTY_ID_EVERY = 3
# Odd factors permute the 32-bit numbers, so that every id of a column has a hexadecimal of its own.
_ID_FACTOR, _COLUMN_STEP = 2_654_435_761, 0x9E3779B9


def generate_criteo(
    out: str | Path, options: CriteoGeneratorOptions, *, overwrite: bool = False
) -> dict[str, Any]:
    """Write the local folder `out`, all or nothing; gives what `teacher.json` holds.

    Raises `OutputExistsError`, `StorageError` for a remote `out`, or `TooFewRowsError` where some
    file would stay empty.
    """
    if options.num_rows < options.num_days:
        raise TooFewRowsError(f"{options.num_rows} rows are too few; generate at least one a day")
    with (
        staged_folder(out, overwrite=overwrite, proof=TEACHER_NAME) as folder,
        progress_bars() as progress,
    ):
        task = progress.add_task("generating", total=options.num_rows)
        teacher = Teacher(table_sizes(options.max_ids), options.zipf_exponent, options.seed)

        def draw(seed: tuple[int, ...], num_rows: int) -> Iterator[ClickRows]:
            for block, start in enumerate(range(0, num_rows, _BLOCK_ROWS)):
                size = min(_BLOCK_ROWS, num_rows - start)
                yield teacher.draw(size, [*seed, block])
                progress.advance(task, size)

        scores = _write_files(folder, draw, options)
        document = {
            "options": options.model_dump(),
            "parts": {name: score.as_dict() for name, score in scores.items()},
        }
        (folder / TEACHER_NAME).write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    return document


# Rows of a seed and a number, block by block; always the same ones for the same seed.
_DrawRows = Callable[[tuple[int, ...], int], Iterator[ClickRows]]


def _write_files(
    folder: Path, draw: _DrawRows, options: CriteoGeneratorOptions
) -> dict[str, TeacherScore]:
    """Scores of all rows, of the last tenth and, where there are several files, of each."""
    last_tenth = options.num_rows - int(options.num_rows * _VALIDATION_FRACTION)
    scores = {"all": TeacherScore(), "last_tenth": TeacherScore()}
    for day, own_rows in enumerate(cut_rows(options.num_rows, options.num_days, 1)):
        name = f"day_{day}" if options.num_days > 1 else "train.txt"
        own = scores.setdefault(name, TeacherScore()) if options.num_days > 1 else TeacherScore()
        path = folder / (f"{name}.gz" if options.gzip else name)
        with (
            pa.output_stream(str(path), compression="gzip" if options.gzip else None) as stream,
            pa_csv.CSVWriter(stream, _RAW_SCHEMA, write_options=_RAW_FORMAT) as file,
        ):
            row = own_rows.start
            drawn = draw((options.seed, 2, day), len(own_rows))
            for block, rows in enumerate(drawn):
                own.add(rows)
                scores["all"].add(rows)
                scores["last_tenth"].add(rows[max(0, last_tenth - row) :])
                file.write(raw_table(rows, (options.seed, 3, day, block)))
                row += len(rows)
    return scores


_RAW_SCHEMA = pa.schema(by_column(pa.int8(), pa.int64(), pa.string()))
# Nulls are empty cells.
_RAW_FORMAT = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")


def raw_table(rows: ClickRows, seed: tuple[int, ...]) -> pa.Table:
    """Generated rows as Criteo would write them: counts, hexadecimal ids and empty cells."""
    counts = np.rint(np.expm1(rows.dense.astype(np.float64))).astype(np.int64)
    luck = np.random.default_rng(seed).random(counts.shape, dtype=np.float32)
    is_zero = counts == 0
    counts[is_zero & (luck >= 1 - _NEGATIVE_COUNTS)] = -1
    is_empty = is_zero & (luck < _EMPTY_COUNTS)
    columns = [pa.array(rows.label.astype(np.int8))]
    columns += [
        pa.array(counts[:, column], mask=is_empty[:, column]) for column in range(len(DENSE_NAMES))
    ]
    columns += [hex_texts(raw_ids(rows.ids[:, column], column)) for column in range(len(ID_NAMES))]
    return pa.table(columns, schema=_RAW_SCHEMA)


def raw_ids(ids: np.ndarray, column: int) -> np.ndarray:
    """32-bit raw ids [n] of the teacher's ids [n] of a column, `MISSING` for empty cells."""
    raw = (ids * _ID_FACTOR + (column + 1) * _COLUMN_STEP) & 0xFFFF_FFFF
    has_empty = column % _EMPTY_ID_EVERY == _EMPTY_ID_EVERY - 1
    return np.where((ids == 0) & has_empty, MISSING, raw)
