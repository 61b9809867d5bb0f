"""Writes what is made from code: `python -m deploy.observability.build`; `--check` only compares.

All of it goes to `k8s/base/observability`, because kustomize reads nothing above its root: the
dashboards, which compose.yaml mounts from there, and the rules as a PrometheusRule. It is kept in
git, so that `kubectl apply -k` and compose work without Python; `make lint` checks it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.observability.dashboards import dashboards

FOLDER = Path(__file__).parent
REPO = FOLDER.parents[1]
KUBERNETES = REPO / "k8s" / "base" / "observability"
RULE_FILES = ("recording.yaml", "alerts.yaml")
_MADE = "# Made by `python -m deploy.observability.build` of deploy/observability/rules.\n"


def built_files() -> Mapping[Path, str]:
    """What every made file should contain."""
    files = {KUBERNETES / "rules.yaml": _prometheus_rule()}
    for name, builder in dashboards().items():
        text = json.dumps(json.loads(JSONEncoder().encode(builder.build())), indent=1) + "\n"
        files[KUBERNETES / "dashboards" / name] = text
    return files


def rule_groups() -> list[dict[str, Any]]:
    """The groups of every rule file; a name is unique in an object, so the file's is put before."""
    groups = []
    for file in RULE_FILES:
        for group in yaml.safe_load((FOLDER / "rules" / file).read_text())["groups"]:
            groups.append({**group, "name": f"{group['name']}-{file.removesuffix('.yaml')}"})
    return groups


def _prometheus_rule() -> str:
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "shardloom"},
        "spec": {"groups": rule_groups()},
    }
    return _MADE + yaml.safe_dump(document, sort_keys=False, width=100)


def stale_files() -> list[Path]:
    """Made files that differ from what the code says."""
    return [
        path
        for path, text in built_files().items()
        if not path.exists() or path.read_text() != text
    ]


def main(arguments: list[str] | None = None) -> int:
    """Write what differs; with `--check` name it and fail instead."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if some differ")
    is_check = parser.parse_args(arguments).check
    stale = stale_files()
    built = built_files()
    for path in stale:
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(built[path])
        print(f"{'differs' if is_check else 'written'}: {path.relative_to(REPO)}")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
