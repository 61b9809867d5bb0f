"""Secrets of a job as its submission carries them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

SecretName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)]
SecretValue = Annotated[str, StringConstraints(max_length=16_384, pattern=r"^[^\x00]*$")]
Secrets = Annotated[dict[SecretName, SecretValue], Field(max_length=64)]
"""Environment variables of a job that are stored encrypted and never shown."""
