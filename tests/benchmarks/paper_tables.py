"""The tables of the 2D sparse parallelism paper (arXiv 2508.03854), predicted by the cost model.

python -m tests.benchmarks.paper_tables --json FILE

The model is `trainer.layout.cost` on its profile of hosts with eight H100, with the bandwidths that
the profile has. What the paper does not publish of its two models is taken from part of its cells,
which are listed as used; all others are predicted and compared.

* Step: operations of the dense part and bytes of the lookups of one sample, from the QPS of full
  model parallelism and of M=8 in table 1. The paper's numbers cannot tell both exchanges from the
  dense part, so they are in there. No QPS of table 2 is used.
* Memory: what a rank holds beside tables, from the means of M=1 and M=8; what grows with the
  imbalance, from the peak of M=1; what grows with the batch, from a layout that both tables have
  (M=4 on 1024 GPUs).
* Imbalance of groups of L: 1 + e + k (L / T)^p. e and p are those of the CTR model for both, from
  its M=1, 2 and 8; k is each model's, from M=1.

`qps_error_max` and `memory_error_max`: the largest relative error of cells that were not used;
`optimum_found`: models of which the fastest M is the published one, M=4; `oom_differences`: layouts
that run out of memory here and not there, or the other way; `calibrated_share`: cells used of all.
There is no peer but the paper.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.benchmarks.report import (
    BenchmarkReport,
    Goal,
    Run,
    parser_of,
    tell,
)
from trainer.layout.cost import (
    RESERVE_SHARE,
    Cluster,
    Cost,
    Workload,
    cluster_of,
    cost_of,
    step_time,
)
from trainer.layout.layout import Layout

NAME = "paper_tables"
PROFILE = "8xH100-80GB"
PEER = "the paper"
# Attained by a GPU over NVLink, beside the profile's.
OTHER_BANDWIDTHS = (270e9, 360e9)
GOALS = [
    Goal("qps_error_max", "qps_error_max", "", 0.10, "lower", PEER),
    Goal("memory_error_max", "memory_error_max", "", 0.10, "lower", PEER),
    Goal("optimum_found", "optimum_found", "models", 2, "higher", PEER),
    Goal("oom_differences", "oom_differences", "layouts", 0, "lower", PEER),
    Goal("calibrated_share", "calibrated_share", "", 1 / 3, "lower", PEER),
]


@dataclass(frozen=True)
class Row:
    """A row of the paper: T, L and batch with what was measured; no QPS where memory ran out."""

    table: int
    model: str
    world_size: int
    shard_group_size: int
    batch_size: int
    qps: float | None = None
    peak: float | None = None
    mean: float | None = None
    imbalance: float | None = None

    @property
    def layout(self) -> Layout:
        return Layout(self.world_size, self.shard_group_size, "intra_host")

    @property
    def published(self) -> dict[str, float]:
        """What the paper has a number for."""
        values = {
            "qps": self.qps,
            "peak": self.peak,
            "mean": self.mean,
            "imbalance": self.imbalance,
        }
        return {name: value for name, value in values.items() if value is not None}


TABLE_BYTES = {"CTR": 0.5e12, "ExFM": 1.7e12}
TABLE_1 = {
    "CTR": [
        Row(1, "CTR", 256, 256, 4096, 1.53e6, 0.7240, 0.4966, 5.70),
        Row(1, "CTR", 256, 128, 4096, 2.34e6, 0.5365, 0.4765, 2.01),
        Row(1, "CTR", 256, 64, 4096, 2.66e6, 0.5474, 0.5059, 1.57),
        Row(1, "CTR", 256, 32, 4096, 2.26e6, 0.6990, 0.6291, 1.53),
    ],
    "ExFM": [
        Row(1, "ExFM", 1024, 1024, 896, 5.51e5, 0.9944, 0.7695, 5.18),
        Row(1, "ExFM", 1024, 512, 896, 6.31e5, 0.8557, 0.7915, 2.23),
        Row(1, "ExFM", 1024, 256, 896, 6.54e5, 0.8777, 0.8281, 1.65),
        Row(1, "ExFM", 1024, 128, 896, 6.32e5, 0.9485, 0.9022, 1.63),
    ],
}
TABLE_2 = [
    Row(2, "ExFM", 256, 256, 1152, 1.76e5, 0.9654),
    Row(2, "ExFM", 512, 512, 1152, 3.37e5, 0.9547),
    Row(2, "ExFM", 1024, 1024, 1152, 5.61e5, 1.0),
    Row(2, "ExFM", 2048, 2048, 1152),
    Row(2, "ExFM", 4096, 4096, 1152),
    Row(2, "ExFM", 512, 256, 1152, 3.56e5, 0.9659),
    Row(2, "ExFM", 1024, 256, 1152, 6.76e5, 0.9495),
    Row(2, "ExFM", 2048, 256, 1152, 1.34e6, 0.9507),
    Row(2, "ExFM", 4096, 256, 1152, 2.53e6, 0.9556),
]
# The layout that is in table 1 too, with another batch.
OTHER_BATCH = TABLE_2[6]
ROWS = [*TABLE_1["CTR"], *TABLE_1["ExFM"], *TABLE_2]

Cell = tuple[Row, str]


class Calibration:
    """The published cells; those that are read are noted as used."""

    def __init__(self) -> None:
        self.used: set[Cell] = set()

    def read(self, row: Row, name: str) -> float:
        """A published number, noted as used."""
        self.used.add((row, name))
        return row.published[name]

    def imbalances(self) -> dict[Row, float]:
        """The imbalance of every row, from four published ones."""
        first, second, *_, last = TABLE_1["CTR"]
        largest, smaller = self.read(first, "imbalance"), self.read(second, "imbalance")
        floor = self.read(last, "imbalance")
        power = math.log2((largest - floor) / (smaller - floor))
        excess = {name: self.read(rows[0], "imbalance") - floor for name, rows in TABLE_1.items()}
        return {
            row: floor
            + excess[row.model] * (row.shard_group_size / TABLE_1[row.model][0].world_size) ** power
            for row in ROWS
        }

    def workloads(self, cluster: Cluster) -> dict[Row, Workload]:
        """What each row asks of a rank."""
        imbalances, found = self.imbalances(), {}
        for model in TABLE_1:
            of_model = self._with_memory(
                model, self._with_step(model, cluster, imbalances), cluster, imbalances
            )
            found |= {
                row: replace(of_model, batch_size=row.batch_size, lookup_imbalance=imbalances[row])
                for row in ROWS
                if row.model == model
            }
        return found

    def _with_step(self, model: str, cluster: Cluster, imbalances: Mapping[Row, float]) -> Workload:
        """The model's operations and lookups, with which both ends of table 1 are as published."""
        table_bytes = TABLE_BYTES[model]
        idle = Workload(1, table_bytes, 0.0, table_bytes, 0.0, 0.0, precision="bf16")
        parts, seconds = [], []
        for row in (TABLE_1[model][0], TABLE_1[model][-1]):
            samples = row.world_size * row.batch_size
            beside = step_time(idle, row.layout, cluster)
            beside_s = beside.total_s - beside.host_s  # the host's work is hidden
            parts.append([row.batch_size, row.batch_size * imbalances[row]])
            seconds.append(samples / self.read(row, "qps") - beside_s)
        dense_s, lookup_s = np.linalg.solve(np.array(parts), np.array(seconds))
        return replace(
            idle,
            dense_flops=float(dense_s) * cluster.bf16_flops_per_s,
            lookup_bytes=float(lookup_s) * cluster.hbm_bytes_per_s,
        )

    def _with_memory(
        self, model: str, workload: Workload, cluster: Cluster, imbalances: Mapping[Row, float]
    ) -> Workload:
        """What a rank of the model holds beside tables."""
        first, last, hbm_bytes = TABLE_1[model][0], TABLE_1[model][-1], cluster.hbm_bytes

        def beside_tables(share: float, row: Row) -> float:
            return share * hbm_bytes - TABLE_BYTES[model] / row.shard_group_size

        mean_bytes = 0.5 * sum(beside_tables(self.read(row, "mean"), row) for row in (first, last))
        peak_bytes = beside_tables(self.read(first, "peak"), first)
        batch = first.batch_size
        lookup_bytes = (peak_bytes - mean_bytes) / (imbalances[first] - 1) / batch
        fixed_bytes = 0.0  # the CTR model has one batch, so its parts cannot be told apart
        if model == OTHER_BATCH.model:
            row, other = OTHER_BATCH, OTHER_BATCH.batch_size
            straggling = lookup_bytes * other * (imbalances[row] - 1)
            other_bytes = beside_tables(self.read(row, "peak"), row) - straggling
            per_sample = (other_bytes - mean_bytes) / (other - batch)
            fixed_bytes = mean_bytes - batch * per_sample - RESERVE_SHARE * hbm_bytes
        else:
            per_sample = (mean_bytes - RESERVE_SHARE * hbm_bytes) / batch
        return replace(
            workload,
            dense_bytes=fixed_bytes,
            lookup_activation_bytes=lookup_bytes,
            dense_activation_bytes=per_sample - lookup_bytes,
        )


@dataclass(frozen=True)
class Prediction:
    """What the model says of all rows, and which cells it was told."""

    costs: Mapping[Row, Cost]
    imbalances: Mapping[Row, float]
    used: frozenset[Cell]
    hbm_bytes: int

    def of(self, row: Row) -> dict[str, float]:
        """The predicted numbers of a row; memory is full at 1."""
        cost = self.costs[row]
        return {
            "qps": cost.samples_per_s,
            "peak": min(1.0, cost.peak.total_bytes / self.hbm_bytes),
            "mean": cost.mean.total_bytes / self.hbm_bytes,
            "imbalance": self.imbalances[row],
        }

    def errors(self, *names: str) -> list[float]:
        """Relative errors of the cells of these kinds that were not used."""
        return [
            abs(self.of(row)[name] / value - 1)
            for row, name, value in _cells()
            if name in names and (row, name) not in self.used
        ]

    def values(self) -> dict[str, float]:
        """What the goals are about."""
        return {
            "qps_error_max": max(self.errors("qps")),
            "memory_error_max": max(self.errors("peak", "mean")),
            "optimum_found": float(sum(map(self._is_optimum_found, TABLE_1))),
            "oom_differences": float(
                sum(cost.fits != (row.qps is not None) for row, cost in self.costs.items())
            ),
            "calibrated_share": len(self.used) / sum(1 for _ in _cells()),
        }

    def _is_optimum_found(self, model: str) -> bool:
        fastest = max(TABLE_1[model], key=lambda row: self.costs[row].samples_per_s)
        return fastest is max(TABLE_1[model], key=lambda row: row.published["qps"])

    def rows(self) -> Iterator[dict[str, Any]]:
        """A line for each published cell, and for each layout that ran out of memory."""
        for row, cells in itertools.groupby(_cells(with_oom=True), key=lambda cell: cell[0]):
            predicted = self.of(row)
            for _, name, value in cells:
                is_used = (row, name) in self.used
                yield _place(row) | {
                    "cell": name,
                    "published": "OOM" if value is None else f"{value:.4g}",
                    "predicted": (f"{predicted[name]:.4g}" if self.costs[row].fits else "OOM"),
                    "error": "" if value is None else f"{predicted[name] / value - 1:+.1%}",
                    "used": "calibration" if is_used else "",
                }


def _place(row: Row) -> dict[str, Any]:
    return {
        "table": row.table,
        "model": row.model,
        "T": row.world_size,
        "M": row.layout.num_replicas,
        "batch": row.batch_size,
    }


def _cells(with_oom: bool = False) -> Iterator[tuple[Row, str, Any]]:
    for row in ROWS:
        yield from ((row, name, value) for name, value in row.published.items())
        if with_oom and row.qps is None:
            yield row, "qps", None


def predict(cluster: Cluster) -> Prediction:
    """Calibrate on part of the cells and predict all."""
    calibration = Calibration()
    workloads = calibration.workloads(cluster)
    return Prediction(
        costs={row: cost_of(workloads[row], row.layout, cluster) for row in ROWS},
        imbalances={row: workload.lookup_imbalance for row, workload in workloads.items()},
        used=frozenset(calibration.used),
        hbm_bytes=cluster.hbm_bytes,
    )


def report() -> BenchmarkReport:
    """Both tables, and how much the errors depend on the bandwidth of NVLink that is assumed."""
    cluster = cluster_of(PROFILE)
    found = predict(cluster)
    others = {
        f"{bandwidth / 1e9:.0f} GB/s": predict(
            replace(cluster, intra_host_bytes_per_s=bandwidth)
        ).values()
        for bandwidth in OTHER_BANDWIDTHS
    }
    runs = [Run(0, "ours", found.values()), Run(0, "peer", dict.fromkeys(found.values(), 1.0))]
    settings = {"cluster": vars(cluster), "with_other_nvlink": others}
    return BenchmarkReport(NAME, settings, GOALS, runs, list(found.rows()))


def main() -> int:
    """Command line; returns the exit code."""
    return tell(parser_of(__doc__).parse_args().json, report)


if __name__ == "__main__":
    sys.exit(main())
