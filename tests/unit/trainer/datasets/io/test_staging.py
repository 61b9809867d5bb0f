"""Output folders: kills, working folders elsewhere, full disks; the journal of finished parts."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import polars as pl
import pytest
from pyarrow import fs
from typer.testing import CliRunner

from trainer.data.manifest import MANIFEST_NAME, Manifest
from trainer.datasets.cli import app
from trainer.datasets.criteo.prepare import CriteoOptions, prepare_criteo
from trainer.datasets.criteo.synthetic import CriteoGeneratorOptions, generate_criteo
from trainer.datasets.io import staging as module
from trainer.datasets.io.journal import JOURNAL_NAME, Facts, Journal, progress_bars
from trainer.datasets.io.staging import staged, staged_folder
from trainer.errors import OutputExistsError, StorageError
from trainer.storage import Location

MANIFEST = Manifest(source="test", splits={}, columns={}, vocab_sizes={}, options={}, statistics={})


def prepare(
    out: Path | Location, text: str = "new", *, overwrite: bool = False, **options: object
) -> None:
    work = {"text": text}
    with staged(Location.parse(out), work, overwrite=overwrite, **options) as staging:
        staging.scratch("work.txt", lambda path: path.write_text(text) and None)
        staging.result("part.txt", lambda path: path.write_text(text) and None)
        staging.publish(MANIFEST)


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def raw(tmp_path) -> Iterator[Path]:
    generate_criteo(tmp_path / "raw", CriteoGeneratorOptions(num_rows=200))
    yield tmp_path / "raw/train.txt"


def test_what_a_run_left_that_was_killed_at_its_very_end_is_removed(tmp_path, monkeypatch):
    out = tmp_path / "out"
    prepare(out, "old")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_drop_retired", killed)
        prepare(out, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 3, "the older folder and working files are left"
    with pytest.raises(OutputExistsError, match="--overwrite"):
        prepare(out)
    assert list(tmp_path.iterdir()) == [out]
    assert (out / "part.txt").read_text() == "new"


def test_what_a_kill_leaves_without_a_journal_is_cleared_and_what_is_not_ours_spared(tmp_path):
    out, working = tmp_path / "out", tmp_path / ".out.partial"
    for left in ("scratch/units/00000.arrow", ".journal.jsonl.0a1b2c3d.partial", "thesis.txt"):
        (working / left).parent.mkdir(parents=True, exist_ok=True)
        (working / left).write_text("half")
        if left == "thesis.txt":
            with pytest.raises(OutputExistsError, match="not ours to empty"):
                prepare(out)
            assert (working / left).exists()
        else:
            prepare(out, overwrite=True)
            assert list(tmp_path.iterdir()) == [out]


def test_unfinished_work_that_is_to_replace_a_folder_is_no_leftover(tmp_path, monkeypatch):
    out = tmp_path / "out"
    prepare(out, "old")
    with (
        pytest.raises(KeyboardInterrupt),
        staged(Location.parse(out), {"text": "new"}, overwrite=True) as staging,
    ):
        staging.scratch("work.txt", lambda path: path.write_text("new") and None)
        raise KeyboardInterrupt
    with pytest.raises(OutputExistsError, match="--overwrite"):
        prepare(out)
    assert (tmp_path / ".out.partial/scratch/work.txt").exists()


def test_a_folder_that_somebody_makes_meanwhile_is_not_replaced_unasked(tmp_path):
    out = tmp_path / "out"
    with (
        pytest.raises(OutputExistsError, match="--overwrite"),
        staged(Location.parse(out), {"text": "new"}, overwrite=False) as staging,
    ):
        staging.result("part.txt", lambda path: path.write_text("new") and None)
        prepare(out.with_name("other"), "theirs")
        out.with_name("other").rename(out)
        staging.publish(MANIFEST)
    assert (out / "part.txt").read_text() == "theirs"
    # What was done goes on once there is room for it.
    out.rename(out.with_name("other"))
    made = maker()
    with staged(Location.parse(out), {"text": "new"}, overwrite=False) as staging:
        staging.result("part.txt", made)
        staging.publish(MANIFEST)
    assert not made.called and (out / "part.txt").read_text() == "new"
    with (
        pytest.raises(OutputExistsError, match="--overwrite"),
        staged_folder(tmp_path / "raw", overwrite=False, proof="proof"),
    ):
        (tmp_path / "raw").mkdir()
        (tmp_path / "raw/theirs").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "out", "raw"]


def test_a_link_stays_one_and_what_is_prepared_or_generated_lies_where_it_leads(tmp_path):
    (tmp_path / "disk").mkdir()
    for name in ("out", "raw"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    for text in ("old", "new"):
        prepare(tmp_path / "out", text, overwrite=text == "new")
        with staged_folder(tmp_path / "raw", overwrite=True, proof="proof") as folder:
            (folder / "proof").write_text(text)
        assert (tmp_path / "out/part.txt").read_text() == text
        assert (tmp_path / "raw/proof").read_text() == text
        assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["out", "raw"]
    sources = [Location.parse(tmp_path / "disk/out/part.txt")]
    with pytest.raises(OutputExistsError, match="which is read"):
        prepare(tmp_path / "out", overwrite=True, sources=sources)
    assert len(list(tmp_path.iterdir())) == 3


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    prepare(tmp_path / "out")
    assert (tmp_path / "out/part.txt").exists()
    (tmp_path / "raw").mkdir()
    with staged_folder(tmp_path / "raw", overwrite=False, proof="proof") as folder:
        (folder / "proof").touch()
    assert [path.name for path in (tmp_path / "raw").iterdir()] == ["proof"]


def test_two_processes_do_not_prepare_the_same_folder(tmp_path):
    out = tmp_path / "out"
    with (
        staged(Location.parse(out), {}, overwrite=False),
        pytest.raises(OutputExistsError, match="is in use by another process"),
    ):
        prepare(out)


def test_a_folder_with_a_manifest_of_something_else_is_not_replaced(tmp_path):
    out = tmp_path / "website"
    out.mkdir()
    (out / MANIFEST_NAME).write_text('{"name": "a web page", "icons": []}')
    with pytest.raises(OutputExistsError, match=r"manifest\.json is no manifest of ours"):
        prepare(out, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == [out, out / MANIFEST_NAME]
    (out / MANIFEST_NAME).rename(out / "thesis.txt")
    with pytest.raises(OutputExistsError, match="not ours to overwrite"):
        prepare(out, overwrite=True)
    assert (out / "thesis.txt").exists()


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or Path("/dev/shm").stat().st_dev == Path("/tmp").stat().st_dev,
    reason="needs a second disk",
)
def test_working_files_can_lie_on_another_disk(tmp_path):
    work_folder = Path("/dev/shm") / tmp_path.name / "work"
    out = tmp_path / "new" / "out"
    try:
        prepare(out, work_folder=work_folder)
        assert not list(work_folder.iterdir())
    finally:
        shutil.rmtree(work_folder.parent, ignore_errors=True)
    assert sorted(path.name for path in out.iterdir()) == [MANIFEST_NAME, "part.txt"]
    assert list(out.parent.iterdir()) == [out]


def test_a_working_folder_is_for_its_user_only(tmp_path, monkeypatch):
    local = Location.parse(tmp_path / "out")
    with staged(local, {}, overwrite=False, work_folder=tmp_path / "work"):
        (folder,) = (tmp_path / "work").iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "bucket/out").mkdir(parents=True)
    out = Location(fs.LocalFileSystem(), str(tmp_path / "bucket/out"), root="s3://")
    monkeypatch.setattr(module.os, "getuid", lambda: 12345)
    with pytest.raises(OutputExistsError, match=r"belongs to another user; .*--work-dir"):
        prepare(out)


def test_too_small_a_disk_is_found_before_rows_are_read_and_the_work_is_kept(
    raw, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        usage = SimpleNamespace(free=200 * 164 - 1)
        patch.setattr(module.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(StorageError, match=r"working files need .* GB free; make room or name"):
            prepare_criteo([raw], tmp_path / "out", options=CriteoOptions(num_partitions=2))
        assert list((tmp_path / ".out.partial/scratch").iterdir()) == [
            tmp_path / ".out.partial/scratch/lines"
        ]
        usage.free += 1
        prepare_criteo([raw], tmp_path / "out", options=CriteoOptions(num_partitions=2))


def test_a_disk_that_refuses_is_a_message_and_no_traceback(raw, tmp_path, before_parts):
    def refuse(*_: object) -> None:
        raise OSError("410000 requested and 255968 written")

    arguments = ["prepare", "criteo", str(raw), str(tmp_path / "out")]
    with before_parts(refuse):
        failed = CliRunner().invoke(app, arguments)
    assert failed.exit_code == 2
    assert "255968 written; is the disk full? Make room, then run the same" in failed.stderr
    arguments += ["--work-dir", str(tmp_path / "work")]
    assert CliRunner().invoke(app, arguments).exit_code == 0


def test_a_vocabulary_that_a_disk_refuses_is_told_as_a_full_disk(tmp_path):
    values = pl.DataFrame({"value": np.random.default_rng(0).random(1000)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        pytest.raises(OSError, match="File too large") as refused,
        staged(Location.parse(tmp_path / "out"), {}, overwrite=False) as staging,
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            staging.vocabulary("x", values)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.errno == errno.EFBIG


WORK = {"options": {"a": 1}}


def maker() -> Mock:
    """Writes a part, and knows how often it was asked to."""
    return Mock(side_effect=lambda path: path.write_text("part") and {"rows": 3})


def test_a_finished_part_is_not_made_again_unless_the_work_is_another(tmp_path):
    make = maker()
    first = Journal(tmp_path, WORK).part("deep/one", make)
    journal = Journal(tmp_path, WORK)
    assert journal.part("deep/one", make) == first
    assert (make.call_count, first.facts) == (1, {"rows": 3})
    assert (tmp_path / "deep" / "one").read_text() == "part"
    journal = Journal(tmp_path, {"options": {"a": 2}})
    assert (journal.find("deep/one"), (tmp_path / "deep/one").exists()) == (None, False)


def test_a_part_that_is_damaged_or_gone_is_made_again(tmp_path):
    make = maker()
    Journal(tmp_path, WORK).part("one", make)
    for calls, damage in enumerate(["PART", "cut", None], start=2):
        (tmp_path / "one").write_text(damage or "")
        if not damage:
            (tmp_path / "one").unlink()
        Journal(tmp_path, WORK).part("one", make)
        assert make.call_count == calls
        assert (tmp_path / "one").read_text() == "part"


def test_a_line_cut_by_a_kill_costs_only_its_part(tmp_path):
    journal = Journal(tmp_path, WORK)
    for name in ("one", "two"):
        journal.part(name, maker())
    path = tmp_path / JOURNAL_NAME
    path.write_text(path.read_text()[:-20])
    again = maker()
    resumed = Journal(tmp_path, WORK)
    assert resumed.find("one") and not resumed.find("two")
    resumed.part("two", again)
    resumed.part("three", again)
    whole = Journal(tmp_path, WORK)
    assert whole.find("one") and whole.find("two") and whole.find("three")


def test_a_part_that_fails_is_not_recorded(tmp_path):
    def fail(path: Path) -> Facts:
        path.write_text("half")
        raise OSError("disk full")

    journal = Journal(tmp_path, WORK)
    with pytest.raises(OSError, match="disk full"):
        journal.part("one", fail)
    assert journal.find("one") is None
    assert not (tmp_path / "one").exists()


def test_where_there_is_no_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now_s = 0.0
    with progress_bars() as progress:
        progress.get_time = lambda: now_s
        task = progress.add_task("reading", total=400)
        for _ in range(100):
            progress.advance(task, 1)
            now_s += 0.2
        for _ in progress.track(range(200), description="writing"):
            now_s += 0.2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in told] == ["reading"] + 4 * ["writing"], told
    assert told[0] == "reading: 13 %" and told[-1] == "writing: 76 %"
