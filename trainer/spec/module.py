"""A user's own network in `model`: the class, the code that holds it, and where that comes from.

`model.module` names a class `package.mod:Class`. Its code is installed on every host of the
cluster, or travels with the job: `model.code` is the id of an archive that
`shardloom submit --code DIR` (or `POST /v1/code`) has uploaded.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"

ModulePath = Annotated[
    str,
    Field(
        pattern=rf"^{_NAME}(\.{_NAME})*:{_NAME}$",
        max_length=255,
        description="A torch module of your own, as in `package.mod:Class`.",
    ),
]
CodeId = Annotated[
    str,
    Field(
        pattern=r"^[0-9a-f]{64}$",
        description="SHA-256 of the uploaded code that holds `module`; --code sets it.",
    ),
]


def split_path(module: str) -> tuple[str, str]:
    """(module to import, name of the class in it) of a `ModulePath`."""
    name, _, kind = module.partition(":")
    return name, kind
