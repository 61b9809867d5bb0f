"""Which folders jobs may read: below the configured roots, whatever links lie on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from service.security.files import is_below
from service.settings import Settings
from trainer.spec import FieldProblem, JobSpec


def roots_of(settings: Settings) -> tuple[Path, ...] | None:
    """Folders below which everything lies that jobs may read; None where anything may be."""
    if settings.storage_roots is None:
        return None if settings.auth == "local" else (settings.runs_dir,)
    return (settings.runs_dir, *settings.storage_roots)


def paths_of(spec: JobSpec) -> dict[str, str]:
    """Every path that a spec names, to read or to write, by its field."""
    warm_start, sinks = spec.checkpoint.warm_start, spec.sinks
    found: dict[str, str | None] = {
        "data.path": spec.data.path,
        "checkpoint.warm_start.path": warm_start.path if warm_start else None,
        "sinks.tensorboard.dir": sinks.tensorboard.dir if sinks.tensorboard else None,
        "sinks.mlflow.tracking_uri": _file_of(sinks.mlflow.tracking_uri) if sinks.mlflow else None,
    }
    return {field: path for field, path in found.items() if path is not None}


def _file_of(uri: str) -> str | None:
    """The file or folder that a URI stands for; None for one behind HTTP."""
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        return None
    # sqlite:////FOLDER/FILE has one slash more than file:///FOLDER.
    return parts.path.removeprefix("/") if parts.scheme.startswith("sqlite") else parts.path


def outside_roots(spec: JobSpec, roots: Sequence[Path] | None) -> list[FieldProblem]:
    """A problem for each path of a spec that lies outside of the roots."""
    if roots is None:
        return []
    known = ", ".join(str(root) for root in roots)
    return [
        FieldProblem(
            field,
            "outside_roots",
            f"{path[:200]} is outside of the folders that jobs may read ({known}); "
            "SHARDLOOM_STORAGE_ROOTS names them",
        )
        for field, path in paths_of(spec).items()
        if not is_below(Path(path), roots)
    ]


def job_of_path(path: Path, runs_dir: Path) -> str | None:
    """Id of the job whose run folder a path leads into; "" where it is `runs_dir` itself.

    None where it leads elsewhere.
    """
    real, runs = path.resolve(), runs_dir.resolve()
    if not real.is_relative_to(runs):
        return None
    return next(iter(real.relative_to(runs).parts), "")
