"""Commands of other packages: loaded when called, and a clear word if they cannot be."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from service.cli import build_app
from service.commands import plugins


@pytest.fixture
def plugged(monkeypatch, tmp_path):
    """Plug in the module `some_plugin` with the given source; returns its name."""

    def plug(source: str) -> None:
        (tmp_path / "some_plugin.py").write_text(source)
        entry = EntryPoint("greet", "some_plugin:app", plugins.GROUP)
        monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "some_plugin", raising=False)

    return plug


WORKING = """
import typer
app = typer.Typer()

@app.command()
def hello(name: str, loud: bool = False):
    print("HELLO" if loud else "hello", name)

@app.command()
def bye():
    print("bye")
"""


def test_arguments_and_options_reach_the_plug_in(plugged):
    plugged(WORKING)
    result = CliRunner().invoke(build_app(), ["greet", "hello", "Ada", "--loud"])
    assert (result.exit_code, result.stdout) == (0, "HELLO Ada\n")


def test_the_help_is_that_of_the_plug_in(plugged):
    plugged(WORKING)
    result = CliRunner().invoke(build_app(), ["greet", "--help"])
    assert "shardloom greet" in result.stdout
    assert "bye" in result.stdout


def test_a_plug_in_is_listed_without_being_imported(plugged):
    plugged("raise RuntimeError('imported too early')")
    result = CliRunner().invoke(build_app(), ["--help"])
    assert result.exit_code == 0
    assert "greet" in result.stdout


def test_a_missing_package_is_named_with_the_extra_that_brings_it(plugged):
    plugged("import a_package_that_is_not_there")
    result = CliRunner().invoke(build_app(), ["greet", "hello"])
    assert result.exit_code == 3
    assert "a_package_that_is_not_there" in result.stderr
    assert "shardloom[greet]" in result.stderr


def test_a_fault_of_our_own_code_is_not_taken_for_a_missing_package(plugged):
    plugged("import trainer.there_is_no_such_module")
    result = CliRunner().invoke(build_app(), ["greet", "hello"])
    assert isinstance(result.exception, ModuleNotFoundError)


def test_the_data_commands_are_plugged_in():
    names = [entry.name for entry in plugins.entry_points(group=plugins.GROUP)]
    assert "data" in names
