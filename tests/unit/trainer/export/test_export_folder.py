"""Exports as files of a run folder: where each stands, and who may work on it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.service import write_export
from tests.harness.wait import scaled
from tests.unit.trainer.export.export_case import make_spec
from trainer.export.__main__ import main
from trainer.export.requests import (
    HELD,
    ExportFolder,
    ask_for,
    export_on_success,
    find_export,
    list_exports,
    remove_deleted,
)
from trainer.protocol.run_dir import RunDir

HOLD = """
import sys, pathlib
from trainer.export.requests import ExportFolder
with ExportFolder(pathlib.Path(sys.argv[1])).hold() as is_open:
    print(is_open, flush=True)
    sys.stdin.read()
"""


def test_an_export_is_queued_then_done_or_failed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    first, second = ask_for(run_dir, "best", "int8"), ask_for(run_dir, "7", "none")
    assert [each.status for each in (first, second)] == ["queued", "queued"]
    first.tell("loading")
    assert first.message == "loading"
    second.fail("too large")
    assert (second.status, second.message) == ("failed", "too large")
    second.fail("\U0001f525" * 2**16)
    assert second.message.startswith("\U0001f525")
    assert first.read_report() is None
    write_export(first)
    assert first.status == "succeeded"
    assert first.read_report() == {"num_rows": 3}
    assert [each.id for each in list_exports(run_dir)] == [first.id, second.id]
    assert find_export(run_dir, second.id) == second
    assert find_export(run_dir, "../checkpoints") is None


def test_what_is_no_request_is_not_listed(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    (ask_for(run_dir, "newest", "int8").root / "request.json").write_text("{")
    (run_dir.exports_dir / "x-strange").mkdir()
    (run_dir.exports_dir / "x-strange" / "request.json").write_text("{}")
    assert list_exports(run_dir) == []


def test_one_process_at_a_time_works_on_an_export(tmp_path: Path) -> None:
    folder = ask_for(RunDir(tmp_path), "newest", "int8")
    command = [sys.executable, "-c", HOLD, str(folder.root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first:  # type: ignore[call-overload]
        assert first.stdout.readline().strip() == "True"
        assert folder.status == "running"
        # A service has other exports to make.
        assert main(["--request", str(folder.root), "--places", "0"]) == HELD
        with subprocess.Popen(command, **pipes) as second:  # type: ignore[call-overload]
            write_export(folder)
            first.stdin.close()
            # The one that waited finds nothing left to do.
            assert second.stdout.readline().strip() == "False"
            second.stdin.close()
    assert folder.status == "succeeded"


def test_what_becomes_of_the_export_that_a_job_asks_for_is_told_in_its_timeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(happens: Callable[[ExportFolder], object], command: list[str], **_: object) -> object:
        assert command[:-1] == [sys.executable, "-m", "trainer.export", "--request"]
        happens(ExportFolder(Path(command[-1])))
        return SimpleNamespace(returncode=9)

    told: list[Any] = []
    export_on_success(make_spec(tmp_path), RunDir(tmp_path), told.append)
    assert told == [] and not (tmp_path / "exports").exists(), "none was asked for"
    spec = make_spec(tmp_path, export={"on_success": True, "checkpoint": "best"})
    for happens, level, said in (
        (write_export, "info", "export x-"),
        (lambda folder: folder.fail("no checkpoint yet"), "error", "failed: no checkpoint yet"),
        (lambda folder: None, "error", "ended with code 9; export.log says more"),
        (ExportFolder.mark_deleted, "info", "was deleted before it was done"),
    ):
        told.clear()
        monkeypatch.setattr(subprocess, "run", partial(run, happens))
        export_on_success(spec, RunDir(tmp_path), told.append)
        assert [note.level for note in told] == ["info", level]
        assert said in told[-1].message
    folders = list_exports(RunDir(tmp_path))
    assert [folder.status for folder in folders] == ["succeeded", "failed", "failed"]
    assert {folder.wanted.checkpoint for folder in folders} == {"best"}


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGINT as in a process of its own: what other tests run may have set it otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_process_ends_when_its_export_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupts: None
) -> None:
    folder = ask_for(RunDir(tmp_path), "newest", "int8")

    def never_ends(*_: object, **__: object) -> None:
        folder.mark_deleted()
        assert not folder.remove()  # its process holds the lock
        threading.Event().wait(scaled(60))
        pytest.fail("it worked on")

    monkeypatch.setattr("trainer.export.__main__.export", never_ends)
    monkeypatch.setattr("trainer.export.__main__._POLL_S", 0.02)
    assert main(["--request", str(folder.root)]) == 1
    assert list_exports(RunDir(tmp_path)) == []
    assert remove_deleted(RunDir(tmp_path)) == 1
    assert list((tmp_path / "exports").iterdir()) == []
    assert main(["--request", str(folder.root)]) == 1
