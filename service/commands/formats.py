"""Numbers, sizes and times as people read them; pure functions."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
_SIZE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def human_bytes(num_bytes: float) -> str:
    """A size in decimal units, as in `12.3 MB`."""
    size, unit = float(num_bytes), 0
    while size >= 999.95 and unit < len(_SIZE_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_SIZE_UNITS[unit]}"


def human_duration(duration_s: float) -> str:
    """A duration in its two largest units, as in `1h 05m` or `42s`."""
    if duration_s < 10:
        return f"{max(duration_s, 0.0):.1f}s"
    whole_s = round(duration_s)
    minutes, seconds = divmod(whole_s, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {seconds:02}s" if minutes else f"{seconds}s"


def human_age(time_s: float, now_s: float) -> str:
    """How long ago a Unix time was, in its largest unit, as in `2 m ago`."""
    age_s = now_s - time_s
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        if age_s >= unit_s:
            return f"{int(age_s // unit_s)} {unit} ago"
    return "now"


def human_count(count: float) -> str:
    """A count in three digits, as in `21.3k`."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= unit:
            return f"{count / unit:.1f}{suffix}"
    return f"{count:.0f}"


def human_number(value: float) -> str:
    """A metric's value in four significant digits, without an exponent where that reads well."""
    if math.isnan(value) or math.isinf(value):
        return str(value)
    if value != 0 and not 1e-4 <= abs(value) < 1e7:
        return f"{value:.3e}"
    digits = max(0, 4 - len(f"{abs(value):.0f}")) if abs(value) >= 1 else 4
    return f"{value:,.{digits}f}"


def clock(time_s: float) -> str:
    """Local time of day of a Unix time, as in `14:03:59`."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """A curve of block characters; at most `width` of them, each the mean of its share of values.

    Values that are not finite leave a gap.
    """
    buckets = _buckets(values, width)
    finite = [value for value in buckets if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_block(value, low, span) for value in buckets)


def _block(value: float, low: float, span: float) -> str:
    if not math.isfinite(value):
        return " "
    if span == 0:
        return BLOCKS[len(BLOCKS) // 2]
    return BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))]


def _buckets(values: Sequence[float], width: int) -> list[float]:
    num_buckets = min(width, len(values))
    if num_buckets == 0:
        return []
    edges = [index * len(values) // num_buckets for index in range(num_buckets + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
