"""Dashboard pages, mounted on the same app as the API."""

from __future__ import annotations
