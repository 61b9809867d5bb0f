"""The Helm chart of k8s/chart, rendered and packaged by Helm itself (its library, as a wheel).

python -m deploy.chart render    each of k8s/examples as build/k8s/NAME.yaml
python -m deploy.chart package   dist/shardloom-VERSION.tgz, linted, with rules and dashboards
python -m deploy.chart push      packages it, and pushes it to the registry and folder
                                 CHART_REPOSITORY (oci://registry.example/charts), as
                                 REGISTRY_USER with REGISTRY_PASSWORD where they are set
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml

from deploy.observability.build import CHART_FILES, write_files

ROOT = Path(__file__).parents[1]
CHART, EXAMPLES = ROOT / "k8s" / "chart", ROOT / "k8s" / "examples"
NAMESPACE = "shardloom"


def copy_whole(folder: Path) -> Path:
    """The chart below a folder, with what git does not keep of it."""
    whole = folder / CHART.name
    shutil.copytree(CHART, whole, ignore=shutil.ignore_patterns(CHART_FILES.name))
    write_files(whole / CHART_FILES.name)
    return whole


def render(chart: Path, values: Mapping[str, Any]) -> str:
    """What `helm install shardloom CHART` sends for these values, as YAML; raises `HelmError`."""
    with helm_python.Chart.load(chart) as loaded:
        files = loaded.render(dict(values), name="shardloom", namespace=NAMESPACE)
    return "\n".join(
        f"---\n{text.strip()}" for name, text in sorted(files.items()) if name.endswith(".yaml")
    )


def values_of(example: str) -> dict[str, Any]:
    """The values of one of k8s/examples."""
    values: dict[str, Any] = yaml.safe_load((EXAMPLES / f"{example}.yaml").read_text())
    return values


def problems(chart: Path) -> list[str]:
    """What `helm lint --strict` finds with the values of every example; an icon is not wanted."""
    found = []
    for path in sorted(EXAMPLES.glob("*.yaml")):
        report = helm_python.lint(chart, values_of(path.stem), strict=True, namespace=NAMESPACE)
        texts = [*report["errors"], *(each["error"] for each in report["messages"])]
        found += [f"{path.name}: {text}" for text in texts if text != "icon is recommended"]
    return found


def push(package: str, environment: Mapping[str, str]) -> str:
    """Push a package to where the environment says; what Helm says. Raises `HelmError`."""
    repository = environment.get("CHART_REPOSITORY", "")
    if not repository.startswith("oci://"):
        raise SystemExit(
            f"CHART_REPOSITORY={repository}: set the registry and folder to push the chart to, as "
            "in oci://registry.example/charts"
        )
    host = repository.removeprefix("oci://").partition("/")[0]
    with (
        tempfile.TemporaryDirectory() as folder,
        helm_python.RegistryClient(credentials_file=Path(folder) / "config.json") as client,
    ):
        user, password = environment.get("REGISTRY_USER"), environment.get("REGISTRY_PASSWORD")
        if user and password:
            client.login(host, user, password)
        return str(client.push(package, repository)["output"])


def main() -> int:
    """Render, package or push; 1 where lint finds something."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("render", "package", "push"))
    what = parser.parse_args().what
    out = ROOT / ("build/k8s" if what == "render" else "dist")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        chart = copy_whole(Path(made))
        if found := problems(chart):
            print("\n".join(found), file=sys.stderr)
            return 1
        if what != "render":
            package = helm_python.package(chart, destination=out)
            print(package)
            if what == "push":
                print(push(package, os.environ))
            return 0
        for path in sorted(EXAMPLES.glob("*.yaml")):
            (out / path.name).write_text(render(chart, values_of(path.stem)) + "\n")
            print(out / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
