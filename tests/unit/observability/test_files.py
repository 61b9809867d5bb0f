"""Dashboards, provisioning and the collector: made from code, complete, and read as meant."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from deploy.observability.build import KUBERNETES, built_files, main, rule_groups, stale_files
from deploy.observability.panels import TAG
from tests.unit.observability.expressions import FOLDER, dashboard_documents, rules

every_dashboard = pytest.mark.parametrize("name", sorted(dashboard_documents()))


def _yaml(path: str) -> Any:
    return yaml.safe_load((FOLDER / path).read_text())


def test_what_is_made_from_code_is_as_the_code_says() -> None:
    assert stale_files() == [], "run `python -m deploy.observability.build`"
    assert main(["--check"]) == 0
    folders = (FOLDER / "grafana" / "dashboards", KUBERNETES / "dashboards")
    found = {path for folder in folders for path in folder.iterdir()}
    assert found == {path for path in built_files() if path.suffix == ".json"}


def test_kubernetes_has_every_rule() -> None:
    document = yaml.safe_load((KUBERNETES / "rules.yaml").read_text())
    groups = document["spec"]["groups"]
    assert groups == rule_groups()
    assert [rule for group in groups for rule in group["rules"]] == sorted(
        rules(), key=lambda rule: "alert" in rule
    )
    assert len({group["name"] for group in groups}) == len(groups)


def test_alerts_find_the_service_under_the_same_name_everywhere() -> None:
    # The operator calls the job of a ServiceMonitor by the name of the Service.
    objects = yaml.safe_load_all((KUBERNETES.parent / "service.yaml").read_text())
    (service,) = [each["metadata"]["name"] for each in objects if each["kind"] == "Service"]
    assert service == _yaml("prometheus.yml")["scrape_configs"][0]["job_name"]
    named = {each for rule in rules() for each in re.findall(r'job="([^"]+)"', rule["expr"])}
    assert named == {service}


@every_dashboard
def test_a_dashboard_fits_into_what_kubectl_apply_can_take(name: str) -> None:
    # It keeps what it applied in an annotation, and annotations have 256 KiB.
    assert len(json.dumps(json.dumps(dashboard_documents()[name], indent=1))) < 200 * 1024


@every_dashboard
def test_a_dashboard_is_read_back_by_grafanas_own_types_as_it_is(name: str) -> None:
    document = dashboard_documents()[name]
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(document)))
    assert read == document
    assert document["tags"] == [TAG]


@every_dashboard
def test_panels_have_places_titles_and_the_chosen_data_source(name: str) -> None:
    document = dashboard_documents()[name]
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        place = panel["gridPos"]
        cells = {
            (place.get("x", 0) + x, place.get("y", 0) + y)
            for x in range(place["w"])
            for y in range(place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
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


def test_grafana_is_given_the_data_source_and_the_dashboards() -> None:
    (source,) = _yaml("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"]
    (provider,) = _yaml("grafana/provisioning/dashboards/shardloom.yaml")["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


def test_compose_mounts_what_prometheus_and_grafana_read() -> None:
    services = yaml.safe_load((FOLDER.parent / "compose.yaml").read_text())["services"]
    mounts = {
        name: dict(mount.split(":")[:2] for mount in services[name]["volumes"])
        for name in ("prometheus", "grafana", "otel-collector")
    }
    config = _yaml("prometheus.yml")
    (service, ray) = config["scrape_configs"]
    assert (
        mounts["prometheus"]["./observability/prometheus.yml"] == "/etc/prometheus/prometheus.yml"
    )
    assert mounts["prometheus"]["./observability/rules"] == "/etc/prometheus/rules"
    key = f"/etc/prometheus/{service['authorization']['credentials_file']}"
    assert key in mounts["prometheus"].values()
    assert mounts["grafana"]["./observability/grafana/dashboards"] == "/var/lib/grafana/dashboards"
    assert "./observability/otel-collector.yaml" in mounts["otel-collector"]
    hosts = [target.split(":")[0] for target in service["static_configs"][0]["targets"]]
    assert {*hosts, *ray["dns_sd_configs"][0]["names"]} <= services.keys()


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
