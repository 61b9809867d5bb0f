"""Numbers as a reader wants them: short, aligned, in a sensible unit. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
_SECOND_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))
_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def grouped(number: int) -> str:
    """An integer in groups of thousands, as in `12,400`."""
    return f"{number:,}"


def compact(value: float | None) -> str:
    """At most four characters of digits and a suffix: `987`, `16.5k`, `1.2M`."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return _not_finite(value)
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{suffix}" if abs(value) < limit * 1e3 else f"{value:.2e}"
    return f"{value:.3g}"


def precise(value: float | None) -> str:
    """A loss or a quality metric: four decimals, or three digits when tiny or large."""
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return _not_finite(value)
    if value and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}"
    return f"{value:.4f}"


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"


def ratio(value: float | None) -> str:
    """How many times the mean the largest share is: `1.08×`."""
    if value is None:
        return NOTHING
    return f"{value:.2f}{TIMES}" if math.isfinite(value) else _not_finite(value)


def latency(seconds: float | None) -> str:
    """A short time in its natural unit: `840 µs`, `12.3 ms`, `1.25 s`."""
    if seconds is None:
        return NOTHING
    if not math.isfinite(seconds):
        return _not_finite(seconds)
    for unit_s, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= unit_s * 0.9995:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def duration(seconds: float | None) -> str:
    """A span in its two largest units: `45s`, `3m 20s`, `2h 05m`, `4d 03h`."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    rest = max(0, int(seconds))
    for (unit_s, unit), (smaller_s, smaller) in pairwise(_SECOND_UNITS):
        if rest >= unit_s:
            return f"{rest // unit_s}{unit} {rest % unit_s // smaller_s:02d}{smaller}"
    return f"{rest}s"


def clock(seconds: float) -> str:
    """Time since the start of a job: `+02:13`, `+1:05:09`."""
    rest = max(0, int(seconds))
    hours, minutes, rest_s = rest // 3600, rest % 3600 // 60, rest % 60
    return f"+{hours}:{minutes:02d}:{rest_s:02d}" if hours else f"+{minutes:02d}:{rest_s:02d}"


def utc(time_s: float) -> str:
    """Unix seconds as a date and time, `2026-11-21 04:31:11 UTC`."""
    return datetime.fromtimestamp(time_s, tz=UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def size(num_bytes: float | None) -> str:
    """Bytes in decimal units: `512 B`, `105 MB`."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return NOTHING
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_SIZE_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_SIZE_UNITS[unit]}"


def metric(name: str, value: float | None) -> str:
    """A metric in the unit that its name implies, as in `sync/time_s` or `balance/lookup`."""
    if name.startswith("balance/"):
        return ratio(value)
    if name.startswith("speed/"):
        return compact(value)
    if name.endswith("_s"):
        return latency(value)
    if name.endswith("bytes"):
        return size(value)
    return precise(value)


def metrics_line(values: Mapping[str, float]) -> str:
    """All metrics of a record on one line: `validation/rmse 0.8812 · validation/mae 0.6700`."""
    return " · ".join(f"{name} {metric(name, values[name])}" for name in sorted(values)) or NOTHING
