"""Reading a spec's text: YAML or JSON, and `--set path.to[0].field=value` overrides."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from trainer.spec.base import FieldProblem, SpecError

# Far beyond any spec; what is longer is an accident, or meant to keep us busy.
MAX_TEXT_CHARS = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 32
_MAX_PATH_CHARS = 500
_KEY = r"[^.\[\]=]+"
_INDEX = r"\[[0-9]{1,6}\]"
_PATH_PATTERN = re.compile(rf"{_KEY}(?:\.{_KEY}|{_INDEX})*")
_PART_PATTERN = re.compile(rf"{_INDEX}|{_KEY}")


class _BoundedLoader(yaml.SafeLoader):
    """Counts nodes as often as aliases repeat them, so that a few lines cannot fill the memory."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = 0
        self._num_nodes_below: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """One node with those below it; raises `ComposerError` once there are too many."""
        num_before, mark = self._num_nodes, self.peek_event().start_mark
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        # An alias within its own anchor has no count yet: it has no end.
        self._num_nodes += self._num_nodes_below.get(id(node), MAX_NODES) if is_alias else 1
        if self._num_nodes > MAX_NODES:
            raise yaml.composer.ComposerError(None, None, "too many values or aliases", mark)
        self._num_nodes_below[id(node)] = self._num_nodes - num_before
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping; raises `ComposerError` for a key that stands twice: one would be lost."""
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in names:
                    problem = f"'{_shown(key.value)}' stands twice in one mapping; remove one"
                    raise yaml.composer.ComposerError(None, None, problem, key.start_mark)
                names.add((key.tag, key.value))
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """The value of a node; raises `ConstructorError` where it is not what its tag says."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # about PyYAML's own code
            problem = f"a value is wrong: it cannot be read as !!{node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


# JSON has no dates: they stay texts.
_BoundedLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_document(text: str) -> Any:
    """Parse YAML (of which JSON is a part); raises `SpecError` with the line of a syntax fault."""
    if len(text) > MAX_TEXT_CHARS:
        message = f"has {len(text)} characters, more than the {MAX_TEXT_CHARS} of any spec"
        raise SpecError([FieldProblem("spec", "syntax", message)])
    try:
        return yaml.load(text, _BoundedLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "spec"
        problem = getattr(error, "problem", None) or "not valid YAML or JSON"
        raise SpecError([FieldProblem(where, "syntax", str(problem))]) from None
    except RecursionError:
        raise SpecError([FieldProblem("spec", "syntax", "nested too deeply")]) from None
    except (ValueError, OverflowError) as error:  # a number that is too large, as "\UFFFFFFFF"
        raise SpecError([FieldProblem("spec", "syntax", f"a value is wrong: {error}")]) from None


def apply_overrides(document: Any, overrides: Sequence[str]) -> Any:
    """Return `document` with each `path.to[0].field=value` set; values are read as YAML.

    Missing sections are made on the way; a list index must exist. Raises `SpecError`.
    """
    result = _copy_of(document)
    for override in overrides:
        path, separator, text = override.partition("=")
        if not separator:
            raise _refused(override, "an override reads path.to.field=value")
        _set_path(result, path, parse_document(text))
    return result


def set_values(document: Any, values: Mapping[str, Any]) -> Any:
    """Return `document` with the value of each `path.to[0].field` set, as `apply_overrides` does.

    Raises `SpecError`, also for values that are nested too deeply.
    """
    result = _copy_of(document)
    for path, value in values.items():
        check_depth(value, path)
        _set_path(result, path, value)
    return result


def check_depth(value: Any, field: str) -> None:
    """Raise `SpecError` for a value that is nested deeper than any spec is."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            below
            for each in level
            if isinstance(each, Mapping | list | tuple)
            for below in (each.values() if isinstance(each, Mapping) else each)
        ]
        if not level:
            return
    message = f"is nested deeper than {MAX_DEPTH} levels"
    raise SpecError([FieldProblem(_shown(field), "depth", message)])


def _copy_of(document: Any) -> Any:
    check_depth(document, "spec")
    return _tree_of(document)


def _tree_of(value: Any) -> Any:
    """A copy as JSON would have it: names are texts, and aliases stand for values of their own."""
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else json.dumps(key, default=str): _tree_of(below)
            for key, below in value.items()
        }
    return [_tree_of(below) for below in value] if isinstance(value, list) else value


def _set_path(document: Any, path: str, value: Any) -> None:
    if len(path) > _MAX_PATH_CHARS or not _PATH_PATTERN.fullmatch(path):
        raise _refused(path, "a path reads path.to[0].field")
    *parents, last = keys = [
        int(part[1:-1]) if part.startswith("[") else part for part in _PART_PATTERN.findall(path)
    ]
    for key, following in zip(parents, keys[1:], strict=True):
        if isinstance(document, dict) and isinstance(key, str):
            if document.get(key) is None:
                document[key] = [] if isinstance(following, int) else {}
            document = document[key]
        else:
            document = _item(document, key, path)
    if isinstance(document, dict) and isinstance(last, str):
        document[last] = value
    else:
        _item(document, last, path)
        document[last] = value


def _item(document: Any, key: str | int, path: str) -> Any:
    # A text has items, too, but none that could be set.
    if isinstance(document, list) and isinstance(key, int) and key < len(document):
        return document[key]
    message = (
        f"nothing to set at {_shown(str(key))!r} in the spec; items of lists read as in a[0].b"
    )
    raise _refused(path, message)


def _refused(path: str, message: str) -> SpecError:
    return SpecError([FieldProblem(_shown(path), "override", message)])


def _shown(path: str) -> str:
    """A path as an answer can carry it: not all of a long one, no half of a surrogate pair."""
    text = path if len(path) <= _MAX_PATH_CHARS else f"{path[:_MAX_PATH_CHARS]}..."
    return text.encode(errors="replace").decode()
