"""Parquet sources, batches and the global data position."""

from __future__ import annotations
