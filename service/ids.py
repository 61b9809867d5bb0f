"""Identifiers of jobs: `job-` and 12 characters that sort by time."""

from __future__ import annotations

import secrets

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_NUM_CHARS = 12
_RANDOM_BITS = 20
# 40 bits of milliseconds since the start of 2025 last until 2059.
_EPOCH_S = 1_735_689_600.0


def new_job_id(now: float) -> str:
    """An id that sorts after every id made a millisecond or more before `now` (Unix seconds)."""
    elapsed_ms = max(0, int((now - _EPOCH_S) * 1000))
    number = elapsed_ms << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
    digits = [_ALPHABET[number >> 5 * place & 31] for place in reversed(range(_NUM_CHARS))]
    return "job-" + "".join(digits)
