"""The one table of what a route asks of who calls it; pure.

A route without an entry asks for an administrator of everything, and fails
tests/unit/service/test_policy_table.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from service.security.principal import ALL_PROJECTS, Principal, Role


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
    MACHINE = "machine"
    """In all projects; machines of the cluster may as well, by Ray's token."""


@dataclass(frozen=True)
class Rule:
    """What a route asks for. `is_secret`: local mode without credentials does not suffice."""

    scope: Scope
    role: Role = Role.VIEWER
    is_secret: bool = False


_PUBLIC = Rule(Scope.PUBLIC)
_SIGNED_IN = Rule(Scope.SIGNED_IN)
_SEE_JOB = Rule(Scope.JOB)
_CHANGE_JOB = Rule(Scope.JOB, Role.SUBMITTER)
_SEE_SOME = Rule(Scope.ANYWHERE)
_ADMINISTER = Rule(Scope.EVERYTHING, Role.ADMIN)
_ADMINISTER_SOME = Rule(Scope.ANYWHERE, Role.ADMIN)
_DELIVER = Rule(Scope.ATTEMPT)

UNLISTED = _ADMINISTER
"""What a route asks for that nobody thought of."""

_JOB = "/v1/jobs/{job}"
_WEBHOOK = "/v1/webhooks/{webhook_id}"
_CHANGES = ("cancel", "pause", "resume", "restart")
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
    ("GET", "/redoc"): _SIGNED_IN,
    ("GET", "/openapi.json"): _SIGNED_IN,
    ("GET", "/metrics"): Rule(Scope.EVERYTHING),
    ("GET", "/v1/whoami"): _SIGNED_IN,
    ("GET", "/v1/cluster"): _SEE_SOME,
    ("GET", "/v1/cluster/head"): Rule(Scope.MACHINE, Role.ADMIN),
    ("GET", "/v1/queue"): _SEE_SOME,
    ("GET", "/v1/jobs"): _SEE_SOME,
    ("POST", "/v1/jobs"): Rule(Scope.ANYWHERE, Role.SUBMITTER),
    ("POST", "/v1/code"): Rule(Scope.ANYWHERE, Role.SUBMITTER),
    ("GET", _JOB): _SEE_JOB,
    ("DELETE", _JOB): _CHANGE_JOB,
    ("PATCH", _JOB): _CHANGE_JOB,
    # Whoever sees a job may copy it; where to is checked like any submission.
    ("POST", f"{_JOB}:clone"): _CHANGE_JOB,
    ("POST", f"{_JOB}/resize"): _CHANGE_JOB,
    ("POST", f"{_JOB}/drain"): _CHANGE_JOB,
    ("POST", f"{_JOB}/traces"): _CHANGE_JOB,
    ("POST", f"{_JOB}/exports"): _CHANGE_JOB,
    ("DELETE", f"{_JOB}/exports/{{export_id}}"): _CHANGE_JOB,
    **{("POST", f"{_JOB}:{change}"): _CHANGE_JOB for change in _CHANGES},
    **{("GET", f"{_JOB}/{read}"): _SEE_JOB for read in _READS},
    ("POST", "/v1/attempts/{attempt_id}/events"): _DELIVER,
    ("GET", "/v1/attempts/{attempt_id}/secrets"): Rule(Scope.ATTEMPT, is_secret=True),
    ("GET", "/v1/projects"): _SEE_SOME,
    ("GET", "/v1/projects/{name}"): Rule(Scope.PROJECT),
    ("PUT", "/v1/projects/{name}"): _ADMINISTER,
    ("DELETE", "/v1/projects/{name}"): _ADMINISTER,
    ("GET", "/v1/keys"): _ADMINISTER,
    ("POST", "/v1/keys"): _ADMINISTER,
    ("DELETE", "/v1/keys/{key_id}"): _ADMINISTER,
    ("GET", "/v1/audit"): _ADMINISTER,
    # The handlers want it in the webhook's own project.
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


class Verdict(Enum):
    """What a rule says to a principal."""

    ALLOWED = "allowed"
    NOT_SIGNED_IN = "not_signed_in"
    FORBIDDEN = "forbidden"


def rule_of(method: str, path: str) -> Rule:
    """The rule of a route, by its path template."""
    return RULES.get(("GET" if method == "HEAD" else method, path), UNLISTED)


def judge(rule: Rule, principal: Principal | None, path_params: Mapping[str, str]) -> Verdict:
    """Whether a rule lets a principal in, as far as the path alone can tell.

    A rule of scope JOB or ANYWHERE is judged again where the project of the object is known.
    """
    if rule.scope is Scope.PUBLIC:
        return Verdict.ALLOWED
    if principal is None:
        return Verdict.NOT_SIGNED_IN
    return Verdict.ALLOWED if _holds(rule, principal, path_params) else Verdict.FORBIDDEN


def _holds(rule: Rule, principal: Principal, path_params: Mapping[str, str]) -> bool:
    if rule.scope is Scope.ATTEMPT:
        is_own = principal.kind == "attempt" and principal.name == path_params.get("attempt_id")
        return is_own or (principal.kind == "local" and not rule.is_secret)
    if principal.kind == "machine":
        return rule.scope is Scope.MACHINE
    if principal.kind == "attempt":
        return False
    match rule.scope:
        case Scope.SIGNED_IN:
            return True
        case Scope.PROJECT:
            return principal.may(rule.role, path_params.get("name", ""))
        case Scope.EVERYTHING | Scope.MACHINE:
            return principal.may(rule.role, ALL_PROJECTS)
        case _:
            return principal.may_somewhere(rule.role)
