"""Which files a command means, and what counts as the same rows."""

from __future__ import annotations

import os

import pytest

from trainer.datasets.io.sources import check_distinct, find_sources
from trainer.errors import SourceMissingError


def test_a_folder_with_a_file_and_its_compressed_copy_is_refused(tmp_path):
    for name in ("day_0", "day_1", "day_1.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(SourceMissingError, match=r"day_1.gz and .*day_1 are the same rows"):
        check_distinct(find_sources([str(tmp_path)]))


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_one_file_by_two_names_is_refused(tmp_path, link):
    folder = tmp_path / "days"
    folder.mkdir()
    (folder / "day_0").write_bytes(b"")
    link(folder / "day_0", tmp_path / "train.txt")
    for twice in ([folder, folder / "day_0"], [folder, tmp_path / "train.txt"]):
        with pytest.raises(SourceMissingError, match="same rows, which would be counted twice"):
            check_distinct(find_sources([str(path) for path in twice]))
    # Equal names in two folders are two files.
    (tmp_path / "days" / "train.txt").write_bytes(b"")
    check_distinct(find_sources([str(folder / "train.txt"), str(tmp_path / "train.txt")]))
