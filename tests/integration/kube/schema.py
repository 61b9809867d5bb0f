"""What objects may hold: unknown fields, defaults, and rules, told as Kubernetes tells them.

Works on the structural schemas of custom definitions (all they say is enforced; their CEL rules
are the few in `_RULES`, and a definition with another rule is refused), and on the published
JSON schemas of built-in kinds (from kubernetes-validate).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate

_MANAGERS = ("ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue")
_DELETION_SOURCES = ("onSuccess", "onFailure")
_RULES: dict[str, Callable[[Any, Any], bool]] = {
    "self == oldSelf": lambda new, old: old is None or new == old,
    "self in ['ray.io/kuberay-operator', 'kueue.x-k8s.io/multikueue']": lambda new, old: (
        new in _MANAGERS
    ),
    "!(has(self.jobStatus) && has(self.jobDeploymentStatus))": lambda new, old: (
        not ("jobStatus" in new and "jobDeploymentStatus" in new)
    ),
    "has(self.jobStatus) || has(self.jobDeploymentStatus)": lambda new, old: (
        "jobStatus" in new or "jobDeploymentStatus" in new
    ),
    "!((has(self.onSuccess) || has(self.onFailure)) && has(self.deletionRules))": (
        lambda new, old: not (any(n in new for n in _DELETION_SOURCES) and "deletionRules" in new)
    ),
    "((has(self.onSuccess) && has(self.onFailure)) || has(self.deletionRules))": (
        lambda new, old: all(n in new for n in _DELETION_SOURCES) or "deletionRules" in new
    ),
}
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_GO_TYPES = {"integer": "number", "boolean": "bool"}
_BLOCKING = (
    "FieldValueNotSupported",
    "FieldValueRequired",
    "FieldValueTooLong",
    "FieldValueTooMany",
    "FieldValueTypeInvalid",
)
_BYTE_FORMAT = re.compile(r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$")


@dataclass(frozen=True)
class Cause:
    """What is wrong with one field."""

    reason: str
    message: str
    field: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


_RULES_NOT_CHECKED = Cause(
    "FieldValueInvalid",
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation",
    "<nil>",
)


@dataclass(frozen=True)
class Schema:
    """Schema of one kind; an empty one allows everything."""

    root: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        strange = sorted(set(_rules_in(self.root)) - set(_RULES))
        if strange:
            raise NotImplementedError(f"CEL rules that are not in _RULES: {strange}")

    def unknown_fields(self, value: dict[str, Any]) -> list[str]:
        """Paths of fields that the schema does not know."""
        return list(_unknown(self.root, value, "", at_root=True))

    def pruned(self, value: dict[str, Any]) -> dict[str, Any]:
        """The object without fields that the schema does not know."""
        result: dict[str, Any] = _pruned(self.root, value, at_root=True)
        return result

    def with_defaults(self, value: dict[str, Any]) -> dict[str, Any]:
        """The object with the defaults of fields that it leaves out."""
        result: dict[str, Any] = _defaulted(self.root, value)
        return result

    def violations(self, value: dict[str, Any]) -> list[Cause]:
        """What breaks the schema, but for its CEL rules."""
        return list(_violations(self.root, value, ""))

    def broken_rules(
        self, value: dict[str, Any], old: dict[str, Any] | None, found: list[Cause]
    ) -> list[Cause]:
        """CEL rules that an object breaks, not looked at if what was found is too bad for that.

        `old` is the object before an update.
        """
        if self.has_rules and any(cause.reason in _BLOCKING for cause in found):
            return [_RULES_NOT_CHECKED]
        return list(_broken_rules(self.root, value, old, ""))

    def of_field(self, name: str) -> Schema:
        """Schema of one field of the object."""
        return Schema(self.root.get("properties", {}).get(name, {}))

    @property
    def has_rules(self) -> bool:
        """Whether the definition has CEL rules."""
        return next(_rules_in(self.root), None) is not None

    def decoding_error(self, value: dict[str, Any], struct: str) -> str | None:
        """Why Go could not read the object at all into its struct, as built-in kinds are read."""
        return next(_decoding_errors(self.root, value, struct, ""), None)


@cache
def built_in_schema(kind: str, group: str) -> Schema:
    """Published schema of a kind that Kubernetes has itself."""
    short = f"-{group.split('.')[0]}" if group else ""
    return Schema(_read(f"{kind.lower()}{short}-v1.json"))


@cache
def metadata_schema() -> Schema:
    """Published schema of ObjectMeta, under the name metadata."""
    reference = {"$ref": "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    return Schema({"properties": {"metadata": reference}})


@cache
def _read(name: str) -> dict[str, Any]:
    package = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    version = kubernetes_validate.latest_version()
    document: dict[str, Any] = json.loads(
        (package / f"v{version}-local" / name).read_text(encoding="utf-8")
    )
    return document


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    definition: dict[str, Any] = _read("_definitions.json")["$defs"][reference.rsplit("/", 1)[-1]]
    return definition


def _rules_in(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for part in schema:
            yield from _rules_in(part)
    elif isinstance(schema, dict):
        rules = schema.get("x-kubernetes-validations", ())
        yield from (rule["rule"] for rule in rules if isinstance(rule, dict))
        for part in schema.values():
            yield from _rules_in(part)


def _is_open(schema: dict[str, Any]) -> bool:
    return bool(schema.get("x-kubernetes-preserve-unknown-fields")) or not (
        "properties" in schema or "additionalProperties" in schema
    )


def _child(schema: dict[str, Any], name: str, at_root: bool) -> dict[str, Any] | None:
    """Schema of a field; None if it is unknown, empty where anything goes."""
    if at_root and name in ("apiVersion", "kind"):
        return {}
    if at_root and name == "metadata":
        return _resolved(metadata_schema().root["properties"]["metadata"])
    known = schema.get("properties", {})
    if name in known:
        return _resolved(known[name])
    more = schema.get("additionalProperties")
    if isinstance(more, dict):
        return _resolved(more)
    return {} if more is True or _is_open(schema) else None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _unknown(
    schema: dict[str, Any], value: Any, path: str, *, at_root: bool = False
) -> Iterator[str]:
    schema = _resolved(schema)
    if isinstance(value, list):
        items = schema.get("items", {})
        for index, item in enumerate(value):
            yield from _unknown(items, item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for name, part in value.items():
            child = _child(schema, name, at_root)
            if child is None:
                yield _join(path, name)
            else:
                yield from _unknown(child, part, _join(path, name))


def _pruned(schema: dict[str, Any], value: Any, *, at_root: bool = False) -> Any:
    schema = _resolved(schema)
    if isinstance(value, list):
        return [_pruned(schema.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    children = {name: _child(schema, name, at_root) for name in value}
    return {
        name: _pruned(child, value[name]) for name, child in children.items() if child is not None
    }


def _defaulted(schema: dict[str, Any], value: Any) -> Any:
    if isinstance(value, list):
        return [_defaulted(schema.get("items", {}), item) for item in value]
    if not isinstance(value, dict):
        return value
    known = schema.get("properties", {})
    result = {
        name: json.loads(json.dumps(child["default"]))
        for name, child in known.items()
        if "default" in child and value.get(name) is None
    }
    for name, part in value.items():
        if name not in result:
            child = known.get(name) or schema.get("additionalProperties") or {}
            result[name] = _defaulted(child if isinstance(child, dict) else {}, part)
    return result


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return next(name for name, types in _TYPES.items() if isinstance(value, types))


def _fits_type(schema: dict[str, Any], value: Any) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, int | str) and not isinstance(value, bool)
    wanted = schema.get("type")
    names = wanted if isinstance(wanted, list) else [wanted]
    if wanted is None or (value is None and (schema.get("nullable") or "null" in names)):
        return True
    if isinstance(value, bool):
        return "boolean" in names
    if isinstance(value, float) and value.is_integer() and "integer" in names:
        return True
    return any(isinstance(value, _TYPES[name]) for name in names if name in _TYPES)


def _violations(schema: dict[str, Any], value: Any, path: str) -> Iterator[Cause]:
    schema = _resolved(schema)
    if not _fits_type(schema, value):
        name, is_type = _wanted_type(schema), _type_of(value)
        if isinstance(value, float) and "format" in schema:
            name, is_type = schema["format"], "float64"
        said = f"{path} in body must be of type {name}: {json.dumps(is_type)}"
        yield Cause("FieldValueTypeInvalid", f"Invalid value: {json.dumps(is_type)}: {said}", path)
        return
    yield from _value_violations(schema, value, path)
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _violations(schema.get("items", {}), item, f"{path}[{index}]")
    elif isinstance(value, dict):
        yield from _object_violations(schema, value, path)


def _wanted_type(schema: dict[str, Any]) -> str:
    wanted = schema.get("type")
    return str(wanted[0] if isinstance(wanted, list) else wanted or "int-or-string")


def _object_violations(schema: dict[str, Any], value: dict[str, Any], path: str) -> Iterator[Cause]:
    for name in schema.get("required", ()):
        if value.get(name) is None:
            yield Cause("FieldValueRequired", "Required value", _join(path, name))
    for name, part in value.items():
        child = _child(schema, name, at_root=not path)
        if child and not (part is None and name not in schema.get("required", ())):
            yield from _violations(child, part, _join(path, name))


def _value_violations(schema: dict[str, Any], value: Any, path: str) -> Iterator[Cause]:
    if "enum" in schema and value not in schema["enum"]:
        allowed = ", ".join(json.dumps(each) for each in schema["enum"])
        said = f"Unsupported value: {json.dumps(value)}: supported values: {allowed}"
        yield Cause("FieldValueNotSupported", said, path)
    for said in _broken_bounds(schema, value):
        shown = json.dumps(value)
        yield Cause("FieldValueInvalid", f"Invalid value: {shown}: {path} in body {said}", path)


def _broken_bounds(schema: dict[str, Any], value: Any) -> Iterator[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            yield f"should be greater than or equal to {schema['minimum']}"
        if value > schema.get("maximum", value):
            yield f"should be less than or equal to {schema['maximum']}"
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"should be at least {schema['minLength']} chars long"
        if len(value) > schema.get("maxLength", len(value)):
            yield f"should be at most {schema['maxLength']} chars long"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"should match '{schema['pattern']}'"
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"should have at least {schema['minItems']} items"
        if len(value) > schema.get("maxItems", len(value)):
            yield f"should have at most {schema['maxItems']} items"


def _broken_rules(schema: dict[str, Any], value: Any, old: Any, path: str) -> Iterator[Cause]:
    schema = _resolved(schema)
    for rule in schema.get("x-kubernetes-validations", ()):
        if isinstance(rule, dict) and not _RULES[rule["rule"]](value, old):
            shown = f"{json.dumps(value)}: " if isinstance(value, str) else ""
            said = f"Invalid value: {shown}{rule.get('message', rule['rule'])}"
            yield Cause("FieldValueInvalid", said, path)
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(schema.get("items", {}), item, None, f"{path}[{index}]")
    elif isinstance(value, dict):
        before = old if isinstance(old, dict) else {}
        for name, part in value.items():
            child = _child(schema, name, at_root=not path)
            if child:
                yield from _broken_rules(child, part, before.get(name), _join(path, name))


def _decoding_errors(schema: dict[str, Any], value: Any, struct: str, path: str) -> Iterator[str]:
    """Like those of Go's JSON decoder: the innermost struct, and the path without indices."""
    struct = schema["$ref"].rsplit(".", 1)[-1] if "$ref" in schema else struct
    schema = _resolved(schema)
    if not _fits_type(schema, value):
        is_type = _GO_TYPES.get(_type_of(value), _type_of(value))
        wanted = "[]uint8" if schema.get("format") == "byte" else _wanted_type(schema)
        field = f"{struct}.{path}" if struct else path
        yield f"json: cannot unmarshal {is_type} into Go struct field {field} of type {wanted}"
    elif isinstance(value, str) and schema.get("format") == "byte":
        if not _BYTE_FORMAT.match(value):
            yield "illegal base64 data at input byte 0"
    elif isinstance(value, list):
        for item in value:
            yield from _decoding_errors(schema.get("items", {}), item, struct, path)
    elif isinstance(value, dict):
        inner = schema.get("additionalProperties")
        for name, part in value.items():
            child = schema.get("properties", {}).get(name)
            if child is not None:
                where = _join(path, name) if struct else ""
                yield from _decoding_errors(child, part, struct, where)
            elif isinstance(inner, dict):
                yield from _decoding_errors(inner, part, struct, path)
