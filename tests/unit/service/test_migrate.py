"""`shardloom migrate`: from where to where, and a check that changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import inspect, make_url, text

from service.migrate import BEHIND, UNAVAILABLE, UP_TO_DATE, bring_up, look, main
from service.store.engine import migrate, newest_revision, open_engine
from service.store.sql import SqlJobStore
from tests.unit.service.fake_service import shardloom


@pytest.fixture
def configured(database_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The database that the settings name."""
    monkeypatch.setenv("SHARDLOOM_DATABASE_URL", database_url)
    return database_url


def test_a_new_database_is_behind_and_stays_so_when_looked_at(database_url: str) -> None:
    assert look(database_url).found is None
    assert look(database_url).is_behind
    url = make_url(database_url)
    if url.get_backend_name() == "sqlite":
        assert url.database is not None and not Path(url.database).exists()
    else:
        assert inspect(open_engine(database_url)).get_table_names() == []


def test_migrating_says_from_where_and_a_second_time_does_nothing(database_url: str) -> None:
    engine = open_engine(database_url)
    migrate(engine, "0001")
    engine.dispose()
    assert look(database_url).found == "0001"
    assert bring_up(database_url).found == "0001"
    assert not look(database_url).is_behind
    again = bring_up(database_url)
    assert again.found == again.wanted == newest_revision()
    SqlJobStore.open(database_url).close()


def test_the_exit_code_says_whether_a_migration_is_due(
    configured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(check=True) == BEHIND
    assert "`shardloom migrate`" in capsys.readouterr().out
    assert main() == UP_TO_DATE
    assert f"from nothing to {newest_revision()}" in capsys.readouterr().out
    assert main(check=True) == UP_TO_DATE
    assert main() == UP_TO_DATE
    assert "already" in capsys.readouterr().out


def test_a_database_of_a_newer_version_is_left_alone(
    configured: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bring_up(configured)
    engine = open_engine(configured)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    assert main(check=True) == UNAVAILABLE
    assert "9999" in capsys.readouterr().err
    assert main() == UNAVAILABLE
    assert "version" in capsys.readouterr().err


def test_a_database_that_is_not_there_is_told_with_what_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "postgresql://someone:hunter2@127.0.0.1:1/shardloom?connect_timeout=1"
    monkeypatch.setenv("SHARDLOOM_DATABASE_URL", url)
    for check in (True, False):
        assert main(check=check) == UNAVAILABLE
        told = capsys.readouterr().err
        assert "SHARDLOOM_DATABASE_URL" in told and "hunter2" not in told


def test_the_command_line_has_it(configured: str) -> None:
    assert shardloom("migrate", "--check").exit_code == BEHIND
    assert shardloom("migrate").exit_code == UP_TO_DATE
    assert shardloom("migrate", "--check").exit_code == UP_TO_DATE


def test_it_needs_no_other_setting(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli", "migrate"],
        env={
            "PATH": os.environ["PATH"],
            "SHARDLOOM_DATABASE_URL": f"sqlite:///{tmp_path / 'made' / 'store.db'}",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "migrated the database" in done.stdout
