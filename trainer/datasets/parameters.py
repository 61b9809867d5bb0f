"""Options of a command from the fields of a model, so that each is stated once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from itertools import chain
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

Command = Callable[..., None]


def options_from_model(command: Command) -> Command:
    """Decorate a command whose parameter `options` is a model: fields with a docstring are options.

    They are called as the fields, or as their aliases; the other fields are for callers in Python.
    What the model refuses is bad usage.
    """
    signature = inspect.signature(command, eval_str=True)
    kind: type[BaseModel] = signature.parameters["options"].annotation
    made = [
        _parameter(field.alias or name, field)
        for name, field in kind.model_fields.items()
        if field.description
    ]

    @wraps(command)
    def run(**given: Any) -> None:
        try:
            options = kind(**{each.name: given.pop(each.name) for each in made})
        except ValidationError as error:
            fault = error.errors()[0]
            text = fault["msg"].removeprefix("Value error, ")
            raise typer.BadParameter(text, param_hint=_flag(str(fault["loc"][0]))) from None
        command(options=options, **given)

    shown = (made if own.name == "options" else [own] for own in signature.parameters.values())
    run.__dict__["__signature__"] = signature.replace(parameters=[*chain.from_iterable(shown)])
    return run


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    bounds = {
        end: getattr(each, end)
        for each in field.metadata
        for end in ("ge", "gt", "le")
        if hasattr(each, end)
    }
    # Only whole numbers have an exclusive bound, 0.
    low = bounds.get("ge", 1 if "gt" in bounds else None)
    option = typer.Option(_flag(name), help=field.description, min=low, max=bounds.get("le"))
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=field.get_default(),
        annotation=Annotated[field.annotation, option],
    )
