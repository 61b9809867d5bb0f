"""What a run measures and reports."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import TooManyBadRowsError
from trainer.training.metrics import QuarantineReporter


@pytest.mark.parametrize(("share", "is_too_much"), [(1.0, False), (0.25, True)])
def test_bad_validation_rows_are_set_against_those_that_were_read(
    share: float, is_too_much: bool
) -> None:
    spec: Any = SimpleNamespace(data=SimpleNamespace(on_bad_rows="quarantine", max_bad_share=0.1))
    reporter = QuarantineReporter(spec, (1000, 100), lambda event: None)
    reporter.add_held_out(Counter({("part-0.parquet", "no label"): 5}))
    reporter.end_validation(share)
    reporter.add_held_out(Counter({("part-0.parquet", "no label"): 5}))  # the same ones again
    (part,) = reporter.parts()
    assert part.sums.tolist() == [0, 5]
    if is_too_much:
        with pytest.raises(TooManyBadRowsError, match="5 of 25 rows"):
            part.read(part.sums, torch.empty(0))
    else:
        assert part.read(part.sums, torch.empty(0)) == {"data/quarantined_rows": 5}
