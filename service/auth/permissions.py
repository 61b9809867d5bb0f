"""Authorization rules: which role each route needs, and which paths a job may read or write.

`RULES` has an entry for every route; one without needs an administrator of all projects, and fails
tests/unit/service/auth/test_permissions.py. Paths must lie below the configured roots once all
links are resolved.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

from service.domain.auth import ALL_PROJECTS, Principal, Role
from service.files import is_below
from service.settings import Settings
from service.storage import in_time
from trainer.spec.base import FieldProblem, is_remote, places_of
from trainer.spec.job import JobSpec

_HTTP = ("http", "https")
# What comes before the path of a file in the path of a URI, by its scheme.
_PREFIXES = {"": "", "file": "", "sqlite": "/"}


def roots_of(settings: Settings) -> tuple[Path | str, ...] | None:
    """Folders (paths, or URLs) below which all lies that jobs may read; None: anything may be."""
    ours = (settings.runs_dir, *([settings.checkpoint_root] if settings.checkpoint_root else []))
    if settings.storage_roots is None:
        return ours if settings.auth == "required" else None
    return (*ours, *settings.storage_roots)


def paths_of(spec: JobSpec, *, written: bool = False) -> dict[str, str]:
    """Every path that a spec names, or only those `written` below, by its field."""
    found = {
        field: file_of(text) if text and mark.is_uri else text
        for field, mark, text in places_of(spec)
        if mark.is_written or not written
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
    """A problem for each path of a spec that lies, or might lie, outside of the roots.

    Raises OSError where that cannot be seen.
    """
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
        if not in_time(Path(path), partial(is_allowed, path, roots))
    ]
    message = (
        "must be http://HOST, https://HOST, file:///FOLDER, sqlite:////FOLDER/FILE or an "
        "absolute folder, without '%', '?', '#' and '..'"
    )
    uris = {field: uri for field, mark, uri in places_of(spec) if uri and mark.is_uri}
    unclear = [field for field, uri in uris.items() if is_unclear(uri)]
    return problems + [FieldProblem(field, "unclear_uri", message) for field in unclear]


def without_lost_place(
    spec: JobSpec, cloned: JobSpec, roots: Sequence[Path | str] | None
) -> JobSpec:
    """The spec of a clone without the checkpoint path of its original, if that is not allowed now.

    It was the service's own then, or lay below a root; a clone has no checkpoints there yet.
    Raises OSError where that cannot be seen.
    """
    path = spec.checkpoint.path
    if roots is None or path is None or path != cloned.checkpoint.path:
        return spec
    if in_time(Path(path), partial(is_allowed, path, roots)):
        return spec
    checkpoint = spec.checkpoint.model_copy(update={"path": None})
    return spec.model_copy(update={"checkpoint": checkpoint})


def is_allowed(path: str, roots: Sequence[Path | str] | None) -> bool:
    """Whether a job may use a path or URL; without roots it may use any."""
    if roots is None:
        return True
    if is_remote(path):
        return any(_is_below_url(path, root) for root in roots if isinstance(root, str))
    folders = [root for root in roots if isinstance(root, Path)]
    # A driver has another working folder: of a relative path we cannot say where it would lie.
    return Path(path).is_absolute() and is_below(Path(path), folders)


def _is_below_url(url: str, root: str) -> bool:
    """Whether a URL lies below another one, on the endpoint that the operator chose."""
    folder = root.rstrip("/")
    is_plain = url.isprintable() and not any(mark in url for mark in "%?#")
    is_plain &= not {".", "..", ""} & {*url.rstrip("/").split("/")[2:]}
    return is_plain and (url == folder or url.startswith(f"{folder}/"))


def job_below(path: str, root: Path | str | None) -> str | None:
    """Id of the job whose folder below `root`, a folder or URL of one, a path or URL leads into.

    "" where it leads to `root` itself, None where elsewhere.
    """
    if isinstance(root, str):
        place, folder = _plain_url(path), _plain_url(root)
        is_inside = place == folder or place.startswith(f"{folder}/")
        return place[len(folder) :].strip("/").partition("/")[0] if is_inside else None
    if root is None or "://" in path:
        return None
    # Not `resolve`, which raises RuntimeError for links that lead to themselves.
    real, runs = Path(os.path.realpath(path)), os.path.realpath(root)
    return next(iter(real.relative_to(runs).parts), "") if real.is_relative_to(runs) else None


def _plain_url(url: str) -> str:
    """What a URL names, however it is written: `urlsplit` removes what jobs' readers remove."""
    parts = urlsplit(url)
    path = posixpath.normpath(f"/{unquote(parts.path)}").lstrip("/")
    return f"{parts.scheme}://{parts.netloc}/{path}".rstrip("/")


class Scope(Enum):
    """Where the role of a rule must be held."""

    PUBLIC = "public"
    """Nowhere: no credentials are asked for."""
    SIGNED_IN = "signed_in"
    """Nowhere, but one must be somebody."""
    ANYWHERE = "anywhere"
    """In some project; the handler shows or takes only what belongs to such projects."""
    JOB = "job"
    """In the project of the job that the path names; other people's jobs do not exist."""
    PROJECT = "project"
    """In the project that the path names."""
    EVERYTHING = "everything"
    """In all projects."""
    ATTEMPT = "attempt"
    """None: only the attempt that the path names may, by its own token."""


@dataclass(frozen=True)
class Rule:
    """What a route requires. `is_secret`: being the service's own user does not suffice."""

    scope: Scope
    role: Role = Role.VIEWER
    is_secret: bool = False


_PUBLIC = Rule(Scope.PUBLIC)
_SIGNED_IN = Rule(Scope.SIGNED_IN)
_SEE_JOB = Rule(Scope.JOB)
_CHANGE_JOB = Rule(Scope.JOB, Role.SUBMITTER)
_SEE_SOME = Rule(Scope.ANYWHERE)
_SUBMIT_SOME = Rule(Scope.ANYWHERE, Role.SUBMITTER)
_ADMINISTER = Rule(Scope.EVERYTHING, Role.ADMIN)
_ADMINISTER_SOME = Rule(Scope.ANYWHERE, Role.ADMIN)
_DELIVER = Rule(Scope.ATTEMPT)
UNLISTED = _ADMINISTER
"""The rule of a route without an entry."""
_JOB = "/v1/jobs/{job}"
CLAIM_PATH = "/v1/attempts:claim"
_FILES = "/v1/attempts/{attempt_id}/files"
_SWEEP = "/v1/sweeps/{sweep_id}"
_WEBHOOK = "/v1/webhooks/{webhook_id}"
_CHANGES = (
    *(":cancel", ":pause", ":resume", ":restart"),
    *("/resize", "/drain", "/traces", "/exports"),
)
_READS = (
    "attempts",
    "events",
    "metrics",
    "logs",
    "logs:download",
    "checkpoints",
    "traces",
    "traces/{name}",
    "exports",
    "exports/{export_id}",
    "exports/{export_id}/archive",
)
RULES: Mapping[tuple[str, str], Rule] = {
    ("GET", "/healthz"): _PUBLIC,
    ("GET", "/readyz"): _PUBLIC,
    ("GET", "/"): _PUBLIC,
    ("GET", "/login"): _PUBLIC,
    ("POST", "/login"): _PUBLIC,
    ("POST", "/logout"): _SIGNED_IN,
    ("GET", "/docs"): _SIGNED_IN,
    ("GET", "/docs/oauth2-redirect"): _SIGNED_IN,
    ("GET", "/openapi.json"): _SIGNED_IN,
    ("GET", "/metrics"): Rule(Scope.EVERYTHING),
    ("GET", "/v1/whoami"): _SIGNED_IN,
    ("GET", "/v1/cluster"): _SEE_SOME,
    ("GET", "/v1/queue"): _SEE_SOME,
    ("GET", "/v1/jobs"): _SEE_SOME,
    ("POST", "/v1/jobs"): _SUBMIT_SOME,
    ("POST", "/v1/plans"): _SUBMIT_SOME,
    ("POST", "/v1/code"): _SUBMIT_SOME,
    ("GET", _JOB): _SEE_JOB,
    # Whoever sees a job may copy it; where to is checked like any submission.
    ("POST", f"{_JOB}:clone"): _SEE_JOB,
    ("DELETE", _JOB): _CHANGE_JOB,
    ("DELETE", f"{_JOB}/exports/{{export_id}}"): _CHANGE_JOB,
    **{("POST", f"{_JOB}{change}"): _CHANGE_JOB for change in _CHANGES},
    **{("GET", f"{_JOB}/{read}"): _SEE_JOB for read in _READS},
    # The code in its body lets in.
    ("POST", CLAIM_PATH): _PUBLIC,
    ("GET", "/v1/attempts/{attempt_id}/files"): _DELIVER,
    **{(method, f"{_FILES}/{{path:path}}"): _DELIVER for method in ("GET", "PUT", "DELETE")},
    ("POST", "/v1/attempts/{attempt_id}/logs/{source}"): _DELIVER,
    ("POST", "/v1/attempts/{attempt_id}/outbox/{stream}"): _DELIVER,
    ("POST", "/v1/attempts/{attempt_id}/events"): _DELIVER,
    ("GET", "/v1/attempts/{attempt_id}/lease"): _DELIVER,
    ("POST", "/v1/attempts/{attempt_id}/secrets"): Rule(Scope.ATTEMPT, is_secret=True),
    ("GET", "/v1/projects"): _SEE_SOME,
    ("GET", "/v1/projects/{name}"): Rule(Scope.PROJECT),
    ("PUT", "/v1/projects/{name}"): _ADMINISTER,
    ("DELETE", "/v1/projects/{name}"): _ADMINISTER,
    ("GET", "/v1/keys"): _ADMINISTER,
    ("POST", "/v1/keys"): _ADMINISTER,
    ("DELETE", "/v1/keys/{key_id}"): _ADMINISTER,
    ("GET", "/v1/audit"): _ADMINISTER,
    # The handlers want it in the sweep's or the webhook's own project.
    ("GET", "/v1/sweeps"): _SEE_SOME,
    ("POST", "/v1/sweeps"): _SUBMIT_SOME,
    ("GET", _SWEEP): _SEE_SOME,
    ("DELETE", _SWEEP): _SUBMIT_SOME,
    ("POST", f"{_SWEEP}:cancel"): _SUBMIT_SOME,
    ("GET", "/v1/webhooks"): _ADMINISTER_SOME,
    ("POST", "/v1/webhooks"): _ADMINISTER_SOME,
    ("GET", _WEBHOOK): _ADMINISTER_SOME,
    ("PATCH", _WEBHOOK): _ADMINISTER_SOME,
    ("DELETE", _WEBHOOK): _ADMINISTER_SOME,
    ("POST", f"{_WEBHOOK}:rotate"): _ADMINISTER_SOME,
    ("POST", f"{_WEBHOOK}:test"): _ADMINISTER_SOME,
    ("GET", f"{_WEBHOOK}/deliveries"): _ADMINISTER_SOME,
    ("POST", f"{_WEBHOOK}/deliveries/{{delivery_id}}:redeliver"): _ADMINISTER_SOME,
}


def rule_of(method: str, path: str) -> Rule:
    """The rule of a route, by its path template."""
    return RULES.get(("GET" if method == "HEAD" else method, path), UNLISTED)


def allows(rule: Rule, principal: Principal | None, path_params: Mapping[str, str]) -> bool:
    """Whether a rule lets a principal in, as far as the path alone can tell.

    A rule of scope JOB or ANYWHERE is checked again where the project of the object is known.
    """
    if rule.scope is Scope.PUBLIC or principal is None:
        return rule.scope is Scope.PUBLIC
    if rule.scope is Scope.ATTEMPT:
        is_own = principal.kind == "attempt" and principal.name == path_params.get("attempt_id")
        return is_own or (principal.kind == "local" and not rule.is_secret)
    if principal.kind == "attempt":
        return False
    match rule.scope:
        case Scope.SIGNED_IN:
            return True
        case Scope.PROJECT:
            return principal.may(rule.role, path_params.get("name", ""))
        case Scope.EVERYTHING:
            return principal.may(rule.role, ALL_PROJECTS)
        case _:
            return principal.may_somewhere(rule.role)
