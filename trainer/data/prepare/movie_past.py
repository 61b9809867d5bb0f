"""What came before each rating of its movie, for ratings that are kept by user.

An exchange through files: every unit of users puts its rows aside in the order of movies; then
movies are cut into ranges of about `range_rows` ratings, and for each range the rows of all units
are brought together, looked at in the order of time, and the answers written in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from trainer.data.prepare.journal import Facts
from trainer.data.prepare.movie_folds import fold_of
from trainer.data.prepare.past import MoviePast, Ratings, UserPast, look_back_at_movies
from trainer.data.prepare.progress import Advance
from trainer.data.prepare.rating_rows import dense_of_movies
from trainer.data.prepare.spill import Columns, map_columns, write_columns
from trainer.data.prepare.staging import Staging
from trainer.data.prepare.statistics import Moments
from trainer.data.ragged import IntArray


def write_by_movie(path: Path, unit: Ratings, past: UserPast) -> None:
    """Put the rows of a unit aside in the order of their movies."""
    order = np.argsort(unit.movie, kind="stable")
    write_columns(
        path,
        {
            "order": order.astype(np.int32),
            "movie": unit.movie[order],
            "timestamp": unit.timestamp[order],
            "residual": past.residual[order].astype(np.float32),
            "is_training": (~unit.is_validation[order]).astype(np.uint8),
            "fold": fold_of(unit.user[order]),
        },
    )


def cut_movies(rows_of_movie: IntArray, range_rows: int) -> IntArray:
    """First movie number of each range of about `range_rows` rows, and the number of movies."""
    num_ranges = max(1, round(int(rows_of_movie.sum()) / range_rows))
    before = np.cumsum(rows_of_movie) - rows_of_movie
    starts = np.searchsorted(before, np.arange(num_ranges) * range_rows)
    starts[0] = 0
    return np.unique(np.append(starts, len(rows_of_movie)))


class MovieExchange:
    """The pasts of movies, written once and read unit by unit."""

    def __init__(self, by_movie: Sequence[Path], bounds: IntArray) -> None:
        """`by_movie` are the files of `write_by_movie`, `bounds` those of `cut_movies`."""
        self._by_movie = by_movie
        # Row of unit u where range m begins: [units, ranges + 1].
        self._cuts = np.array(
            [np.searchsorted(map_columns(path)["movie"], bounds) for path in by_movie]
        )
        self._answers: list[Path] = []

    def answer(self, staging: Staging, advance: Advance) -> dict[str, Moments]:
        """Look at every range of movies; gives the moments of the dense features of training."""
        total: dict[str, Moments] = {}
        for number in range(self._cuts.shape[1] - 1):

            def make(path: Path, number: int = number) -> Facts:
                return self._answer_range(path, number)

            path, facts = staging.scratch(f"movie_past/{number:05d}.arrow", make)
            self._answers.append(path)
            for name, moments in facts.items():
                total[name] = total.get(name, Moments()) + Moments(**moments)
            advance(float(np.diff(self._cuts[:, number : number + 2]).sum()))
        return total

    def past_of(self, unit: int) -> MoviePast:
        """The answers for the rows of a unit, in the unit's own order."""
        order = map_columns(self._by_movie[unit])["order"]
        count, mean = np.empty(len(order)), np.empty(len(order))
        for number, path in enumerate(self._answers):
            begin, end = self._cuts[unit, number : number + 2]
            answers, place = map_columns(path), self._place(unit, number)
            count[order[begin:end]] = answers["count"][place : place + end - begin]
            mean[order[begin:end]] = answers["mean"][place : place + end - begin]
        return MoviePast(count, mean)

    def _place(self, unit: int, number: int) -> int:
        """Where, among the answers of a range, those of a unit begin."""
        return int((self._cuts[:unit, number + 1] - self._cuts[:unit, number]).sum())

    def _answer_range(self, path: Path, number: int) -> Facts:
        rows = self._gather(number)
        is_training = rows["is_training"].astype(bool)
        past = look_back_at_movies(rows["movie"], rows["timestamp"], rows["residual"], is_training)
        write_columns(
            path, {"count": past.count.astype(np.int32), "mean": past.mean.astype(np.float32)}
        )
        return {
            name: asdict(Moments.of(values[is_training]))
            for name, values in dense_of_movies(past).items()
        }

    def _gather(self, number: int) -> Columns:
        names = ("movie", "timestamp", "residual", "is_training")
        pieces: dict[str, list] = {name: [] for name in names}
        for path, cuts in zip(self._by_movie, self._cuts, strict=True):
            columns = map_columns(path)
            for name in names:
                pieces[name].append(columns[name][cuts[number] : cuts[number + 1]])
        return {name: np.concatenate(parts) for name, parts in pieces.items()}
