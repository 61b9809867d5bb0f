"""Reports of `shardloom data inspect`: column statistics and a suggested part of a job spec.

The suggestion follows simple rules and is meant to be read: names and cardinalities say which
columns are ids. All tables get one dimension, as the networks need it: twice the fourth root of
the largest cardinality, rounded up to a power of two from 8 to 128.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from rich.markup import escape
from rich.table import Table

from trainer.data.manifest import Manifest
from trainer.datasets.profile import ColumnReport, ColumnSketch, DataSet
from trainer.spec.base import IDENTIFIER_PATTERN

_LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "rating", "stars", "y")
# What the label is made of in data that we prepare: no inputs.
_LABEL_PARTS = {"movielens": ("user_mean", "user_scale")}
_TIME_NAME = re.compile(r"(^|_)(timestamp|time|ts|date|datetime)$")
_ID_NAME = re.compile(r"(id|ids|_?cat(egory)?_?\d*|code|zip|genres?|tokens?|tags?)$", re.IGNORECASE)
_DIMS = (8, 16, 32, 64, 128)
# An integer column with more distinct values than this and no name of an id is taken for a number.
_MAX_ENUM = 1000
# A larger integer counts nothing: a float of 64 bits would not tell it from the next.
_MAX_COUNT = 2**53
# Integers that are numbers by their names.
_COUNT_NAME = re.compile(r"(^|_)(int_?\d*$|age(_|$))|(?<!ac)count|num")
# What pandas stores of the numbers of rows.
_INDEX_NAME = re.compile(r"__index_level_\d+__|Unnamed: 0")
# A column of numbers may hold this share of other words, one of lists holds as many bars.
_WORDS = 0.1
# Of ids that name rows this share is distinct; an estimate may be a little off.
_ROW_NAMES = 0.98
# A larger hour is a date, such as 14102100.
_LAST_HOUR = 24
# Ids that fill their range can be used as they are.
_MAX_SPARSENESS = 4
_ROOM = 1.5
_REFUSED = "which training refuses: mend them, or set data.on_bad_rows to quarantine"


@dataclass(frozen=True)
class Suggestion:
    """Parts of a spec as plain values; `notes` says what was excluded or guessed."""

    label: str | None
    loss: str
    features: tuple[dict[str, Any], ...]
    embedding_tables: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    def yaml(self) -> str:
        """The parts as YAML, with the notes as comments."""
        notes = list(self.notes)
        if self.label:
            notes.append(f"data.label: {{column: {self.label}}}, model.tasks: loss {self.loss}")
        # A column's name may hold line ends, which would end a comment.
        lines = [f"# {' '.join(note.splitlines())}" for note in notes]
        for name in ("features", "embedding_tables"):
            items = getattr(self, name)
            lines.append(f"{name}:" if items else f"{name}: []")
            for item in items:
                flow = yaml.safe_dump(item, default_flow_style=True, sort_keys=False, width=10_000)
                lines.append(f"  - {flow.strip()}")
        return "\n".join(lines) + "\n"


def suggest(columns: Sequence[ColumnReport], manifest: Manifest | None) -> Suggestion:
    """Suggest features and tables for columns, which are prepared ids where there is a manifest."""
    sizes = manifest.vocab_sizes if manifest else {}
    label = _find_label(columns)
    left_out = _LABEL_PARTS.get(manifest.source, ()) if manifest else ()
    features: list[dict[str, Any]] = []
    tables: list[dict[str, Any]] = []
    notes: list[str] = []
    usable = [each for each in columns if each is not label and each.name not in left_out]
    dim = _embedding_dim(usable, sizes)
    for column in usable:
        if reason := _unusable(column) or _row_name(column, sizes):
            notes.append(f"{column.name}: left out, {reason}")
            continue
        notes += [f"{column.name}: {doubt}" for doubt in _doubts(column, sizes)]
        feature, num_rows = _feature(column, sizes)
        if manifest and f"{column.name}_std" in manifest.statistics:
            feature["transform"] = "standardise"
        features.append(feature)
        if num_rows is not None:
            if not re.fullmatch(IDENTIFIER_PATTERN, feature["table"]):  # too long
                feature["table"] = f"table_{len(tables)}"
            tables.append(
                {"name": feature["table"], "num_embeddings": num_rows, "embedding_dim": dim}
            )
    if not any(feature["type"] == "dense" for feature in features):
        notes.append(
            "no dense feature, which every model.arch needs: add a column of numbers, or take a "
            "model.module of your own"
        )
    if not tables:
        notes.append(
            "no embedding table, of which a job needs one: where a column names things, make it "
            "`type: id` with `hashing: {}` and give it a table"
        )
    if label is None:
        notes.append("no label found: set data.label.column")
    elif label.kind == "text" or label.lists:
        notes.append(f"{label.name}: a label is one number a row: store it as such")
    elif label.num_nulls:
        notes.append(f"{label.name}: {label.num_nulls:,} nulls, {_REFUSED}")
    return Suggestion(
        label.name if label else None,
        "bce" if label and label.is_binary else "mse",
        tuple(features),
        tuple(tables),
        tuple(notes),
    )


def _find_label(columns: Sequence[ColumnReport]) -> ColumnReport | None:
    names = {column.name.lower(): column for column in columns if column.kind != "other"}
    named = [names[name] for name in _LABEL_NAMES if name in names]
    binary = (column for column in columns if column.is_binary and not _unusable(column))
    return next(iter(named or binary), None)


def _doubts(column: ColumnReport, sizes: dict[str, int]) -> Iterator[str]:
    """What training would refuse of a column, or what else it may have been meant as."""
    if column.num_infinite:
        yield f"{column.num_infinite:,} infinite values, {_REFUSED}"
    is_count = _is_id(column, sizes) or _COUNT_NAME.search(column.name.lower())
    if column.kind == "integer" and column.num_distinct > _MAX_ENUM and not is_count:
        yield "many distinct integers: if they name things, make it `type: id` with `hashing: {}`"
    if column.kind != "text" or column.lists is not None:
        return
    if 0 < column.num_words <= _WORDS * column.num_values:
        count = f"{column.num_words:,} of {column.num_values:,} values are no numbers"
        yield f"{count}: if it is one, store these as null and the column as a number"
    if column.num_barred > _WORDS * column.num_values:
        yield "holds `|`: if that parts several values, store lists"


def _unusable(column: ColumnReport) -> str | None:
    """Why a column is no input; None where it is one."""
    if _INDEX_NAME.fullmatch(column.name):
        return "the numbers of rows in pandas"
    if not re.fullmatch(IDENTIFIER_PATTERN, column.name):
        return "its name is no identifier: rename it"
    is_hour = column.name.lower() == "hour" and (column.maximum or 0) > _LAST_HOUR
    if _TIME_NAME.search(column.name.lower()) or is_hour:
        return "a time: derive features from it"
    if column.kind == "other":
        return "neither a number nor text: store it as one"
    if not column.num_distinct:
        return "it holds no value"
    if column.num_distinct == 1 and column.num_nulls == 0 and column.lists is None:
        return "always the same"
    if column.kind == "number" and column.lists is not None:
        return "a list of numbers: use it as weights_column"
    return None


def _row_name(column: ColumnReport, sizes: dict[str, int]) -> str | None:
    """Why ids would tell rows apart and nothing else; None where they do not."""
    is_known = column.name in sizes or column.lists is not None
    num_values = column.num_values
    if is_known or num_values <= _MAX_ENUM or column.num_distinct < _ROW_NAMES * num_values:
        return None
    span = (column.maximum or 0) - (column.minimum or 0)
    is_count = column.kind == "integer" and span < num_values
    if not (is_count or _is_id(column, sizes)):
        return None
    return "a value of its own in each row, of which no other row can learn"


def _is_id(column: ColumnReport, sizes: dict[str, int]) -> bool:
    if column.name in sizes or column.lists is not None or column.kind == "text":
        return True
    if column.kind != "integer":
        return False
    least, most = column.minimum or 0, column.maximum or 0
    if max(-least, most) > _MAX_COUNT:
        return True
    if least < 0 or _ID_NAME.search(column.name):
        return least >= 0
    return column.num_distinct <= _MAX_ENUM and not _COUNT_NAME.search(column.name.lower())


def _feature(
    column: ColumnReport, sizes: dict[str, int]
) -> tuple[dict[str, Any], int | str | None]:
    """A feature, and the rows of its table if it has one."""
    if not _is_id(column, sizes):
        return _dense(column, is_prepared=bool(sizes)), None
    kind = "id" if column.lists is None else "id_list"
    feature = {"name": column.name, "type": kind, "table": f"table_{column.name}"}
    if column.name in sizes:
        return feature, "auto"
    if _fills_its_range(column):
        return feature, int(column.maximum or 0) + 1
    return feature | {"hashing": {"num_buckets": "auto"}}, _with_room(column.num_distinct)


def _dense(column: ColumnReport, *, is_prepared: bool) -> dict[str, Any]:
    feature: dict[str, Any] = {"name": column.name, "type": "dense"}
    if is_prepared:
        return feature
    missing = 0.0
    if column.kind == "integer":
        feature["transform"] = "log1p"
    elif column.std:
        # Only prepared data has a manifest that would know mean and deviation.
        missing, std = _rounded(column.mean), _rounded(column.std)
        feature |= {"transform": "standardise", "mean": missing, "std": std}
    return feature | ({"missing": missing} if column.num_nulls else {})


def _rounded(value: float | None) -> float:
    return float(f"{value or 0.0:.6g}")


def _fills_its_range(column: ColumnReport) -> bool:
    if column.kind != "integer" or column.num_nulls or column.minimum is None:
        return False
    top = column.maximum or 0
    return column.minimum >= 0 and top <= _MAX_SPARSENESS * column.num_distinct


def _with_room(num_distinct: int) -> int:
    """Rows for hashed values: half as many again, rounded up to two digits."""
    wanted = int(num_distinct * _ROOM) + 10
    unit = 10 ** max(0, len(str(wanted)) - 2)
    return -(-wanted // unit) * unit


def _embedding_dim(columns: Sequence[ColumnReport], sizes: dict[str, int]) -> int:
    ids = [column for column in columns if _is_id(column, sizes)]
    largest = max([sizes.get(column.name, column.num_distinct) for column in ids], default=1)
    wanted = 2 * largest**0.25
    return next((dim for dim in _DIMS if dim >= wanted), _DIMS[-1])


@dataclass(frozen=True)
class DataReport:
    """What one data set holds."""

    data: DataSet
    num_rows: int
    columns: tuple[ColumnReport, ...]
    suggestion: Suggestion

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "title": self.data.title,
            "format": self.data.text.text if self.data.text else "parquet",
            "num_files": len(self.data.files),
            "size_bytes": self.data.size_bytes,
            "num_rows": self.num_rows,
            "columns": self.columns,
            "manifest": self.data.manifest,
            "suggested": self.suggestion,
        }


def inspect_data(data: DataSet, on_rows: Callable[[int], object] = lambda _: None) -> DataReport:
    """Read a data set once; `on_rows` hears of every part's rows. Raises a `DataError`."""
    # What is stored with types is no number where it is text, whatever stands in it.
    texts = data.text.texts if data.text else ()
    sketches = {
        name: ColumnSketch(name, is_text=data.text is None or name in texts)
        for name in data.columns
    }
    num_rows = 0
    for batch in data.batches():
        for name, sketch in sketches.items():
            sketch.add(batch[name])
        num_rows += len(batch)
        on_rows(len(batch))
    columns = tuple(sketch.report() for sketch in sketches.values())
    return DataReport(data, num_rows, columns, suggest(columns, data.manifest))


_MANY_NULLS = 0.5
_RIGHT = ("distinct", "nulls", "range", "top 1%", "Zipf")


def columns_table(report: DataReport) -> Table:
    """One row per column of the data."""
    roles = _roles(report)
    rows = [
        _cells(column) | {"suggested": roles.get(column.name, "[dim]left out[/]")}
        for column in report.columns
    ]
    has_lists = any(column.lists for column in report.columns)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    shown = [name for name in rows[0] if has_lists or name != "lists"]
    for name in shown:
        table.add_column(name, justify="right" if name in _RIGHT else "left")
    for cells in rows:
        table.add_row(*(cells[name] for name in shown))
    return table


def _cells(column: ColumnReport) -> dict[str, str]:
    about = "~" if column.is_estimate else ""
    is_id = column.kind in ("integer", "text")
    zipf = "" if column.zipf_exponent is None else f"{column.zipf_exponent:.2f}"
    bounds = lengths = ""
    if column.minimum is not None and column.maximum is not None:
        bounds = f"{_number(column.minimum)} … {_number(column.maximum)}"
    if lists := column.lists:
        empty = f", {lists.num_empty:,} empty" if lists.num_empty else ""
        lengths = f"mean {lists.mean:.1f}, max {lists.longest}{empty}"
    return {
        "column": f"[cyan]{escape(column.name)}[/]",
        "holds": f"{column.kind} lists" if lists else column.kind,
        "distinct": f"{about}{column.num_distinct:,}",
        "nulls": _nulls(column),
        "range": bounds,
        "top 1%": "" if not is_id or column.top_share is None else f"{column.top_share:.0%}",
        "Zipf": zipf if is_id else "",
        "lists": lengths,
    }


def _nulls(column: ColumnReport) -> str:
    if not column.num_nulls:
        return "[dim]none[/]"
    share = column.num_nulls / column.num_rows
    text = f"{share:.1%}" if share >= 0.001 else f"{column.num_nulls:,}"
    return f"[yellow]{text}[/]" if share > _MANY_NULLS else text


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _roles(report: DataReport) -> dict[str, str]:
    """What each column is suggested as, in a few words."""
    suggestion = report.suggestion
    tables = {table["name"]: table for table in suggestion.embedding_tables}
    vocabularies = report.data.manifest.vocab_sizes if report.data.manifest else {}
    roles = {suggestion.label: f"[green]label[/] ({suggestion.loss})"} if suggestion.label else {}
    for feature in suggestion.features:
        words = [feature["type"]]
        words += [feature["transform"]] if "transform" in feature else []
        words += ["hashed"] if "hashing" in feature else []
        if (table := tables.get(feature.get("table", ""))) is not None:
            rows = vocabularies.get(feature["name"], table["num_embeddings"])
            words.append(f"table {rows:,} x {table['embedding_dim']}")
        roles[feature["name"]] = ", ".join(words)
    return roles
