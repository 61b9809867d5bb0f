"""Secrets of a job as its submission carries them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

# What Python, the loader, Ray and the driver themselves go by is not a job's to set.
_OURS = re.compile(r"(PATH|HOME|PYTHON.*|LD_.*|RAY_.*|SHARDLOOM_.*)")


def _is_free(name: str) -> str:
    if _OURS.fullmatch(name):
        raise ValueError(f"{name} is not a secret's to set; choose another name")
    return name


SecretName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128),
    AfterValidator(_is_free),
]
SecretValue = Annotated[str, StringConstraints(max_length=16_384, pattern=r"^[^\x00]*$")]
Secrets = Annotated[dict[SecretName, SecretValue], Field(max_length=64)]
"""Environment variables of a job that are stored encrypted and never shown."""
