"""The lock of a run folder: one owner, dead ones replaced, live ones named. No waiting."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.clock import FakeClock
from trainer.driver import main, run_lock
from trainer.driver.attempt import AttemptFailed, DriverContext
from trainer.driver.run_lock import Owner, RunLock, hold_run, is_gone
from trainer.failures import EndReason, Failure
from trainer.protocol.outbox import EventWriter
from trainer.protocol.run_dir import RunDir


def lock(run_dir: Path, name: str, clock: FakeClock | None = None) -> RunLock:
    """A lock that waits in no time."""
    clock = clock or FakeClock()
    return RunLock(run_dir, name, patience_s=5, clock=clock, sleep=clock.sleep)


def meanwhile(happens: Callable[[], object]) -> FakeClock:
    """A clock in each of whose sleeps something happens."""
    return FakeClock(meanwhile=lambda _: happens() and None)


def pretend(run_dir: Path, **changes: object) -> None:
    """Make the lock file that of another process, or of one on another machine."""
    path = RunDir(run_dir).lock_path
    owner = Owner.model_validate_json(path.read_bytes()).model_copy(update=changes)
    path.write_bytes(owner.model_dump_json().encode())


def test_a_dead_process_on_this_machine_is_replaced_at_once(tmp_path: Path) -> None:
    lock(tmp_path, "job-a0").acquire()
    pretend(tmp_path, process_start="1")  # its id is another process's by now
    fake = FakeClock()
    second = lock(tmp_path, "job-a1", clock=fake)
    second.acquire()
    assert fake.now < 1
    assert second.beat()


def test_an_owner_elsewhere_lives_while_it_beats_whatever_its_clock_says(tmp_path: Path) -> None:
    lock(tmp_path, "job-a0").acquire()
    beats = iter(range(1, 1000))

    def beat() -> None:
        pretend(tmp_path, machine="elsewhere", since=-1e9, beat=next(beats))

    with pytest.raises(AttemptFailed, match="job-a0"):
        lock(tmp_path, "job-a1", clock=meanwhile(beat)).acquire()


def test_an_owner_elsewhere_that_stopped_beating_is_replaced(tmp_path: Path) -> None:
    first = lock(tmp_path, "job-a0")
    first.acquire()
    beats = iter(range(1, 4))

    def beat_for_the_last_time() -> None:
        if beat := next(beats, 0):
            pretend(tmp_path, machine="elsewhere", beat=beat)

    beat_for_the_last_time()
    lock(tmp_path, "job-a1", clock=meanwhile(beat_for_the_last_time)).acquire()
    assert not first.beat(), "the first learns that it lost the folder"
    first.release()
    assert "job-a1" in RunDir(tmp_path).lock_path.read_text(), "and leaves it to the second"


def test_an_owner_that_ends_meanwhile_is_waited_for(tmp_path: Path) -> None:
    first = lock(tmp_path, "job-a0")
    first.acquire()
    lock(tmp_path, "job-a1", clock=meanwhile(first.release)).acquire()
    assert "job-a1" in RunDir(tmp_path).lock_path.read_text()


def test_a_beat_that_storage_refused_is_made_up_for_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def opened_to_read(path: Path, mode: str, *how: Any, **named: Any) -> Any:
        if "+" in mode:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return opened(path, mode, *how, **named)

    owner = lock(tmp_path, "job-a0")
    owner.acquire()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="quota"):
        patch.setattr(Path, "open", opened_to_read)
        owner.beat()
    assert owner.beat()
    owner.release()
    assert not RunDir(tmp_path).lock_path.exists()


def test_of_two_that_take_over_the_one_whose_name_stays_has_it(tmp_path: Path) -> None:
    lock(tmp_path, "job-a0").acquire()
    pretend(tmp_path, process_start="1")

    def third_comes() -> None:
        pretend(tmp_path, name="job-a2", machine="elsewhere", token=os.urandom(4).hex())

    with pytest.raises(AttemptFailed, match="job-a2"):
        lock(tmp_path, "job-a1", clock=meanwhile(third_comes)).acquire()


def test_a_damaged_lock_counts_until_it_was_watched_for_a_while(tmp_path: Path) -> None:
    for content in (b"", b"\x00" * 99, b'{"name": "job-a'):
        RunDir(tmp_path).lock_path.write_bytes(content)
        fake = FakeClock()
        lock(tmp_path, "job-a1", clock=fake).acquire()
        assert fake.now >= 5


def test_processes_of_other_machines_are_never_judged_by_their_number() -> None:
    owner = Owner.here("job-a0").model_copy(update={"pid": 2**22 + 1, "machine": "elsewhere"})
    assert is_gone(owner, Owner.here("job-a1").machine) is None
    assert is_gone(owner.model_copy(update={"machine": "here"}), "here")


def test_a_process_that_has_ended_is_gone_though_nobody_has_waited_for_it() -> None:
    here = Owner.here("job-a0")
    with subprocess.Popen(["sleep", "600"]) as process:
        start = run_lock._process_start(process.pid)
        owner = here.model_copy(update={"pid": process.pid, "process_start": start})
        assert is_gone(owner, here.machine) is False
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(owner, here.machine) is True


def test_the_folder_is_held_for_a_block_and_free_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), hold_run(tmp_path, "job-a0", on_lost=int):
        assert RunDir(tmp_path).lock_path.exists()
        raise ValueError("inside")
    assert not RunDir(tmp_path).lock_path.exists()


def test_what_a_block_gives_is_not_lost_with_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_away(*_: Any) -> bytes:
        raise OSError(errno.ESTALE, "stale file handle")

    with hold_run(tmp_path, "job-a0", on_lost=int):
        monkeypatch.setattr(Path, "read_bytes", is_away)


def test_a_driver_refuses_a_folder_in_use_and_holds_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = DriverContext("job-1", "job-1-a1", tmp_path, None, 0)
    writer = EventWriter(context.files.stream_path("driver"))
    held = []

    def attempt(context: DriverContext, writer: EventWriter) -> Failure:
        held.append("job-1-a1" in RunDir(tmp_path).lock_path.read_text())
        return Failure(EndReason.BAD_SPEC, "the end")

    monkeypatch.setattr(main, "check_versions", lambda: [])
    monkeypatch.setattr(main, "run_until_stopped", attempt)
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.0)
    first = lock(tmp_path, "job-1-a0")
    first.acquire()
    refused = main.end_attempt(context, writer)
    assert (refused.reason, held) == (EndReason.RUN_IN_USE, [])
    assert f"job-1-a0 (process {os.getpid()} on " in refused.message
    assert str(tmp_path) in refused.message
    first.release()
    assert main.end_attempt(context, writer).reason == EndReason.BAD_SPEC
    assert held == [True]
    assert not RunDir(tmp_path).lock_path.exists()
