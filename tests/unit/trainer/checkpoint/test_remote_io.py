"""Remote files of checkpoints: what went wrong with the storage is what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.checkpoint.remote_io import _RemoteFiles
from trainer.errors import StorageAwayError
from trainer.storage import Location


class FailingStream:
    """Takes some bytes, then is away."""

    def __init__(self, num_good_bytes: int) -> None:
        self._left = num_good_bytes

    def write(self, content: memoryview) -> None:
        """Write, or raise."""
        self._left -= len(content)
        if self._left < 0:
            raise StorageAwayError("the store is away")

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("num_good_bytes", [0, 64, 700, 4096])
def test_an_archive_that_cannot_be_ended_hides_no_fault_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_good_bytes: int
) -> None:
    stream = FailingStream(num_good_bytes)
    monkeypatch.setattr(Location, "open_output", lambda self: stream)
    path = Location.parse(str(tmp_path / "share"))
    # Large, so that some of it is written before the archive's end; small, so that all of it is.
    for tensor in (torch.zeros(100_000), torch.zeros(4)):
        with (
            pytest.raises(StorageAwayError, match="is away"),
            _RemoteFiles().create_stream(path, "wb") as output,
        ):
            for _ in range(100):
                torch.save(tensor, output)
