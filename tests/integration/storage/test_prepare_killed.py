"""Preparing in a process that is killed: run again, the result has the same bytes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.harness.files import digest
from trainer.datasets.io.journal import JOURNAL_NAME
from trainer.datasets.movielens.synthetic import generate_movielens

OPTIONS = ("--unit-rows", "1000", "--num-partitions", "8")


def command(source: Path, out: Path) -> list[str]:
    code = "from trainer.datasets.cli import app; app()"
    return [sys.executable, "-c", code, "prepare", "movielens", str(source), str(out), *OPTIONS]


def num_parts(journal: Path) -> int:
    """Recorded parts; the first line says what the work is."""
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.is_file() else 0


def kill_after(process: subprocess.Popen, journal: Path, wanted: int) -> int:
    """Kill the process (SIGKILL) once so many parts are recorded; gives how many then are."""
    while num_parts(journal) < wanted:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    process.kill()
    process.wait()
    return num_parts(journal)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ratings") / "csv"
    generate_movielens(folder, num_ratings=80_000, seed=3)
    return folder


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    subprocess.run(command(source, out), check=True, capture_output=True)
    return out


# Parts in the journal: while sorting, while looking back, and while writing Parquet.
@pytest.mark.parametrize("kills", [(120,), pytest.param((30, 120, 245), marks=pytest.mark.slow)])
def test_a_run_that_was_killed_ends_with_the_bytes_of_one_that_was_not(
    source, whole, tmp_path, kills
):
    out, journal = tmp_path / "out", tmp_path / ".out.partial" / JOURNAL_NAME
    done = 0
    for wanted in kills:
        process = subprocess.Popen(
            command(source, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        found = kill_after(process, journal, wanted)
        assert found >= max(wanted, done), "what was finished is kept"
        assert not out.exists()
        done = found
    subprocess.run(command(source, out), check=True, capture_output=True)
    assert digest(out) == digest(whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
