"""MkDocs hooks: reference pages from schemas and definitions; links of the top-level pages.

The line `<!-- generated: NAME; HINT -->` of a page is replaced by the text of `GENERATORS[NAME]`;
the hint tells who reads the page in a checkout where else that is.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, get_args

REPO = Path(__file__).parents[1]
# MkDocs is a program of its own, which does not look for modules here.
sys.path.insert(0, str(REPO))

import typer  # noqa: E402
from fastapi import FastAPI  # noqa: E402

import shardloom  # noqa: E402
from service.app import build_app  # noqa: E402
from service.auth.permissions import RULES as ROUTE_RULES  # noqa: E402
from service.auth.permissions import (  # noqa: E402
    Rule,
    Scope,
)
from service.cli.main import build_app as build_cli  # noqa: E402
from service.domain.retries import MAX_BACKOFF_S  # noqa: E402
from service.domain.timeline import ServiceEvent  # noqa: E402
from service.settings import Settings  # noqa: E402
from trainer.datasets.cli import app as data_app  # noqa: E402
from trainer.failures import Budget, EndReason  # noqa: E402
from trainer.protocol.events import (  # noqa: E402
    METRICS,
    Event,
    EventModel,
)
from trainer.spec import json_schema  # noqa: E402

logger = logging.getLogger("mkdocs.hooks")

_MARKER = re.compile(r"^<!-- generated: ([\w-]+); .* -->$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
_TEST_FILE = re.compile(r"\b(test_\w+\.py)`")
_PAGES_OUTSIDE = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
_METHODS = ("get", "post", "put", "patch", "delete")

Schema = Mapping[str, Any]
# Where models are described, by name; others are shown without a link.
Links = Mapping[str, str]


# ---- hooks of MkDocs


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the markers of a page by what is generated."""
    return _MARKER.sub(lambda found: GENERATORS[found[1]](), markdown)


def on_post_build(**_: Any) -> None:
    """Warn of links and test files that do not exist: errors with `--strict`."""
    for name in _PAGES_OUTSIDE:
        for link in _LINK.findall((REPO / name).read_text()):
            if not (REPO / link).exists():
                logger.warning("%s links to %s, which does not exist", name, link)
    reliability = (REPO / "docs" / "reliability.md").read_text()
    files = {path.name for path in (REPO / "tests").rglob("test_*.py")}
    for name in set(_TEST_FILE.findall(reliability)) - files:
        logger.warning("reliability.md names %s, which does not exist", name)


# ---- JSON Schema


def _cell(text: object) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _code(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{text}`" if text else '`""`'


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _here(names: Iterable[str]) -> dict[str, str]:
    return {name: f"#{_slug(name)}" for name in names}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


def _type(schema: Schema, links: Links) -> str:
    """A type in words, with links to the models of the page."""
    if reference := schema.get("$ref"):
        name = _name(reference)
        return f"[{name}]({links[name]})" if name in links else f"`{name}`"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            found = list(dict.fromkeys(_type(each, links) for each in schema[key]))
            return " \\| ".join(found)
    if "const" in schema:
        return _code(schema["const"])
    if "enum" in schema:
        return " \\| ".join(_code(each) for each in schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items") or schema.get("prefixItems", [{}])[0]
        return f"list of {_type(items, links)}"
    if kind == "object":
        values = schema.get("additionalProperties")
        return f"map to {_type(values, links)}" if isinstance(values, dict) else "object"
    return f"{kind or 'any'}{_bounds(schema)}"


def _bounds(schema: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [
        f"{sign} {schema[key]:,}".replace(",", " ")
        for key, sign in signs.items()
        if key in schema and abs(schema[key]) < 2**62
    ]
    return f" ({', '.join(found)})" if found else ""


def _fields(schema: Schema, links: Links) -> Iterator[str]:
    """A table of a model's fields, with the column of meanings only where some field has one."""
    properties: Schema = schema.get("properties", {})
    if not properties:
        return
    required = set(schema.get("required", ()))
    has_text = any(each.get("description") for each in properties.values())
    yield "| field | type | default |" + (" meaning |" if has_text else "")
    yield "|---|---|---|" + ("---|" if has_text else "")
    for name, field in properties.items():
        if name in required:
            default = "**required**"
        elif "default" in field:
            default = "" if field["default"] is None else _code(field["default"])
        else:
            default = ""
        # A whole section as a default says less than the section itself.
        default = default if len(default) <= 60 else "see there"
        row = f"| `{name}` | {_type(field, links)} | {default} |"
        yield row + (f" {_cell(field.get('description', ''))} |" if has_text else "")
    yield ""


def _model(name: str, schema: Schema, links: Links, level: str) -> Iterator[str]:
    yield f"{level} {name} {{ #{_slug(name)} }}\n"
    if text := schema.get("description"):
        yield f"{inspect.cleandoc(text)}\n"
    if "enum" in schema:
        yield " · ".join(_code(each) for each in schema["enum"]) + "\n"
    yield from _fields(schema, links)


def _job_spec() -> str:
    schema = json_schema()
    models: dict[str, Any] = schema["$defs"]
    links = _here(models)
    parts = ["## The spec\n", *_fields(schema, links)]
    for name in _in_order(schema, models):
        parts += _model(name, models[name], links, "##")
    return "\n".join(parts)


def _in_order(schema: Schema, models: Schema) -> list[str]:
    """Names of the models as a reader meets them: depth first from the top."""
    found: dict[str, None] = {}

    def visit(part: Any) -> None:
        for name in re.findall(r'"#/\$defs/(\w+)"', json.dumps(part)):
            if name not in found:
                found[name] = None
                visit(models[name])

    visit({key: value for key, value in schema.items() if key != "$defs"})
    return list(found)


# ---- REST


@cache
def _service() -> FastAPI:
    """The service's app over an empty database in a folder that is removed at the end."""
    folder = tempfile.TemporaryDirectory(prefix="shardloom-docs-")
    settings = Settings(home=Path(folder.name), backend="fake", dashboard=False, auth="local")
    app = build_app(settings)
    app.state.folder = folder  # It is removed with the app.
    return app


def _rest_api() -> str:
    document = _service().openapi()
    schemas: dict[str, Any] = document["components"]["schemas"]
    elsewhere = {name: f"job-spec.md#{_slug(name)}" for name in json_schema()["$defs"]}
    elsewhere |= {model.__name__: f"events.md#{_kind(model)}" for model in _event_models()}
    shown = sorted(set(schemas) - set(elsewhere) - {"JobSpec"})
    links = {"JobSpec": "job-spec.md", **elsewhere, **_here(shown)}
    parts: list[str] = []
    for tag, operations in _by_tag(document).items():
        parts.append(f"## {tag.capitalize()}\n")
        for method, path, operation in operations:
            parts += _operation(method, path, operation, links)
    parts.append("## Bodies\n")
    for name in shown:
        parts += _model(name, schemas[name], links, "###")
    return "\n".join(parts)


def _by_tag(document: Schema) -> dict[str, list[tuple[str, str, Any]]]:
    found: dict[str, list[tuple[str, str, Any]]] = {}
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                operation = item[method]
                found.setdefault(operation["tags"][0], []).append((method, path, operation))
    return dict(sorted(found.items()))


def _operation(method: str, path: str, operation: Schema, links: Links) -> Iterator[str]:
    heading = operation.get("summary", path)
    yield f"### {heading} {{ #{_slug(operation['operationId'])} }}\n"
    yield f"`{method.upper()} {path}`{{ .route .route-{method} }}\n"
    if text := operation.get("description"):
        yield f"{inspect.cleandoc(text)}\n"
    facts = []
    rule = ROUTE_RULES.get((method.upper(), path))
    if rule is not None:
        facts.append(f"**Access**: {_access(rule)}")
    if body := operation.get("requestBody"):
        facts.append(f"**Body**: {_content(body, links)}")
    for status, answer in operation.get("responses", {}).items():
        if status[0] == "2":
            facts.append(f"**{status}**: {_content(answer, links) or answer['description']}")
    yield "  \n".join(facts) + "\n"
    parameters = [each for each in operation.get("parameters", ()) if each["in"] != "path"]
    if parameters:
        yield "| parameter | in | type | meaning |"
        yield "|---|---|---|---|"
        for each in parameters:
            schema = each.get("schema", {})
            text = each.get("description") or schema.get("description", "")
            yield f"| `{each['name']}` | {each['in']} | {_type(schema, links)} | {_cell(text)} |"
        yield ""


def _access(rule: Rule) -> str:
    role = f"role `{rule.role.name.lower()}`"
    return {
        Scope.PUBLIC: "anybody",
        Scope.SIGNED_IN: "any credentials",
        Scope.ANYWHERE: f"{role} in some project; only what belongs to such projects is shown",
        Scope.JOB: f"{role} in the project of the job",
        Scope.PROJECT: f"{role} in that project",
        Scope.EVERYTHING: f"{role} in all projects",
        Scope.ATTEMPT: "the token of that attempt",
    }[rule.scope]


def _content(part: Schema, links: Links) -> str:
    kinds = part.get("content", {})
    return ", ".join(
        _type(body["schema"], links)
        if kind == "application/json" and body.get("schema")
        else f"`{kind}`"
        for kind, body in kinds.items()
    )


# ---- command line


def _cli() -> str:
    root: Any = typer.main.get_command(build_cli())
    root.commands["data"] = typer.main.get_command(data_app)
    panels: dict[str, list[str]] = {}
    for panel, name, command in _commands(root):
        panels.setdefault(panel, []).append("\n".join(_command(name, command)))
    return "\n".join(f"## {panel}\n\n" + "\n".join(parts) for panel, parts in panels.items())


def _commands(group: Any, prefix: str = "", panel: str = "Tools") -> Iterator[tuple[str, str, Any]]:
    """(panel, name, command) of all below a group, in the order of its help."""
    for name, command in group.commands.items():
        path, shown_in = f"{prefix}{name}", str(command.rich_help_panel or panel)
        is_group = hasattr(command, "commands")
        # Of groups only those that have options of their own.
        if command.params or not is_group:
            yield shown_in, path, command
        if is_group:
            yield from _commands(command, f"{path} ", shown_in)


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"### {name} {{ #{_slug(name)} }}\n"
    context = typer.Context(command)
    yield f"```\nshardloom {name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    if command.help:
        yield f"{inspect.cleandoc(command.help)}\n"
    records = (each.get_help_record(context) for each in command.params)
    rows = [f"| {_code(names)} | {_cell(text)} |" for names, text in filter(None, records)]
    if rows:
        yield "| argument, option | meaning |"
        yield "|---|---|"
        yield from rows
        yield ""


# ---- settings, metrics, events


def _settings() -> str:
    parts = ["| variable | meaning |", "|---|---|"]
    for name, field in Settings.model_fields.items():
        text = _cell(field.description or "")
        if field.default_factory is None and field.default not in (None, [], {}, ()):
            default = _plain(field.default).replace(sys.executable, "python")
            text += f" Default: {_code(default)}."
        aliases = getattr(field.validation_alias, "choices", (name, f"SHARDLOOM_{name.upper()}"))
        names = ", ".join(_code(str(each)) for each in aliases[1:])
        parts.append(f"| {names} | {text} |")
    return "\n".join(parts) + "\n"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _metrics() -> str:
    registry = _service().state.context.telemetry.registry
    parts = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(registry.collect(), key=lambda each: each.name):
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        labels |= set(getattr(family, "_labelnames", ()))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        shown = ", ".join(f"`{each}`" for each in sorted(labels))
        parts.append(f"| `{name}` | {family.type} | {shown} | {_cell(family.documentation)} |")
    return "\n".join(parts) + "\n"


def _job_metrics() -> str:
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in METRICS.items()]
    return "\n".join(["| name | meaning |", "|---|---|", *rows]) + "\n"


def _events() -> str:
    parts: list[str] = []
    for model in _event_models():
        schema = model.model_json_schema()
        links: Links = {}
        kind = _kind(model)
        parts.append(f"### {kind} {{ #{kind} }}\n\n{inspect.cleandoc(model.__doc__ or '')}\n")
        own = {
            name: field
            for name, field in schema["properties"].items()
            if name not in ("kind", "time")
        }
        parts += _fields({**schema, "properties": own}, links)
    return "\n".join(parts)


def _service_events() -> str:
    rows = [f"| `{kind}` | {_cell(kind.meaning)} |" for kind in ServiceEvent]
    return "\n".join(("| kind | meaning |", "|---|---|", *rows)) + "\n"


def _event_models() -> Iterator[type[EventModel]]:
    union, *_ = get_args(Event)
    yield from get_args(union)


def _kind(model: type[EventModel]) -> str:
    return str(model.model_fields["kind"].default)


_BUDGETS = {
    Budget.USER: "another attempt, counted",
    Budget.FREE: "another attempt, not counted",
    Budget.NONE: "the job ends",
}
_ENDS = {
    EndReason.COMPLETED: "the job has succeeded",
    EndReason.CANCELLED: "the job is cancelled",
    EndReason.PAUSED: "the job is paused; after a preemption it waits again",
}


def _end_reasons() -> str:
    parts = ["| reason | what follows | what to change |", "|---|---|---|"]
    for reason in EndReason:
        rule = reason.rule
        follows = [_ENDS.get(reason, _BUDGETS[rule.budget])]
        if rule.budget is not Budget.NONE and rule.first_backoff_s:
            follows.append(f"after {rule.first_backoff_s:g} to {MAX_BACKOFF_S:g} s")
        if rule.needs_memory:
            follows.append("a larger shard group size where it is `auto`")
        if rule.avoids_host:
            follows.append("not on that host for `recovery.exclude_host_s`")
        if reason is EndReason.NO_ROOM:
            follows.append("when the minimum of workers fits")
        parts.append(f"| `{reason.value}` | {', '.join(follows)} | {_cell(rule.advice)} |")
    return "\n".join(parts) + "\n"


def _sdk() -> str:
    parts = ["| call | meaning |", "|---|---|"]
    for name, call in sorted(inspect.getmembers(shardloom.Client, inspect.isfunction)):
        if not name.startswith("_"):
            names = [each for each in inspect.signature(call).parameters if each != "self"]
            text = (inspect.getdoc(call) or "").partition("\n\n")[0]
            parts.append(f"| `{name}({', '.join(names)})` | {_cell(text)} |")
    return "\n".join(parts) + "\n"


def _sdk_errors() -> str:
    parts = ["| error | is a | meaning |", "|---|---|---|"]
    for name in shardloom.__all__:
        error = getattr(shardloom, name)
        if isinstance(error, type) and issubclass(error, Exception):
            text = (inspect.getdoc(error) or "").partition("\n\n")[0]
            parts.append(f"| `{name}` | `{error.__base__.__name__}` | {_cell(text)} |")
    return "\n".join(parts) + "\n"


GENERATORS = {
    "cli": _cli,
    "end-reasons": _end_reasons,
    "events": _events,
    "job-metrics": _job_metrics,
    "job-spec": _job_spec,
    "metrics": _metrics,
    "rest-api": _rest_api,
    "sdk": _sdk,
    "sdk-errors": _sdk_errors,
    "service-events": _service_events,
    "settings": _settings,
}
