"""Every table of the database: those of jobs, and those of each concern beside them.

Who needs the whole schema (migrations, deletion) takes `metadata` from here, so that it is whole.
"""

from __future__ import annotations

from service.store import answers, keys, projects, webhooks  # noqa: F401  (their tables join the metadata)
from service.store.tables import metadata

__all__ = ["metadata"]
