"""How many examples Hypothesis draws: few and always the same ones, or many and new ones.

`fast` is the default; `SHARDLOOM_TEST_PROFILE=all`, as `make test-all` sets it, draws all.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_NUM_FAST, _NUM_ALL = 25, 100


def load_profile() -> None:
    """Register both profiles and load that of the environment."""
    # On a busy machine a slow example says nothing about the code; examples are bounded in number.
    # Examples may share what a fixture made.
    shared = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    settings.register_profile("fast", shared, max_examples=_NUM_FAST, derandomize=True)
    settings.register_profile("all", shared, max_examples=_NUM_ALL)
    settings.load_profile(profile())


def profile() -> str:
    """The name of the profile of this session."""
    return os.environ.get("SHARDLOOM_TEST_PROFILE", "fast")


def examples(number: int, fast: int | None = None) -> int:
    """`number` examples in profile `all`; in `fast` those of `fast`, or a quarter (at least 5)."""
    if profile() == "all":
        return number
    return fast if fast is not None else max(5, number * _NUM_FAST // _NUM_ALL)
