"""From held-out NE to gaps: means over seeds, their error, the ratios and the plot.

A *gap* is relative: (NE of a variant - NE of the peer) / NE of the peer, from means over seeds.
Runs are paired by seed, so the error of a gap is that of the paired differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


def table_of(final_ne: Mapping[str, Sequence[float]], teacher_ne: float | None) -> Table:
    """NE and gap of every variant; gaps in percent."""
    best = "unknown" if teacher_ne is None else f"{teacher_ne:.5f}"
    table = Table(
        *("variant", "NE", "gap %", "standard error %", "spread over seeds %", "significant"),
        title="ne_parity: held-out normalized entropy after the same samples",
        caption=f"best reachable NE (the teacher's): {best}; parity is {PARITY:.2%}",
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


def plot(path: Path, rows: Sequence[int], ne: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Draw each variant's gap along the training rows to `path` (format by its suffix).

    `ne[variant][seed][i]` is the NE after `rows[i]` training rows. Like figure 4 of the 2D sparse
    parallelism paper; bands are two standard errors wide on each side.
    """
    import matplotlib.pyplot as plt  # only --plot needs it

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name in (name for name in ne if name != PEER):
        gaps = [gap_of(_at(ne[name], i), _at(ne[PEER], i)) for i in range(len(rows))]
        middle = [100 * gap.relative for gap in gaps]
        width = [200 * (gap.standard_error or 0) for gap in gaps]
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


def _at(curves: Sequence[Sequence[float]], index: int) -> list[float]:
    return [curve[index] for curve in curves]
