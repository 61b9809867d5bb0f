"""The whole job spec: its sections put together."""

from __future__ import annotations

DEFAULT_PROJECT = "default"
MAX_PRIORITY = 1000
