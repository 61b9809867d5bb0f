"""What every section of the spec shares: strict models and name patterns."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trainer.spec.problems import problem

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
LABEL_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?$"
IDENTIFIER_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,62}$"

Identifier = Annotated[str, Field(pattern=IDENTIFIER_PATTERN)]
Label = Annotated[str, Field(pattern=LABEL_PATTERN)]


def _writable(text: str) -> str:
    """Half a surrogate pair, and NUL, are in no file's name."""
    if "\x00" in text or text != text.encode(errors="replace").decode():
        raise problem("unwritable_path", "holds a character that no path can hold")
    return text


PathText = Annotated[str, Field(min_length=1), AfterValidator(_writable)]


class SpecModel(BaseModel):
    """Base of every section: unknown keys are errors and values never change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )
