"""REST API: routers, middleware, dependencies, problem responses."""

from __future__ import annotations
