"""What all sections of a spec share: strict models, name patterns, and `SpecError`.

Problems name the path of the field as users write it, a stable code and a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args
from urllib.parse import urlsplit

from annotated_types import GroupedMetadata
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
)
from pydantic_core import PydanticCustomError

from trainer.errors import guess


@dataclass(frozen=True)
class FieldProblem:
    """One faulty field of a spec or a request.

    `path` is the field in the user's own words, as in `embedding_tables[0].embedding_dim`;
    `code` is stable and machine-readable.
    """

    path: str
    code: str
    message: str


def field_path(parts: Iterable[int | str]) -> str:
    """`rows[3].x` of "rows", 3 and "x"."""
    named = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return "".join(named).removeprefix(".")


def request_problems(errors: Iterable[Any]) -> list[FieldProblem]:
    """FastAPI's errors about a request as problems."""
    return [FieldProblem(_request_path(each), each["type"], _text(each)) for each in errors]


def _request_path(error: Any) -> str:
    # The first part says where the field was (body, query, path, header), not what it is called.
    where, *parts = error["loc"]
    if error["type"] == "json_invalid":
        return str(where)
    # Pydantic's word for a key of a mapping, which is the part before it and may be empty.
    parts = [part for part in parts if part not in ("", "[key]")]
    # A field below the one that was checked, as `problem` names it.
    parts += filter(None, [error.get("ctx", {}).get("at")])
    return field_path(parts) or str(where)


class SpecError(ValueError):
    """A spec that cannot be accepted; `problems` lists every fault found."""

    def __init__(self, problems: Sequence[FieldProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{p.path}: {p.message}" for p in self.problems))


def problem(code: str, message: str, at: str = "") -> PydanticCustomError:
    """A fault for a validator to raise; `at` is the faulty field below the one being checked."""
    # Braces would be read as placeholders of pydantic's message template.
    return PydanticCustomError(code, "{message}", {"message": message, "at": at})


# pydantic adds the tag of a union's branch to a location ("constrained-int", "WorkersSpec",
# "literal['auto']"); users never wrote that.
_UNION_TAG = re.compile(r"\[|^constrained-|^(int|bool|float)$|^WorkersSpec$")


def _path(error: Any) -> str:
    location, at = error["loc"], error.get("ctx", {}).get("at", "")
    # An unknown field may have the name of a tag, and is the last part.
    above = location[:-1] if error["type"] == "extra_forbidden" else location
    parts = [part for part in above if not (isinstance(part, str) and _UNION_TAG.search(part))]
    parts += location[len(above) :]
    text = field_path([*parts, at] if at else parts)
    # An unknown key may hold half a surrogate pair, which no answer could carry.
    return text.encode(errors="replace").decode() or "spec"


_MESSAGES = {
    "missing": "required field is missing",
    "model_type": "must be a mapping of fields to values",
}
NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
LABEL_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?$"
IDENTIFIER_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,62}$"
_WORD = r"[A-Za-z_][A-Za-z0-9_]*"
MODULE_PATTERN = rf"^{_WORD}(\.{_WORD})*:{_WORD}$"
# What to say of a text that does not match its pattern; other schemas add theirs.
FORMS = {
    NAME_PATTERN: "must be 1 to 63 of a-z, 0-9 and '-', and begin and end with a letter or digit",
    LABEL_PATTERN: "must be 1 to 63 of A-Z, a-z, 0-9 and '_./-', and begin and end with a letter "
    "or digit",
    IDENTIFIER_PATTERN: "must be 1 to 63 of A-Z, a-z, 0-9 and '_', and not begin with a digit; "
    "rename a column of another form in the data",
    MODULE_PATTERN: "must name a class as package.module:Class",
}


def _text(error: Any) -> str:
    pattern = error["ctx"]["pattern"] if error["type"] == "string_pattern_mismatch" else ""
    return FORMS.get(pattern) or error["msg"].removeprefix("Value error, ")


def _message(error: Any, model: type[BaseModel]) -> str:
    if error["type"] == "extra_forbidden" and error["loc"][-1] == "constraints":
        return "unknown field; each table has its own limits: embedding_tables[].constraints"
    if error["type"] == "extra_forbidden":
        *above, name = error["loc"]
        nearest = guess(str(name), _fields_at(model, above))
        return f"unknown field{nearest}; `shardloom spec schema` lists all"
    return _MESSAGES.get(error["type"]) or _text(error)


def _fields_at(model: type[BaseModel], location: Iterable[int | str]) -> list[str]:
    """Names of the fields of what is at a location of pydantic's, in all branches of a union."""
    models = [model]
    for part in location:
        # Numbers of items, keys and tags of branches lead nowhere else.
        fields = [each.model_fields[part] for each in models if part in each.model_fields]
        models = [found for each in fields for found in _models_in(each.annotation)] or models
    return [name for each in models for name in each.model_fields]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from _models_in(each)


# Nobody mends more at once, and looking through them takes time.
_MAX_ERRORS = 200


def problems_of(errors: Sequence[Any], model: type[BaseModel]) -> list[FieldProblem]:
    """Pydantic's errors about `model` as problems, one a field.

    What the branches of a union say of the same value is one fault.
    """
    by_path: dict[str, list[FieldProblem]] = {}
    for error in errors[:_MAX_ERRORS]:
        path = _path(error)
        by_path.setdefault(path, []).append(
            FieldProblem(path, error["type"], _message(error, model))
        )
    # A list that lost its faulty items also counts as too short, and a section is no number, where
    # that would do as well; what is inside is the fault.
    return [
        _merge(found)
        for path, found in by_path.items()
        if not any(other.startswith((f"{path}[", f"{path}.")) for other in by_path)
    ]


def _merge(found: list[FieldProblem]) -> FieldProblem:
    # Of all that the branches of a union say, this alone tells what the user did wrong.
    if bounds := [fault for fault in found if fault.code == "bounds"]:
        return bounds[0]
    messages = dict.fromkeys(fault.message for fault in found)
    return FieldProblem(found[0].path, found[0].code, ", or: ".join(messages))


Identifier = Annotated[str, Field(pattern=IDENTIFIER_PATTERN)]
Label = Annotated[str, Field(pattern=LABEL_PATTERN)]


def is_stored(info: ValidationInfo) -> bool:
    """Whether the spec was accepted once, maybe by an earlier version: it must stay readable."""
    return bool(info.context and info.context.get("stored"))


def is_laid_out(info: ValidationInfo) -> bool:
    """Whether its layout was chosen just now, which is checked though the spec is stored."""
    return bool(info.context and info.context.get("laid_out"))


def _writable(text: str, info: ValidationInfo) -> str:
    """Half a surrogate pair is in no file's name, and URLs lose control characters on their way.

    Of a `[` that ends nowhere in a URL's host no storage knows what it means.
    """
    is_printed = all(character >= " " for character in text) or is_stored(info)
    if not is_printed or "\0" in text or text != text.encode(errors="replace").decode():
        raise problem("unwritable_path", "holds a character that no path can hold")
    try:
        urlsplit(text)
    except ValueError as error:
        if not is_stored(info):
            message = f"is neither a path nor a URL: {error}; write %5B for a '['"
            raise problem("bad_uri", message) from None
    return text


PathText = Annotated[str, Field(min_length=1), AfterValidator(_writable)]


@dataclass(frozen=True)
class Place:
    """Marks a field that names what a job reads, or writes, beside its run folder.

    The service confines what is in such a field: a path or URL, of which `is_uri` says that files
    are named by `file:` or `sqlite:`.
    """

    is_written: bool
    is_uri: bool = False


ReadsFrom = Annotated[PathText, Place(is_written=False)]
WritesTo = Annotated[PathText, Place(is_written=True)]
WritesToUri = Annotated[PathText, Place(is_written=True, is_uri=True)]


def places_of(section: BaseModel, above: str = "") -> Iterator[tuple[str, Place, str | None]]:
    """Every marked field of a spec, or of a section of it: its path, its mark and its value."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from places_of(value, f"{above}{name}.")
        for hint in (*field.metadata, field.annotation):
            yield from ((f"{above}{name}", mark, value) for mark in _marks(hint))


def _marks(hint: Any) -> list[Place]:
    """The marks in a type hint: of `WritesTo | None` that of the first."""
    within = [mark for part in get_args(hint) for mark in _marks(part)]
    return [hint] if isinstance(hint, Place) else within


def is_remote(path: str) -> bool:
    """Whether this is a URL of an object store that `trainer.storage` knows."""
    return path.startswith(("s3://", "gs://"))


@dataclass(frozen=True)
class Bounds(GroupedMetadata):
    """Bounds of what is submitted; what was stored before they were set stays readable."""

    why: str
    least: float | None = None
    most: float | None = None

    def __iter__(self) -> Iterator[object]:
        ends = {"minimum": self.least, "maximum": self.most}
        yield AfterValidator(self._check)
        yield Field(json_schema_extra={name: end for name, end in ends.items() if end is not None})

    def _check(self, value: float, info: ValidationInfo) -> float:
        if self.most is not None and value > self.most and not is_stored(info):
            raise problem("bounds", f"must be at most {self.most:g}, {self.why}")
        if self.least is not None and value < self.least and not is_stored(info):
            raise problem("bounds", f"must be at least {self.least:g}, {self.why}")
        return value


# As torch, Arrow and databases keep whole numbers.
MAX_INTEGER = 2**63 - 1
# As many as the cost model estimates, 16 times the largest run that it is checked against
# (docs/benchmarks.md); more would take seconds to lay out.
MAX_WORKERS = 1 << 14
# 30 years: timers of Python, gloo and NCCL take no more than some hundred.
_MAX_SECONDS = 10**9
FITS_64_BITS = Bounds("the largest number of 64 bits", most=MAX_INTEGER)
Count = Annotated[PositiveInt, FITS_64_BITS]
CountOrZero = Annotated[NonNegativeInt, FITS_64_BITS]
_FEW_WORKERS = Bounds("the most workers of a job", most=MAX_WORKERS)
Workers = Annotated[PositiveInt, _FEW_WORKERS]
WorkersOrNone = Annotated[NonNegativeInt, _FEW_WORKERS]
Seconds = Annotated[PositiveFloat, Bounds("30 years", most=_MAX_SECONDS)]


class SpecModel(BaseModel):
    """Base of every section: unknown keys are errors and values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )
