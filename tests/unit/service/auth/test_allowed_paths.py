"""Paths that a spec names are confined."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from service.auth.permissions import (
    job_below,
    outside_roots,
    paths_of,
    roots_of,
    without_lost_place,
)
from service.domain.auth import Role
from service.files import is_below
from service.settings import Settings
from tests.harness.builders import spec_document
from tests.harness.service import GuardedApps
from trainer.spec import validate_spec
from trainer.spec.base import PathText, Place, SpecError, SpecModel
from trainer.spec.job import JobSpec


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


def test_data_outside_of_the_roots_is_refused_by_name(open_guarded: GuardedApps) -> None:
    house = open_guarded()
    [root] = house.settings.storage_roots or []
    spec = spec_document()
    for path in ("/etc", "/", "/proc/self", f"{root}/../.."):
        spec["data"]["path"] = path
        answer = house.send("POST", "/v1/jobs", "root", json={"spec": spec})
        [fault] = answer.json()["fields"]
        assert (answer.status_code, fault["path"]) == (422, "data.path")
        assert (fault["code"], str(root) in fault["message"]) == ("outside_roots", True)


def test_remote_folders_are_confined_to_remote_roots(tmp_path: Path) -> None:
    roots = ["s3://lake/clicks/", str(tmp_path)]
    settings = Settings(home=tmp_path, storage_roots=roots, checkpoint_root="s3://lake/runs")
    for path, is_allowed in (
        ("s3://lake/clicks", True),
        ("s3://lake/clicks/2026", True),
        ("s3://lake/clicks-of-others", False),
        ("s3://lake/clicks/../secret", False),
        ("s3://lake/clicks/%2e%2e/secret", False),
        ("s3://lake/clicks//2026", False),
        ("s3://lake/clicks?endpoint_override=http://elsewhere", False),
        ("s3://other/clicks", False),
        ("gs://lake/clicks", False),
        ("file:///etc", False),
        ("http://lake/clicks", False),
        ("s3://lake/runs", True),
        ("s3://lake/runs/mine", True),
        ("s3://lake/runs?endpoint_override=http://10.0.0.1:80", False),
    ):
        data = {**spec_document()["data"], "path": path}
        spec = validate_spec(spec_document(data=data))
        problems = outside_roots(spec, roots_of(settings))
        assert [each.path for each in problems] == ([] if is_allowed else ["data.path"]), path
    spec = validate_spec(spec_document(data=data, checkpoint={"path": "s3://elsewhere/runs"}))
    refused = [each.path for each in outside_roots(spec, roots_of(settings))]
    assert refused == ["data.path", "checkpoint.path"]


def test_a_split_leads_nowhere_out_of_its_data() -> None:
    spec = spec_document()
    spec["data"]["split"] = {"train": "a/../../../etc"}
    with pytest.raises(SpecError, match=r"below data\.path"):
        validate_spec(spec)


@pytest.mark.parametrize("remote", [None, "s3://lake/runs"])
def test_what_jobs_of_foreign_projects_keep_is_neither_read_nor_joined(
    open_guarded: GuardedApps, remote: str | None
) -> None:
    house = open_guarded(checkpoint_root=remote)
    house.add_key("both", {"default": Role.SUBMITTER, "hidden": Role.VIEWER})
    hidden = house.submit("root", project="hidden")
    root = remote or str(house.settings.runs_dir)
    (house.settings.runs_dir / hidden / "checkpoints").mkdir(parents=True)
    start = spec_document(checkpoint={"warm_start": {"path": f"{root}/{hidden}/checkpoints"}})
    beside = spec_document(checkpoint={"path": f"{root}/{hidden}"})
    unknown = spec_document(data={**start["data"], "path": str(house.settings.runs_dir)})
    for spec in (start, beside, unknown):
        refused = house.send("POST", "/v1/jobs", "submitter", json={"spec": spec})
        assert refused.json()["fields"][0]["code"] == "foreign_run"
    assert house.send("POST", "/v1/jobs", "both", json={"spec": start}).status_code == 201


def _refused_sinks(sinks: dict[str, Any], root: Path) -> list[str]:
    """Fields of the sinks that lie neither in the data nor below `root`."""
    spec = validate_spec(spec_document(sinks=sinks))
    return [problem.path for problem in outside_roots(spec, [Path(spec.data.path), root])]


def test_sinks_write_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _refused_sinks({"tensorboard": {"dir": "/etc"}}, tmp_path) == ["sinks.tensorboard.dir"]
    root = str(tmp_path)
    for uri in (
        "file:///etc",
        "/etc/mlruns",
        "sqlite:////etc/x.db",
        f"sqlite:///{root}/x#/../../evil.db",
        f"sqlite:////{root}/../evil.db",
        "sqlite:///x.db",
        f"sqlite+pysqlite:///{root}/x.db",
        f"file://{root}/%2e%2e/evil2",
        f"file://host{root}/x",
        f"{root}/ok?/../../evil3",
        "postgresql://host/db",
        "http:/etc",
    ):
        found = _refused_sinks({"mlflow": {"tracking_uri": uri}}, tmp_path)
        assert found == ["sinks.mlflow.tracking_uri"], uri
    for uri in (
        f"sqlite:///{root}/x.db",
        f"file://{root}/x",
        f"file:{root}/x",
        f"{root}/x",
        "http://mlflow.example:5000",
        "https://h/p",
    ):
        assert _refused_sinks({"mlflow": {"tracking_uri": uri}}, tmp_path) == [], uri
    elsewhere = validate_spec(spec_document(sinks={"mlflow": {"tracking_uri": "file:///etc"}}))
    assert outside_roots(elsewhere, None) == []


def test_every_field_that_names_a_path_is_marked_and_confined() -> None:
    sections: list[type[SpecModel]] = [JobSpec]
    marked, unmarked = set[str](), set[str]()
    for section in sections:
        for name, field in section.model_fields.items():
            hints = [field.annotation, *field.metadata]
            for hint in hints:
                hints += get_args(hint)
            nested = [
                each for each in hints if isinstance(each, type) and issubclass(each, SpecModel)
            ]
            sections += (each for each in nested if each not in sections)
            is_path = get_args(PathText)[-1] in hints or re.search(
                "(path|dir|folder|file|ur[il])$", name
            )
            if any(isinstance(hint, Place) for hint in hints):
                marked.add(f"{section.__name__}.{name}")
            elif is_path:
                unmarked.add(f"{section.__name__}.{name}")
    # The one is below `data.path`, the other a name.
    assert unmarked == {"VocabularySpec.path", "MlflowSpec.experiment"}
    spec = spec_document(
        checkpoint={"path": "/a", "warm_start": {"path": "/b"}},
        sinks={"tensorboard": {"dir": "/c"}, "mlflow": {"tracking_uri": "sqlite:////d/e"}},
    )
    written = {
        "checkpoint.path": "/a",
        "sinks.tensorboard.dir": "/c",
        "sinks.mlflow.tracking_uri": "/d/e",
    }
    read = {"data.path": spec["data"]["path"], "checkpoint.warm_start.path": "/b"}
    assert paths_of(validate_spec(spec), written=True) == written
    assert paths_of(validate_spec(spec)) == read | written
    # A mark in a list of sections would not be found.
    assert len(marked) == len(read | written), marked


def test_sinks_write_only_into_runs_of_the_job_s_own_project(open_guarded: GuardedApps) -> None:
    house = open_guarded()
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


@pytest.mark.parametrize("auth", ["local", "required"])
def test_what_no_path_can_hold_is_refused_by_name(open_guarded: GuardedApps, auth: str) -> None:
    house = open_guarded(auth=auth, allowed_hosts=["shardloom.example"])
    data = spec_document()["data"]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"data": {**data, "path": "/a\x00b"}}, "data.path"),
        ({"data": {**data, "path": "/a\ud800b"}}, "data.path"),
        ({"data": {**data, "path": "s3://a/\tb"}}, "data.path"),
        ({"checkpoint": {"warm_start": {"path": "/a\x00"}}}, "checkpoint.warm_start.path"),
        ({"sinks": {"tensorboard": {"dir": "/a\x00"}}}, "sinks.tensorboard.dir"),
        ({"sinks": {"mlflow": {"tracking_uri": "file:///a\x00"}}}, "sinks.mlflow.tracking_uri"),
        ({"sinks": {"mlflow": {"tracking_uri": "http://[bad"}}}, "sinks.mlflow.tracking_uri"),
        ({"sinks": {"mlflow": {"tracking_uri": "fi\nle:///a"}}}, "sinks.mlflow.tracking_uri"),
    ]
    for changes, field in cases:
        content = json.dumps({"spec": spec_document(**changes)})
        headers = {"content-type": "application/json"}
        for path in ("/v1/jobs", "/v1/jobs?dry_run=true"):
            answer = house.send("POST", path, "root", content=content, headers=headers)
            [fault] = answer.json()["fields"]
            assert (answer.status_code, fault["path"]) == (422, field)


def test_a_path_tells_whose_folder_it_leads_into(tmp_path: Path) -> None:
    remote = "s3://lake/runs/"
    (tmp_path / "job-2").symlink_to(tmp_path / "job-2")
    for path, root, job_id in (
        (f"{tmp_path}/job-2/x", tmp_path, "job-2"),
        (f"{tmp_path}/job-1/checkpoints", tmp_path, "job-1"),
        (str(tmp_path), tmp_path, ""),
        (f"{tmp_path}/job-1/../../x", tmp_path, None),
        ("s3://lake/runs/job-1/checkpoints/step-1", remote, "job-1"),
        ("s3://lake/runs", remote, ""),
        ("s3://lake/\truns/job-1", remote, "job-1"),
        ("s3://lake//x/.\n./%72uns/job-1?region=eu-west-1", remote, "job-1"),
        ("s3://lake/runs-beside/job-1", remote, None),
        (f"{tmp_path}/job-1", remote, None),
        ("s3://lake/runs/job-1", None, None),
    ):
        assert job_below(path, root) == job_id, path


def test_clones_keep_their_checkpoints_below_the_root_of_today(open_guarded: GuardedApps) -> None:
    house = open_guarded(checkpoint_root="s3://lake/runs")
    job = house.store.get_job(house.submit("root"))
    assert job.spec.checkpoint.path == "s3://lake/runs"
    again = house.send("POST", f"/v1/jobs/{job.id}:clone", "root", json={})
    assert again.json()["spec"]["checkpoint"]["path"] == "s3://lake/runs"
    changed = house.settings.model_copy(update={"checkpoint_root": "s3://lake/later"})
    house.http.app.state.context = replace(house.http.app.state.context, settings=changed)
    later = house.send("POST", f"/v1/jobs/{job.id}:clone", "root", json={})
    assert later.json()["spec"]["checkpoint"]["path"] == "s3://lake/later"


def test_a_clone_does_not_take_over_a_place_that_the_operator_has_given_up(tmp_path: Path) -> None:
    before = validate_spec(spec_document(checkpoint={"path": "s3://lake/runs"}))
    settings = Settings(home=tmp_path, auth="required", checkpoint_root="s3://lake/later")
    roots = roots_of(settings)
    assert without_lost_place(before, before, roots).checkpoint.path is None
    named = validate_spec(spec_document(checkpoint={"path": "s3://lake/elsewhere"}))
    assert without_lost_place(named, before, roots) == named, "what is named is refused"
    assert without_lost_place(before, before, None) == before
    assert without_lost_place(before, before, (*roots, "s3://lake/runs")) == before
