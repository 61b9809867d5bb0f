"""deploy/machines.md says what is so: commands, options, ports, messages, files."""

from __future__ import annotations

import re
import shlex

import yaml
from typer.main import get_command

from service import machine_ray
from service.cli import build_app
from service.local import DEFAULT_PORT
from service.machine_ray import NodePorts, parse_ports
from service.settings import Settings
from tests.conftest import REPO
from tests.unit.deploy.test_systemd import OTHER_VARIABLES

GUIDE = (REPO / "deploy" / "machines.md").read_text()
PROMETHEUS = REPO / "deploy" / "observability" / "prometheus.yml"
BLOCKS = re.findall(r"^```\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def test_every_command_and_option_of_the_guide_is_there() -> None:
    commands = get_command(build_app()).commands  # type: ignore[attr-defined]
    lines = [line.partition("#")[0] for block in BLOCKS for line in block.splitlines()]
    calls = [shlex.split(line)[1:] for line in lines if line.startswith("shardloom ")]
    assert {call[0] for call in calls} >= {"up", "join", "submit", "follow"}
    for name, *words in calls:
        known = {option for each in commands[name].params for option in each.opts}
        assert {word for word in words if word.startswith("--")} <= known, name


def test_the_table_has_the_ports_that_are_used() -> None:
    usual = parse_ports(machine_ray.NODE_PORT, machine_ray.WORKER_PORTS)
    assert usual == NodePorts()
    first, last = usual.fixed.start, usual.fixed.stop - 1
    for row in (
        f"| {DEFAULT_PORT} | head |",
        f"| {machine_ray.RAY_PORT} | head |",
        f"| {machine_ray.RAY_DASHBOARD_PORT} | head |",
        f"| {first}-{last} | all |",
        f"| {machine_ray.WORKER_PORTS} | all |",
    ):
        assert row in GUIDE


def test_prometheus_reads_what_the_guide_writes_for_it() -> None:
    service, ray = yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
    last = NodePorts().fixed.stop - 1
    assert f'"10.0.0.1:{last}"' in GUIDE and f"port {last} (the last of its six)" in GUIDE
    assert f"' >{ray['file_sd_configs'][0]['files'][0]} " in GUIDE
    assert f">{service['authorization']['credentials_file']})" in GUIDE
    assert f"s/{service['static_configs'][0]['targets'][0]}/" in GUIDE


def test_variables_and_files_of_the_guide_are_there() -> None:
    used = set(re.findall(r"SHARDLOOM_([A-Z_]+)", GUIDE))
    known = {name.upper() for name in Settings.model_fields} | OTHER_VARIABLES
    assert used - known == {"URL", "API_KEY"}
    for path in re.findall(r"/opt/shardloom/(deploy/[\w./-]+)", GUIDE):
        assert (REPO / path).exists(), path


def test_the_messages_in_the_table_of_trouble_are_said() -> None:
    source = "".join(
        re.sub(r'"\s*f?"', "", (REPO / "service" / name).read_text())
        for name in ("join.py", "machines.py", "network.py", "local.py", "commands/machines.py")
    )
    table = GUIDE[GUIDE.index("## Trouble") :]
    quoted = re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)
    assert len(quoted) > 8
    for message in quoted:
        parts = [part.strip() for part in re.split(r"\.\.\.|\b\d+\b|gpu-1", message)]
        assert all(part.lstrip(":") in source for part in parts), message
