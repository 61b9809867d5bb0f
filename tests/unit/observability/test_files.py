"""Dashboards, rules and the collector fit each other."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.observability.dashboards import dashboards
from tests.unit.k8s.rendering import build, one
from tests.unit.observability.expressions import FOLDER, dashboard_documents, rules


def _yaml(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text())


def test_alerts_find_the_service_under_the_same_name_everywhere() -> None:
    # The operator calls the job of a ServiceMonitor by the name of the Service.
    service = one(build("gpu"), "Service", "shardloom")["metadata"]["name"]
    assert service == _yaml("prometheus.yml")["scrape_configs"][0]["job_name"]
    named = {each for rule in rules() for each in re.findall(r'job="([^"]+)"', rule["expr"])}
    assert named == {service}


def test_dashboards_are_read_back_by_grafanas_own_types_as_they_are() -> None:
    documents = dashboard_documents()
    assert set(documents) == set(dashboards())
    for name, document in documents.items():
        read = json.loads(JSONEncoder().encode(Dashboard.from_json(document)))
        assert read == document, name
        # kubectl keeps what it applied in an annotation, and annotations have 256 KiB.
        assert len(json.dumps(json.dumps(document, indent=1))) < 200 * 1024, name
        panels = [panel for panel in document["panels"] if panel["type"] != "row"]
        assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}, name
        assert document["templating"]["list"][0]["name"] == "datasource", "it can be chosen"
    uids = {document["uid"] for document in documents.values()}
    assert len(uids) == len(documents)
    links = set(re.findall(r"/d/([\w-]+)", json.dumps(documents)))
    assert {"shardloom-job"} <= links <= uids, "links lead to ours"


def test_the_collector_uses_all_that_it_names_and_names_all_that_it_uses() -> None:
    config = _yaml("otel-collector.yaml")
    service, connectors = config["service"], set(config["connectors"])
    used: dict[str, set[str]] = {"receivers": set(), "processors": set(), "exporters": set()}
    for pipeline in service["pipelines"].values():
        for kind, names in pipeline.items():
            used[kind] |= set(names)
    assert used["receivers"] & used["exporters"] == connectors
    for kind, names in used.items():
        assert names - connectors == set(config[kind]), kind
    assert set(service["extensions"]) == set(config["extensions"])
    # Where the service sends its spans: OTLP over HTTP, as SHARDLOOM_OTLP_ENDPOINT says.
    assert config["receivers"]["otlp"]["protocols"]["http"]["endpoint"].endswith(":4318")
