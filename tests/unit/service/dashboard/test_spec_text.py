"""The text of a spec in the editor: completion, places, edits in place, command, differences."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from service.dashboard import spec_text
from service.dashboard.new_job import FORM
from tests.harness.builders import spec_document
from trainer.spec.parse import parse_document

TEXT = """# what it is for
name: tiny
training: {epochs: 2}  # short
optimizer:
  sparse: {name: sgd, lr: 0.1}
  # slow
  dense:
    lr: 0.01
embedding_tables:
  - {name: users, embedding_dim: 8}
"""


def test_completion_knows_the_fields_of_a_section_and_the_values_of_a_field() -> None:
    table = spec_text.completions()
    assert {"name", "data", "parallelism"} <= {each["label"] for each in table[""]}
    assert "every_steps" in {each["label"] for each in table["sync"]}
    assert [each["label"] for each in table["parallelism.placement="]] == [
        *("intra_host", "inter_host", "auto")
    ]
    assert {path for paths in FORM.values() for path in paths} <= {*spec_text.schema_fields()}


def test_a_problem_has_the_line_of_its_field_or_of_its_section() -> None:
    lines = {
        "optimizer.dense.lr": 8,
        "optimizer.dense.nothing": 7,
        "embedding_tables[0].embedding_dim": 10,
        "line 3, column 5": 3,
    }
    assert spec_text.lines_of(TEXT, [*lines]) == [*lines.values()]
    checked = spec_text.check("name: [")
    assert checked.spec is None
    assert checked.problems[0].path.startswith("line ")
    assert spec_text.check(yaml.safe_dump(spec_document())).spec is not None


def test_a_text_is_read_once_for_the_lines_of_all_its_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compose = Mock(wraps=yaml.compose)
    monkeypatch.setattr(yaml, "compose", compose)
    assert spec_text.lines_of(TEXT, ["name", "training.epochs"] * 100) == [2, 3] * 100
    assert compose.call_count == 1
    assert spec_text.lines_of(TEXT, []) == []
    assert compose.call_count == 1


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("training.epochs", 3, "training: {epochs: 3}  # short"),
        ("training.seed", 7, "training: {epochs: 2, seed: 7}  # short"),
        ("optimizer.dense.name", "adam", "    name: adam"),
        (
            "embedding_tables[0].pooling",
            "mean",
            "  - {name: users, embedding_dim: 8, pooling: mean}",
        ),
        ("checkpoint.every_steps", 50, "checkpoint: {every_steps: 50}"),
        ("name", "other", "name: other"),
    ],
)
def test_a_field_is_changed_in_place_and_comments_stay(path: str, value: Any, line: str) -> None:
    changed = spec_text.with_value(TEXT, path, value)
    assert line in changed.splitlines()
    assert "# what it is for" in changed
    assert "  # slow" in changed
    assert spec_text.value_at(parse_document(changed), path) == value


def test_a_field_is_taken_out() -> None:
    changed = spec_text.with_value(TEXT, "optimizer.dense.lr", None)
    assert spec_text.value_at(parse_document(changed), "optimizer.dense.lr") is None
    for path, value in (("nothing.here", None), ("training.seed", None), ("name", "tiny")):
        assert spec_text.with_value(TEXT, path, value) == TEXT
    assert spec_text.with_value("name: x\ndata: !!set {a}\n", "name", None) == "data: !!set {a}\n"


_VALUES = st.one_of(st.integers(), st.booleans(), st.text("ab:#'{}\n", max_size=6))
_PATHS = st.sampled_from(["name", "training.epochs", "optimizer.sparse.eps", "a.b.c"])


@given(_PATHS, _VALUES)
def test_whatever_is_set_is_read_back_and_nothing_else_changes(path: str, value: Any) -> None:
    document = parse_document(spec_text.with_value(TEXT, path, value))
    assert spec_text.value_at(document, path) == value
    unchanged = [name for name in parse_document(TEXT) if name != path.partition(".")[0]]
    assert all(document[name] == parse_document(TEXT)[name] for name in unchanged)


def test_only_what_differs_is_told_and_items_of_lists_go_by_their_names() -> None:
    users, movies = {"name": "users", "dim": 8}, {"name": "movies", "dim": 4}
    left = {"tables": [users, movies], "same": 1, "layers": [16, 8]}
    right = {"tables": [movies, {**users, "dim": 16}], "same": 1, "layers": [16]}
    assert spec_text.differences([left, right]) == {
        "tables[users].dim": [8, 16],
        "layers": [[16, 8], [16]],
    }
    labelled = [{"labels": {}, "tables": []}, {"labels": {"team": "ads"}, "tables": [users]}]
    assert spec_text.differences(labelled) == {
        "labels.team": [None, "ads"],
        "tables[users].dim": [None, 8],
    }
