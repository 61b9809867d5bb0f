"""Base models of REST bodies: pages and problems (pydantic only).

Times are Unix seconds, durations `_s`, sizes `_bytes`. Lists are pages: `next` is the value to
give as `after` for the following page, and null on the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from trainer.spec.base import FieldProblem

Item = TypeVar("Item")


class ApiModel(BaseModel):
    """Base of every body. Built from domain dataclasses by attribute."""

    model_config = ConfigDict(from_attributes=True)


class RequestModel(ApiModel):
    """Base of bodies of requests: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


class Page(ApiModel, Generic[Item]):
    """One page of a list."""

    items: list[Item]
    next: str | None = None

    @classmethod
    def of(cls, found: Sequence[Any], limit: int, view: Callable[[Any], Item]) -> Page[Item]:
        """At most `limit` items, `view` of what was found: that is one more where there is more."""
        following = str(found[limit - 1].id) if len(found) > limit else None
        return cls(items=[view(each) for each in found[:limit]], next=following)


class Problem(ApiModel):
    """RFC 9457 problem details; `code` is stable and machine-readable."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    instance: str | None = None
    fields: list[FieldProblem] = []
