"""2D sparse parallelism: layout arithmetic, process groups, the model-parallel wrapper and sync."""

from __future__ import annotations
