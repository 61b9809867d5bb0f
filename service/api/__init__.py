"""HTTP surface: routers, schemas, dependencies and error handlers."""

from __future__ import annotations
