"""Preparing in many units: the same rows, mixed users, and going on after an interruption."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from trainer.data.errors import BadValueError, OutputExistsError
from trainer.data.manifest import load_manifest, verify_checksums
from trainer.data.prepare import movielens
from trainer.data.prepare.journal import JOURNAL_NAME
from trainer.data.prepare.movielens import MovieLensOptions, prepare_movielens

IN_UNITS = MovieLensOptions(unit_rows=300, num_partitions=5, row_group_rows=64)


def rows_of(out: Path, split: str) -> pl.DataFrame:
    return pl.read_parquet(out / split / "*.parquet")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def whole(csv_folder, tmp_path_factory) -> Path:
    """Prepared without interruption."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare_movielens(csv_folder, out, options=IN_UNITS)
    return out


@pytest.mark.parametrize("split", ["per_user", "global"])
@pytest.mark.parametrize("user_mean", ["past", "training"])
def test_many_units_give_the_rows_of_one(csv_folder, tmp_path, split, user_mean):
    options = IN_UNITS.model_copy(update={"split": split, "user_mean": user_mean})
    at_once = options.model_copy(update={"unit_rows": 10**6})
    one = prepare_movielens(csv_folder, tmp_path / "one", options=at_once)
    many = prepare_movielens(csv_folder, tmp_path / "many", options=options)
    assert many.statistics == pytest.approx(one.statistics)
    assert (many.vocab_sizes, many.counts) == (one.vocab_sizes, one.counts)
    for part in ("train", "validation"):
        key = ["user_id", "timestamp", "movie_id"]
        frames = [rows_of(tmp_path / out, part).sort(key) for out in ("one", "many")]
        assert_frame_equal(*frames, rel_tol=1e-5, abs_tol=1e-5)


@pytest.mark.parametrize("split", ["per_user", "global"])
def test_held_out_rows_can_be_kept_from_looking_at_one_another(csv_folder, tmp_path, split):
    options = IN_UNITS.model_copy(update={"split": split, "validation_past": "training"})
    prepare_movielens(csv_folder, tmp_path / "one", options=options)
    held_out = rows_of(tmp_path / "one", "validation").select("user_id", "timestamp")
    source, begins = tmp_path / "csv", held_out.group_by("user_id").agg(pl.col("timestamp").min())
    names = pl.read_parquet(tmp_path / "one" / "vocab" / "user_id.parquet")
    later = begins.join(names, left_on="user_id", right_on="index").rename({"value": "userId"})
    source.mkdir()
    for name in ("movies.csv", "tags.csv"):
        (source / name).write_bytes((csv_folder / name).read_bytes())
    ratings = pl.read_csv(csv_folder / "ratings.csv").join(
        later.select("userId", begin="timestamp"), on="userId", how="left", maintain_order="left"
    )
    # Stars at the moment validation begins stay: they may be of training rows of that second.
    is_held_out = pl.col("timestamp") > pl.col("begin")
    turned = pl.when(is_held_out).then(5.5 - pl.col("rating")).otherwise(pl.col("rating"))
    ratings.with_columns(rating=turned).drop("begin").write_csv(source / "ratings.csv")
    prepare_movielens(source, tmp_path / "two", options=options)
    frames = [rows_of(tmp_path / out, "validation") for out in ("one", "two")]
    assert not frames[0].equals(frames[1])
    assert frames[0].drop("rating").equals(frames[1].drop("rating"))


def test_the_order_of_the_lines_does_not_matter(csv_folder, whole, tmp_path):
    source = tmp_path / "csv"
    source.mkdir()
    for name in ("movies.csv", "tags.csv"):
        (source / name).write_bytes((csv_folder / name).read_bytes())
    ratings = pl.read_csv(csv_folder / "ratings.csv")
    ratings.sample(fraction=1, shuffle=True, seed=1).write_csv(source / "ratings.csv")
    prepare_movielens(source, tmp_path / "out", options=IN_UNITS)
    found, expected = contents(tmp_path / "out"), contents(whole)
    assert found == expected


def test_neighbours_in_a_file_share_a_user_no_more_than_chance_has_it(whole):
    train = load_manifest(whole).splits["train"]
    shared, expected = 0.0, 0.0
    for file in train.files:
        user = pl.read_parquet(whole / file.path)["user_id"].to_numpy()
        share = np.unique(user, return_counts=True)[1] / len(user)
        shared += float((user[1:] == user[:-1]).mean())
        expected += float((share**2).sum())
    assert shared < 1.5 * expected


def test_files_are_of_equal_size_and_row_groups_are_full(whole):
    train = load_manifest(whole).splits["train"]
    sizes = [file.num_rows for file in train.files]
    assert len(sizes) == 5 and max(sizes) - min(sizes) <= 1
    assert all(file.num_row_groups == -(-file.num_rows // 64) for file in train.files)


def interrupt_after(monkeypatch, num_files: int) -> None:
    """Let the writing of Parquet files fail after some of them, as a full disk does."""
    write, written = movielens.write_partition, []

    def write_some(path, *arguments):
        if len(written) == num_files:
            raise OSError("no space left on device")
        written.append(path)
        write(path, *arguments)

    monkeypatch.setattr(movielens, "write_partition", write_some)


def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(
    csv_folder, whole, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        interrupt_after(patch, 3)
        prepare_movielens(csv_folder, tmp_path / "out", options=IN_UNITS)
    assert not (tmp_path / "out").exists()
    num_files = sum(len(split.files) for split in load_manifest(whole).splits.values())
    # Writing fails again if more than what was left is written.
    interrupt_after(monkeypatch, num_files - 3)
    prepare_movielens(csv_folder, tmp_path / "out", options=IN_UNITS)
    assert contents(tmp_path / "out") == contents(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("change", ["options", "input"])
def test_other_options_or_inputs_start_anew(csv_folder, tmp_path, monkeypatch, change):
    source = tmp_path / "csv"
    source.mkdir()
    for path in csv_folder.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        interrupt_after(patch, 3)
        prepare_movielens(source, tmp_path / "out", options=IN_UNITS)
    options = IN_UNITS
    if change == "options":
        options = IN_UNITS.model_copy(update={"history_length": 3})
    else:
        ratings = pl.read_csv(source / "ratings.csv").with_columns(rating=pl.lit(3.0))
        ratings.write_csv(source / "ratings.csv")
    prepare_movielens(source, tmp_path / "out", options=options)
    prepare_movielens(source, tmp_path / "fresh", options=options)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_part_damaged_between_the_runs_is_made_again(csv_folder, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        interrupt_after(patch, 3)
        prepare_movielens(csv_folder, tmp_path / "out", options=IN_UNITS)
    working = tmp_path / ".out.partial"
    for name in ("scratch/units/00002.arrow", "result/train/part-00000.parquet"):
        content = bytearray((working / name).read_bytes())
        content[len(content) // 2] ^= 1
        (working / name).write_bytes(content)
    prepare_movielens(csv_folder, tmp_path / "out", options=IN_UNITS)
    assert contents(tmp_path / "out") == contents(whole)


def test_two_processes_do_not_prepare_the_same_folder(csv_folder, tmp_path, monkeypatch):
    refused = []

    def try_too(*arguments):
        if not refused:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                refused.append(pool.apply(_refusal, (csv_folder, tmp_path / "out")))
        return write(*arguments)

    write = movielens.write_partition
    monkeypatch.setattr(movielens, "write_partition", try_too)
    prepare_movielens(csv_folder, tmp_path / "out", options=IN_UNITS)
    assert refused and "is in use by another process" in refused[0]


def _refusal(source: Path, out: Path) -> str:
    try:
        prepare_movielens(source, out, options=IN_UNITS)
    except OutputExistsError as error:
        return str(error)
    return ""


def test_working_files_can_lie_elsewhere_and_spare_what_is_there(csv_folder, whole, tmp_path):
    work = tmp_path / "fast-disk"
    work.mkdir()
    (work / "thesis.txt").write_text("years of work")
    prepare_movielens(csv_folder, tmp_path / "out", options=IN_UNITS, work_folder=work)
    assert contents(tmp_path / "out") == contents(whole)
    assert [path.name for path in work.iterdir()] == ["thesis.txt"]


def test_bad_data_spares_what_lies_beside_the_working_files(tmp_path):
    work, source = tmp_path / "fast-disk", tmp_path / "csv"
    for folder in (work, source):
        folder.mkdir()
    (work / "thesis.txt").write_text("years of work")
    (source / "movies.csv").write_text("movieId,title,genres\n1,A (1999),Drama\n")
    (source / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,nine,1\n")
    with pytest.raises(BadValueError, match="'nine'"):
        prepare_movielens(source, tmp_path / "out", options=IN_UNITS, work_folder=work)
    assert [path.name for path in work.iterdir()] == ["thesis.txt"]


def test_a_folder_of_the_working_name_that_is_not_ours_is_spared(csv_folder, tmp_path):
    precious = tmp_path / ".out.partial"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputExistsError, match="not ours to empty"):
        prepare_movielens(csv_folder, tmp_path / "out", options=IN_UNITS)
    assert (precious / "thesis.txt").exists()


@pytest.mark.parametrize("left", ["scratch/units/00000.arrow", ".journal.jsonl.unfinished"])
def test_what_a_kill_leaves_without_a_journal_is_cleared(csv_folder, whole, tmp_path, left):
    path = tmp_path / ".out.partial" / left
    path.parent.mkdir(parents=True)
    path.write_text("half")
    prepare_movielens(csv_folder, tmp_path / "out", options=IN_UNITS)
    assert contents(tmp_path / "out") == contents(whole)


def test_the_manifest_holds_checksums_of_vocabularies_too(whole):
    manifest = load_manifest(whole)
    assert set(manifest.vocabularies) == {"user_id", "movie_id", "genres", "tokens"}
    for name, entry in manifest.vocabularies.items():
        assert entry.num_values == manifest.vocab_sizes[name] - 1
    num_files = sum(len(split.files) for split in manifest.splits.values())
    assert verify_checksums(whole, manifest) == num_files + 4
    assert not (whole / JOURNAL_NAME).exists()
