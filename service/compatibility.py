"""What the machines of one cluster must have in common: versions, and one run storage.

A machine that joins asks the head's service for `HeadFacts`, and compares. The run storage is known
by an id in a file of its own, RUNS_DIR/.storage-id, so that an empty folder of the same name on
another disk is not taken for it.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel

from service.files import create_once, write_private
from trainer.protocol.versions import installed_versions

_ID_FILE = ".storage-id"
_CODE = Path(__file__).resolve().parents[1] / "trainer"


class HeadFacts(BaseModel):
    """What a machine must know to join: where Ray is, and what is to be the same."""

    gcs_address: str
    ray_address: str
    runs_dir: str
    storage_id: str
    versions: dict[str, str]


def versions_here() -> dict[str, str]:
    """Versions that must be the same everywhere, by name."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"Python": python, "Shardloom": _own_version(), **installed_versions()}


@cache
def _own_version() -> str:
    """Version with a digest of the trainer's code: two check-outs may say the same version."""
    digest = hashlib.sha256()
    for path in sorted(_CODE.rglob("*.py")):
        digest.update(path.relative_to(_CODE).as_posix().encode() + b"\0" + path.read_bytes())
    try:
        number = version("shardloom")
    except PackageNotFoundError:
        number = "source"
    return f"{number} (code {digest.hexdigest()[:12]})"


def differences(head: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """One line for each version that is not the same on both machines."""
    return [
        f"{name}: {head.get(name, 'none')} on the head, {here.get(name, 'none')} here"
        for name in sorted({*head, *here}, key=str.lower)
        if head.get(name) != here.get(name)
    ]


def storage_id(runs_dir: Path) -> str:
    """Id of a run storage, given to it on first use; raises `OSError`."""
    path = runs_dir / _ID_FILE
    runs_dir.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        create_once(path, secrets.token_hex(16), 0o666)
    return path.read_text().strip()


def changed_storage(runs_dir: Path, memory: Path) -> str | None:
    """Why a head should not use this run storage: it had another one before; None if it may.

    `memory` is the head's own file of its storage's id, made on first use. Raises `OSError`.
    """
    if not memory.exists():
        write_private(memory, storage_id(runs_dir))
        return None
    path = runs_dir / _ID_FILE
    if path.exists() and path.read_text().strip() == memory.read_text().strip():
        return None
    return (
        f"the run storage {runs_dir} is not the one that this head had before: is it mounted? If "
        f"it is meant to be another one, remove {memory}"
    )


def storage_fault(runs_dir: Path, expected_id: str) -> str | None:
    """Why a machine cannot work with the head's run storage, as a sentence; None if it can."""
    try:
        found = (runs_dir / _ID_FILE).read_text().strip()
    except FileNotFoundError:
        found = None
    except OSError as error:
        return f"the run storage {runs_dir} cannot be read here: {error.strerror}"
    if found != expected_id:
        state = "is not there" if not runs_dir.is_dir() else "is another folder than the head's"
        return (
            f"the run storage {runs_dir} {state}: mount the head's storage on this machine at the "
            "same path (NFS, Lustre, ...)"
        )
    probe = runs_dir / f".probe-{secrets.token_hex(4)}"
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return (
            f"user {os.getuid()} cannot write to the run storage {runs_dir}: {error.strerror}; "
            "use the same user id on all machines"
        )
    return None
