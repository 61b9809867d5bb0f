"""Writes what Kubernetes and Grafana take of ours: `python -m deploy.observability.build`.

    rules.yaml             the groups of deploy/observability/rules, for a PrometheusRule
    dashboards/NAME.json   Grafana's dashboards

They go into the chart's folder `files`, from which compose.yaml mounts the dashboards as well.
They are outputs: git ignores them, a packaged chart has them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.observability.dashboards import dashboards

FOLDER = Path(__file__).parent
CHART_FILES = FOLDER.parents[1] / "k8s" / "chart" / "files"
RULE_FILES = ("recording.yaml", "alerts.yaml")


def built_files() -> Mapping[str, str]:
    """What every made file contains, by its path in the folder."""
    groups = yaml.safe_dump({"groups": rule_groups()}, sort_keys=False, width=100)
    documents = {
        f"dashboards/{name}": json.dumps(
            json.loads(JSONEncoder().encode(builder.build())), indent=1
        )
        for name, builder in dashboards().items()
    }
    return {"rules.yaml": groups, **documents}


def rule_groups() -> list[dict[str, Any]]:
    """The groups of every rule file; a name is unique in an object, so the file's is put before."""
    groups = []
    for file in RULE_FILES:
        for group in yaml.safe_load((FOLDER / "rules" / file).read_text())["groups"]:
            groups.append({**group, "name": f"{group['name']}-{file.removesuffix('.yaml')}"})
    return groups


def write_files(folder: Path) -> None:
    """Write all of them below a folder."""
    for name, text in built_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write_files(CHART_FILES)
