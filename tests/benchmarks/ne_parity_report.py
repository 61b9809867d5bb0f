"""From held-out NE to gaps: means over seeds, their error and the ratios.

A *gap* is relative: (NE of a variant - NE of the peer) / NE of the peer, from means over seeds.
Runs are paired by seed, so the error of a gap is that of the paired differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from tests.benchmarks.report import Ratio

PEER = "1D"
PARITY = 2e-4


@dataclass(frozen=True)
class Gap:
    """Relative NE gap to the peer: signed mean, its standard error, lowest and highest seed.

    A single seed has no error (None).
    """

    relative: float
    standard_error: float | None
    spread: tuple[float, float]

    @property
    def is_significant(self) -> bool:
        """Whether the gap is larger than parity allows, even two standard errors nearer to 0."""
        if self.standard_error is None:
            return False
        return abs(self.relative) - 2 * self.standard_error > PARITY


def gap_of(ours: Sequence[float], peer: Sequence[float]) -> Gap:
    """Gap of `ours` to `peer`, each the NE by seed."""
    middle = statistics.fmean(peer)
    relative = [(mine - other) / middle for mine, other in zip(ours, peer, strict=True)]
    error = None
    if len(relative) > 1:
        error = statistics.stdev(relative) / math.sqrt(len(relative))
    return Gap(statistics.fmean(relative), error, (min(relative), max(relative)))


def ratio_of_gap(ours: Sequence[float], peer: Sequence[float], goal: float, better: str) -> Ratio:
    """The size of a gap as benchmarks report it; `spread` is signed, of the single seeds."""
    gap = gap_of(ours, peer)
    return Ratio(
        value=abs(gap.relative),
        goal=goal,
        better=better,
        ours=statistics.fmean(ours),
        peer=statistics.fmean(peer),
        peer_name="1D of stock TorchRec",
        unit="NE",
        spread=list(gap.spread),
    )


def gaps_of(final_ne: Mapping[str, Sequence[float]]) -> dict[str, Gap]:
    """Gap of each variant but the peer."""
    return {name: gap_of(ne, final_ne[PEER]) for name, ne in final_ne.items() if name != PEER}


def table_of(final_ne: Mapping[str, Sequence[float]], teacher_ne: float) -> Table:
    """NE and gap of every variant; gaps in percent."""
    table = Table(
        *("variant", "NE", "gap %", "standard error %", "spread over seeds %", "significant"),
        title="ne_parity: held-out normalized entropy after the same samples",
        caption=f"best reachable NE (the teacher's): {teacher_ne:.5f}; parity is {PARITY:.2%}",
    )
    means = {name: f"{statistics.fmean(ne):.6f}" for name, ne in final_ne.items()}
    table.add_row(PEER, means[PEER])
    for name, gap in gaps_of(final_ne).items():
        error = "" if gap.standard_error is None else f"{100 * gap.standard_error:.4f}"
        low, high = (f"{100 * bound:+.4f}" for bound in gap.spread)
        significant = "yes" if gap.is_significant else "no"
        relative = f"{100 * gap.relative:+.4f}"
        table.add_row(name, means[name], relative, error, f"{low} to {high}", significant)
    return table
