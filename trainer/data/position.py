"""Where training is in the data, and which rows each rank takes next. Pure arithmetic.

A position counts rows of an epoch consumed by all ranks together. The order of an epoch's rows
does not depend on the number of ranks T, so a job that resumes at another T loses and repeats
nothing. Every rank gets the same number of batches: the tail of an epoch that does not fill one
batch on each rank is left out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class DataPosition:
    """`row` rows of epoch `epoch` (both from 0) have been consumed, over all ranks."""

    epoch: int = 0
    row: int = 0


START = DataPosition()
"""Position of a job that has seen nothing yet."""


@dataclass(frozen=True)
class BatchShape:
    """Rows of a split and how one step divides them: T ranks of `batch_size` rows each."""

    num_rows: int
    world_size: int
    batch_size: int

    @property
    def rows_per_step(self) -> int:
        """Rows that one step takes on all ranks together."""
        return self.world_size * self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a training epoch: its incomplete last step is left out."""
        return self.num_rows // self.rows_per_step

    @property
    def padded_steps(self) -> int:
        """Steps that cover every row once, the last one padded."""
        return -(-self.num_rows // self.rows_per_step)


def step_start(position: DataPosition, shape: BatchShape) -> DataPosition:
    """Where the next step begins: here, or at the next epoch if too few rows are left in this."""
    if position.row + shape.rows_per_step <= shape.num_rows:
        return position
    return DataPosition(position.epoch + 1, 0)


def advance(start: DataPosition, shape: BatchShape) -> DataPosition:
    """Position after a step that began at `start` (as given by `step_start`)."""
    return DataPosition(start.epoch, start.row + shape.rows_per_step)


def rank_slice(start_row: int, rank: int, shape: BatchShape) -> range:
    """Rows of the epoch's order that `rank` takes in the step that begins at `start_row`."""
    first = start_row + rank * shape.batch_size
    return range(first, first + shape.batch_size)


def remaining_steps(position: DataPosition, shape: BatchShape, epochs: int) -> int:
    """Steps from `position` to the end of the last of `epochs` epochs."""
    if position.epoch >= epochs:
        return 0
    here = max(0, shape.num_rows - position.row) // shape.rows_per_step
    return here + (epochs - position.epoch - 1) * shape.steps_per_epoch
