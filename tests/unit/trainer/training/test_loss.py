"""What ends a run by its loss, metrics or bad rows, and the random numbers of steps."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import nn

from tests.harness.builders import spec
from tests.harness.small_model import dlrm_spec, fused_kernel
from trainer.coordination.messages import EarlyStoppingState
from trainer.errors import TooManyBadRowsError
from trainer.protocol.run_dir import RunDir
from trainer.spec.training import EarlyStoppingSpec
from trainer.training.loss import NonFiniteLossGuard
from trainer.training.metrics import QuarantineReporter, after_validation, is_over
from trainer.training.session import draws_at_random, step_seed


def stops_at(values: list[float], spec: EarlyStoppingSpec, metric: str = "rmse") -> int | None:
    """Number of the validation (from 0) that ends the run."""
    plateau: EarlyStoppingState | None = None
    for number, value in enumerate(values):
        plateau = after_validation(plateau, metric, value, spec)
        if is_over(plateau, spec):
            return number
    return None


def test_a_run_ends_after_patience_validations_without_a_gain() -> None:
    spec = EarlyStoppingSpec(patience=2, min_delta=0.01)
    assert stops_at([1.0, 0.9, 0.895, 0.891], spec) == 3, "gains below min_delta are none"
    assert stops_at([1.0, 0.9, 0.95, 0.88, 0.9, 0.9], spec) == 5
    assert stops_at([1.0, 0.9, 0.8, 0.7], spec) is None


def test_a_run_that_gets_worse_ends_whichever_way_the_metric_counts() -> None:
    spec = EarlyStoppingSpec(patience=1)
    assert stops_at([0.7, 0.8, 0.75], spec, "auc") == 2
    assert stops_at([0.7, 0.8, 0.75], spec, "click/auc") == 2
    assert stops_at([0.8, 0.9, 1.05, 1.06], spec, "calibration") == 3, "1 is perfect"


def test_a_nan_at_the_start_is_not_the_value_to_beat() -> None:
    spec = EarlyStoppingSpec(patience=2)
    assert stops_at([math.nan, 0.9, 0.8, 0.7], spec) is None
    assert stops_at([math.nan, math.nan], spec) == 1
    assert not is_over(EarlyStoppingState(best=1.0, num_validations=99), None)


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


def test_bad_rows_are_told_once_and_counted_in_each_epoch() -> None:
    spec: Any = SimpleNamespace(data=SimpleNamespace(on_bad_rows="quarantine", max_bad_share=1.0))
    told: list[Any] = []
    reporter = QuarantineReporter(spec, (1000, 100), told.append)
    sums = []
    for epoch in (0, 0, 1):
        reporter.begin_epoch(epoch)
        reporter.add(Counter({("part-0.parquet", "no label"): 2}))
        (part,) = reporter.parts()
        sums += part.sums.tolist()[:1]
    assert sums == [2, 2, 2]
    assert [event.count for event in told] == [2, 2]


def test_no_two_seeds_syncs_steps_or_ranks_draw_the_same() -> None:
    keys = list(product(range(2), range(3), range(50), range(4)))
    seeds = {step_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert step_seed(*keys[-1]) in seeds, "a step that is repeated draws what it drew before"


@pytest.mark.parametrize("data_type", ["fp32", "fp16"])
def test_steps_that_round_fp16_tables_by_chance_are_seeded_for_a_bitwise_resume(
    data_type: str,
) -> None:
    table = {"name": "t", "num_embeddings": 9, "embedding_dim": 4, "data_type": data_type}
    feature = {"name": "id", "type": "id", "table": "t"}
    found = dlrm_spec([table], [feature], {}, {"shard_group_size": 1}, batch_size=2)
    assert draws_at_random(found, torch.device("cuda")) == (data_type == "fp16")
    assert not draws_at_random(found, torch.device("cpu")), "there FBGEMM rounds to the nearest"


@pytest.fixture
def guard(tmp_path: Path) -> NonFiniteLossGuard:
    return NonFiniteLossGuard(
        spec(), RunDir(tmp_path), 100, torch.device("cpu"), lambda event: None
    )


def model_of(kernels: list[Any], **parameters: nn.Parameter) -> Any:
    """What a guard sees of a model."""
    return SimpleNamespace(named_parameters=parameters.items, embedding_kernels=lambda: kernels)


def is_found(guard: NonFiniteLossGuard, kernel: Any, gradient: torch.Tensor) -> bool:
    """Whether the guard finds fault with a step in which `kernel` had this `gradient`.

    Three bags of each of two features, with 1, 0 and 1 ids.
    """
    ids, offsets = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 1, 2, 3, 3, 4])
    kernel(indices=ids, offsets=offsets).backward(gradient)
    return not guard.part().sums.isfinite().item()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dims", [(4, 4), (4, 12)])
def test_a_gradient_of_a_lookup_is_seen_where_a_row_learns_from_it(
    guard: NonFiniteLossGuard, dims: tuple[int, int], bad: float
) -> None:
    kernel = fused_kernel([5, 7], dims)
    guard.watch(model_of([kernel]))
    gradient = torch.full((3, sum(dims)), torch.finfo(torch.float32).max)
    gradient[1] = bad
    assert not is_found(guard, kernel, gradient), "that bag has no ids, and no sum overflows"
    for column in range(sum(dims)):
        gradient[2] = 0.0
        gradient[2, column] = bad
        assert is_found(guard, kernel, gradient)


def test_what_is_clamped_or_of_a_sequence_is_seen_as_fbgemm_takes_it(tmp_path: Path) -> None:
    clamping = spec(optimizer={"sparse": {"max_gradient": 1.0}})
    guard = NonFiniteLossGuard(
        clamping, RunDir(tmp_path), 100, torch.device("cpu"), lambda event: None
    )
    options = {"gradient_clipping": True, "max_gradient": 1.0, "pooling_mode": PoolingMode.NONE}
    kernel = fused_kernel([5, 7], **options)
    guard.watch(model_of([kernel]))
    gradient = torch.tensor([math.inf, -math.inf, 1.0, 0.0]).repeat(4, 1)
    assert not is_found(guard, kernel, gradient)
    gradient[3, 3] = math.nan
    assert is_found(guard, kernel, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_weights_held_whole_are_looked_at_where_something_was_trained_since(
    guard: NonFiniteLossGuard, dtype: torch.dtype
) -> None:
    weights = nn.Parameter(torch.full((3,), 6e4, dtype=dtype))
    mask = nn.Parameter(torch.tensor(-math.inf), requires_grad=False)
    guard.watch(model_of([], weights=weights, mask=mask))
    guard.add(torch.tensor(1.0))
    assert guard.part().sums.isfinite().all(), "what is frozen may be what it is"
    weights.detach()[1] = math.nan
    guard.add(torch.tensor(1.0))
    assert guard.part().sums.isnan().all()
    assert guard.part().sums.isfinite().all(), "it was told, as a group's fault with its lease"
