"""MovieLens csv folders (ml-latest-small, ml-latest, ml-32m) to a prepared Parquet folder.

One row per rating. The model learns `(rating - user_mean) / user_scale`. Nothing leaks: what is
fitted (vocabularies, moments, tags) comes from the training part only, and what a row counts or
averages (histories, popularity, means) from rows with a strictly smaller timestamp, or, where its
name says `others`, from training rows of other users alone.

Ratings stream through files in units of whole users, so that memory does not grow with their
number; only what there is one of per user, movie or tag stays in memory. Rows of a unit are
shuffled, units follow one another, and the whole is cut into files of equal size. Every file on the
way is a recorded part (`io/journal.py`): a run that was killed resumes, to the same bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from rich.progress import Progress

from trainer.data.manifest import Manifest, SplitEntry
from trainer.data.ragged import IntArray, cut_at, offsets_of
from trainer.data.transforms import VocabularyEncoder
from trainer.datasets.io.csv_reader import BlockReader
from trainer.datasets.io.journal import Facts, Part, progress_bars
from trainer.datasets.io.staging import (
    Staging,
    cut_rows,
    map_columns,
    split_entry,
    staged,
    write_partition,
)
from trainer.datasets.movielens.features import MovieFolds
from trainer.datasets.movielens.options import MovieLensOptions
from trainer.datasets.movielens.rows import (
    COLUMN_TYPES,
    SCHEMA,
    Fitted,
    MovieExchange,
    SplitName,
    UnitRows,
    cut_movies,
)
from trainer.datasets.movielens.source import (
    RATING_COLUMNS,
    Blocks,
    cut_users,
    describe_movies,
    encode_catalogue,
    read_blocks,
    read_movies,
    read_tag_words,
    write_unit,
)
from trainer.datasets.movielens.statistics import Moments, RatingStatistics, Units
from trainer.errors import SourceMissingError, TooFewRowsError
from trainer.storage import Location

_GROUPS_PER_BATCH = 8
_HISTORIES = ("history_movies", "history_liked", "history_disliked")
# Lists of ids hold almost as many values as a row group has rows: packing their differences takes
# half the time of a dictionary to write, two thirds to read, and is smaller.
_ENCODINGS: dict[str, Any] = {
    "use_dictionary": ["user_id", "movie_id", "genres.list.element", "year", "rating"],
    "column_encoding": {
        f"{name}.list.element": "DELTA_BINARY_PACKED" for name in ("tokens", *_HISTORIES)
    },
}


# Raised whenever the same input would give other bytes or facts: older work is not resumed.
_VERSION = 8
_SOURCE_FILES = ("ratings.csv", "movies.csv", "tags.csv")


def prepare_movielens(
    source: Path | str | Location,
    out: Path | str | Location,
    *,
    options: MovieLensOptions | None = None,
    overwrite: bool = False,
    work_folder: Path | None = None,
) -> Manifest:
    """Read the csv folder `source` and write the prepared folder `out`, all or nothing.

    Both may be local paths or URLs. Raises a `DataError` that names file, line and column of a bad
    value.
    """
    options = options or MovieLensOptions()
    source = Location.parse(source)
    if not source.is_dir():
        raise SourceMissingError(
            f"{source} is not a folder; name the folder that holds ratings.csv"
        )
    out = Location.parse(out)
    # What the result's bytes depend on: unfinished work is resumed only where all is equal.
    work = {
        "command": "prepare movielens",
        "version": _VERSION,
        "source": str(source),
        "files": {name: (source / name).fingerprint() for name in _SOURCE_FILES},
        "options": options.model_dump(),
    }
    with (
        staged(
            out, work, overwrite=overwrite, sources=[source], work_folder=work_folder
        ) as staging,
        progress_bars() as progress,
    ):
        return staging.publish(_Preparation(source, options, staging, progress).run())


@dataclass(frozen=True)
class _Preparation:
    """The steps, in order; each takes what those before it found."""

    source: Location
    options: MovieLensOptions
    staging: Staging
    progress: Progress
    counts: dict[str, int] = field(default_factory=dict)

    def run(self) -> Manifest:
        ratings = self.source / "ratings.csv"
        reader = BlockReader(ratings, RATING_COLUMNS)
        movies = read_movies(self.source / "movies.csv")
        task = self.progress.add_task("reading ratings", total=ratings.size_bytes())
        blocks = read_blocks(reader, self.staging, partial(self.progress.advance, task))
        self.counts["ratings_last_line_unfinished"] = int(not blocks.has_line_end)
        movie_ids = np.union1d(blocks.movies, movies["movieId"].to_numpy())
        self.counts["movies_without_metadata"] = len(movie_ids) - len(movies)
        units = self._sort(blocks, movie_ids)
        statistics = self._compute_statistics(units, len(blocks.users), len(movie_ids))
        tag_words, num_tags = read_tag_words(
            self.source / "tags.csv", blocks.users, statistics.begins, self.options.split
        )
        self.counts["training_tags"] = num_tags
        vocabularies, fitted = self._fit(blocks, movies, movie_ids, tag_words, units, statistics)
        rows = self._build_histories(fitted)
        return self._write(vocabularies, rows)

    def _sort(self, blocks: Blocks, movie_ids: IntArray) -> Units:
        users = cut_users(blocks.rows_per_user, self.options.unit_rows)
        paths, repeated = [], 0
        tracked = self.progress.track(users, description="sorting by user and time")
        for number, own in enumerate(tracked):

            def make(path: Path, own: range = own) -> Facts:
                return write_unit(path, blocks, own, movie_ids)

            path, facts = self.staging.scratch(f"units/{number:05d}.arrow", make)
            paths.append(path)
            repeated += facts["num_repeated"]
        self.counts.update(users=len(blocks.users), duplicates_dropped=repeated)
        return Units(paths, users, self.options.split, self.options.validation_fraction)

    def _compute_statistics(
        self, units: Units, num_users: int, num_movies: int
    ) -> RatingStatistics:
        statistics = RatingStatistics(units, num_users, num_movies)
        num_rows = int((statistics.num_training + statistics.num_held_out).sum())
        if not statistics.num_training.sum() or not statistics.num_held_out.sum():
            raise TooFewRowsError(
                f"{self.source / 'ratings.csv'}: {num_rows} ratings leave no validation or no "
                f"training rows with split {self.options.split!r} at fraction "
                f"{self.options.validation_fraction:g}; use more ratings, another fraction or "
                "another split"
            )
        self.counts["ratings"] = num_rows
        return statistics

    def _fit(
        self,
        blocks: Blocks,
        movies: pl.DataFrame,
        movie_ids: IntArray,
        tag_words: pl.DataFrame,
        units: Units,
        statistics: RatingStatistics,
    ) -> tuple[dict[str, VocabularyEncoder], Fitted]:
        options = self.options
        every_id = pl.Series("movieId", movie_ids)
        described = describe_movies(movies, tag_words, every_id, options.max_tokens_per_movie)
        is_known = statistics.training_rows_of_movie > 0
        seen = described.filter(pl.Series(is_known))
        genres = fit_vocabulary(seen["genres"].explode().drop_nulls())
        tokens = fit_vocabulary(
            seen["tokens"].explode().drop_nulls(),
            min_count=options.min_token_count,
            max_size=options.max_tokens,
        )
        users = VocabularyEncoder.of(blocks.users[statistics.training_rows_of_user > 0])
        rated = VocabularyEncoder.of(movie_ids[is_known])
        fitted = Fitted(
            units=units,
            statistics=statistics,
            catalogue=encode_catalogue(described, genres, tokens),
            user_index=users.encode(pa.array(blocks.users)),
            movie_index=rated.encode(pa.array(movie_ids)),
            options=options,
        )
        found = {"user_id": users, "movie_id": rated, "genres": genres, "tokens": tokens}
        return found, fitted

    def _build_histories(self, fitted: Fitted) -> UnitRows:
        moments = defaultdict[str, Moments](Moments)
        paths = []
        units = range(len(fitted.units))
        for unit in self.progress.track(units, description="histories of users"):
            path, facts = self.staging.scratch(
                f"by_movie/{unit:05d}.arrow", partial(fitted.write_by_movie, unit=unit)
            )
            paths.append(path)
            for name, own in facts.items():
                moments[name] += Moments(**own)
        bounds = cut_movies(fitted.statistics.rows_of_movie, self.options.unit_rows)
        task = self.progress.add_task("histories of movies", total=self.counts["ratings"])
        advance = partial(self.progress.advance, task)
        exchange = MovieExchange(paths, bounds, self.staging, advance)
        folds = MovieFolds(map(map_columns, paths), len(fitted.movie_index))
        for rows in map(map_columns, paths):
            for name, values in folds.dense(rows["movie"], rows["fold"]).items():
                moments[name] += Moments.of(values[rows["is_training"] > 0])
        return UnitRows(fitted, exchange, folds, moments | exchange.moments)

    def _write(self, vocabularies: dict[str, VocabularyEncoder], rows: UnitRows) -> Manifest:
        statistics = rows.fitted.statistics
        sizes = {name: vocabulary.num_ids for name, vocabulary in vocabularies.items()}
        return Manifest(
            source="movielens",
            splits=self._write_splits(statistics, rows),
            columns=COLUMN_TYPES,
            vocab_sizes=sizes | dict.fromkeys(_HISTORIES, sizes["movie_id"]),
            options=self.options.model_dump(),
            statistics={
                "global_mean": statistics.overall.mean,
                "global_std": statistics.overall.std,
                "baseline_global_mean_rmse": statistics.global_mean_rmse,
                "baseline_user_movie_bias_rmse": statistics.bias_rmse,
                **rows.statistics,
            },
            vocabularies={
                name: self.staging.vocabulary(
                    name, pl.DataFrame({"index": known.ids, "value": known.values})
                )
                for name, known in vocabularies.items()
            },
            counts=self.counts,
        )

    def _write_splits(self, statistics: RatingStatistics, rows: UnitRows) -> dict[str, SplitEntry]:
        offsets: dict[SplitName, IntArray] = {
            "train": offsets_of(statistics.num_training),
            "validation": offsets_of(statistics.num_held_out),
        }
        limits = (self.options.num_partitions, self.options.row_group_rows)
        files = [
            (split, number, own)
            for split, of_units in offsets.items()
            for number, own in enumerate(cut_rows(int(of_units[-1]), *limits))
        ]
        # In the order of units, so that each unit is gathered about once.
        files.sort(key=lambda file: cut_at(file[2], offsets[file[0]])[0][0])
        parts: dict[str, list[Part]] = {split: [] for split in offsets}
        task = self.progress.add_task("writing Parquet", total=self.counts["ratings"])
        for split, number, own in files:
            make = partial(
                write_partition,
                schema=SCHEMA,
                tables=self._tables(own, offsets[split], partial(rows.build, split)),
                row_group_rows=self.options.row_group_rows,
                **_ENCODINGS,
            )
            part = self.staging.result(f"{split}/part-{number:05d}.parquet", make)
            parts[split].append(part)
            self.progress.advance(task, part.facts["num_rows"])
        return {split: split_entry(found) for split, found in parts.items()}

    def _tables(
        self, rows: range, offsets: IntArray, build: Callable[[int, slice], pa.Table]
    ) -> Iterator[pa.Table]:
        """Rows counted over all units, some row groups at a time."""
        size = _GROUPS_PER_BATCH * self.options.row_group_rows
        for start in range(0, len(rows), size):
            pieces = cut_at(rows[start : start + size], offsets)
            yield pa.concat_tables(build(*piece) for piece in pieces)


def fit_vocabulary(
    values: pl.Series, *, min_count: int = 1, max_size: int | None = None
) -> VocabularyEncoder:
    """Keep values seen at least `min_count` times, the `max_size` most frequent of them.

    Ties in frequency go to the smaller value, so that the result depends on the values alone.
    """
    counts = values.alias("value").value_counts(name="count")
    kept = counts.filter(pl.col("count") >= min_count).sort(
        ["count", "value"], descending=[True, False]
    )
    return VocabularyEncoder.of(kept["value"].head(max_size or len(kept)).sort())
