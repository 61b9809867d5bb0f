"""The systemd units of machines: systemd takes them, and they call commands that there are."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from ray.scripts.scripts import start as ray_start
from typer.testing import CliRunner

from service.cli.main import build_app
from service.settings import Settings
from tests.conftest import REPO
from tests.harness.processes import run_program
from trainer.driver.drain_node import parser

FOLDER = REPO / "deploy" / "systemd"
UNITS = [FOLDER / "shardloom.service", FOLDER / "shardloom-ray.service"]
every_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
PROGRAMS = "/opt/shardloom/.venv/bin/"


def _commands(unit: Path) -> list[list[str]]:
    """Program and arguments of each line that starts one."""
    lines = re.findall(r"^Exec\w+=-?(.*)$", unit.read_text(), re.MULTILINE)
    words = [shlex.split(line) for line in lines]
    assert all(each[0].startswith(PROGRAMS) for each in words)
    return [[each[0].removeprefix(PROGRAMS), *each[1:]] for each in words]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
@every_unit
def test_systemd_takes_the_unit_without_a_word(unit: Path, tmp_path: Path) -> None:
    # It looks for the program, which a newcomer's machine has elsewhere.
    installed = tmp_path / unit.name
    installed.write_text(re.sub(PROGRAMS + r"\w+", "/bin/true", unit.read_text()))
    done = run_program(["systemd-analyze", "verify", "--man=no", installed])
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_units_call_commands_and_options_that_there_are() -> None:
    for program, name, *arguments in _commands(UNITS[0]):
        assert program == "shardloom"
        assert not arguments
        assert CliRunner().invoke(build_app(), [name, "--help"]).exit_code == 0
    start, drain = _commands(UNITS[1])
    assert start[:2] == ["ray", "start"]
    assert drain[:3] == ["python", "-m", "trainer.driver.drain_node"]
    options = _environment("ray")["RAY_START"].split() + start[2:]
    known = {option for each in ray_start.params for option in each.opts}
    named = {word.partition("=")[0] for word in options if word.startswith("--")}
    assert named <= known
    parser().parse_args(drain[3:])


# systemd.exec(5): each implies DeviceAllow=, which closes all other devices, GPUs and InfiniBand
# among them.
CLOSE_DEVICES = {"ProtectClock", "PrivateDevices", "DeviceAllow", "DevicePolicy", "RootImage"}


@every_unit
def test_a_unit_gives_its_command_the_gpus_and_enough_time_to_end(unit: Path) -> None:
    text = unit.read_text()
    assert not CLOSE_DEVICES & set(re.findall(r"^(\w+)=", text, re.MULTILINE))
    (limit_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    graces = re.findall(r"--grace-s (\d+)", text)
    # Beside the grace of the jobs: two times five seconds for processes to end.
    assert int(limit_s) >= 20 + sum(map(int, graces))


def test_the_environment_files_name_what_somebody_reads_and_ray_has_a_token() -> None:
    service, ray = _environment("service"), _environment("ray")
    names = {name.removeprefix("SHARDLOOM_").lower() for name in service}
    assert names <= set(Settings.model_fields)
    assert ray["RAY_AUTH_MODE"] == "token"
    assert not [name for name in ray if name.startswith("SHARDLOOM_")], "jobs read them"
    for used in re.findall(r"\$\{?(\w+)", UNITS[1].read_text()):
        assert used in ray


def _environment(kind: str) -> dict[str, str]:
    """Variables of an example of an environment file, those in comments left out."""
    text = (FOLDER / f"{kind}.env.example").read_text()
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))
