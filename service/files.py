"""The service's home folder, and files and folders that only their owner can read.

All functions raise `OSError`.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.protocol.run_dir import write_whole

DEFAULT_HOME = "~/.shardloom"


def home_dir() -> Path:
    """The folder named by SHARDLOOM_HOME, or the default one; absolute."""
    return Path(os.environ.get("SHARDLOOM_HOME") or DEFAULT_HOME).expanduser().absolute()


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode(), mode=0o600)


def create_once(path: Path, text: str) -> None:
    """Write a new private file atomically, unless another process was first."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    write_private(draft, text)
    try:
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def make_private(folder: Path) -> None:
    """Make a folder that only its owner may look into; one that is there stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def make_writable(folder: Path) -> None:
    """Make a folder if it is missing; raises where files cannot be made in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(folder))
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, f"user {os.geteuid()} may not write there", str(folder))


def is_below(path: Path, roots: Sequence[Path]) -> bool:
    """Whether a path, all links resolved, is one of the roots or lies below one.

    The roots may be reached by links themselves.
    """
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(root)) for root in roots)
