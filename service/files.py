"""What `shardloom up` remembers of the local stack, and where it keeps its files.

HOME/                    $SHARDLOOM_HOME, ~/.shardloom by default
  stack.json             processes and addresses of the running stack (mode 0600)
  joined-HOSTNAME.json   node by which this machine has joined the cluster of another one
  stack.lock             held while a stack starts or stops
  storage-id             id of the run storage that the head on this machine has had
  ray-token              bearer token of the Ray cluster that is headed here (mode 0600)
  cluster-token          the same of the cluster that this machine has joined (mode 0600)
  logs/service.log, ray.log, host-ADDRESS.log, node-ADDRESS.log
/tmp/shardloom-HASH/     Ray's own folder; short, because a socket's path has 107 bytes at most
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

DEFAULT_HOME = "~/.shardloom"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".draft")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    draft.replace(path)


# Whether a file is where its name says, and folders for nobody else's eyes.


def make_private(folder: Path) -> None:
    """Make a folder that only its owner may look into; one that is there stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def is_below(path: Path, roots: Sequence[Path]) -> bool:
    """Whether a path, all links resolved, is one of the roots or lies below one.

    The roots may be reached by links themselves.
    """
    real = os.path.realpath(path)
    return any(_is_inside(real, os.path.realpath(root)) for root in roots)


def _is_inside(real: str, root: str) -> bool:
    return real == root or real.startswith(root.rstrip(os.sep) + os.sep)
