"""Places that run attempts: Ray Jobs, and a scripted fake for tests."""

from __future__ import annotations
