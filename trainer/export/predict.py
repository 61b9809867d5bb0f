"""Predictions of an export: `Predictor(DIR).predict(rows)`.

Rows are dicts or an Arrow table; the decoder of the training data decodes them. Labels are not
needed, but what a label was normalised by is, because predictions are in the label's own unit.
Columns may hold raw values, such as a movie's own number, where the preparation of the data
replaced them by ids: the export's vocabularies map them (`raw` of `Predictor.predict`).

Needs torch and FBGEMM's CPU kernels, pyarrow and numpy; neither TorchRec, nor Ray, nor the source
of the model. Raises `BadRow` for a row that cannot be scored.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from trainer.data.decode import (
    FLOAT32,
    InputColumn,
    LabelColumns,
    RowLayout,
    check_kinds,
    check_schema,
    decode,
    layout_of,
)
from trainer.data.parquet import as_read
from trainer.data.rows import IdLists, Rows, SparseIds, concat_rows
from trainer.data.transforms import VocabularyEncoder, load_vocabulary
from trainer.errors import BadValueError, DataError
from trainer.export.artifact import (
    FEATURES,
    PROGRAM,
    VOCABULARIES,
    ArtifactError,
    BadRow,
    check_files,
    read_manifest,
    read_spec,
)
from trainer.spec.job import JobSpec

PAD_ROWS = 2
"""Rows with one id 0 in each feature behind those to score: no size is ever 0 or 1."""
Predictions = dict[str, NDArray[np.float32]]
_LABEL = InputColumn("label", "__label__")
_REQUEST = "request"
_VOCABULARY_FOLDER = "vocab"
_MAX_ROWS_AT_ONCE = 8192
_MAX_PADDED_IDS = 2**18


def array_of(values: Sequence[Any]) -> pa.Array:
    """Values, or lists of them, in their own type: uint64 where int64 is too small.

    Raises `pa.ArrowException`, TypeError, ValueError or OverflowError where they are of several
    kinds, or beyond 64 bits.
    """
    try:
        return pa.array(values)
    except (OverflowError, pa.ArrowInvalid):
        # Arrow never infers uint64; asked for it, it would cut decimals off.
        lists = (value if isinstance(value, list) else [value] for value in values)
        if not all(item is None or type(item) is int for items in lists for item in items):
            raise
    is_list = any(isinstance(value, list) for value in values)
    return pa.array(values, pa.list_(pa.uint64()) if is_list else pa.uint64())


def scoring_layout(spec: JobSpec, vocabularies: Path) -> RowLayout:
    """The columns to read of rows without labels; `vocabularies` is the export's folder of them.

    Raises a `DataError` where one is missing.
    """
    # With a colon in its name a relative one would be a URL.
    there = spec.data.model_copy(update={"path": str(vocabularies.absolute())})
    layout = layout_of(spec.model_copy(update={"data": there}))
    labels = tuple(
        # A probability needs neither offset nor scale.
        LabelColumns(_LABEL, None, None, is_binary=False)
        if each.is_binary
        else replace(each, value=_LABEL)
        for each in layout.labels
    )
    return replace(layout, labels=labels, row_weight=None)


def input_columns(layout: RowLayout) -> dict[str, InputColumn]:
    """What a row to score has, by name, in order; columns that several features read once."""
    return {column.name: column for column in layout.columns if column is not _LABEL}


def rows_of_table(
    table: pa.Table, layout: RowLayout, kinds: Mapping[str, str | None] = MappingProxyType({})
) -> Rows:
    """Decode a table of rows to score.

    `kinds` are those of columns in training (`raw_kind`), as far as they are known: numbers that
    were float32 are rounded to it. Raises `BadRow` for the first cell that is wrong, and
    `ColumnError` for a type that is.
    """
    columns = input_columns(layout)
    if missing := [name for name in columns if name not in table.column_names]:
        raise BadRow(0, missing[0], f"there is no such column; needed are {', '.join(columns)}")
    if (schema := as_read(table.schema)) != table.schema:
        table = table.cast(schema)
    labels = pa.array(np.zeros(len(table), np.float32))
    check_schema(layout, table.schema.append(pa.field(_LABEL.name, labels.type)), "the table")
    check_kinds(layout, table.schema, "the table", kinds)
    table = table.select(list(columns)).append_column(_LABEL.name, labels)
    for place, (name, column) in enumerate(columns.items()):
        if column.encoder is not None and kinds.get(name) == FLOAT32:
            kind = pa.list_(pa.float32()) if column.is_list else pa.float32()
            table = table.set_column(place, name, table[name].cast(kind, safe=False))
    try:
        return decode(table, layout, lambda row: (_REQUEST, row))
    except BadValueError as error:
        is_missing = error.value is None
        problem = "is missing or null" if is_missing else error.problem
        raise BadRow(int(error.place.rpartition(" ")[2]), error.column, problem) from error


def table_of_dicts(
    rows: Sequence[Mapping[str, Any]], layout: RowLayout, kinds: Mapping[str, str] | None = None
) -> pa.Table:
    """Rows as an Arrow table; a list that is missing or null is an empty one.

    `kinds` says which columns of raw values were of strings, integers or numbers in training:
    what is hashed must be of the same type again. Raises `BadRow` for a column that nobody reads,
    one that is missing, or a value of the wrong kind.
    """
    columns = input_columns(layout)
    for index, row in enumerate(rows):
        if unknown := row.keys() - columns.keys():
            raise BadRow(index, min(unknown), f"is no input; inputs are {', '.join(columns)}")
    known = kinds or {}
    return pa.table({name: _array(rows, c, known.get(name)) for name, c in columns.items()})


def _array(rows: Sequence[Mapping[str, Any]], column: InputColumn, kind: str | None) -> pa.Array:
    empty: list[Any] | None = [] if column.is_list else None
    values = [empty if (value := row.get(column.name)) is None else value for row in rows]
    types = _types(column, kind)
    for each in types:
        if (array := _converted(values, each)) is not None:
            return array
    index = _first_misfit(
        len(values), lambda num: any(_converted(values[:num], t) is not None for t in types)
    )
    problem = f"{values[index]!r} is not {wanted_kind(column, kind)}"
    raise BadRow(index, column.name, problem)


def _first_misfit(num_values: int, fits: Callable[[int], bool]) -> int:
    """Index of the first value that is not like those before it, or fits nowhere.

    `fits` says so of the first N values. No longer prefix of them fits where one does not.
    """
    return bisect.bisect_left(range(1, num_values), True, key=lambda num: not fits(num))


def _converted(values: list[Any], kind: pa.DataType) -> pa.Array | None:
    """`values` as `kind`; None where they are of another kind, or not all of one."""
    try:
        # In their own type: asked for integers, Arrow would cut off the decimals.
        found = array_of(values)
        if not _is_like(found.type, kind):
            return None
        if kind in _WIDER:
            found = found.cast(_WIDER[kind], safe=False)
        # Integers may be rounded to floats, as in training.
        is_float = pa.types.is_floating(kind.value_type if pa.types.is_list(kind) else kind)
        return found.cast(kind, safe=not is_float)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def _is_like(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_null(found):
        return True
    if pa.types.is_list(wanted):
        return pa.types.is_list(found) and _is_like(found.value_type, wanted.value_type)
    is_whole = pa.types.is_integer(found) or pa.types.is_boolean(found)
    if pa.types.is_floating(wanted):
        return is_whole or pa.types.is_floating(found) or pa.types.is_decimal(found)
    if pa.types.is_integer(wanted):
        return is_whole
    return found == wanted


_RAW_TYPES = {
    "string": (pa.string(),),
    # Hashes of 64 bits need all of an uint64.
    "integer": (pa.int64(), pa.uint64()),
    "number": (pa.float64(),),
}
_KNOWN_TYPES = _RAW_TYPES | {FLOAT32: (pa.float32(),)}
_WIDER = {pa.float32(): pa.float64(), pa.list_(pa.float32()): pa.list_(pa.float64())}


def _types(column: InputColumn, kind: str | None) -> list[pa.DataType]:
    """Arrow types that a column may have, the first that fits counts."""
    if column.encoder is None:
        items = [pa.int64() if column.num_ids else pa.float64()]
    elif kind in _KNOWN_TYPES:
        items = [*_KNOWN_TYPES[kind]]
    else:
        known = chain.from_iterable(_RAW_TYPES.values())
        items = [each for each in known if column.encoder.accepts(each)]
    return [pa.list_(item) for item in items] if column.is_list else items


def wanted_kind(column: InputColumn, kind: str | None = None) -> str:
    """What a value of `column` is, in words."""
    if column.encoder is not None:
        kind = "number" if kind == FLOAT32 else kind
        article = "an" if kind == "integer" else "a"
        item = f"{article} {kind}" if kind else column.encoder.wanted
        return f"a list, each {item}" if column.is_list else item
    if column.num_ids:
        return "a list of integers" if column.is_list else "an integer"
    return "a list of numbers" if column.is_list else "a number"


def program_arrays(rows: Rows, spec: JobSpec) -> Iterator[NDArray[Any]]:
    """`rows` and `PAD_ROWS` more as the program takes them (`trainer.export.program`)."""
    padded = concat_rows([rows, _padding(rows)])
    yield padded.dense
    parts = padded.sparse.split(len(spec.pooled_features))
    weighted = (spec.is_weighted, spec.has_weighted_sequences)
    for ids, is_weighted in zip(parts, weighted, strict=True):
        if ids.is_single:  # any features
            yield ids.packed()
            yield ids.lengths().ravel()
            if is_weighted:
                yield ids.weights()


def _padding(rows: Rows) -> Rows:
    arrays = {
        name: np.zeros((PAD_ROWS, *array.shape[1:]), array.dtype)
        for name, array in rows.arrays.items()
    }
    ids, offsets = np.zeros(PAD_ROWS, np.int64), np.arange(PAD_ROWS + 1)
    lists = tuple(
        IdLists(ids, offsets, None if found.weights is None else np.ones(PAD_ROWS, np.float32))
        for found in rows.sparse.lists
    )
    singles = np.zeros((PAD_ROWS, rows.sparse.singles.shape[1]), rows.sparse.singles.dtype)
    return replace(rows, sparse=SparseIds(rows.sparse.is_single, singles, lists), **arrays)


def with_ids(
    rows: Sequence[Mapping[str, Any]], raw: Mapping[str, str], folder: Path
) -> list[dict[str, Any]]:
    """Rows in which the columns of `raw` hold ids; it names the vocabulary of each column.

    What a vocabulary does not know is id 0. Raises `BadRow` for a vocabulary that is not in
    `folder`, and for values of another kind than its own.
    """
    found = [dict(row) for row in rows]
    known = {path.stem: path for path in sorted((folder / _VOCABULARY_FOLDER).glob("*.parquet"))}
    for column, name in raw.items():
        if name not in known:
            listed = ", ".join(known) or "none"
            raise BadRow(0, column, f"there is no vocabulary '{name}'; there are: {listed}")
        _encode(found, column, load_vocabulary(known[name]))
    return found


def _encode(rows: Sequence[dict[str, Any]], column: str, encoder: VocabularyEncoder) -> None:
    """Replace the values of one column, all looked up at once."""
    places = [place for place, row in enumerate(rows) if row.get(column) is not None]
    cells = [rows[place][column] for place in places]
    lists = [cell if isinstance(cell, list) else [cell] for cell in cells]
    values = _raw_values(lists, encoder)
    if values is None:
        index = _first_misfit(len(lists), lambda num: _raw_values(lists[:num], encoder) is not None)
        problem = f"{cells[index]!r} is not {encoder.wanted}, as its vocabulary has them"
        raise BadRow(places[index], column, problem)
    ids = iter(encoder.encode(values).tolist())
    for place, cell, items in zip(places, cells, lists, strict=True):
        taken = [next(ids) for _ in items]
        rows[place][column] = taken if isinstance(cell, list) else taken[0]


def _raw_values(lists: list[list[Any]], encoder: VocabularyEncoder) -> pa.Array | None:
    """All values of the lists; None where they are of several kinds, or not the vocabulary's."""
    try:
        values = array_of([item for items in lists for item in items])
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None
    return values if pa.types.is_null(values.type) or encoder.accepts(values.type) else None


def rows_at_once(spec: JobSpec) -> int:
    """How many rows a model takes at a time: its sequences are padded to their longest."""
    row_ids = sum(each.length_limit for each in spec.sequence_features)
    return max(1, min(_MAX_ROWS_AT_ONCE, _MAX_PADDED_IDS // max(1, row_ids)))


class Predictor:
    """The model of an export, ready to score. Threads may share one."""

    def __init__(self, folder: Path) -> None:
        """Load and check the export in `folder`; raises `ArtifactError`."""
        self.manifest = read_manifest(folder)
        check_files(folder, self.manifest)
        self.spec = read_spec(folder)
        try:
            self.layout = scoring_layout(self.spec, folder / VOCABULARIES)
        except DataError as error:
            raise ArtifactError(f"{folder} lacks a vocabulary: {error}") from error
        self.features = json.loads((folder / FEATURES).read_text(encoding="utf-8"))
        self._kinds = {
            each["name"]: each.get("precision", each["kind"]) for each in self.features["inputs"]
        }
        self._program = _load(folder / PROGRAM)
        self._vocabularies = folder / VOCABULARIES

    def predict(
        self,
        rows: Sequence[Mapping[str, Any]] | pa.Table,
        raw: Mapping[str, str] = MappingProxyType({}),
    ) -> Predictions:
        """A float32 array [n] for each task, in the unit of its label (`bce`: a probability).

        `rows` are dicts by column, or a table with at least these columns. `raw` names columns
        that hold values of the raw data, each with the vocabulary that makes them ids, as in
        `{"movie_id": "movie_id", "history_movies": "movie_id"}`. Raises `BadRow`, and of a table
        whose columns have other types `ColumnError`.
        """
        if raw:
            ids = [c.name for c in self.layout.sparse if c.encoder is None]
            if others := raw.keys() - ids:
                known = ", ".join(dict.fromkeys(ids)) or "none: the model encodes raw values itself"
                raise BadRow(0, min(others), f"is no input of ids; those are {known}")
            if isinstance(rows, pa.Table):
                inputs = input_columns(self.layout)
                rows = rows.select([n for n in rows.column_names if n in inputs]).to_pylist()
            rows = with_ids(rows, raw, self._vocabularies)
        return self.score(self.decode(rows))

    def decode(self, rows: Sequence[Mapping[str, Any]] | pa.Table) -> Rows:
        """Rows to score as the trainer has them; raises as `predict` does."""
        table = (
            rows if isinstance(rows, pa.Table) else table_of_dicts(rows, self.layout, self._kinds)
        )
        return rows_of_table(table, self.layout, self._kinds)

    def score(self, rows: Rows) -> Predictions:
        """The same of decoded rows."""
        size = rows_at_once(self.spec)
        pieces = [
            rows.slice(start, min(start + size, len(rows))) for start in range(0, len(rows), size)
        ]
        outputs = [self._outputs(piece) for piece in pieces]
        shape = (0, len(self.spec.model.tasks))
        whole = np.concatenate(outputs) if outputs else np.empty(shape, np.float32)
        return in_own_unit(whole, rows, self.spec)

    def _outputs(self, rows: Rows) -> NDArray[np.float32]:
        arrays = [torch.from_numpy(array) for array in program_arrays(rows, self.spec)]
        with torch.inference_mode():
            return self._program(*arrays)[:-PAD_ROWS].numpy()


def in_own_unit(outputs: NDArray[np.float32], rows: Rows, spec: JobSpec) -> Predictions:
    """Outputs [n, K] of the model in the units of the labels, by task: probabilities of `bce`."""
    found = {}
    for index, task in enumerate(spec.model.tasks):
        values = outputs[:, index]
        with np.errstate(over="ignore"):  # infinite then, which whoever asked has to look at
            if task.is_binary:
                found[task.name] = (1 / (1 + np.exp(-values))).astype(np.float32)
            else:
                found[task.name] = values * rows.scale[:, index] + rows.offset[:, index]
    return found


def _load(path: Path) -> Any:
    import fbgemm_gpu  # noqa: F401, registers the operators that programs call
    from torch.export.pt2_archive import _package

    try:
        archive: Any = _Archive(path)
        program = _package._load_exported_programs(archive, [_Archive.PROGRAM], None)
        # Guards are source code: they are left out. `program_arrays` keeps to what they say.
        return program["model"].module(check_guards=False)
    except ArtifactError:
        raise
    except Exception as error:  # whatever a damaged or newer file makes the reader raise
        raise ArtifactError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}; use the versions of torch "
            "and fbgemm-gpu that EXPORT.json names"
        ) from error


class _Archive:
    """What `torch.export` may read of a program: raw tensors, and a description without code.

    Weights, constants and example inputs may be pickles as well, and PyTorch evaluates or calls
    what strings of the description name: all of that would run code of who wrote the export.
    """

    PROGRAM = "models/model.json"
    _SIZES = tuple(f"data/{each}/model_{each}_config.json" for each in ("weights", "constants"))
    _EXAMPLES = "data/sample_inputs/model.pt"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.archive_file = torch._C.PyTorchFileReader(str(path))

    def get_file_names(self) -> list[str]:
        return self.archive_file.get_all_records()

    def read_bytes(self, name: str) -> bytes:
        """A record that is no tensor; raises `ArtifactError` where it could run code."""
        if name == self._EXAMPLES:
            return b""  # only guards need them
        if name not in (self.PROGRAM, *self._SIZES):
            raise self._refused(f"pickled objects ({name})")
        content: bytes = self.archive_file.get_record(name)
        if name == self.PROGRAM and (found := next(_code_in(json.loads(content)), None)):
            raise self._refused(found)
        return content

    def read_string(self, name: str) -> str:
        return self.read_bytes(name).decode()

    def _refused(self, what: str) -> ArtifactError:
        return ArtifactError(
            f"{self._path} is refused: it holds {what}, which may run code; something else than "
            "`shardloom export` wrote it, or the model calls operators that are not PyTorch's or "
            "FBGEMM's. Export again"
        )


_TEXT, _VARIABLE = re.compile(r".*", re.DOTALL), re.compile(r"\w*")
_NAME = re.compile(r"[^\"'\\\n()]*")
_OPERATOR = re.compile(
    r"torch\.ops\.(aten|fbgemm|prims)\.(?!from_file\.)\w+\.[a-zA-Z]\w*|(_operator|math)\.\w+"
    r"|torch\._?sym_\w+|torch\.ops\.higher_order\.(cond|map_impl|scan|while_loop|wrap_with_\w+)"
)
# As sympy writes an expression; its functions have capitals.
_EXPRESSION = re.compile(
    r"(Symbol\('[a-z]+\d+'|Float\('[-+.\de]+'|[A-Z]\w*\(|[a-z]\w*=(True|False|None|\d+)|-?\d+"
    r"|true|false|oo|int_oo|nan|[,) ])*"
)
_TREE = re.compile(
    r'("(type|context|children_spec|builtins\.(tuple|list|dict)|null|\[\])"|null|\d+|[][{}:, ])*'
)
# What a string may be, by its key in a program's description; `_NAME` where none is here. Texts go
# into comments and messages; guards are left out.
_STRINGS = {
    **dict.fromkeys(("name", "as_name", "forward_arg_names", "as_operator"), _VARIABLE),
    "target": _OPERATOR,
    "expr_str": _EXPRESSION,
    **dict.fromkeys(("in_spec", "out_spec"), _TREE),
    **dict.fromkeys(("as_string", "as_strings", "guards_code", "torch_version"), _TEXT),
    **dict.fromkeys(("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"), _TEXT),
    **dict.fromkeys(("from_node", "custom"), _TEXT),
}


def _code_in(part: Any, wanted: re.Pattern[str] = _NAME) -> Iterator[str]:
    """Strings in a program's description that PyTorch might run as code."""
    if isinstance(part, str):
        if not wanted.fullmatch(part):
            yield repr(part)
    elif isinstance(part, list):
        for each in part:
            yield from _code_in(each, wanted)
    elif isinstance(part, dict):
        for key, value in part.items():
            yield from _code_in(key)
            yield from _code_in(value, _STRINGS.get(key, _NAME))
