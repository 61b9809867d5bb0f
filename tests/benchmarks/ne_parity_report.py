"""From held-out NE to gaps: means over seeds, their error, the ratios and the plot.

A *gap* is relative: (NE of a variant - NE of the peer) / NE of the peer, from means over seeds.
Runs are paired by seed, so the error of a gap is that of the paired differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.benchmarks.report import Ratio

PEER = "1D"
PARITY = 2e-4


@dataclass(frozen=True)
class Gap:
    """Relative NE gap to the peer: signed mean, its standard error, lowest and highest seed."""

    relative: float
    standard_error: float
    spread: tuple[float, float]

    @property
    def is_significant(self) -> bool:
        """Whether the gap is larger than parity allows, even two standard errors nearer to 0."""
        return abs(self.relative) - 2 * self.standard_error > PARITY


def gap_of(ours: Sequence[float], peer: Sequence[float]) -> Gap:
    """Gap of `ours` to `peer`, each the NE by seed; one seed has no error (NaN)."""
    middle = statistics.fmean(peer)
    relative = [(mine - other) / middle for mine, other in zip(ours, peer, strict=True)]
    error = math.nan
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


def gaps_of(final_ne: Mapping[str, Sequence[float]]) -> dict[str, dict[str, Any]]:
    """Of each variant but the peer: its mean NE and its gap, ready for JSON."""
    peer = final_ne[PEER]
    return {
        name: {"ne": statistics.fmean(ne), **asdict(gap_of(ne, peer))}
        for name, ne in final_ne.items()
        if name != PEER
    }


def table_of(final_ne: Mapping[str, Sequence[float]], teacher_ne: float | None) -> Table:
    """NE and gap of every variant; gaps in percent."""
    best = "unknown" if teacher_ne is None else f"{teacher_ne:.5f}"
    table = Table(
        *("variant", "NE", "gap %", "standard error %", "spread over seeds %"),
        title="ne_parity: held-out normalized entropy after the same samples",
        caption=f"best reachable NE (the teacher's): {best}; parity is {PARITY:.2%}",
    )
    table.add_row(PEER, f"{statistics.fmean(final_ne[PEER]):.6f}", "", "", "")
    for name, ne in final_ne.items():
        if name == PEER:
            continue
        gap = gap_of(ne, final_ne[PEER])
        low, high = gap.spread
        table.add_row(
            name,
            f"{statistics.fmean(ne):.6f}",
            f"{100 * gap.relative:+.4f}",
            f"{100 * gap.standard_error:.4f}",
            f"{100 * low:+.4f} to {100 * high:+.4f}",
        )
    return table


def plot(path: Path, rows: Sequence[int], ne: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Draw each variant's gap along the training rows to `path` (format by its suffix).

    `ne[variant][seed][i]` is the NE after `rows[i]` training rows. Like figure 4 of the 2D sparse
    parallelism paper; bands are two standard errors wide on each side.
    """
    import matplotlib.pyplot as plt  # only --plot needs it

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name in (name for name in ne if name != PEER):
        gaps = [
            gap_of([c[i] for c in ne[name]], [c[i] for c in ne[PEER]]) for i in range(len(rows))
        ]
        middle = [100 * gap.relative for gap in gaps]
        width = [200 * gap.standard_error for gap in gaps]
        (line,) = axes.plot(rows, middle, marker="o", markersize=3, label=name)
        low, high = ([m + s * w for m, w in zip(middle, width, strict=True)] for s in (-1, 1))
        axes.fill_between(rows, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.axhspan(-100 * PARITY, 100 * PARITY, color="gray", alpha=0.25, linewidth=0)
    axes.set(xlabel="training samples", ylabel=f"relative NE gap to {PEER} (%)")
    axes.set_title("Held-out normalized entropy of 2D against 1D")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
