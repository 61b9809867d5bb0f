"""What every section of the spec shares: strict models, name patterns, and refusals."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

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


def _refuse(value: Any) -> Any:
    if value is None:
        return None
    raise problem("not_supported_yet", "not supported yet in this version; remove it")


NotYet = Annotated[
    Any,
    BeforeValidator(_refuse),
    Field(deprecated=True, description="Not supported yet: refused when set."),
]


def only(*supported: object) -> AfterValidator:
    """Accept only what this version can do of what the design allows."""

    def check(value: Any) -> Any:
        if value in supported:
            return value
        choices = " or ".join(repr(choice) for choice in supported)
        raise problem("not_supported_yet", f"{value!r} is not supported yet; use {choices}")

    return AfterValidator(check)
