"""Paths are confined: what a spec names, and what a job left among its files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.security.files import is_below
from service.security.paths import (
    job_of_checkpoints,
    job_of_path,
    outside_roots,
    roots_of,
    without_lost_place,
)
from service.security.principal import Role
from service.settings import Settings
from tests.unit.service.api_house import Api
from tests.unit.service.builders import spec_document
from tests.unit.service.guarded import guarded
from trainer.spec import SpecError, validate_spec


def test_a_link_out_of_the_roots_is_seen_through(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "root-beside"
    for folder in (root / "in", outside):
        folder.mkdir(parents=True)
    (root / "out").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    (root / "back").symlink_to(root / "in")
    assert is_below(root, [root])
    assert is_below(root / "back", [root])
    for path in (outside, root / "out", root / "in/../..", root / "out/x", root / "in/../../etc"):
        assert not is_below(path, [root]), path
    (tmp_path / "link").symlink_to(root)
    assert is_below(tmp_path / "link" / "in", [root])
    assert is_below(root / "in", [tmp_path / "link"])


def test_local_mode_reads_anywhere_unless_told_otherwise(tmp_path: Path) -> None:
    assert roots_of(Settings(home=tmp_path)) is None
    told = Settings(home=tmp_path, storage_roots=[tmp_path / "data"])
    assert roots_of(told) == (tmp_path / "runs", tmp_path / "data")
    asked = Settings(home=tmp_path, auth="required")
    assert roots_of(asked) == (tmp_path / "runs",)


@pytest.mark.parametrize("path", ["/etc", "/", "/proc/self", "{root}/../.."])
def test_data_outside_of_the_roots_is_refused_by_name(tmp_path: Path, path: str) -> None:
    house = guarded(tmp_path)
    [root] = house.settings.storage_roots or []
    spec = spec_document()
    spec["data"]["path"] = path.replace("{root}", str(root))
    answer = house.send("POST", "/v1/jobs", "root", json={"spec": spec})
    [fault] = answer.json()["fields"]
    assert (answer.status_code, fault["path"], fault["code"]) == (422, "data.path", "outside_roots")
    assert str(root) in fault["message"]
    house.store.close()


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("s3://lake/clicks", True),
        ("s3://lake/clicks/2026", True),
        ("s3://lake/clicks-of-others", False),
        ("s3://lake/clicks/../secret", False),
        ("s3://lake/clicks/%2e%2e/secret", False),
        ("s3://lake/clicks?endpoint_override=http://elsewhere", False),
        ("s3://other/clicks", False),
        ("gs://lake/clicks", False),
        ("file:///etc", False),
        ("http://lake/clicks", False),
    ],
)
def test_remote_folders_are_confined_to_remote_roots(
    tmp_path: Path, path: str, is_allowed: bool
) -> None:
    settings = Settings(home=tmp_path, storage_roots=["s3://lake/clicks/", str(tmp_path)])
    spec = spec_document()
    spec["data"]["path"] = path
    problems = outside_roots(validate_spec(spec), roots_of(settings))
    assert ([each.path for each in problems] == []) is is_allowed


def test_a_split_leads_nowhere_out_of_its_data() -> None:
    spec = spec_document()
    spec["data"]["split"] = {"train": "a/../../../etc"}
    with pytest.raises(SpecError, match=r"below data\.path"):
        validate_spec(spec)


def test_checkpoints_of_foreign_projects_cannot_be_started_from(tmp_path: Path) -> None:
    house = guarded(tmp_path)
    house.add_key("both", {"default": Role.SUBMITTER, "hidden": Role.VIEWER})
    hidden = house.submit("root", project="hidden")
    folder = house.settings.runs_dir / hidden / "checkpoints"
    folder.mkdir(parents=True)
    spec = spec_document(checkpoint={"warm_start": {"path": str(folder)}})
    refused = house.send("POST", "/v1/jobs", "submitter", json={"spec": spec})
    assert refused.json()["fields"][0]["code"] == "foreign_run"
    unknown = spec_document(data={**spec["data"], "path": str(house.settings.runs_dir)})
    refused = house.send("POST", "/v1/jobs", "submitter", json={"spec": unknown})
    assert refused.json()["fields"][0]["code"] == "foreign_run"
    assert house.send("POST", "/v1/jobs", "both", json={"spec": spec}).status_code == 201
    house.store.close()


def test_a_path_tells_whose_run_it_leads_into(tmp_path: Path) -> None:
    assert job_of_path(tmp_path / "job-1" / "checkpoints", tmp_path) == "job-1"
    assert job_of_path(tmp_path, tmp_path) == ""
    assert job_of_path(tmp_path / "job-1" / ".." / ".." / "x", tmp_path) is None


def test_a_link_among_the_logs_shows_nothing_of_what_it_leads_to(api: Api, tmp_path: Path) -> None:
    job_id = api.start()
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret\n")
    api.log(f"{job_id}-a0", "driver", "hello\n")
    folder = api.settings.runs_dir / job_id / "attempts" / f"{job_id}-a0" / "logs"
    (folder / "rank-0.log").symlink_to(secret)
    answer = api.http.get(f"/v1/jobs/{job_id}/logs")
    assert "hello" in answer.text
    assert "the secret" not in answer.text
    download = api.http.get(f"/v1/jobs/{job_id}/logs:download", params={"source": "rank-0"})
    assert b"the secret" not in download.content


@pytest.mark.parametrize(
    ("sinks", "field"),
    [
        ({"tensorboard": {"dir": "/etc"}}, "sinks.tensorboard.dir"),
        ({"mlflow": {"tracking_uri": "file:///etc"}}, "sinks.mlflow.tracking_uri"),
        ({"mlflow": {"tracking_uri": "sqlite:////etc/x.db"}}, "sinks.mlflow.tracking_uri"),
        ({"tensorboard": {"dir": "x://y"}}, "sinks.tensorboard.dir"),
        ({"mlflow": {"tracking_uri": "/etc/mlruns"}}, "sinks.mlflow.tracking_uri"),
        ({"mlflow": {"tracking_uri": "http://mlflow.example:5000"}}, None),
    ],
)
def test_sinks_write_nowhere_else(
    tmp_path: Path, sinks: dict[str, Any], field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = validate_spec(spec_document(sinks=sinks))
    data = Path(spec.data.path)
    found = [problem.path for problem in outside_roots(spec, [data, tmp_path])]
    assert found == ([] if field is None else [field])


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:///{root}/x#/../../evil.db",
        "sqlite:////{root}/../evil.db",
        "sqlite:///{root}/x?/../../evil.db",
        "sqlite:///x.db",
        "sqlite+pysqlite:///{root}/x.db",
        "file://{root}/%2e%2e/evil2",
        "file://host{root}/x",
        "file:relative",
        "{root}/ok#/../../evil3",
        "{root}/ok?/../../evil3",
        "{root}/a/../b",
        "fi\nle:///etc",
        " {root}/x",
        "databricks://x",
        "postgresql://host/db",
        "s3://bucket/x",
        "http:/etc",
        "relative",
    ],
)
def test_a_uri_that_others_may_read_as_another_path_is_refused(tmp_path: Path, uri: str) -> None:
    sinks = {"mlflow": {"tracking_uri": uri.replace("{root}", str(tmp_path))}}
    spec = validate_spec(spec_document(sinks=sinks))
    found = outside_roots(spec, [Path(spec.data.path), tmp_path])
    assert [problem.path for problem in found] == ["sinks.mlflow.tracking_uri"]
    assert outside_roots(spec, None) == []


@pytest.mark.parametrize(
    "uri", ["sqlite:///{root}/x.db", "file://{root}/x", "file:{root}/x", "{root}/x", "https://h/p"]
)
def test_plain_uris_below_the_roots_are_fine(tmp_path: Path, uri: str) -> None:
    sinks = {"mlflow": {"tracking_uri": uri.replace("{root}", str(tmp_path))}}
    spec = validate_spec(spec_document(sinks=sinks))
    assert outside_roots(spec, [Path(spec.data.path), tmp_path]) == []


def test_sinks_write_only_into_runs_of_the_job_s_own_project(tmp_path: Path) -> None:
    house = guarded(tmp_path)
    house.add_key("both", {"default": Role.SUBMITTER, "hidden": Role.SUBMITTER})
    runs = house.settings.runs_dir
    hidden = house.submit("root", project="hidden")
    own = house.submit("root")

    def send(key: str, folder: Path, field: str) -> list[str]:
        uri = {"mlflow": {"tracking_uri": f"sqlite:///{folder}/m.db"}}
        sinks = uri if field == "mlflow" else {"tensorboard": {"dir": str(folder)}}
        body = {"spec": spec_document(sinks=sinks)}
        answer = house.send("POST", "/v1/jobs", key, json=body)
        return [fault["code"] for fault in answer.json().get("fields") or []]

    for key in ("submitter", "both", "root"):
        for field in ("mlflow", "tensorboard"):
            for folder in (runs / hidden / "x", runs, runs / "nobody"):
                assert send(key, folder, field) == ["foreign_run"], (key, field, folder)
            assert send(key, runs / own / "x", field) == []
    house.store.close()


@pytest.mark.parametrize("where", ["local", "required"])
@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data": {"path": "/a\x00b"}}, "data.path"),
        ({"data": {"path": "/a\ud800b"}}, "data.path"),
        ({"checkpoint": {"warm_start": {"path": "/a\x00"}}}, "checkpoint.warm_start.path"),
        ({"sinks": {"tensorboard": {"dir": "/a\x00"}}}, "sinks.tensorboard.dir"),
        ({"sinks": {"mlflow": {"tracking_uri": "file:///a\x00"}}}, "sinks.mlflow.tracking_uri"),
        ({"sinks": {"mlflow": {"tracking_uri": "http://[bad"}}}, "sinks.mlflow.tracking_uri"),
    ],
)
def test_what_no_path_can_hold_is_refused_by_name(
    tmp_path: Path, where: str, dry_run: bool, changes: dict[str, Any], field: str
) -> None:
    spec = spec_document()
    spec["data"].update(changes.get("data", {}))
    spec.update({name: section for name, section in changes.items() if name != "data"})
    host = {"auth": "local", "allowed_hosts": ["shardloom.example"]} if where == "local" else {}
    house = guarded(tmp_path, **host)
    answer = house.send(
        "POST",
        f"/v1/jobs?dry_run={dry_run}".lower(),
        "root",
        content=json.dumps({"spec": spec}),
        headers={"content-type": "application/json"},
    )
    [fault] = answer.json()["fields"]
    assert (answer.status_code, fault["path"]) == (422, field)
    house.store.close()


def test_a_path_tells_whose_checkpoints_it_leads_to(tmp_path: Path) -> None:
    root = "s3://lake/runs/"
    assert job_of_checkpoints("s3://lake/runs/job-1/checkpoints/step-1", root) == "job-1"
    assert job_of_checkpoints("s3://lake/runs", root) == ""
    assert job_of_checkpoints("s3://lake/runs-beside/job-1", root) is None
    assert job_of_checkpoints(str(tmp_path / "job-1"), root) is None
    assert job_of_checkpoints(str(tmp_path / "job-1" / "x"), tmp_path) == "job-1"
    assert job_of_checkpoints("s3://lake/runs/job-1", None) is None


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("s3://lake/runs", True),
        ("s3://lake/runs/mine", True),
        ("s3://elsewhere/runs", False),
        ("s3://lake/runs?endpoint_override=http://10.0.0.1:80", False),
    ],
)
def test_checkpoints_lie_below_the_root_for_them_or_a_storage_root(
    tmp_path: Path, path: str, is_allowed: bool
) -> None:
    settings = Settings(home=tmp_path, auth="required", checkpoint_root="s3://lake/runs")
    spec = validate_spec(spec_document(checkpoint={"path": path}))
    refused = {each.path for each in outside_roots(spec, roots_of(settings))}
    assert ("checkpoint.path" not in refused) is is_allowed


def test_remote_checkpoints_of_foreign_projects_cannot_be_started_from(tmp_path: Path) -> None:
    house = guarded(tmp_path, checkpoint_root="s3://lake/runs")
    hidden = house.submit("root", project="hidden")
    place = {"warm_start": {"path": f"s3://lake/runs/{hidden}/checkpoints"}}
    body = {"spec": spec_document(checkpoint=place)}
    refused = house.send("POST", "/v1/jobs", "submitter", json=body)
    assert refused.json()["fields"][0]["code"] == "foreign_run"
    beside = {"spec": spec_document(checkpoint={"path": f"s3://lake/runs/{hidden}"})}
    refused = house.send("POST", "/v1/jobs", "submitter", json=beside)
    assert refused.json()["fields"][0]["code"] == "foreign_run"
    assert house.send("POST", "/v1/jobs", "root", json=body).status_code == 201
    house.store.close()


def test_a_job_keeps_the_place_for_checkpoints_that_it_was_submitted_with(tmp_path: Path) -> None:
    house = guarded(tmp_path, checkpoint_root="s3://lake/runs")
    job = house.store.get_job(house.submit("root"))
    assert job.spec.checkpoint.path == "s3://lake/runs"
    again = house.send("POST", f"/v1/jobs/{job.id}:clone", "root", json={})
    assert again.json()["spec"]["checkpoint"]["path"] == "s3://lake/runs"
    house.store.close()


def test_a_clone_does_not_take_over_a_place_that_the_operator_has_given_up(tmp_path: Path) -> None:
    before = validate_spec(spec_document(checkpoint={"path": "s3://lake/runs"}))
    settings = Settings(home=tmp_path, auth="required", checkpoint_root="s3://lake/later")
    roots = roots_of(settings)
    assert without_lost_place(before, before, roots).checkpoint.path is None
    named = validate_spec(spec_document(checkpoint={"path": "s3://lake/elsewhere"}))
    assert without_lost_place(named, before, roots) == named, "what is named is refused"
    assert without_lost_place(before, before, None) == before
    assert without_lost_place(before, before, (*roots, "s3://lake/runs")) == before


def test_a_clone_of_before_the_checkpoint_root_changed_is_accepted(tmp_path: Path) -> None:
    house = guarded(tmp_path, checkpoint_root="s3://lake/runs")
    job_id = house.submit("root")
    changed = house.settings.model_copy(update={"checkpoint_root": "s3://lake/later"})
    house.app.state.context = replace(house.app.state.context, settings=changed)
    again = house.send("POST", f"/v1/jobs/{job_id}:clone", "root", json={})
    assert again.json()["spec"]["checkpoint"]["path"] == "s3://lake/later"
    house.store.close()
