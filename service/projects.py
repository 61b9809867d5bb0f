"""Projects: names that jobs belong to, with quotas of what may run at the same time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Project:
    """Quotas of a project; None is no limit. A project without a row has none.

    `max_workers` bounds the workers of its running jobs together, `max_running_jobs` their number.
    """

    name: str
    max_workers: int | None = None
    max_running_jobs: int | None = None
    updated_at: float | None = None


@dataclass(frozen=True)
class Usage:
    """What the jobs of a project hold now."""

    num_workers: int = 0
    num_running_jobs: int = 0
    num_queued_jobs: int = 0


def with_unlisted(projects: Iterable[Project], names: Iterable[str]) -> list[Project]:
    """The projects that have a row, and those that jobs name without one, by name."""
    known = {project.name: project for project in projects}
    return [known.get(name) or Project(name) for name in sorted({*known, *names})]
