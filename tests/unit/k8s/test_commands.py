"""The commands that the manifests run, run: migration, backup, Redis, the first key."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from service.auth.security import write_given_keys
from service.backends.kuberay.first_secrets import PARTS
from service.db.auth import KeyStore
from service.db.engine import migrate, newest_revision, open_engine, stored_revision
from service.db.jobs import JobStore
from service.domain.auth import role_names
from service.errors import ServiceError
from service.settings import Settings
from tests.harness.builders import queued_job
from tests.harness.databases import PostgresqlServer, open_migrated, store_job
from tests.harness.processes import run_program
from tests.harness.service import shardloom
from tests.harness.wait import free_port, scaled, wait_for
from tests.unit.k8s.pods import Pod, pods
from tests.unit.k8s.rendering import ray_cluster


def test_the_migration_job_brings_the_database_to_the_newest_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pod,) = pods("gpu", "migrate")
    (container,) = pod.containers
    program, *arguments = container["command"]
    url = f"sqlite:///{tmp_path / 'made' / 'shardloom.db'}"
    # It needs no other setting.
    monkeypatch.setenv("SHARDLOOM_DATABASE_URL", url)
    done = shardloom(*arguments)
    assert (program, done.exit_code) == ("shardloom", 0), done.output
    assert "migrated the database" in done.stdout and str(newest_revision()) in done.stdout
    with open_engine(url).connect() as connection:
        assert stored_revision(connection) == newest_revision()


def _run_in(
    pod: Pod, folder: Path, database_url: str, programs: Path
) -> subprocess.CompletedProcess[str]:
    """Run the command of a pod's container with a folder in place of /backup."""
    (container,) = pod.containers
    command = [each.replace("/backup", str(folder)) for each in container["command"]]
    variables = {each["name"]: each.get("value", database_url) for each in container["env"]}
    return run_program(command, **variables | {"PATH": f"{programs}:{os.environ['PATH']}"})


def test_a_backup_brings_the_database_back_and_a_broken_one_changes_nothing(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    backup, _, restore = sorted(pods("gpu+theirs", "backup"), key=lambda pod: pod.owner)
    url = postgresql.migrated_database()
    where = (tmp_path, url, postgresql.programs)
    store = open_migrated(url)
    kept, lost = store_job(store).id, queued_job(name="later")
    done = _run_in(backup, *where)
    assert done.returncode == 0, done.stderr
    (dump,) = tmp_path.iterdir()
    store_job(store, lost)
    with store.engine.begin() as connection:  # as a newer version's migration does
        connection.exec_driver_sql("CREATE TABLE newer (id int)")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    store.close()
    whole = dump.read_bytes()
    for size in (len(whole) // 2, 0):
        dump.write_bytes(whole[:size])
        assert _run_in(restore, *where).returncode != 0
    with open_engine(url).connect() as connection:
        assert stored_revision(connection) == "9999"
    dump.write_bytes(whole)
    done = _run_in(restore, *where)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"restored {dump}\n"
    # The newer version can migrate again.
    with open_engine(url).begin() as connection:
        connection.exec_driver_sql("CREATE TABLE newer (id int)")
    store = JobStore.open(url)
    assert [job.id for job in store.list_live_jobs()] == [kept]
    store.close()


def test_redis_wants_its_password_and_keeps_what_it_was_told_when_it_is_killed(
    tmp_path: Path,
) -> None:
    (pod,) = pods("gpu", "redis")
    (container,) = pod.containers
    (tmp_path / "data").mkdir()
    port = free_port()
    *shell, script = container["command"]
    script = script.replace("/data", f"{tmp_path}/data").replace("/tmp/redis", f"{tmp_path}/redis")
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": programs, "REDISCLI_AUTH": "hunter2"}

    def ask(*words: str, password: str = "hunter2") -> str:
        program, *probe = container["readinessProbe"]["exec"]["command"]
        command = [program, "-p", str(port), *(words or probe)]
        done = run_program(command, PATH=programs, REDISCLI_AUTH=password)
        return (done.stdout + done.stderr).strip()

    for value in ("", "state"):
        server = subprocess.Popen(
            [*shell, f"{script} --port {port}"], env=variables, stdout=subprocess.DEVNULL
        )
        try:
            wait_for(lambda: ask() == "PONG", "Redis")
            assert "hunter2" not in Path(f"/proc/{server.pid}/cmdline").read_text()
            assert "AUTH" in ask("get", "key", password="other")
            assert ask("get", "key") == value
            assert ask("set", "key", "state") == "OK"
        finally:
            server.kill()
            server.wait()


def test_an_autoscaler_that_gives_up_starts_again_until_its_pod_is_stopped(tmp_path: Path) -> None:
    (script,) = ray_cluster("gpu")["spec"]["autoscalerOptions"]["args"]
    script = script.replace("sleep 5", "sleep 0.1")
    starts, program = tmp_path / "starts", tmp_path / "autoscaler"
    starts.touch()
    program.write_text(f"echo >>{starts}\n[ $(wc -l <{starts}) -lt 3 ] && exit 1\nexec sleep 600\n")
    # As KubeRay v1.7.0 has it: its command, our arguments, and its own in a variable.
    container = subprocess.Popen(
        ["/bin/bash", "-c", "--", script],
        env={"PATH": os.environ["PATH"], "KUBERAY_GEN_AUTOSCALER_START_CMD": f"sh {program}"},
        start_new_session=True,
    )
    try:
        wait_for(lambda: len(starts.read_text()) == 3, "the third start")
        container.terminate()
        # It ends by itself: the first process of a container is not ended by a signal.
        assert container.wait(scaled(10)) == 128 + signal.SIGTERM
    finally:
        os.killpg(container.pid, signal.SIGKILL)
        container.wait()


def test_the_first_key_is_an_administrator_s_until_it_is_revoked(tmp_path: Path) -> None:
    given = Settings(
        first_key=SecretStr(PARTS["firstKey"]()["key"]),
        metrics_key=SecretStr(PARTS["metricsKey"]()["key"]),
    )
    engine = open_engine(f"sqlite:///{tmp_path / 'shardloom.db'}")
    migrate(engine)
    keys = KeyStore(engine)
    with pytest.raises(ServiceError, match="SHARDLOOM_FIRST_KEY does not read as an API key"):
        write_given_keys(keys, Settings(first_key=SecretStr("admin")), 1.0)
    for _ in range(2):  # each start of each replica
        write_given_keys(keys, given, 1.0)
    found = {key.name: key for key in keys.list_keys()}
    roles = {name: role_names(key.roles) for name, key in found.items()}
    assert roles == {"first": {"*": "admin"}, "metrics": {"*": "viewer"}}
    for key in found.values():
        assert key.expires_at is None
        keys.revoke_key(key.id, 2.0)
    write_given_keys(keys, given, 3.0)
    assert not keys.has_usable_key(3.0)
    engine.dispose()
