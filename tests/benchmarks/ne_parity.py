"""Normalized entropy of 2D training against 1D after the same samples, by moment scale c.

python -m tests.benchmarks.ne_parity --json FILE [--seeds N] ...

2D training divides each gradient by L instead of T, so the second moments of row-wise AdaGrad grow
up to M times faster; the paper's algorithm 1 divides them by c = M again. This measures how close
that comes to 1D, and how far c = 1 is off. Rows are Criteo-shaped, from a teacher whose own NE is
the best reachable one. The peer is 1D training by stock TorchRec; all variants of a seed get the
same rows in the same order and the same starting weights. The noise floor is our engine in 1D under
another sharding, which differs from the peer in rounding alone.

c = M is not 1D exactly. A row that one group alone looks up has M times the gradient g of 1D
there, and its moment takes in M^2 g^2 before a sync averages that to M g^2. So it moves by
lr g / sqrt(v + M g^2) where 1D moves by lr g / sqrt(v + g^2): the n-th lookup counts
1 / sqrt(n + M - 1) instead of 1 / sqrt(n). Rows that are new move less, and eps decides how much
that matters: from about the size of g on, new rows take SGD-like steps in 1D and 2D alike. The
default eps is of that size because 1D is best there; `--sparse-eps 1e-8` shows the difference.

The dense part in bf16 (`training.dense_precision`) is compared with 2D at c = M in fp32.

A *gap* is relative: (NE of a variant - NE of the peer) / NE of the peer, from means over seeds.
Runs are paired by seed, so the error of a gap is that of the paired differences.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean, stdev
from typing import Any

from rich.table import Table

from tests.benchmarks.ne_parity_case import Settings
from tests.benchmarks.ne_parity_ranks import SeedResult, Variant, measure_seed
from tests.benchmarks.report import Ratio, log, measure_and_tell, parser_of
from tests.harness.ranks import run_ranks

NAME = "ne_parity"
PEER = "1D"
PARITY = 2e-4
NOISE = "1D, ours"
OVERLAPPED = "2D, c=M, overlapped"
BF16 = "2D, c=M, dense bf16"
_SEED_TIMEOUT_S = 3600.0


def variants_of(
    world_size: int, shard_group_size: int, has_overlap: bool = False, only_scales: bool = False
) -> list[Variant]:
    """The peer, our engine in 1D, and 2D with c = M, M/2, 1 and in bf16, or c = M and overlap.

    `only_scales` leaves out our engine in 1D and bf16.
    """
    num_replicas = world_size // shard_group_size
    every = {num_replicas, num_replicas // 2, 1}
    scales = [num_replicas] if has_overlap else sorted(every, reverse=True)
    in_2d = [Variant(name_of_scale(c), shard_group_size, float(c)) for c in scales]
    if only_scales:
        return [Variant(PEER, world_size, None), *in_2d]
    if has_overlap:
        in_2d.append(replace(in_2d[0], name=OVERLAPPED, is_overlapped=True))
    else:
        in_2d.append(replace(in_2d[0], name=BF16, precision="bf16"))
    return [Variant(PEER, world_size, None), Variant(NOISE, world_size, 1.0), *in_2d]


def name_of_scale(scale: int) -> str:
    """Name of the 2D variant with moment scale c."""
    return f"2D, c={scale}"


def measure(
    num_seeds: int, of_seed: Callable[..., SeedResult], settings: Settings, *more: Any
) -> list[SeedResult]:
    """What `of_seed` measures of each seed on ranks; raises `AssertionError` when one fails."""
    results: list[SeedResult] = []
    for seed in range(num_seeds):
        call = (of_seed, settings.world_size, settings, *more, seed)
        results.append(run_ranks(*call, timeout_s=_SEED_TIMEOUT_S)[0])
        last = final_ne(results[-1:]).items()
        shown = ", ".join(f"{name} {ne:.6f}" for name, (ne,) in last)
        log(f"seed {seed + 1}/{num_seeds}: NE {shown}")
    return results


def final_ne(results: list[SeedResult]) -> dict[str, list[float]]:
    """NE after all samples, by variant and seed."""
    return {name: [result.curves[name].ne[-1] for result in results] for name in results[0].curves}


@dataclass(frozen=True)
class Gap:
    """Relative NE gap to the peer: signed mean, its standard error, lowest and highest seed.

    A single seed has no error (None).
    """

    relative: float
    standard_error: float | None
    spread: tuple[float, float]


def gap_of(ours: Sequence[float], peer: Sequence[float]) -> Gap:
    """Gap of `ours` to `peer`, each the NE by seed."""
    middle = fmean(peer)
    relative = [(mine - other) / middle for mine, other in zip(ours, peer, strict=True)]
    error = None
    if len(relative) > 1:
        error = stdev(relative) / math.sqrt(len(relative))
    return Gap(fmean(relative), error, (min(relative), max(relative)))


def ratio_of_gap(
    ours: Sequence[float],
    peer: Sequence[float],
    goal: float,
    better: str,
    peer_name: str = "1D of stock TorchRec",
) -> Ratio:
    """The size of a gap as benchmarks report it; `spread` is signed, of the single seeds."""
    gap = gap_of(ours, peer)
    return Ratio(
        value=abs(gap.relative),
        goal=goal,
        better=better,
        ours=fmean(ours),
        peer=fmean(peer),
        peer_name=peer_name,
        unit="NE",
        spread=list(gap.spread),
    )


def gaps_of(final_ne: Mapping[str, Sequence[float]], peer: str = PEER) -> dict[str, Gap]:
    """Gap of each variant but the peer."""
    return {name: gap_of(ne, final_ne[peer]) for name, ne in final_ne.items() if name != peer}


def table_of(title: str, results: list[SeedResult], peer: str) -> Table:
    """NE of every variant after all samples, and its gap in percent."""
    table = Table(
        *("variant", "NE", "gap %", "standard error %", "spread over seeds %"),
        title=title,
        caption=f"best reachable NE (the teacher's): {results[0].teacher_ne:.5f}",
    )
    ne_by_variant = final_ne(results)
    means = {name: f"{fmean(ne):.6f}" for name, ne in ne_by_variant.items()}
    table.add_row(peer, means[peer])
    for name, gap in gaps_of(ne_by_variant, peer).items():
        error = "" if gap.standard_error is None else f"{100 * gap.standard_error:.4f}"
        low, high = (f"{100 * bound:+.4f}" for bound in gap.spread)
        relative = f"{100 * gap.relative:+.4f}"
        table.add_row(name, means[name], relative, error, f"{low} to {high}")
    return table


def curves_of(results: list[SeedResult]) -> Table:
    """Gap of every variant along the training, in percent, of means over the seeds."""
    names = [name for name in results[0].curves if name != PEER]
    title = "ne_parity: gap in % along the training"
    table = Table("samples", f"NE of {PEER}", *names, title=title)
    for index, rows in enumerate(results[0].curves[PEER].rows):
        ne = {
            name: [result.curves[name].ne[index] for result in results]
            for name in results[0].curves
        }
        gaps = (f"{100 * gap.relative:+.4f}" for gap in gaps_of(ne).values())
        table.add_row(f"{rows:,}", f"{fmean(ne[PEER]):.6f}", *gaps)
    return table


def document_of(
    settings: Settings, num_replicas: int, results: list[SeedResult], machine: dict[str, Any]
) -> dict[str, Any]:
    """The report as the JSON file holds it."""
    ne = final_ne(results)
    scaled = name_of_scale(num_replicas)
    ratios = {"gap_scaled": ratio_of_gap(ne[scaled], ne[PEER], PARITY, "lower")}
    if BF16 in ne:
        ratios["gap_bf16"] = ratio_of_gap(
            ne[BF16], ne[scaled], PARITY, "lower", f"{scaled}, dense part in fp32"
        )
    if OVERLAPPED in ne:
        ratios["gap_overlapped"] = ratio_of_gap(ne[OVERLAPPED], ne[PEER], PARITY, "lower")
    if name_of_scale(1) in ne:
        ratios["gap_unscaled"] = ratio_of_gap(ne[name_of_scale(1)], ne[PEER], PARITY, "higher")
    return {
        "benchmark": NAME,
        "machine": machine,
        "settings": {**asdict(settings), "num_replicas": num_replicas, "num_seeds": len(results)},
        "ratios": ratios,
        "teacher_ne": results[0].teacher_ne,
        "gaps": {name: {"ne": fmean(ne[name]), **asdict(gap)} for name, gap in gaps_of(ne).items()},
        "runs": runs_of(results),
    }


def runs_of(results: list[SeedResult]) -> list[dict[str, Any]]:
    """The curve of every variant of every seed, as the JSON file holds it."""
    return [
        {"seed": seed, "variant": name, **asdict(curve)}
        for seed, result in enumerate(results)
        for name, curve in result.curves.items()
    ]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; every number of `Settings` has an option of its name."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=4, help="runs of each variant (default 4)")
    parser.add_argument("--shard-group-size", type=int, default=1, help="L in 2D (default 1)")
    help_text = "train the peer and 2D with each c alone"
    parser.add_argument("--only-scales", action="store_true", help=help_text)
    for setting in fields(Settings):
        option = "--" + setting.name.replace("_", "-")
        kind = type(setting.default)
        parser.add_argument(
            option, type=kind, default=setting.default, help=f"default {setting.default}"
        )
    options = parser.parse_args(arguments)
    options.settings = Settings(**{f.name: getattr(options, f.name) for f in fields(Settings)})
    if problem := _problem(options):
        parser.error(problem)
    return options


def _problem(options: argparse.Namespace) -> str | None:
    num_replicas, rest = divmod(options.settings.world_size, options.shard_group_size)
    if rest or num_replicas == 1:
        return "--world-size must be a multiple of --shard-group-size, and larger"
    if options.seeds < 1:
        return "--seeds must be at least 1"
    return options.settings.problem()


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0 when it measured, whatever came out; 1 when it could not."""
    options = parse(arguments)
    return measure_and_tell(options.json, lambda machine: run(options, machine))


def run(options: argparse.Namespace, machine: dict[str, Any]) -> tuple[dict[str, Any], list[Table]]:
    """Measure; the document and the table to print."""
    settings: Settings = options.settings
    has_overlap = settings.sync_overlap > 0
    variants = variants_of(
        settings.world_size, options.shard_group_size, has_overlap, options.only_scales
    )
    results = measure(options.seeds, measure_seed, settings, variants)
    num_replicas = settings.world_size // options.shard_group_size
    document = document_of(settings, num_replicas, results, machine)
    title = f"{NAME}: held-out normalized entropy after the same samples; parity is {PARITY:.2%}"
    return document, [curves_of(results), table_of(title, results, PEER)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
