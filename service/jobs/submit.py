"""Submit a job and find one; checks of the data that its spec names.

What can be done with a job that exists is in `service.jobs.actions`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

from pydantic import BaseModel, PositiveInt, ValidationError
from pydantic_core import from_json

from service.auth.permissions import paths_of
from service.db.auth import KeyStore
from service.db.jobs import JobStore
from service.domain.job_filter import JobFilter
from service.domain.models import Job, JobStatus, new_job_id
from service.errors import JobNotFound
from service.jobs.run_storage import reach, run_dir_of, write_json
from service.settings import Settings
from service.storage import in_time
from trainer.errors import ABOUT_VOCABULARIES, ManifestError, missing_column
from trainer.protocol.run_dir import COMMIT_MARKER, RunDir
from trainer.protocol.untrusted import MAX_ENTRIES, NotRegular, read_untrusted
from trainer.spec.base import FieldProblem, SpecError, is_remote, places_of
from trainer.spec.job import JobSpec
from trainer.spec.resolve import size_tables

UNREADABLE = "unreadable_path"
"""The code of a path that storage does not let us look at, now or ever."""
_MANIFEST_NAME = "manifest.json"
# Each file of the data has an entry. While a document is parsed nothing else runs.
_MAX_MANIFEST_BYTES = 1 << 23
_MAX_SHOWN_CHARS = 200
# What the database keeps of the path of a checkpoint, without the names of job and step.
_MAX_CHECKPOINT_PATH_CHARS = 900
_CHECKPOINTS = "give the folder of a job (`files` of `shardloom show`), or one checkpoint in it"
# Characters.
_LONGER_THAN_IDS = 17


def check_data(spec: JobSpec) -> JobSpec:
    """Look at the folders that a spec reads; the spec with the table sizes that its data tells.

    Raises `SpecError` naming the field.
    """
    mend = "prepare one with `shardloom data prepare`"
    sized = [spec]

    def look() -> FieldProblem | None:
        return _prepared_problem(spec, sized) or _missing_vocabulary(spec)

    found = [_place_problem(spec.data.path, "data.path", mend, look)]
    if (warm_start := spec.checkpoint.warm_start) is not None:
        start, field = warm_start.path, "checkpoint.warm_start.path"
        look_in = partial(_lacks_checkpoint, Path(start), field)
        found.append(_place_problem(start, field, _CHECKPOINTS, look_in))
    if (path := spec.checkpoint.path) is not None:
        mend = "make it, on storage that all hosts of the cluster share"
        found.append(_place_problem(path, "checkpoint.path", mend))
        if len(path) > _MAX_CHECKPOINT_PATH_CHARS:
            most = f"at most {_MAX_CHECKPOINT_PATH_CHARS}"
            message = f"has {len(path)} characters; give one of {most}, or checkpoints get no rows"
            found.append(FieldProblem("checkpoint.path", "too_long", message))
    problems = [problem for problem in found if problem is not None]
    if problems:
        raise SpecError(problems)
    return sized[-1]


def _place_problem(
    path: str, field: str, mend: str, problem_in: Callable[[], FieldProblem | None] = lambda: None
) -> FieldProblem | None:
    """What is wrong with a folder or URL, or in that folder, as far as one can tell from here.

    What is behind a URL is seen when the job starts, with the credentials of the cluster.
    """
    if "://" in path:
        if is_remote(path):
            return None
        message = f"{path[:_MAX_SHOWN_CHARS]}: give a local folder or a URL with s3:// or gs://"
        return FieldProblem(field, "unknown_scheme", message)
    folder = Path(path)
    if not folder.is_absolute():
        message = f"'{path}' is relative, but service and cluster have other working folders"
        return FieldProblem(field, "relative_path", f"{message}; give an absolute path")

    def look() -> FieldProblem | None:
        if not folder.is_dir():
            return FieldProblem(field, "missing_path", f"{path} is not a folder; {mend}")
        return problem_in()

    try:
        return in_time(folder, look)
    except OSError as error:
        place = str(error.filename or path)
        shown = place if len(place) <= _MAX_SHOWN_CHARS else f"{place[:_MAX_SHOWN_CHARS]}..."
        message = f"cannot look at {shown} ({error.strerror}); check the path and its rights"
        return FieldProblem(field, UNREADABLE, message)


def _lacks_checkpoint(folder: Path, field: str) -> FieldProblem | None:
    """That a folder neither is a checkpoint nor holds any, as far as its first entries tell."""
    if folder == RunDir(folder.parent).checkpoints_dir:
        return None
    run_dir = RunDir(folder)
    if run_dir.job_path.is_file():
        path = _own_checkpoint_path(run_dir.job_path)
        if path is None or run_dir.checkpoints_dir.is_dir():
            return None  # The job may be still to save.
        place, mark, options = path.partition("?") if is_remote(path) else (path, "", "")
        own = f"{place.rstrip('/')}/{folder.name}{mark}{options}"
        message = f"the job of {folder} keeps its checkpoints in {own}; give that folder"
        return FieldProblem(field, "no_checkpoint", message)
    with os.scandir(folder) as entries:
        places = ["", *(each.name for each in islice(entries, MAX_ENTRIES))]
    if any(os.path.lexists(folder / place / COMMIT_MARKER) for place in places):
        return None
    return FieldProblem(field, "no_checkpoint", f"{folder} holds no checkpoint; {_CHECKPOINTS}")


def _own_checkpoint_path(job_file: Path) -> str | None:
    """The `checkpoint.path` in a `job.json`, which anybody may have written."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        path = from_json(read_untrusted(job_file, job_file.parent))["spec"]["checkpoint"]["path"]
        if isinstance(path, str) and len(path) <= _MAX_CHECKPOINT_PATH_CHARS:
            return path
    return None


def _has_rows(folder: Path) -> bool:
    """Whether there are Parquet files among the first of a folder, which may hold any number."""
    try:
        with os.scandir(folder) as entries:
            return any(each.name.endswith(".parquet") for each in islice(entries, MAX_ENTRIES))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _prepared_problem(spec: JobSpec, sized: list[JobSpec]) -> FieldProblem | None:
    """What is wrong with prepared data; otherwise the spec with its table sizes is appended."""
    path = spec.data.path
    manifest = Path(path) / _MANIFEST_NAME
    has_rows = _has_rows(Path(path) / spec.data.split.train)
    # A folder of Parquet files that `shardloom data prepare` did not make has no manifest.
    if has_rows and not manifest.exists():
        return _unknown_size(spec)
    again = "prepare the data again with `shardloom data prepare`"
    try:
        found = _read_manifest(manifest)
    except FileNotFoundError:
        message = (
            f"{manifest.parent} has neither Parquet files in {spec.data.split.train} nor a "
            f"{_MANIFEST_NAME}; where the files lie in it itself, set data.split.train to '.'; "
            "where `shardloom data prepare` was to make it, let that finish"
        )
        return FieldProblem("data.path", "missing_manifest", message)
    except ValidationError as error:
        message = f"{manifest} is no manifest ({error.errors()[0]['msg']}); {again}"
    except NotRegular as error:
        message = f"{manifest} cannot be read ({error}); {again}"
    else:
        sized.append(_sized(spec, found))
        # The folder of a part that the manifest does not name may have other columns.
        is_named = spec.data.split.train in found.splits
        return _missing_column(spec, found.columns) if is_named else None
    return FieldProblem("data.path", "unreadable_manifest", message)


def _missing_column(spec: JobSpec, columns: Collection[str]) -> FieldProblem | None:
    label_of = {f"model.tasks[{n}].label": task.label for n, task in enumerate(spec.model.tasks)}
    if None in label_of.values():
        label_of["data.label"] = spec.data.label
    names = {
        f"{field}.{each}": getattr(label, each)
        for field, label in label_of.items()
        for each in ("column", "offset_column", "scale_column")
        if label
    }
    names["data.weight_column"] = spec.data.weight_column
    for index, feature in enumerate(spec.features):
        names[f"features[{index}].column"] = feature.source_column
        names[f"features[{index}].weights_column"] = feature.weights_column
    for field, name in names.items():
        if name and columns and name not in columns:
            message = missing_column(spec.data.path, name, columns)
            return FieldProblem(field, "missing_column", message)
    return None


def _missing_vocabulary(spec: JobSpec) -> FieldProblem | None:
    for index, feature in enumerate(spec.features):
        file = Path(spec.data.path) / feature.vocabulary_file
        if feature.vocabulary and not file.exists():
            message = f"{file} is missing; {ABOUT_VOCABULARIES}"
            return FieldProblem(f"features[{index}].vocabulary", "missing_path", message)
    return None


def _unknown_size(spec: JobSpec) -> FieldProblem | None:
    """A table whose size only a manifest would tell, where there is none."""
    read_later = {feature.name: 1 for feature in spec.features if feature.vocabulary}
    try:
        size_tables(spec, {}, read_later)
    except ManifestError as error:
        message = f"{spec.data.path} has no {_MANIFEST_NAME}: {error}"
        return FieldProblem("embedding_tables", "unknown_size", message)
    return None


class _Split(BaseModel):
    """A part of prepared data, of which only the name is read."""


class _Manifest(BaseModel):
    """What of a manifest tells columns and sizes of tables; the rest becomes no object of Python.

    Folders that others made may have no `columns`.
    """

    splits: dict[str, _Split] = {}
    columns: dict[str, str] = {}
    vocab_sizes: dict[str, PositiveInt] = {}


def _read_manifest(path: Path) -> _Manifest:
    """A manifest; raises OSError or ValidationError."""
    return _Manifest.model_validate_json(read_untrusted(path, path.parent, _MAX_MANIFEST_BYTES))


def with_table_sizes(spec: JobSpec) -> JobSpec:
    """The spec with the table sizes that its prepared data tells; unchanged where it does not."""
    try:
        path = Path(spec.data.path) / _MANIFEST_NAME
        return _sized(spec, in_time(path.parent, partial(_read_manifest, path)))
    except (OSError, ValidationError):
        return spec


def _sized(spec: JobSpec, manifest: _Manifest) -> JobSpec:
    try:
        return size_tables(spec, manifest.vocab_sizes)
    except ManifestError:
        return spec


def submit_job(
    store: JobStore,
    keys: KeyStore,
    settings: Settings,
    spec: JobSpec,
    *,
    secrets: Mapping[str, str],
    idempotency_key: str | None,
    admit: Callable[[], None] = lambda: None,
    check: Callable[[JobSpec], None] = lambda sized: None,
    actor: str = "user",
    parent: str | None = None,
) -> Job:
    """Store a new job, or return the one that the key made.

    Of a new job `admit` is called first, then `check` with its spec, the table sizes of its data in
    it. `secrets` are encrypted; `parent` is the id of the job that it is a clone of. Raises
    `IdempotencyConflict`, `StorageUnavailable`, or `SpecError` if the data is not there. A repeated
    submit is answered as the first one was, whatever happened to data, code and cluster since.
    """
    canonical = json.dumps(spec.model_dump(mode="json"), sort_keys=True)
    request_hash = hashlib.sha256(canonical.encode()).hexdigest()
    if idempotency_key is not None:
        known = store.find_submitted(idempotency_key, request_hash, spec.project)
        if known is not None:
            return known
    admit()
    if settings.checkpoint_root is not None and spec.checkpoint.path is None:
        # From now on it is the job's: another setting later does not part it from its checkpoints.
        checkpoint = spec.checkpoint.model_copy(update={"path": str(settings.checkpoint_root)})
        spec = spec.model_copy(update={"checkpoint": checkpoint})
    check(check_data(spec))
    # To the microsecond, which is as fine as filters by time can name it.
    now = round(time.time(), 6)
    job = Job(
        id=new_job_id(now),
        name=spec.name,
        spec=spec,
        status=JobStatus.QUEUED,
        created_at=now,
        project=spec.project,
        priority=spec.priority,
        queued_at=now,
    )
    if secrets:
        keys.keep_secrets(job.id, secrets, now)
        path = run_dir_of(settings, job.id).secret_names_path  # tells the driver to ask for them
        reach(settings, partial(write_json, path, sorted(secrets), settings.runs_dir))
    return store.create_job(
        job,
        idempotency_key=idempotency_key,
        request_hash=request_hash,
        actor=actor,
        parent=parent,
    )


def check_places(spec: JobSpec) -> None:
    """Raise `SpecError` for what a job would leave on a disk of one of its hosts."""
    message = (
        "hosts share no folder here (SHARDLOOM_RUNS_SHARED), so files would be lost: name object "
        "storage or a server, where this field takes one, or leave this section out"
    )
    local = {field for field, path in paths_of(spec, written=True).items() if not is_remote(path)}
    # Without a path checkpoints are on the service's own root, other files in the run folder.
    unnamed = {field for field, mark, path in places_of(spec) if mark.is_written and path is None}
    if found := local | unnamed - {"checkpoint.path"}:
        raise SpecError([FieldProblem(field, "not_shared", message) for field in sorted(found)])


def find_job(store: JobStore, reference: str, projects: Collection[str] | None = None) -> Job:
    """The job with this id, else the newest with this name, else the one whose id starts so.

    `projects` are those whose jobs may be seen, None for all. Raises `JobNotFound`, also where a
    prefix fits several jobs.
    """
    try:
        found = store.get_job(reference)
    except JobNotFound:
        named, _ = store.list_jobs(JobFilter(name=reference), projects=projects, limit=1)
    else:
        if projects is not None and found.project not in projects:
            raise JobNotFound(reference)
        return found
    if named:
        return named[0]
    # Pages go down from a cursor. It has characters of ids only: databases differ in how they sort
    # others, and in these "z" is the last.
    end = reference.ljust(_LONGER_THAN_IDS, "z")
    near, _ = store.list_jobs(JobFilter(after=end), projects=projects, limit=2)
    matches = [job for job in near if reference and job.id.startswith(reference)]
    if len(matches) != 1:
        raise JobNotFound(reference)
    return matches[0]
