"""Storage that is away is told apart from data that are bad: only the former may come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import driver, failures
from trainer.attempt import DriverContext
from trainer.data.errors import CorruptFileError, DataError, StorageError, StorageRefusedError
from trainer.outbox import EventWriter
from trainer.worker import named_failures

CASES = [
    (StorageError("s3://b cannot be read"), failures.STORAGE_ERROR),
    (StorageRefusedError("s3://b: access was denied"), failures.DATA_ERROR),
    (CorruptFileError("part-0 is cut short"), failures.DATA_ERROR),
]


@pytest.mark.parametrize(("error", "reason"), CASES)
def test_a_worker_says_which(error: DataError, reason: str) -> None:
    with pytest.raises(failures.WorkerFailure) as caught, named_failures():
        raise error
    assert (caught.value.reason, caught.value.message) == (reason, str(error))


@pytest.mark.parametrize(("error", "reason"), CASES)
def test_the_driver_says_which(
    error: DataError, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(driver, "open_attempt", refuse)
    context = DriverContext("job-1", "job-1-a0", tmp_path, None, 0)
    ended = driver.run_attempt(context, EventWriter(tmp_path / "driver.jsonl"))
    assert ended == failures.Failure(reason, str(error))
