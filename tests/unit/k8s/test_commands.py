"""The commands that the manifests run, run: migration, first key, making of secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.auth.security import create_first_key
from service.db.engine import newest_revision, open_engine, stored_revision
from tests.unit.k8s.pods import pods
from tests.unit.k8s.rendering import FOLDER, ROOT

_STUB = """#!/bin/bash
# Stands for kubectl: keeps what it is told, and answers that no Secret is there yet.
echo "$@" >>"$STUB_FOLDER/calls"
for argument; do
    case "$argument" in
    secret) [ "$3" = get ] && exit "${SECRET_IS_THERE:-1}" ;;
    --from-file=*) cp -r "${argument#--from-file=}" "$STUB_FOLDER/" ;;
    esac
done
exit 0
"""


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def _variables(folder: Path) -> dict[str, str]:
    url = f"sqlite:///{folder / 'shardloom.db'}"
    return {"SHARDLOOM_DATABASE_URL": url, "SHARDLOOM_HOME": str(folder / "home")}


def _output_of(component: str, variables: dict[str, str]) -> str:
    """What the command of a Job prints."""
    (pod,) = pods("base", component)
    (container,) = pod.containers
    program, *arguments = container["command"]
    done = _run([str(Path(sys.executable).with_name(program)), *arguments], **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_migration_job_brings_the_database_to_the_newest_version(tmp_path: Path) -> None:
    variables = _variables(tmp_path)
    # Twice: a Job is run again where its pod was lost.
    for _ in range(2):
        assert str(newest_revision()) in _output_of("migrate", variables)
    with open_engine(variables["SHARDLOOM_DATABASE_URL"]).connect() as connection:
        assert stored_revision(connection) == newest_revision()


def test_the_first_key_job_makes_an_administrator_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = _variables(tmp_path)
    key = _output_of("first-key", variables)
    assert len(key.split()) == 1 and len(key) > 30
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert create_first_key("second", {"*": "admin"}, None) is None


def _make_secrets(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    stub = folder / "kubectl"
    stub.write_text(_STUB)
    stub.chmod(0o700)
    return _run(
        [str(FOLDER / "make-secrets.sh")],
        KUBECTL=str(stub),
        STUB_FOLDER=str(folder),
        **environment,
    )


def test_secrets_are_made_of_files_and_never_stand_on_a_command_line(tmp_path: Path) -> None:
    done = _make_secrets(
        tmp_path / "made",
        DATABASE_URL="postgresql://user:hunter2@db/shardloom",
        AWS_ACCESS_KEY_ID="the-id",
        AWS_SECRET_ACCESS_KEY="the-secret",
    )
    assert done.returncode == 0, done.stderr
    made = tmp_path / "made"
    assert (made / "shardloom-database/url").read_text().endswith("hunter2@db/shardloom")
    assert not (made / "shardloom-database/password").exists()
    assert (made / "shardloom-object-store/AWS_SECRET_ACCESS_KEY").read_text() == "the-secret"
    # The service wants 32 characters at least.
    keys = [
        (made / "shardloom-service/secret_key").read_text(),
        (made / "shardloom-ray-token/auth_token").read_text(),
    ]
    assert all(len(key) >= 32 and key.isalnum() for key in keys) and len(set(keys)) == 2
    calls = (made / "calls").read_text() + done.stdout + done.stderr
    assert not [each for each in ("hunter2", "the-secret", *keys) if each in calls]


def test_the_database_of_the_dev_overlay_gets_a_password_of_its_own(tmp_path: Path) -> None:
    assert _make_secrets(tmp_path / "made").returncode == 0
    password = (tmp_path / "made/shardloom-database/password").read_text()
    url = (tmp_path / "made/shardloom-database/url").read_text()
    assert url == f"postgresql://shardloom:{password}@postgresql/shardloom"


def test_secrets_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    done = _make_secrets(tmp_path / "made", SECRET_IS_THERE="0")
    assert done.returncode == 0
    assert done.stdout.count("stays as it is") == 3
    assert "create secret" not in (tmp_path / "made/calls").read_text()
