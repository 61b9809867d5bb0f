"""Criteo files to prepared folders: ids, counts, splits, shuffling, restarts and bad input."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.harness.files import digest
from trainer.data.manifest import load_manifest, verify_checksums
from trainer.datasets.criteo import encode
from trainer.datasets.criteo.encode import frequent_values
from trainer.datasets.criteo.prepare import CriteoOptions, prepare_criteo
from trainer.datasets.criteo.reader import DENSE_NAMES, ID_NAMES
from trainer.datasets.criteo.synthetic import CriteoGeneratorOptions, generate_criteo
from trainer.datasets.io.staging import Staging
from trainer.errors import (
    BadValueError,
    CorruptFileError,
    DataError,
    SourceMissingError,
    TooFewRowsError,
)

SMALL = {"block_bytes": 32_768, "run_blocks": 2, "bucket_rows": 300, "row_group_rows": 128}
OPTIONS = CriteoOptions(min_count=3, num_partitions=4, **SMALL)


def line(label: object = 0, count: object = 1, raw_id: object = "0000000a") -> str:
    """One row with the same count and id in all columns."""
    return "\t".join([str(label), *[str(count)] * len(DENSE_NAMES), *[str(raw_id)] * len(ID_NAMES)])


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def prepared(path: Path, out: Path, **options: object) -> Path:
    prepare_criteo([path], out, options=OPTIONS.model_copy(update=options), overwrite=True)
    return out


def rows_of(folder: Path, split: str) -> pl.DataFrame:
    return pl.concat([pl.read_parquet(path) for path in sorted((folder / split).iterdir())])


@pytest.fixture(scope="module")
def days(tmp_path_factory) -> Path:
    """3000 generated rows in two raw files."""
    folder = tmp_path_factory.mktemp("raw") / "days"
    options = CriteoGeneratorOptions(num_rows=3000, num_days=2, max_ids=200)
    generate_criteo(folder, options)
    return folder


@pytest.fixture(scope="module")
def whole(days, tmp_path_factory) -> Path:
    return prepared(days, tmp_path_factory.mktemp("prepared") / "out")


def test_a_prepared_folder_is_whole_and_has_a_file_for_each_partition(whole):
    manifest = load_manifest(whole)
    train, validation = manifest.splits["train"], manifest.splits["validation"]
    assert (train.num_rows, validation.num_rows) == (2700, 300)
    assert len(train.files) == 4
    assert all(file.num_row_groups > 1 for file in train.files)
    assert verify_checksums(whole, manifest) >= 8
    assert rows_of(whole, "train").columns == ["label", *DENSE_NAMES, *ID_NAMES]


def cells_of(days: Path) -> pl.DataFrame:
    """The raw cells of both files."""
    options = {"separator": "\t", "has_header": False, "infer_schema": False}
    return pl.concat([pl.read_csv(days / name, **options) for name in ("day_0", "day_1")])


def test_every_row_arrives_with_its_counts_transformed_and_training_is_shuffled(days, whole):
    raw = cells_of(days)
    counts = raw.select(
        pl.col(raw.columns[1:14]).cast(pl.Float64).fill_null(0).clip(lower_bound=0).log1p()
    ).to_numpy()
    wanted = np.column_stack([raw[raw.columns[0]].cast(pl.Float64), counts]).astype(np.float32)
    columns = ["label", *DENSE_NAMES]
    train = rows_of(whole, "train").select(columns).to_numpy()
    validation = rows_of(whole, "validation").select(columns).to_numpy()
    np.testing.assert_allclose(validation, wanted[2700:], rtol=1e-6)
    ordered = [rows[np.lexsort(rows.T)] for rows in (train, wanted[:2700])]
    np.testing.assert_allclose(*ordered, rtol=1e-6)
    assert (train != wanted[:2700]).any()
    # The first partition draws on all of the input, not on its beginning.
    first = pl.read_parquet(whole / "train" / "part-00000.parquet").select(columns).to_numpy()
    places = [np.flatnonzero((np.abs(wanted - row) < 1e-5).all(1))[0] for row in first[:200]]
    assert min(places) < 300 and max(places) > 2300


def test_ids_are_those_of_the_vocabulary_and_rare_values_are_unknown(days, whole):
    raw = cells_of(days)
    for number in (0, 2, 5):
        column = raw.columns[14 + number]
        values = raw[column].fill_null("")
        seen = values.head(2700).value_counts(name="count").filter(pl.col("count") >= 3)
        vocabulary = pl.read_parquet(whole / "vocab" / f"cat_{number}.parquet")
        assert vocabulary["value"].to_list() == sorted(seen[column])
        assert vocabulary["index"].to_list() == list(range(1, len(seen) + 1))
        known = dict(vocabulary.select("value", "index").iter_rows())
        found = rows_of(whole, "validation")[f"cat_{number}"].to_list()
        assert found == [known.get(value, 0) for value in values.tail(300)]
        assert load_manifest(whole).vocab_sizes[f"cat_{number}"] == len(seen) + 1


def test_a_cap_keeps_the_most_frequent_values(tmp_path):
    ids = ["a"] * 5 + ["c"] * 4 + ["b"] * 4 + ["d"] * 3 + ["a"] * 4
    path = write(tmp_path / "raw", [line(raw_id=value) for value in ids])
    out = prepared(path, tmp_path / "out", max_ids=2, min_count=1)
    kept = pl.read_parquet(out / "vocab/cat_7.parquet")["value"].to_list()
    assert kept == ["0000000a", "0000000b"]


def test_days_come_in_the_order_of_their_numbers_and_the_last_can_be_validation(tmp_path):
    for day in (10, 9, 2):
        write(tmp_path / f"day_{day}", [line(count=day)] * 20)
    out = prepared(tmp_path, tmp_path.with_name("natural"), split="last_file")
    assert load_manifest(out).splits["train"].num_rows == 40
    assert rows_of(out, "validation")["int_0"].to_list() == pytest.approx([math.log(11)] * 20)


def test_negative_counts_become_zero_or_keep_their_sign(tmp_path):
    path = write(tmp_path / "raw", [line(count=-2)] * 20)
    for negatives, wanted in (("zero", 0.0), ("keep_sign", -math.log(3))):
        out = prepared(path, tmp_path / "out", negatives=negatives)
        assert rows_of(out, "train")["int_3"].to_list() == pytest.approx([wanted] * 18)


def test_empty_cells_are_zero_counts_and_a_value_of_their_own(tmp_path):
    out = prepared(write(tmp_path / "raw", [line(count="", raw_id="")] * 20), tmp_path / "out")
    train = rows_of(out, "train")
    assert train["int_0"].to_list() == [0.0] * 18
    assert train["cat_0"].to_list() == [1] * 18
    assert pl.read_parquet(out / "vocab/cat_0.parquet")["value"].to_list() == [""]


def test_hashed_ids_fill_their_range_and_leave_zero_to_empty_cells(days, tmp_path):
    out = prepared(days, tmp_path / "out", ids="hashing", num_hash_buckets=50)
    manifest = load_manifest(out)
    assert set(manifest.vocab_sizes.values()) == {50}
    assert not (out / "vocab").exists()
    found = rows_of(out, "train")
    assert found["cat_3"].min() >= 1 and found["cat_3"].max() == 49
    # Its most frequent value is an empty cell.
    assert found["cat_2"].mode().to_list() == [0]


def test_compressed_files_and_those_of_windows_give_the_same_rows(days, whole, tmp_path):
    text = (days / "day_0").read_bytes() + (days / "day_1").read_bytes()
    # With a mark of UTF-8 before the first line.
    windows = b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n")
    (tmp_path / "all.txt.gz").write_bytes(gzip.compress(windows))
    out = prepared(tmp_path / "all.txt.gz", tmp_path / "out", seed=1)
    assert rows_of(out, "validation").equals(rows_of(whole, "validation"))
    # Another seed gives another order.
    assert not rows_of(out, "train").equals(rows_of(whole, "train"))
    assert sorted(rows_of(out, "train").rows()) == sorted(rows_of(whole, "train").rows())


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("scratch/runs/", marks=pytest.mark.slow),
        pytest.param("scratch/vocab/", marks=pytest.mark.slow),
        "result/train/",
    ],
)
def test_a_killed_preparation_goes_on_to_the_same_bytes(
    days, whole, tmp_path, before_parts, killed_at, folder
):
    out, made = tmp_path / "out", list[str]()
    with killed_at(folder, 3):
        prepared(days, out)
    assert not out.exists()
    finished = {f"{folder}{path.name}" for path in (tmp_path / ".out.partial" / folder).iterdir()}
    with before_parts(made.append):
        prepared(days, out)
    assert len(finished) == 2 and finished.isdisjoint(made)
    assert digest(out) == digest(whole)
    assert not list(tmp_path.glob(".*partial*"))


def test_counting_in_ranges_gives_what_counting_at_once_does(monkeypatch):
    rng = np.random.default_rng(0)
    parts = [rng.zipf(1.3, 2000).clip(-1, 2**32 - 1) for _ in range(5)]
    limits = {"min_count": 2, "max_values": 300}
    at_once = frequent_values(lambda: iter(parts), **limits)
    monkeypatch.setattr(encode, "MAX_COUNTED", 50)
    few = frequent_values(lambda: iter(parts), **limits)
    assert few.equals(at_once)
    values, counts = np.unique(np.concatenate(parts), return_counts=True)
    best = sorted(zip(-counts[counts >= 2], values[counts >= 2], strict=True))[:300]
    assert few["value"].to_list() == sorted(int(value) for _, value in best)
    assert few["count"].to_list() == [-count for count, _ in sorted(best, key=lambda pair: pair[1])]


GOOD = [line()] * 5
FAULTS = {
    "commas": ([line().replace("\t", ",")], CorruptFileError, "line 6: 1 .* separated by commas"),
    "short": ([line().rsplit("\t", 2)[0]], CorruptFileError, "line 6: 38 tab-separated columns"),
    "long": ([line() + "\tx"], CorruptFileError, "line 6: 41 tab-separated columns"),
    "unlabelled": ([line()[2:]], CorruptFileError, "line 6: 39 .* test part"),
    "empty line": ([""], CorruptFileError, "line 6: empty"),
    "label": ([line(label=2)], BadValueError, "line 6, column 'label': '2' is not 0 or 1"),
    "no label": ([line(label="")], BadValueError, "line 6, column 'label': '' is not 0 or 1"),
    "count": ([line(count="1.5")], BadValueError, "line 6, column 'int_0': '1.5' is not an int"),
    "id": ([line(raw_id="xyz")], BadValueError, "line 6, column 'cat_0': 'xyz' is not a hexa"),
    "long id": ([line(raw_id="123456789")], BadValueError, "line 6, column 'cat_0'"),
    "signed id": ([line(raw_id="-1")], BadValueError, "line 6, column 'cat_0'"),
}


def test_a_faulty_line_is_named_and_nothing_is_left_behind(tmp_path):
    for lines, kind, message in FAULTS.values():
        path = write(tmp_path / "day_0", [*GOOD, *lines, *GOOD])
        with pytest.raises(kind, match=message) as found:
            prepared(path, tmp_path / "out")
        assert str(found.value).startswith(str(path))
        assert sorted(tmp_path.iterdir()) == [path]


def test_a_fault_far_into_a_file_is_named_by_its_line(days, tmp_path):
    lines = (days / "day_0").read_text().splitlines()
    lines[1234] = lines[1234].replace("\t", ";", 1)
    with pytest.raises(CorruptFileError, match="line 1235: 39 tab-separated columns"):
        prepared(write(tmp_path / "day_0", lines), tmp_path / "out")
    header = "\t".join(["label", *DENSE_NAMES, *ID_NAMES])
    message = r"line 1, column 'label'.* no header: remove the first"
    with pytest.raises(BadValueError, match=message):
        prepared(write(tmp_path / "raw", [header, *GOOD, *GOOD]), tmp_path / "out")


def test_a_file_that_is_no_text_is_refused(days, tmp_path):
    out, text = tmp_path / "out", "\n".join([*GOOD, line(raw_id="h\u00e9"), *GOOD])
    packed = gzip.compress((days / "day_0").read_bytes())
    for name, content, message in (
        ("latin", text.encode("latin-1"), r"line 6: byte \d+ of the line \(0xe9\) is not UTF"),
        ("raw", b"", "raw is empty"),
        ("raw.gz", gzip.compress(b""), r"raw\.gz is empty"),
        ("day_0.gz", packed[: len(packed) * 2 // 3], r"day_0\.gz cannot be read to its end"),
        ("binary", bytes(range(11, 256)) * 400, "binary, line 1"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            prepared(tmp_path / name, out)


def test_a_file_that_changes_while_it_is_read_is_refused(days, tmp_path, monkeypatch):
    lines = (days / "day_0").read_text().splitlines()
    path = tmp_path / "day_0"
    for changed in (lines[1:], [*lines, lines[0]]):
        write(path, lines)
        # Space is checked once lines are counted.
        monkeypatch.setattr(Staging, "check_space", lambda *_, to=changed: write(path, to))
        with pytest.raises(CorruptFileError, match=r"day_0 changed while it was read"):
            prepared(path, tmp_path / "out")


def test_a_missing_file_an_empty_folder_and_too_few_rows_are_refused(tmp_path):
    with pytest.raises(SourceMissingError, match="absent is missing"):
        prepared(tmp_path / "absent", tmp_path / "out")
    with pytest.raises(SourceMissingError, match="no files"):
        prepared(tmp_path, tmp_path.with_name("out"))
    path = write(tmp_path / "raw", GOOD)
    with pytest.raises(TooFewRowsError, match="5 rows leave no validation"):
        prepared(path, tmp_path / "out")
    with pytest.raises(TooFewRowsError, match="only file"):
        prepared(path, tmp_path / "out", split="last_file")
