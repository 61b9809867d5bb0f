"""The systemd units of machines: systemd takes them, and they call commands that there are."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from service.cli.main import build_app
from service.settings import Settings
from tests.conftest import REPO

FOLDER = REPO / "deploy" / "systemd"
UNITS = [FOLDER / f"shardloom-{kind}.service" for kind in ("head", "worker")]
every_unit = pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
PROGRAM = "/opt/shardloom/.venv/bin/shardloom"
# What the units and commands read beside the settings of the service.
OTHER_VARIABLES = {
    "ADDRESS",
    "HEAD",
    "RAY_PORT",
    "RAY_DASHBOARD_PORT",
    "NODE_PORT",
    "WORKER_PORTS",
    "CA_FILE",
}


def _commands(unit: Path) -> list[list[str]]:
    """Arguments of `shardloom` in each line that starts it."""
    lines = re.findall(r"^Exec\w+=(.*)$", unit.read_text(), re.MULTILINE)
    words = [shlex.split(line) for line in lines]
    assert {each[0] for each in words} == {PROGRAM}
    return [each[1:] for each in words]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")
@every_unit
def test_systemd_takes_the_unit_without_a_word(unit: Path, tmp_path: Path) -> None:
    # It looks for the program, which a newcomer's machine has elsewhere.
    installed = tmp_path / unit.name
    installed.write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(installed)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@every_unit
def test_a_unit_calls_commands_and_options_that_there_are(unit: Path) -> None:
    commands = get_command(build_app()).commands  # type: ignore[attr-defined]
    for name, *arguments in _commands(unit):
        known = {option for each in commands[name].params for option in each.opts}
        assert {word for word in arguments if word.startswith("--")} <= known
        assert CliRunner().invoke(build_app(), [name, "--help"]).exit_code == 0


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


def test_the_environment_file_names_what_somebody_reads() -> None:
    text = (FOLDER / "shardloom.env.example").read_text()
    names = re.findall(r"^(?:# )?SHARDLOOM_(\w+)=", text, re.MULTILINE)
    assert len(names) > 10
    assert {name.lower() for name in names} <= set(Settings.model_fields) | {
        name.lower() for name in OTHER_VARIABLES
    }
    for unit in UNITS:
        for used in re.findall(r"\$\{SHARDLOOM_(\w+)\}", unit.read_text()):
            assert used in names
