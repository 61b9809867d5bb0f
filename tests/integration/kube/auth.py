"""Who asks, and what they may: bearer tokens and the rules of roles."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.integration.kube.errors import ApiError, forbidden, unauthorized
from tests.integration.kube.resources import Resource

Rule = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class User:
    """A caller; `rules` hold in `namespace`, or everywhere where that is None."""

    name: str
    namespace: str | None = None
    rules: tuple[Rule, ...] = ()


OPERATOR = "system:serviceaccount:kuberay-system:kuberay-operator"
ADMIN_RULE: Rule = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}


@dataclass(frozen=True)
class Access:
    """What a request wants to do."""

    verb: str
    resource: Resource
    subresource: str
    namespace: str
    name: str

    @property
    def named_resource(self) -> str:
        """As rules name it, like pods/log."""
        plural = self.resource.plural
        return f"{plural}/{self.subresource}" if self.subresource else plural


def allows(user: User, access: Access) -> bool:
    """Whether one of the caller's rules covers the request."""
    if user.namespace is not None and user.namespace != access.namespace:
        return False
    return any(_covers(rule, access) for rule in user.rules)


def _covers(rule: Rule, access: Access) -> bool:
    names = rule.get("resourceNames")
    return (
        _has(rule.get("verbs", ()), access.verb)
        and _has(rule.get("apiGroups", ()), access.resource.group)
        and _has(rule.get("resources", ()), access.named_resource)
        and (not names or access.name in names)
    )


def _has(values: Sequence[str], value: str) -> bool:
    return "*" in values or value in values


def refusal(user: User, access: Access) -> ApiError:
    """403 in the words of RBAC."""
    where = f'in the namespace "{access.namespace}"' if access.namespace else "at the cluster scope"
    why = (
        f'User "{user.name}" cannot {access.verb} resource "{access.named_resource}" '
        f'in API group "{access.resource.group}" {where}'
    )
    return forbidden(access.resource, access.name, why)


@dataclass
class Tokens:
    """Bearer tokens that the server knows."""

    _users: dict[str, User] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def issue(self, user: User) -> str:
        """A new token for a caller."""
        token = secrets.token_urlsafe(24)
        with self._lock:
            self._users[token] = user
        return token

    def revoke(self, token: str) -> None:
        """Know a token no more."""
        with self._lock:
            self._users.pop(token, None)

    def user_of(self, authorization: str | None) -> User:
        """The caller by the Authorization header; raises 401 for a stranger."""
        scheme, _, token = (authorization or "").partition(" ")
        with self._lock:
            user = self._users.get(token.strip())
        if scheme.lower() != "bearer" or user is None:
            raise unauthorized()
        return user
