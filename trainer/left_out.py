"""Tells of rows that are left out because they cannot be used (`data.on_bad_rows: quarantine`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from trainer import events
from trainer.balance import across_ranks
from trainer.data.quarantine import QuarantinedRows, QuarantineTally
from trainer.spec import JobSpec

METRIC = "data/quarantined_rows"


class LeftOutRows:
    """Counts one rank's quarantined rows, and tells of them at each report."""

    def __init__(
        self, spec: JobSpec, device: torch.device, emit: Callable[[events.Event], None]
    ) -> None:
        self._is_on = spec.data.on_bad_rows == "quarantine"
        self._device = device
        self._emit = emit
        self._tally = QuarantineTally()
        self._has_validated = False

    def add(self, found: Iterable[QuarantinedRows]) -> None:
        """Count what a batch left out."""
        self._tally.add(found)

    def add_held_out(self, found: Iterable[QuarantinedRows]) -> None:
        """Count what a batch of a validation left out: all read the same rows, the first counts."""
        if not self._has_validated:
            self.add(found)

    def end_validation(self) -> None:
        """All held-out rows were read."""
        self._has_validated = True

    def report(self) -> dict[str, float]:
        """Rows left out since the last call, over all ranks; an event for each file and reason.

        Nothing where bad rows end the job. Collective otherwise.
        """
        if not self._is_on:
            return {}
        counts = across_ranks([self._tally.num_rows], self._device)
        for rows in self._tally.take():
            self._emit(
                events.RowsQuarantined(
                    time=time.time(), file=rows.file, reason=rows.reason, count=rows.num_rows
                )
            )
        return {METRIC: counts.sum().item()}
