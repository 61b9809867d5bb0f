"""What the commands of `shardloom data` share: options, errors and the summary of a folder."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.data.errors import DataError

if TYPE_CHECKING:
    from trainer.data.manifest import Manifest

EXIT_BAD_DATA = 2
_MANY_VOCABULARIES = 8

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace OUT where it was made by this command.")
]


@contextmanager
def data_errors_shown() -> Iterator[None]:
    """Turn a `DataError`, or a disk that refuses, into a message on stderr and exit code 2."""
    try:
        yield
    except (DataError, OSError) as error:
        text = str(error) if isinstance(error, DataError) else _disk_text(error)
        console = Console(stderr=True)
        console.print(f"[bold red]Error:[/] {escape(text)}", soft_wrap=True)
        for note in getattr(error, "__notes__", ()):
            console.print(escape(note), soft_wrap=True)
        raise typer.Exit(EXIT_BAD_DATA) from None


def _disk_text(error: OSError) -> str:
    """What a disk refused; numpy names no cause where it could not write all of an array."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or error.errno is None
    mend = "is the disk full? Make room" if is_full else "check the path and your rights to it"
    return f"a file cannot be read or written: {error}; {mend}, then run the same command again"


def _vocabulary_rows(sizes: Mapping[str, int]) -> list[tuple[str, str]]:
    shown = {name: size for name, size in sizes.items() if not name.startswith("history_")}
    if len(shown) <= _MANY_VOCABULARIES:
        return [(f"{name} vocabulary", str(size)) for name, size in shown.items()]
    largest = max(shown, key=shown.__getitem__)
    total = f"{sum(shown.values())} ids, most in {largest}: {shown[largest]}"
    return [(f"{len(shown)} vocabularies", total)]


def show_summary(folder: object, manifest: Manifest) -> None:
    """Print rows, vocabularies and statistics of a prepared folder."""
    table = Table("what", "value", title=escape(f"{manifest.source} in {folder}"))
    for name, split in manifest.splits.items():
        size_mb = sum(file.size_bytes for file in split.files) / 1e6
        table.add_row(f"{name} rows", f"{split.num_rows} ({size_mb:.1f} MB)")
    for name, text in _vocabulary_rows(manifest.vocab_sizes):
        table.add_row(name, text)
    unit = " (stars)" if manifest.source == "movielens" else ""
    for name, value in manifest.statistics.items():
        table.add_row(f"{name.replace('_', ' ')}{unit}", f"{value:.4f}")
    for name, count in manifest.counts.items():
        table.add_row(name.replace("_", " "), str(count))
    console = Console()
    console.print(table)
    for line in manifest.bad_lines:
        console.print(f"left out: {escape(line)}", soft_wrap=True)
