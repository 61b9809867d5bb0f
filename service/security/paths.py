"""Which folders jobs may read: below the configured roots, whatever links lie on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from service.security.files import is_below
from service.settings import Settings
from trainer.spec import FieldProblem, JobSpec

_TRACKING_URI = "sinks.mlflow.tracking_uri"
_HTTP = ("http", "https")
_REMOTE = ("s3://", "gs://")
# What comes before the path of a file in the path of a URI, by its scheme.
_PREFIXES = {"": "", "file": "", "sqlite": "/"}


def roots_of(settings: Settings) -> tuple[Path | str, ...] | None:
    """Folders (paths, or URLs) below which all lies that jobs may read; None: anything may be."""
    ours = (settings.runs_dir, *([settings.checkpoint_root] if settings.checkpoint_root else []))
    if settings.storage_roots is None:
        return None if settings.auth == "local" else ours
    return (*ours, *settings.storage_roots)


def paths_of(spec: JobSpec) -> dict[str, str]:
    """Every path that a spec names, to read or to write, by its field."""
    return _paths_read(spec) | paths_written(spec)


def _paths_read(spec: JobSpec) -> dict[str, str]:
    warm_start = spec.checkpoint.warm_start
    found = {"data.path": spec.data.path}
    return found | ({"checkpoint.warm_start.path": warm_start.path} if warm_start else {})


def paths_written(spec: JobSpec) -> dict[str, str]:
    """Every path that a spec names to write below, by its field."""
    tensorboard, mlflow = spec.sinks.tensorboard, spec.sinks.mlflow
    found = {
        "checkpoint.path": spec.checkpoint.path,
        "sinks.tensorboard.dir": tensorboard.dir if tensorboard else None,
        _TRACKING_URI: file_of(mlflow.tracking_uri) if mlflow else None,
    }
    return {field: path for field, path in found.items() if path is not None}


def file_of(uri: str) -> str | None:
    """The file or folder that a URI stands for; None for one behind HTTP, or an unclear one."""
    if is_unclear(uri):
        return None
    parts = urlsplit(uri)
    # sqlite:////FOLDER/FILE has one slash more than file:///FOLDER.
    return None if parts.scheme in _HTTP else parts.path.removeprefix(_PREFIXES[parts.scheme])


def is_unclear(uri: str) -> bool:
    """Whether MLflow, SQLAlchemy and we might each read another path from a URI."""
    parts = urlsplit(uri)
    if parts.scheme in _HTTP:
        return not parts.netloc
    if parts.scheme not in _PREFIXES or parts.netloc:
        return True
    path = parts.path.removeprefix(_PREFIXES[parts.scheme])
    # Among others this finds what `urlsplit` removes on its way, such as a line feed.
    is_as_written = uri.removeprefix(f"{parts.scheme}:").removeprefix("//") == parts.path
    has_marks = any(mark in uri for mark in "%?#")
    return not (is_as_written and path.startswith("/")) or has_marks or ".." in path.split("/")


def outside_roots(spec: JobSpec, roots: Sequence[Path | str] | None) -> list[FieldProblem]:
    """A problem for each path of a spec that lies, or might lie, outside of the roots."""
    if roots is None:
        return []
    known = ", ".join(str(root) for root in roots)
    problems = [
        FieldProblem(
            field,
            "outside_roots",
            f"{path[:200]} is outside of the folders that jobs may read ({known}); "
            "SHARDLOOM_STORAGE_ROOTS names them",
        )
        for field, path in paths_of(spec).items()
        if not _is_allowed(path, roots)
    ]
    mlflow = spec.sinks.mlflow
    if mlflow is not None and is_unclear(mlflow.tracking_uri):
        message = (
            "must be http://HOST, https://HOST, file:///FOLDER, sqlite:////FOLDER/FILE or an "
            "absolute folder, without '%', '?', '#' and '..'"
        )
        problems.append(FieldProblem(_TRACKING_URI, "unclear_uri", message))
    return problems


def without_lost_place(
    spec: JobSpec, cloned: JobSpec, roots: Sequence[Path | str] | None
) -> JobSpec:
    """The spec of a clone without the place for checkpoints of the job that it was made of.

    Where jobs may not write there any more: it was the service's own then, or lay below a root, and
    a clone has no checkpoints yet to be parted from.
    """
    path = spec.checkpoint.path
    if roots is None or path is None or path != cloned.checkpoint.path or _is_allowed(path, roots):
        return spec
    checkpoint = spec.checkpoint.model_copy(update={"path": None})
    return spec.model_copy(update={"checkpoint": checkpoint})


def _is_allowed(path: str, roots: Sequence[Path | str]) -> bool:
    """Whether a path or URL lies below one of the roots."""
    if path.startswith(_REMOTE):
        return any(_is_below_url(path, root) for root in roots if isinstance(root, str))
    folders = [root for root in roots if isinstance(root, Path)]
    # A driver has another working folder: of a relative path we cannot say where it would lie.
    return Path(path).is_absolute() and is_below(Path(path), folders)


def _is_below_url(url: str, root: str) -> bool:
    """Whether a URL lies below another one, on the endpoint that the operator chose."""
    folder = root.rstrip("/")
    is_plain = not any(mark in url for mark in "%?#") and ".." not in url.split("/")
    return is_plain and (url == folder or url.startswith(f"{folder}/"))


def job_of_path(path: Path, runs_dir: Path) -> str | None:
    """Id of the job whose run folder a path leads into; "" where it is `runs_dir` itself.

    None where it leads elsewhere.
    """
    real, runs = path.resolve(), runs_dir.resolve()
    if not real.is_relative_to(runs):
        return None
    return next(iter(real.relative_to(runs).parts), "")


def job_of_checkpoints(path: str, root: Path | str | None) -> str | None:
    """The same for a path or URL that may lead into the service's place for checkpoints."""
    if isinstance(root, str):
        folder = root.rstrip("/")
        is_inside = path.rstrip("/") == folder or path.startswith(f"{folder}/")
        return path[len(folder) :].strip("/").partition("/")[0] if is_inside else None
    return job_of_path(Path(path), root) if root and "://" not in path else None
