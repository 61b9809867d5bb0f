"""Options of a command from the fields of a model, so that each is stated once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

Command = Callable[..., None]


def options_from_model(**flags: str) -> Callable[[Command], Command]:
    """Decorate a command whose parameter `options` is a model: its described fields are options.

    They are called as the fields, but for those of `flags`. What the model refuses is bad usage.
    """

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        kind: type[BaseModel] = signature.parameters["options"].annotation
        named = {name: f"--{name.replace('_', '-')}" for name in kind.model_fields} | flags
        made = [
            _parameter(name, field, named[name])
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
                raise typer.BadParameter(text, param_hint=named[str(fault["loc"][0])]) from None
            command(options=options, **given)

        shown = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for own in signature.parameters.values()
            for parameter in (made if own.name == "options" else [own])
        ]
        run.__dict__["__signature__"] = signature.replace(parameters=shown)
        return run

    return decorate


def _parameter(name: str, field: FieldInfo, flag: str) -> inspect.Parameter:
    bounds = {
        end: getattr(each, end)
        for each in field.metadata
        for end in ("ge", "gt", "le")
        if hasattr(each, end)
    }
    # Only whole numbers have an exclusive bound, 0.
    low = bounds.get("ge", 1 if "gt" in bounds else None)
    option = typer.Option(flag, help=field.description, min=low, max=bounds.get("le"))
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=field.get_default(),
        annotation=Annotated[field.annotation, option],
    )
