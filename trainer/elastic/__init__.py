"""Durable checkpoints and recovery."""

from __future__ import annotations
