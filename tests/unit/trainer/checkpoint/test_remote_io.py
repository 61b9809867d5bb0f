"""Files of checkpoints: what went wrong with storage is what is said; nothing in them is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.harness.files import Call
from trainer.checkpoint import remote_io, save_load
from trainer.checkpoint.remote_io import RemoteReader, RemoteWriter, _RemoteFiles, reader_for
from trainer.checkpoint.state_dict import stored_sizes
from trainer.errors import StorageAwayError
from trainer.protocol.run_dir import file_record
from trainer.storage import Location


class FailingStream:
    """Takes some bytes, then is away."""

    def __init__(self, num_good_bytes: int) -> None:
        self._left = num_good_bytes

    def tell(self) -> int:
        """At the start of a part."""
        return 0

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


def test_a_share_is_in_as_many_objects_as_are_small_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_io, "_MAX_OBJECT_BYTES", 100)
    state: dict[str, Any] = {f"t{i}": torch.full((num,), i) for i, num in enumerate([6, 5, 1, 20])}
    writer = RemoteWriter(Location.parse(tmp_path))
    dcp.save(state | {"plain": b"bytes"}, storage_writer=writer, no_dist=True)
    files = {path.name: file_record(path) for path in tmp_path.iterdir()}
    assert writer.records == files
    # t0 and t1 with t2; a tensor that is larger by itself.
    assert sorted(files) == [".metadata", *(f"__0_{n}0.distcp" for n in ("", "1_", "2_"))]
    loaded: dict[str, Any] = {name: torch.zeros_like(value) for name, value in state.items()}
    save_load.load(tmp_path, loaded | {"plain": b""})
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def test_metadata_and_objects_of_a_checkpoint_run_nothing(tmp_path: Path) -> None:
    folder, ran = tmp_path / "step-3", tmp_path / "ran"
    state = {"weights": torch.ones(2), "meters": Call(os.mkdir, ran), "plain": b"bytes"}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    loaded: dict[str, Any] = {"weights": torch.zeros(2), "plain": b""}
    save_load.load(folder, loaded)
    assert loaded["plain"] == b"bytes"
    assert torch.equal(loaded["weights"], torch.ones(2))
    with pytest.raises(save_load.CheckpointRefused, match=r"step-3 is refused: it holds posix\."):
        save_load.load(folder, {"meters": b""})
    outside = pickle.loads((folder / ".metadata").read_bytes())
    next(iter(outside.storage_data.values())).relative_path = "/dev/zero"
    (folder / ".metadata").write_bytes(pickle.dumps(outside))
    with pytest.raises(save_load.CheckpointRefused, match=r"outside of its folder"):
        stored_sizes(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Call(os.mkdir, ran)))
    for reader in (reader_for(folder), RemoteReader(Location.parse(str(folder)))):
        with pytest.raises(pickle.UnpicklingError, match=r"step-3/\.metadata.*Name another"):
            reader.read_metadata()
    assert not ran.exists()
    os.truncate(folder / ".metadata", 2**40)
    with pytest.raises(OSError, match=r"more than \d+ bytes"):
        stored_sizes(folder)
