"""Dashboards, rules and the collector fit each other; `make lint` compares them with the code."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.observability.dashboards import dashboards
from tests.unit.observability.expressions import FOLDER, KUBERNETES, dashboard_documents, rules


def _yaml(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text())


def test_alerts_find_the_service_under_the_same_name_everywhere() -> None:
    # The operator calls the job of a ServiceMonitor by the name of the Service.
    objects = yaml.safe_load_all((KUBERNETES.parent / "service.yaml").read_text())
    (service,) = [each["metadata"]["name"] for each in objects if each["kind"] == "Service"]
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


def test_panels_have_places_titles_and_the_chosen_data_source() -> None:
    for document in dashboard_documents().values():
        taken: set[tuple[int, int]] = set()
        for panel in document["panels"]:
            place = panel["gridPos"]
            columns = range(place.get("x", 0), place.get("x", 0) + place["w"])
            rows = range(place.get("y", 0), place.get("y", 0) + place["h"])
            cells = set(product(columns, rows))
            assert not cells & taken and max(columns) < 24, panel["title"]
            taken |= cells
            if panel["type"] == "row":
                continue
            assert panel["title"] and panel["targets"], panel
            assert panel["datasource"]["uid"] == "${datasource}"
            ref_ids = [target["refId"] for target in panel["targets"]]
            assert len(set(ref_ids)) == len(ref_ids)
        variables = [each["name"] for each in document["templating"]["list"]]
        assert variables[0] == "datasource"


def test_dashboards_have_ids_of_their_own_and_links_lead_to_one() -> None:
    documents = dashboard_documents()
    uids = [document["uid"] for document in documents.values()]
    assert len(set(uids)) == len(uids)
    text = json.dumps(documents)
    assert "/d/shardloom-job?" in text and "shardloom-job" in uids


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
