"""What the 2D benchmark trains: Criteo-shaped batches and a small DLRM, the same for both sides.

26 tables of 64 columns, one id a row and table drawn by Zipf's law, and 13 dense columns. The
dense layers are small because eight ranks share the cores of one machine, while the link between
the hosts is not shared: large ones would measure the cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.benchmarks.workload import Workload, clicks_spec
from trainer.spec.job import JobSpec

WORLD_SIZE = 8
BATCH_SIZE = 2048  # rows per rank
IN_1D = Workload(
    WORLD_SIZE, WORLD_SIZE, table_rows=50_000, global_batch_size=BATCH_SIZE * WORLD_SIZE
)
NEVER = 10**6  # steps


@dataclass(frozen=True)
class TwoDLayout:
    """How our side lays the model over the ranks, and how it syncs the copies.

    `overlap` counts the steps during which means are formed. What syncs move travels in
    `sync_dtype`, embeddings in fp32. Mode "none" never syncs: no way to train, but the most that
    any sync could reach.
    """

    num_replicas: int
    placement: str
    mode: str
    every_steps: int
    overlap: int = 0
    dense: str = "every_step"
    sync_dtype: str = "fp32"

    @property
    def label(self) -> str:
        """Name of its row in the table."""
        sync = "no sync" if self.mode == "none" else f"{self.mode} N={self.every_steps}"
        parts = [f"2D M={self.num_replicas} {self.placement}, {sync}"]
        if self.overlap:
            parts.append(f"overlap {self.overlap}")
        if self.dense != "every_step":
            parts.append(f"dense {self.dense}")
        if self.sync_dtype != "fp32":
            parts.append(f"synced in {self.sync_dtype}")
        return ", ".join(parts)

    @property
    def is_comparable(self) -> bool:
        """Whether it counts for the ratio: 1D averages gradients at every step."""
        return self.mode != "none" and self.dense == "every_step"

    @property
    def sync(self) -> dict[str, Any]:
        """The job's `parallelism.sync`."""
        common = {
            "overlap": self.overlap,
            "dtype": self.sync_dtype,
            "full_above": 1.0,  # a row named touched_rows shall not turn into full
        }
        if self.mode == "none":
            return common | {"mode": "touched_rows", "every_steps": NEVER}
        return common | {"mode": self.mode, "every_steps": self.every_steps}


def spec_of(layout: TwoDLayout) -> JobSpec:
    """The job that trains `layout`."""
    workload = replace(IN_1D, shard_group_size=WORLD_SIZE // layout.num_replicas)
    return clicks_spec(
        workload,
        "two-d",
        placement=layout.placement,
        sync=layout.sync,
        dense=layout.dense,
    )
