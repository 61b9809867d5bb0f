"""Replica groups as failure domains: the worker side, and the coordinator."""

from __future__ import annotations
