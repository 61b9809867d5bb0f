"""The text of a spec as an editor needs it: completion, places of fields, edits, differences. Pure.

The text is the truth: a field that is changed elsewhere is changed in it, and comments stay. Paths
read `parallelism.sync.every_steps`, as those of `--set` and of problems do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainer.spec import json_schema, validate_spec
from trainer.spec.base import FieldProblem, SpecError
from trainer.spec.job import JobSpec
from trainer.spec.parse import parse_document, set_values

_EXAMPLES = Path(__file__).parent / "examples"
_LINE = re.compile(r"line (\d+), column \d+")
_PART = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


@dataclass(frozen=True)
class FieldSchema:
    """What the schema says of one field; `choices` are all values, where they are few."""

    kind: str
    description: str
    choices: tuple[str, ...]
    default: Any


@cache
def schema_fields() -> Mapping[str, FieldSchema]:
    """Every field of the spec by its path, with `[]` for the items of a list."""
    schema = json_schema()
    return dict(_walk(schema, schema["$defs"], ""))


def _walk(
    node: Mapping[str, Any], definitions: Mapping[str, Any], path: str, depth: int = 0
) -> Iterator[tuple[str, FieldSchema]]:
    if depth > 6:
        return
    for name, below in node.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        shapes = [_resolved(each, definitions) for each in below.get("anyOf", [below])]
        choices = [str(value) for each in shapes for value in each.get("enum", ())]
        choices += [str(each["const"]) for each in shapes if "const" in each]
        kinds = [each.get("type", "any") for each in shapes]
        choices += ["true", "false"] if "boolean" in kinds else []
        kind = " or ".join(dict.fromkeys(kinds))
        told = below.get("description") or shapes[0].get("description", "")
        yield here, FieldSchema(kind, told, tuple(choices), below.get("default"))
        for each in shapes:
            yield from _walk(each, definitions, here, depth + 1)
            items = _resolved(each.get("items", {}), definitions)
            for item in items.get("anyOf", [items]):
                yield from _walk(_resolved(item, definitions), definitions, f"{here}[]", depth + 1)


def _resolved(node: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = node.get("$ref", "") if isinstance(node, Mapping) else ""
    return definitions[reference.rpartition("/")[2]] if reference else node


def completions() -> dict[str, list[dict[str, str]]]:
    """Options of CodeMirror: of a section's fields by its name, of values by `section.field=`.

    A section is named by its last part: editors see the lines above the cursor only.
    """
    table: dict[str, list[dict[str, str]]] = {}
    for path, field in schema_fields().items():
        above, _, name = path.rpartition(".")
        section = re.sub(r"\[\]", "", above).rpartition(".")[2]
        options = table.setdefault(section, [])
        if all(option["label"] != name for option in options):
            told = field.description.partition("\n\n")[0].replace("\n", " ")
            more = {"info": told} if told else {}
            option = {"label": name, "type": "property", "detail": field.kind, **more}
            options.append({**option, "apply": f"{name}: "})
        for choice in field.choices:
            values = table.setdefault(f"{section}.{name}=", [])
            if all(option["label"] != choice for option in values):
                values.append({"label": choice, "type": "enum"})
    return table


@dataclass(frozen=True)
class Checked:
    """A text that was looked at: its document, its spec if it has no problems, else these."""

    document: Any
    spec: JobSpec | None
    problems: tuple[FieldProblem, ...]


def check(text: str) -> Checked:
    """Parse and check a text, as `shardloom spec check` does."""
    document = None
    try:
        document = parse_document(text)
        return Checked(document, validate_spec(document), ())
    except SpecError as error:
        return Checked(document, None, error.problems)


def lines_of(text: str, paths: Sequence[str]) -> list[int]:
    """The line (from 1) where each field stands or, if it is not there, its section begins."""
    root = _composed(text) if paths else None
    return [_line_of(root, path) for path in paths]


def _line_of(node: Any, path: str) -> int:
    if found := _LINE.match(path):
        return int(found[1])
    line = 1
    for key in _keys_of(path):
        pair = _pair_of(node, key)
        if pair is None:
            break
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


def value_at(document: Any, path: str) -> Any:
    """The value of a field in a document; None where it is not there."""
    for key in _keys_of(path):
        is_in_list = isinstance(document, list) and isinstance(key, int) and key < len(document)
        if not is_in_list and not (isinstance(document, dict) and key in document):
            return None
        document = document[key]
    return document


def with_value(text: str, path: str, value: Any) -> str:
    """The text with a field changed, or taken out by None; the rest of it stays, comments too.

    Where that cannot be done in place the document is written anew. Raises `SpecError`.
    """
    document = parse_document(text)
    wanted = _without(document, path) if value is None else set_values(document, {path: value})
    if wanted == document:
        return text
    for changed in _edits(text, path, value):
        with suppress(SpecError):
            if parse_document(changed) == wanted:
                return changed
    return written(wanted)


def written(document: Any) -> str:
    """A document as YAML."""
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def _edits(text: str, path: str, value: Any) -> Iterator[str]:
    """The text with a value replaced, put in, or taken out: right for most texts, not for all."""
    *above, name = _keys_of(path)
    parent = _composed(text)
    for key in above:
        pair = _pair_of(parent, key)
        parent = pair[1] if pair else None
    pair = _pair_of(parent, name)
    shown = json.dumps(value) if value is None or isinstance(value, dict | list) else _scalar(value)
    if pair and value is None:
        first, last = pair[0].start_mark, pair[1].end_mark
        end = text.find("\n", last.index)
        yield text[: first.index - first.column] + (text[end + 1 :] if end >= 0 else "")
    elif pair:
        start, end = pair[1].start_mark.index, pair[1].end_mark.index
        yield text[:start] + shown + text[end:]
    elif isinstance(parent, yaml.MappingNode) and parent.flow_style:
        at = parent.end_mark.index - 1
        yield f"{text[:at]}, {name}: {shown}{text[at:]}"
        yield f"{text[:at]}{name}: {shown}{text[at:]}"
    elif isinstance(parent, yaml.MappingNode) and parent.value:
        last_key = parent.value[-1][0]
        at = last_key.start_mark.index
        yield f"{text[:at]}{name}: {shown}\n{' ' * last_key.start_mark.column}{text[at:]}"
    elif len(above) == 1 and parent is None:
        yield f"{text.rstrip()}\n{above[0]}: {{{name}: {shown}}}\n"


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, width=10_000).removesuffix("...\n").strip()


def _without(document: Any, path: str) -> Any:
    *above, name = _keys_of(path)
    parent = made = deepcopy(document)
    for key in above:
        parent = parent.get(key) if isinstance(parent, dict) else None
    if isinstance(parent, dict):
        parent.pop(name, None)
    return made


def _composed(text: str) -> Any:
    try:
        return yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):
        return None


def _pair_of(node: Any, key: str | int) -> tuple[Any, Any] | None:
    if isinstance(node, yaml.MappingNode):
        return next((pair for pair in node.value if pair[0].value == key), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key], node.value[key]
    return None


def _keys_of(path: str) -> list[str | int]:
    return [int(index) if index else name for index, name in _PART.findall(path)]


# ---- templates


def templates() -> dict[str, str]:
    """Texts of the example specs by file name; none where they were not installed."""
    paths = sorted(_EXAMPLES.glob("*.yaml"))
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


# ---- values on one line


def flow(value: Any) -> str:
    """A value as it is written on one line."""
    return json.dumps(value) if isinstance(value, dict | list) else _scalar(value)


def shown(value: Any) -> str:
    """A value in a table of differences."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return "\N{EN DASH}" if value is None else flow(value)


# ---- differences


def _values(document: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value); items of a list go by their `name`, so that order does not matter."""
    if isinstance(document, dict) and document:
        for name, below in document.items():
            yield from _values(below, f"{path}.{name}" if path else str(name))
    elif isinstance(document, list) and document and all(_is_named(item) for item in document):
        for item in document:
            rest = {key: each for key, each in item.items() if key != "name"} or {"": "yes"}
            yield from _values(rest, f"{path}[{item['name']}]")
    else:
        yield path, document


def _is_named(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("name"), str)


def differences(documents: Sequence[Any]) -> dict[str, list[Any]]:
    """Values by path where documents differ, one of each; None where one does not have it."""
    flattened = [dict(_values(document)) for document in documents]
    paths = dict.fromkeys(path for each in flattened for path in each)
    found = {path: [each.get(path) for each in flattened] for path in paths}

    def is_told(path: str, values: Sequence[Any]) -> bool:
        """What is empty here is told by what others have below it."""
        below = (f"{path}.", f"{path}[")
        has_values = any(value not in (None, {}, []) for value in values)
        return has_values or not any(other.startswith(below) for other in paths)

    return {
        path: values
        for path, values in found.items()
        if any(v != values[0] for v in values[1:]) and is_told(path, values)
    }
