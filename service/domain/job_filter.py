"""Which jobs a list shows: the filters of REST, SDK, command line, dashboard and store. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from service.domain.models import JobStatus

# Each of a kind costs the database a look-up of its own.
_MAX_OF_A_KIND = 20
MAX_SEARCH_CHARS = 200
# Without names of groups, which JSON Schema writes in another way than Python.
_BOUND = r"^([^<>=\s]{1,200})\s*([<>]=?)\s*([+-]?[0-9.]{1,40}(?:[eE][+-]?[0-9]{1,3})?)$"
_LABEL = r"^[^=]+="
_DATETIME = TypeAdapter(datetime)
# Of a URL, which names each of several.
_PARAMETERS = {"statuses": "status", "labels": "label", "metrics": "metric"}


@dataclass(frozen=True)
class MetricBound:
    """What the newest value of a metric must be; NaN and a metric that is not there never are."""

    name: str
    comparison: str
    value: float

    @classmethod
    def parse(cls, text: str) -> MetricBound:
        """The bound in `validation/ne < 0.8`; raises ValueError."""
        if found := re.fullmatch(_BOUND, text.strip()):
            # Of `1.2.3` and of what is beyond all floats there is no number.
            with suppress(ValueError):
                value = float(found[3])
                if math.isfinite(value):
                    return cls(found[1], found[2], value)
        message = "'{text}' is not as in validation/ne<0.8, with <, <=, > or >="
        raise PydanticCustomError("metric_bound", message, {"text": text})

    def __str__(self) -> str:
        return f"{self.name}{self.comparison}{self.value!r}"


def _label(value: Any) -> Any:
    if isinstance(value, str):
        if not re.match(_LABEL, value):
            message = "'{label}' is no label; give KEY=VALUE, as in team=ads"
            raise PydanticCustomError("label", message, {"label": value})
        return tuple(value.split("=", 1))
    return value


def _unix_s(value: Any) -> float:
    moment = _DATETIME.validate_python(value)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_Label = Annotated[
    tuple[str, str],
    BeforeValidator(_label),
    PlainSerializer("=".join),
    WithJsonSchema({"type": "string", "pattern": _LABEL, "examples": ["team=ads"]}),
]
_Bound = Annotated[
    MetricBound,
    BeforeValidator(lambda value: MetricBound.parse(value) if isinstance(value, str) else value),
    PlainSerializer(str),
    WithJsonSchema({"type": "string", "pattern": _BOUND, "examples": ["validation/ne<0.8"]}),
]
_Moment = Annotated[
    float,
    BeforeValidator(_unix_s),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]


class JobFilter(BaseModel):
    """Jobs for which everything holds that is given; of `statuses` one. Times are Unix seconds."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        # A label of a script may be a number, as in `{"tier": 1}`.
        coerce_numbers_to_str=True,
        validate_by_name=True,
        alias_generator=lambda name: _PARAMETERS.get(name, name),
    )

    after: str | None = Field(default=None, description="`next` of the page before.")
    statuses: tuple[JobStatus, ...] = Field(
        default=(),
        max_length=_MAX_OF_A_KIND,
        description="Of several, one must hold.",
    )
    name: str | None = Field(default=None, examples=["movielens-demo"])
    search: str = Field(
        default="",
        max_length=MAX_SEARCH_CHARS,
        description="A part of the name or of the id, in any case.",
    )
    project: str | None = Field(default=None, examples=["ads"])
    labels: Annotated[
        tuple[_Label, ...],
        BeforeValidator(lambda value: [*value.items()] if isinstance(value, Mapping) else value),
    ] = Field(
        default=(),
        max_length=_MAX_OF_A_KIND,
        description="`KEY=VALUE`; of several, all must hold.",
    )
    metrics: tuple[_Bound, ...] = Field(
        default=(),
        max_length=_MAX_OF_A_KIND,
        description="`NAME<VALUE` (or `<=`, `>`, `>=`) of the newest value; all must hold.",
    )
    created_after: _Moment | None = Field(
        default=None, description="ISO 8601 (UTC if it names no zone) or Unix seconds; inclusive."
    )
    created_before: _Moment | None = Field(
        default=None, description="As `created_after`, but exclusive."
    )

    @property
    def params(self) -> dict[str, Any]:
        """As parameters of `GET /v1/jobs`."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)


ALL_JOBS = JobFilter()
