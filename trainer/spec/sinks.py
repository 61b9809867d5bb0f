"""`sinks`: where a job's metrics go beside the service."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from trainer.spec.base import PathText, SpecModel
from trainer.spec.problems import problem


def _absolute(path: str) -> str:
    if PurePath(path).is_absolute() or "://" in path:
        return path
    message = f"'{path}' is relative, but the driver has another working folder; give an absolute"
    raise problem("relative_path", f"{message} path")


def _uri(text: str) -> str:
    try:
        urlsplit(text)
    except ValueError as error:
        raise problem("bad_uri", f"is not a URI: {error}") from None
    return text


class TensorBoardSpec(SpecModel):
    """Event files for TensorBoard in `dir`, by default `tensorboard` in the job's run folder."""

    dir: Annotated[PathText, AfterValidator(_absolute)] | None = None


class MlflowSpec(SpecModel):
    """A run in an MLflow experiment; every attempt of the job goes on in the same run."""

    tracking_uri: Annotated[
        PathText, Field(examples=["http://mlflow.example:5000"]), AfterValidator(_uri)
    ]
    experiment: Annotated[PathText, Field(max_length=250)] = "shardloom"


class SinksSpec(SpecModel):
    """Each is optional; one that fails is told in the timeline, and training goes on."""

    tensorboard: TensorBoardSpec | None = None
    mlflow: MlflowSpec | None = None
