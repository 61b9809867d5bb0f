"""What can be wrong with a MovieLens folder: refused with file and line, or handled as asked."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from trainer.data.manifest import load_manifest
from trainer.datasets.movielens.prepare import MovieLensOptions, prepare_movielens
from trainer.errors import BadValueError, ColumnError, CorruptFileError

OPTIONS = MovieLensOptions(validation_fraction=0.25, min_token_count=1)
HEADER = "userId,movieId,rating,timestamp\n"
RATINGS = [
    *("1,10,5,100", "1,20,1,200", "1,30,3,300", "1,40,4,400"),
    *("2,10,2,1000", "2,20,4,2000", "2,30,4.5,2000", "2,40,1,3000"),
]
MOVIES = [
    "10,Ocean's Eleven (2001),Crime|Thriller",
    '20,"Night, The (1961)",Drama',
    "30,Untitled,(no genres listed)",
    "40,The Night Return (1999),Drama|Crime",
]


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "csv")


def write_folder(folder: Path) -> Path:
    """Two users and four movies, without tags."""
    folder.mkdir()
    (folder / "movies.csv").write_text("movieId,title,genres\n" + "\n".join(MOVIES) + "\n")
    write_ratings(folder, RATINGS)
    return folder


def write_ratings(folder: Path, lines: list[str]) -> None:
    (folder / "ratings.csv").write_text(HEADER + "\n".join(lines) + "\n")


def prepare(folder: Path, **options) -> pl.DataFrame:
    """All prepared rows, by user and time."""
    out = folder.parent / "out"
    prepare_movielens(folder, out, options=OPTIONS.model_copy(update=options), overwrite=True)
    return pl.read_parquet(out / "*" / "part-*.parquet").sort("user_id", "timestamp", "movie_id")


def counts(folder: Path) -> dict[str, int]:
    return load_manifest(folder.parent / "out").counts


@pytest.mark.parametrize("mark", [";", "\t"])
def test_another_delimiter_is_refused_with_what_the_first_line_holds(folder, mark):
    pl.read_csv(folder / "ratings.csv").write_csv(folder / "ratings.csv", separator=mark)
    with pytest.raises(ColumnError, match=r"ratings\.csv, line 1: .*split by commas it has \['use"):
        prepare(folder)


def test_a_line_that_is_no_rating_is_named(folder):
    for line, message in (
        ("3,10,5", "line 10, column 'timestamp': None"),
        ("1,20,1,1700000000000", r"line 10, .*whole seconds.*milliseconds\?"),
        ("1,20,5.5,200", "line 10, column 'rating': '5.5' is not a number above 0 and at most 5"),
    ):
        write_ratings(folder, [*RATINGS, line])
        with pytest.raises(BadValueError, match=rf"ratings\.csv, {message}"):
            prepare(folder)


def test_of_duplicate_ratings_the_latest_or_later_line_is_kept_and_the_others_counted(folder):
    write_ratings(folder, ["2,20,0.5,9000", *RATINGS, "2,20,1,1500", "1,20,0.5,200"])
    rows = prepare(folder)
    assert len(rows) == 8
    assert rows.filter(pl.col("timestamp") == 9000)["rating"].to_list() == [0.5]
    assert rows.filter(pl.col("timestamp") == 200)["rating"].to_list() == [0.5]
    assert not rows["timestamp"].is_in([1500]).any()
    assert counts(folder)["duplicates_dropped"] == 3


def test_the_largest_id_of_a_user_loses_no_rows(folder):
    write_ratings(folder, [*RATINGS, f"{2**63 - 1},10,5,100", f"{2**63 - 1},20,1,200"])
    assert len(prepare(folder)) == len(RATINGS) + 2


def test_a_year_in_digits_other_than_ascii_is_none(folder):
    expected = prepare(folder)
    movies = (folder / "movies.csv").read_text()
    (folder / "movies.csv").write_text(
        movies.replace("Untitled", "Untitled (\uff11\uff19\uff19\uff15)")
    )
    assert prepare(folder)["year"].equals(expected["year"])


def test_timestamps_out_of_order_and_empty_tags_change_nothing(folder):
    expected = prepare(folder)
    write_ratings(folder, RATINGS[::-1])
    write_tags(folder, [])
    assert prepare(folder).equals(expected)
    assert counts(folder)["training_tags"] == 0


def test_a_movie_without_metadata_is_kept_without_genres_and_counted(folder):
    write_ratings(folder, [*RATINGS, "2,99,3,1500", "1,99,3,50"])
    rows = prepare(folder)
    unknown = rows.filter(pl.col("timestamp").is_in([50, 1500]))
    assert unknown["genres"].to_list() == [[], []]
    assert unknown["tokens"].to_list() == [[], []]
    assert (unknown["movie_id"] > 0).all()
    assert unknown["year"].to_list() == [1981.0, 1981.0], "the mean of training"
    assert counts(folder)["movies_without_metadata"] == 1


def test_users_and_movies_of_validation_only_are_unknown_and_lean_on_everybody(folder):
    write_ratings(folder, [*RATINGS, "7,77,5,9000", "8,10,1,9001"])
    out = folder.parent / "out"
    prepare_movielens(folder, out, options=OPTIONS.model_copy(update={"split": "global"}))
    held_out = pl.read_parquet(out / "validation" / "*.parquet").sort("timestamp")
    assert held_out["user_id"].to_list() == [0, 0]
    assert held_out["movie_id"].to_list()[0] == 0
    overall = load_manifest(out).statistics
    assert held_out["user_mean"].to_list() == pytest.approx([overall["global_mean"]] * 2)
    assert held_out["user_scale"].to_list() == pytest.approx([overall["global_std"]] * 2)


@pytest.mark.parametrize(("newline", "end"), [("\n", ""), ("\n", "\n\n\n"), ("\r\n", "\r\n\r\n")])
def test_byte_order_marks_windows_lines_and_blank_lines_at_the_end_are_understood(
    folder, newline, end
):
    expected = prepare(folder)
    for name in ("ratings.csv", "movies.csv"):
        text = (folder / name).read_text().rstrip("\n").replace("\n", newline) + end
        (folder / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert prepare(folder).equals(expected)


def write_tags(folder: Path, lines: list[str]) -> None:
    (folder / "tags.csv").write_text("userId,movieId,tag,timestamp\n" + "".join(lines))


def test_ratings_that_end_without_a_line_end_are_told_as_a_download_may_be_cut(folder):
    prepare(folder)
    assert counts(folder)["ratings_last_line_unfinished"] == 0
    path = folder / "ratings.csv"
    path.write_bytes(path.read_bytes()[:-3])
    prepare(folder)
    assert counts(folder)["ratings_last_line_unfinished"] == 1


def test_a_tag_that_cannot_be_read_is_named(folder):
    write_tags(folder, ["1,10,fine,100\n", '1,20,5" disk,100\n', '2,20,7" disk,100\n'])
    with pytest.raises(CorruptFileError, match=r"tags\.csv, line 3: a quote is left open"):
        prepare(folder)
    write_tags(folder, ["1,10,fine,100\n", "1,20,fine,1700000000000\n"])
    with pytest.raises(BadValueError, match=r"tags\.csv, line 3, .*whole seconds.*milliseconds\?"):
        prepare(folder)
