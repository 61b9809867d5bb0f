"""Generated clicks: the same for a seed, as skewed and as learnable as was asked for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.csv import write_csv

from tests.harness.files import digest
from trainer.datasets.criteo import synthetic as generator
from trainer.datasets.criteo.encode import ids_of
from trainer.datasets.criteo.prepare import CriteoOptions, prepare_criteo
from trainer.datasets.criteo.reader import DENSE_NAMES, ID_NAMES, parse_lines
from trainer.datasets.criteo.synthetic import (
    ClickRows,
    CriteoGeneratorOptions,
    Teacher,
    TeacherScore,
    generate_criteo,
    raw_ids,
    raw_table,
    table_sizes,
)
from trainer.errors import TooFewRowsError

SMALL = {"num_rows": 2000, "max_ids": 100}


def generated(out: Path, **options: object) -> Path:
    generate_criteo(out, CriteoGeneratorOptions(**SMALL | options))
    return out


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    first, again, other = (
        digest(generated(tmp_path / name, seed=seed))
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == again
    assert first != other
    packed = generated(tmp_path / "packed", seed=3, gzip=True)
    text = gzip.decompress((packed / "train.txt.gz").read_bytes())
    assert text == (tmp_path / "a" / "train.txt").read_bytes()


def test_raw_files_read_back_as_what_the_teacher_drew(tmp_path):
    rows = Teacher(table_sizes(50), 1.05, seed=0).draw(500, [1])
    path = tmp_path / "raw"
    write_csv(raw_table(rows, (2,)), path, generator._RAW_FORMAT)
    clicks = parse_lines(path.read_bytes(), "raw", 1)
    counts = clicks.select(DENSE_NAMES)
    found = counts.fill_null(0).to_numpy()
    np.testing.assert_allclose(np.log1p(np.maximum(found, 0)), rows.dense, rtol=1e-6)
    assert (clicks["label"].to_numpy() == rows.label).all()
    assert (found < 0).any() and counts.to_series(0).null_count()
    for column, name in enumerate(ID_NAMES):
        assert (ids_of(clicks[name]) == raw_ids(rows.ids[:, column], column)).all()
    assert clicks["cat_2"].null_count() == (rows.ids[:, 2] == 0).sum() > 0


def test_prepared_raw_rows_hold_the_clicks_that_the_teacher_was_scored_on(tmp_path):
    raw = generated(tmp_path / "raw", num_days=4)
    parts = json.loads((raw / "teacher.json").read_text())["parts"]
    for split, part in (("last_fraction", "last_tenth"), ("last_file", "day_3")):
        manifest = prepare_criteo([raw], tmp_path / split, options=CriteoOptions(split=split))
        assert manifest.splits["validation"].num_rows == parts[part]["rows"]
        assert manifest.statistics["validation_click_rate"] == parts[part]["click_rate"]


@given(seed=st.integers(0, 1000), num_parts=st.integers(1, 5))
def test_scores_are_those_of_the_definitions(seed, num_parts):
    rng = np.random.default_rng(seed)
    probability = rng.uniform(0.01, 0.99, 60).astype(np.float32)
    label = (rng.random(60) < probability).astype(np.float32)
    label[:2] = 0, 1
    score = TeacherScore()
    for part in np.array_split(np.arange(60), num_parts):
        score.add(ClickRows(part, part, label[part], probability[part]))
    found = score.as_dict()
    p, rate = probability.astype(np.float64), label.mean(dtype=np.float64)
    logloss = -np.mean(np.where(label > 0, np.log(p), np.log1p(-p)))
    constant = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    wins = p[label > 0][:, None] - p[label == 0]
    assert found["rows"] == 60
    assert found["logloss"] == pytest.approx(logloss)
    assert found["ne"] == pytest.approx(logloss / constant)
    assert found["auc"] == pytest.approx(((wins > 0) + (wins == 0) / 2).mean(), abs=1e-3)


def test_too_few_rows_are_refused(tmp_path):
    with pytest.raises(TooFewRowsError, match="20 rows are too few"):
        generated(tmp_path / "few", num_rows=20, num_days=30)


def test_a_part_without_clicks_has_no_scores_but_can_be_read(tmp_path):
    out = tmp_path / "out"
    document = generate_criteo(out, CriteoGeneratorOptions(num_rows=10, max_ids=20))
    assert document["parts"]["last_tenth"]["auc"] is None, "one row cannot be of both kinds"
    text = (out / "teacher.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == document
