"""Who asks, and what they may do: a role for each project, `*` standing for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

ALL_PROJECTS = "*"

PrincipalKind = Literal["local", "key", "oidc", "session", "attempt", "machine"]


class Role(IntEnum):
    """What one may do in a project; a higher role may do all that a lower one may."""

    VIEWER = 1
    SUBMITTER = 2
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> Role:
        """The role of a lower-case name; raises ValueError."""
        try:
            return cls[name.upper()]
        except KeyError:
            known = ", ".join(role.label for role in cls)
            raise ValueError(f"'{name}' is not a role; the roles are {known}") from None

    @property
    def label(self) -> str:
        """Name as users write it."""
        return self.name.lower()


@dataclass(frozen=True)
class Principal:
    """One who asks. An attempt is named by its id; `credential_id` is that of an API key."""

    name: str
    kind: PrincipalKind
    roles: Mapping[str, Role] = field(default_factory=dict)
    credential_id: str | None = None

    def role_in(self, project: str) -> Role | None:
        """The role in a project; None where the project may not even be seen."""
        held = [self.roles[name] for name in (project, ALL_PROJECTS) if name in self.roles]
        return max(held, default=None)

    def may(self, role: Role, project: str) -> bool:
        """Whether this role is held in a project."""
        held = self.role_in(project)
        return held is not None and held >= role

    def may_somewhere(self, role: Role) -> bool:
        """Whether this role is held in any project."""
        return any(held >= role for held in self.roles.values())

    @property
    def projects(self) -> frozenset[str] | None:
        """Projects that may be seen; None for all."""
        return None if ALL_PROJECTS in self.roles else frozenset(self.roles)


LOCAL = Principal("local", "local", {ALL_PROJECTS: Role.ADMIN})
"""Whoever works on the service's own machine, in local mode."""


def parse_roles(roles: Mapping[str, str]) -> dict[str, Role]:
    """Roles by project from their names; raises ValueError."""
    return {project: Role.named(name) for project, name in roles.items()}


def role_names(roles: Mapping[str, Role]) -> dict[str, str]:
    """Roles by project as users write them."""
    return {project: role.label for project, role in sorted(roles.items())}
