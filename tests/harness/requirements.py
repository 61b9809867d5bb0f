"""What tests need beside Python packages, and whether its absence skips a test or fails it.

A test skips with a reason that names what is missing. `SHARDLOOM_TEST_REQUIRE` lists what must be
there (words, separated by commas): a skip whose reason has such a word is a failure then. `1`
stands for all in `REQUIREMENTS`.
"""

from __future__ import annotations

import os

REQUIREMENTS = ("chromium", "prometheus", "promtool", "postgresql")


def required() -> tuple[str, ...]:
    """What must be there, in small letters."""
    named = os.environ.get("SHARDLOOM_TEST_REQUIRE", "")
    if named == "1":
        return REQUIREMENTS
    return tuple(word.strip().lower() for word in named.split(",") if word.strip())


def forbidden_skip(reason: str) -> str | None:
    """The required thing whose absence a skip tells; None if the skip is allowed."""
    return next((name for name in required() if name in reason.lower()), None)
