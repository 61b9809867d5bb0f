"""What a run measures and reports."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import TooManyBadRowsError
from trainer.training.metrics import QuarantineReporter


def test_bad_rows_of_all_ranks_count_against_their_split() -> None:
    spec: Any = SimpleNamespace(data=SimpleNamespace(on_bad_rows="quarantine", max_bad_share=0.1))
    reporter = QuarantineReporter(spec, (1000, 100), lambda event: None)
    for _ in range(2):  # the same rows again
        reporter.begin_validation()
        reporter.add_held_out(Counter({("part-0.parquet", "no label"): 5}))
    assert reporter.num_held_out == 5
    (part,) = reporter.parts()
    assert part.sums.tolist() == [0, 5]
    of_all_ranks = torch.tensor([100.0, 10.0])
    assert part.read(of_all_ranks, torch.empty(0)) == {"data/quarantined_rows": 110}
    with pytest.raises(TooManyBadRowsError, match=r"101 of 1,000 rows.*mostly part-0.*: no label"):
        reporter.check(num_trained=101)
    with pytest.raises(TooManyBadRowsError, match="11 of 100 rows"):
        reporter.check(num_held_out=11)
