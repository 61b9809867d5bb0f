"""Deleting jobs with their files, whole or cut off anywhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from service.client.client import ShardloomClient
from service.client.errors import NotFound
from service.domain.models import JobStatus
from service.errors import JobNotEnded, JobUnreadable, StoreUnavailable
from service.jobs import actions
from service.jobs.actions import finish_deletions
from service.jobs.run_storage import run_dir_of, trashed_jobs
from tests.harness.builders import batch, checkpoint
from tests.harness.service import Api, end, problem_in, running, shardloom


def ended(api: Api) -> tuple[str, Path]:
    """A job that has ended, and its run folder with a checkpoint that is listed."""
    job_id = running(api)
    folder = run_dir_of(api.settings, job_id).root
    saved = saved_below(folder)
    told = checkpoint(100).model_copy(update={"path": str(saved)})
    api.post_events(f"{job_id}-a0", batch(told, stream="workers-0"))
    end(api, job_id, "training_error")
    return job_id, folder


def saved_below(folder: Path) -> Path:
    """A checkpoint below the folder of a job."""
    saved = folder / "checkpoints" / "step-00000100-a0-r0"
    saved.mkdir(parents=True)
    (saved / "COMMIT.json").write_text("{}")
    return saved


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for the checkpoints of jobs."""
    found = tmp_path / "elsewhere"
    found.mkdir()
    return found


# Deletes a job up to a step: "rows", "checkpoints" or "trash".
CutOff = Callable[[str, str], None]


@pytest.fixture
def cut_off(api: Api, monkeypatch: pytest.MonkeyPatch) -> CutOff:
    """Cuts deletions off."""
    places = {
        "rows": (api.store, "delete_job", StoreUnavailable("away"), "store_unavailable"),
        "checkpoints": (actions, "remove_checkpoints", OSError("away"), "storage_unavailable"),
        "trash": (actions, "empty_trash", OSError("away"), "storage_unavailable"),
    }

    def delete(job_id: str, step: str) -> None:
        owner, name, error, code = places[step]
        with monkeypatch.context() as broken:
            broken.setattr(owner, name, Mock(side_effect=error))
            problem_in(api.http.delete(f"/v1/jobs/{job_id}"), 503, code)

    return delete


@pytest.mark.parametrize("was_cut_off", [False, True])
def test_files_stay_where_that_is_asked_for(
    api: Api, client: ShardloomClient, cut_off: CutOff, was_cut_off: bool
) -> None:
    job_id, folder = ended(api)
    if was_cut_off:
        cut_off(job_id, "rows")
    client.delete(job_id, artifacts=False)
    assert (folder / "checkpoints").exists()
    assert not (folder / "job.json").exists()


def ended_with_checkpoints_at(api: Api, path: Path | str) -> str:
    job_id = running(api, checkpoint={"path": str(path)})
    end(api, job_id)
    return job_id


def test_checkpoints_in_another_folder_go_with_their_job_and_no_others(
    api: Api, client: ShardloomClient, place: Path
) -> None:
    first, second = (ended_with_checkpoints_at(api, place) for _ in range(2))
    saved_below(place / first)
    others = saved_below(place / second)
    assert client.delete(first).left == []
    assert [*place.iterdir()] == [place / second]
    client.delete(second, artifacts=False)
    assert others.exists()


def test_checkpoints_that_the_service_cannot_delete_are_named_with_their_place(
    api: Api, client: ShardloomClient, tmp_path: Path, place: Path
) -> None:
    remote = ended_with_checkpoints_at(api, "s3://lake/runs/?region=eu-west-1")
    said = shardloom("delete", remote, "--yes")
    assert f"its checkpoints stay at s3://lake/runs/{remote}: " in said.stderr
    assert "deletes no objects" in said.stderr

    linked, unseen = (ended_with_checkpoints_at(api, place) for _ in range(2))
    (tmp_path / "secret").mkdir()
    (place / linked).symlink_to(tmp_path / "secret")
    (left,) = client.delete(linked).left
    assert (left.path, (tmp_path / "secret").exists()) == (str(place / linked), True)
    assert "cannot be deleted" in left.why
    (place / linked).unlink()
    place.rmdir()
    (left,) = client.delete(unseen).left
    assert "does not see" in left.why


def test_what_only_looks_like_the_trash_of_a_job_deletes_nothing(api: Api, place: Path) -> None:
    others = {saved_below(place / "job-000000000000"), saved_below(place / "models")}
    settings = api.settings.model_copy(update={"auth": "required"})
    for name in ("models.x", "job-000000000000.0a"):
        forged = settings.runs_dir / f".deleted-{name}"
        forged.mkdir(parents=True)
        document = {"spec": {"checkpoint": {"path": str(place)}}}
        (forged / "job.json").write_text(json.dumps(document))
    finish_deletions(api.store, settings)
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("step", ["checkpoints", "trash"])
def test_a_deletion_that_is_cut_off_after_the_rows_is_finished_later(
    api: Api, place: Path, cut_off: CutOff, step: str
) -> None:
    job_id, kept = ended_with_checkpoints_at(api, place), running(api)
    saved_below(place / job_id)
    cut_off(job_id, step)
    assert trashed_jobs(api.settings) == [job_id]
    finish_deletions(api.store, api.settings)
    assert (trashed_jobs(api.settings), [*place.iterdir()]) == ([], [])
    assert run_dir_of(api.settings, kept).root.exists()


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_job_whose_deletion_was_cut_off_has_its_files_again_later(
    api: Api,
    client: ShardloomClient,
    cut_off: CutOff,
    monkeypatch: pytest.MonkeyPatch,
    is_readable: bool,
) -> None:
    job_id, folder = ended(api)
    cut_off(job_id, "rows")
    assert not folder.exists()
    with monkeypatch.context() as patched:
        if not is_readable:
            of_tomorrow = JobUnreadable(job_id, "a field of tomorrow")
            patched.setattr(api.store, "get_job", Mock(side_effect=of_tomorrow))
        finish_deletions(api.store, api.settings)
    assert trashed_jobs(api.settings) == []
    (listed,) = api.store.list_checkpoints(job_id)
    assert (Path(listed.path) / "COMMIT.json").exists()
    client.delete(job_id)
    assert list(api.settings.runs_dir.iterdir()) == []
    with pytest.raises(NotFound):
        client.delete(job_id)


def test_a_deletion_passes_beside_others_that_finish_it(
    api: Api, client: ShardloomClient, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = ended_with_checkpoints_at(api, place)
    saved_below(place / job_id)
    delete, remove = api.store.delete_job, shutil.rmtree

    def delete_after_others(deleted: str) -> None:
        finish_deletions(api.store, api.settings)
        delete(deleted)

    def remove_after_others(folder: Path) -> None:
        remove(folder)
        remove(folder)

    monkeypatch.setattr(api.store, "delete_job", delete_after_others)
    monkeypatch.setattr(shutil, "rmtree", remove_after_others)
    assert client.delete(job_id).left == []
    assert [*place.iterdir(), *api.settings.runs_dir.iterdir()] == []


def test_a_restart_takes_back_what_a_deletion_that_was_cut_off_set_aside(
    api: Api, client: ShardloomClient, cut_off: CutOff
) -> None:
    job_id, folder = ended(api)
    cut_off(job_id, "rows")
    client.restart(job_id)
    api.poll()
    assert client.get_job(job_id).current_attempt_id == f"{job_id}-a1"
    assert (folder / "checkpoints" / "step-00000100-a0-r0" / "COMMIT.json").exists()
    assert trashed_jobs(api.settings) == []


def test_a_job_with_a_folder_beside_its_buried_one_keeps_the_first_and_can_be_deleted(
    api: Api, client: ShardloomClient
) -> None:
    job_id, folder = ended(api)
    # As earlier versions left it: buried under the plain name, with a new run beside it.
    folder.rename(folder.with_name(f".deleted-{job_id}"))
    (folder / "attempts").mkdir(parents=True)
    finish_deletions(api.store, api.settings)
    assert [path.name for path in folder.iterdir()] == ["attempts"]
    assert trashed_jobs(api.settings) == [job_id]
    client.delete(job_id)
    assert list(api.settings.runs_dir.iterdir()) == []


def test_what_was_buried_comes_back_beside_what_was_made_since(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, folder = ended(api)
    (folder / "job.json").write_text("old")
    restarted = JobNotEnded(job_id, JobStatus.QUEUED)

    def restart_meanwhile(_: str) -> None:
        (folder / "checkpoints" / "step-00000200-a1-r0").mkdir(parents=True)
        (folder / "job.json").write_text("new")
        raise restarted

    with monkeypatch.context() as broken:
        broken.setattr(api.store, "delete_job", restart_meanwhile)
        problem = api.http.delete(f"/v1/jobs/{job_id}")
    assert problem_in(problem, 409, "job_not_ended")
    saved = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert saved == ["step-00000100-a0-r0", "step-00000200-a1-r0"]
    assert (folder / "job.json").read_text() == "new"
    assert trashed_jobs(api.settings) == []
