"""Identifiers of jobs: `job-` and 12 characters that sort by time."""

from __future__ import annotations

import secrets

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_NUM_CHARS = 12
_RANDOM_BITS = 20
# 40 bits of milliseconds since the start of 2025 last until 2059.
_EPOCH_S = 1_735_689_600.0
_SLACK_MS = 1


def new_job_id(now: float) -> str:
    """An id that sorts after every id made a millisecond or more before `now` (Unix seconds)."""
    return _spelled(_elapsed_ms(now) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS))


def lowest_job_id(now: float) -> str:
    """An id below every id made at `now` (Unix seconds) or later, though not by much."""
    return _spelled(max(0, _elapsed_ms(now) - _SLACK_MS) << _RANDOM_BITS)


def highest_job_id(now: float) -> str:
    """An id above every id made before `now` (Unix seconds), though not by much."""
    return _spelled((_elapsed_ms(now) + 1 + _SLACK_MS) << _RANDOM_BITS)


def _elapsed_ms(now: float) -> int:
    return max(0, int((now - _EPOCH_S) * 1000))


def _spelled(number: int) -> str:
    digits = [_ALPHABET[number >> 5 * place & 31] for place in reversed(range(_NUM_CHARS))]
    return "job-" + "".join(digits)
