"""The PromQL in our rules and dashboards, and the names of metrics in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from deploy.observability.build import built_files

REPO = Path(__file__).parents[3]
FOLDER = REPO / "deploy" / "observability"
_STRING = re.compile(r'"[^"]*"')
_BY = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)")
_MATCHERS = re.compile(r"\{[^}]*\}")
_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*(?!\s*\(|[A-Za-z0-9_:])")
_WORDS = frozenset({"by", "on", "or", "and", "unless", "bool", "offset", "without", "ignoring"})
_DURATION = re.compile(r"\[[^\]]*\]")


def rules() -> list[dict[str, Any]]:
    """Every rule of every file."""
    files = sorted((FOLDER / "rules").glob("*.yaml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def dashboard_documents() -> dict[str, dict[str, Any]]:
    return {
        path.removeprefix("dashboards/"): json.loads(text)
        for path, text in built_files().items()
        if path.startswith("dashboards/")
    }


def dashboard_queries(job_id: str = "job-0000000000ab") -> Iterator[tuple[str, str]]:
    """(file, expression) of every query, with the variables of a dashboard filled in."""
    for name, document in dashboard_documents().items():
        for panel in document["panels"]:
            for target in panel.get("targets", []):
                yield name, target["expr"].replace("$job_id", job_id)


def metrics_in(expr: str) -> set[str]:
    """Names of the metrics and recorded series that an expression reads."""
    bare = _STRING.sub('""', expr)
    for noise in (_BY, _MATCHERS, _DURATION):
        bare = noise.sub(" ", bare)
    return {name for name in _NAME.findall(bare) if name not in _WORDS}
