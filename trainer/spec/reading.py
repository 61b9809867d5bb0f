"""Reading a spec's text: YAML or JSON, and `--set path.to[0].field=value` overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import yaml

from trainer.spec.problems import FieldProblem, SpecError


def parse_document(text: str) -> Any:
    """Parse YAML (of which JSON is a part); raises `SpecError` with the line of a syntax fault."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "spec"
        problem = getattr(error, "problem", None) or "not valid YAML or JSON"
        raise SpecError([FieldProblem(where, "syntax", str(problem))]) from None


def apply_overrides(document: Any, overrides: Sequence[str]) -> Any:
    """Return `document` with each `path.to[0].field=value` set; values are read as YAML.

    Missing sections are made on the way; a list index must exist. Raises `SpecError`.
    """
    result = json.loads(json.dumps(document))
    for override in overrides:
        path, separator, text = override.partition("=")
        keys: list[str | int] = [
            int(key[1:-1]) if key.startswith("[") else key
            for key in re.findall(r"\[\d+\]|[^.\[\]]+", path)
        ]
        if not separator or not keys:
            raise SpecError(
                [FieldProblem(override, "override", "an override reads path.to.field=value")]
            )
        _set_path(result, keys, parse_document(text), path)
    return result


def _set_path(document: Any, keys: list[str | int], value: Any, path: str) -> None:
    *parents, last = keys
    for key, following in zip(parents, keys[1:], strict=True):
        if isinstance(document, dict) and isinstance(key, str):
            document = document.setdefault(key, [] if isinstance(following, int) else {})
        else:
            document = _item(document, key, path)
    if isinstance(document, dict) and isinstance(last, str):
        document[last] = value
    else:
        _item(document, last, path)
        document[last] = value


def _item(document: Any, key: str | int, path: str) -> Any:
    try:
        return document[key]
    except (KeyError, IndexError, TypeError):
        raise SpecError(
            [FieldProblem(path, "override", f"nothing to set at {key!r} in the spec")]
        ) from None
