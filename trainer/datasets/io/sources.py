"""Which files are meant by the paths and folders that a command is given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trainer.datasets.io.csv_reader import COMPRESSIONS
from trainer.errors import SourceMissingError
from trainer.storage import Location


def find_sources(sources: Sequence[str | Path | Location]) -> tuple[Location, ...]:
    """The files meant: those named, and all files of folders named, `day_2` before `day_10`.

    Raises `SourceMissingError` where there is none.
    """
    found: list[Location] = []
    for location in map(Location.parse, sources):
        if location.is_dir():
            files = [file for file in location.list() if _is_data(file.name)]
            found += sorted(files, key=lambda file: _natural(file.name))
        elif location.exists():
            found.append(location)
        else:
            raise SourceMissingError(f"{location} is missing; name a file, or a folder of them")
    if not found:
        raise SourceMissingError(
            f"no files with rows in {', '.join(map(str, sources))}; name such files"
        )
    return tuple(found)


def check_distinct(files: Sequence[Location]) -> None:
    """Raise `SourceMissingError` where rows would count twice, perhaps in both parts of the data.

    That is: where a file is named twice, by whatever paths or links, or lies beside itself
    compressed.
    """
    known: dict[object, Location] = {}
    for file in files:
        end = next((end for end in COMPRESSIONS if file.name.endswith(end)), "")
        names = {_identity(file), ("plain", file.root, file.path.removesuffix(end))}
        if earlier := next((known[name] for name in names if name in known), None):
            raise SourceMissingError(
                f"{file} and {earlier} are the same rows, which would be counted twice; name or "
                "keep only one of them"
            )
        known |= dict.fromkeys(names, file)


def _identity(file: Location) -> object:
    """Equal for two paths of one file, symbolic and hard links included."""
    if not file.is_local:
        return file.text
    status = file.local_path.stat()
    return status.st_dev, status.st_ino


def _is_data(name: str) -> bool:
    """Whether a file of a folder is meant: no hidden one, no description."""
    is_hidden = name.startswith((".", "_"))
    return not is_hidden and not name.endswith((".json", ".md")) and "readme" not in name.lower()


def _natural(name: str) -> list[str | int]:
    """Sorts runs of digits by their value; texts and numbers alternate, so they compare."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]
