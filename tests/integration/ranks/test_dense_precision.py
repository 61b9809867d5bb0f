"""`training.dense_precision: bf16`: what is computed in it, what stays fp32, what is learned; and
`training.dense_compile`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from tests.harness.ranks import run_in_turn
from tests.harness.sessions import make_config, open_session, snapshot
from tests.harness.small_model import Case, spec_of
from tests.integration.ranks.test_movielens_arch import example_config
from trainer.checkpoint.state_dict import state_to_save
from trainer.parallel.planner import PlanError
from trainer.protocol.worker_config import WorkerConfig
from trainer.training.worker import prepare_process, train

LARGEST_GAP = 0.002  # of the losses with bf16 over those with fp32, less 1
ONE = ("parallelism.workers=1", "parallelism.shard_group_size=1", "parallelism.sync=null")
CASES: dict[str, tuple[int, Callable[..., WorkerConfig], tuple[str, ...]]] = {
    "dlrm on two ranks": (
        2,
        make_config,
        ("parallelism.workers=2", "parallelism.shard_group_size=2", "parallelism.sync=null"),
    ),
    "transformer": (1, example_config, (*ONE, "model.transformer.dropout=0.0")),
}


def train_observed(config: WorkerConfig) -> dict[str, Any]:
    """Train to the end; dtypes of what came out of each part, in training and not, and of state.

    And whether the gradients of the last step hold bf16 numbers.
    """
    session = open_session(config)
    seen: dict[str, set[tuple[bool, torch.dtype]]] = {"linear": set(), "lookup": set()}

    def note(part: str) -> Callable[..., None]:
        return lambda module, _, out: seen[part].add((session.model.training, out.dtype))

    for module in session.model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(note("linear"))
    for kernel in session.model.embedding_kernels():
        kernel.register_forward_hook(note("lookup"))
    forward, seen["result"] = session.pipeline.forward, set()

    def noted(batch: Any) -> Any:
        found = forward(batch)
        seen["result"] |= {(session.model.training, each.dtype) for each in found}
        return found

    session.pipeline.forward = noted  # type: ignore[method-assign]
    metrics = train(session)
    state = snapshot(session)
    tensors = [*state["shards"].values(), *state["dense"].values()]
    gradients = [parameter.grad for parameter in session.optimizers.dense.params.values()]
    return {
        "seen": seen,
        "state": {each.dtype for each in tensors},
        "metrics": metrics,
        "has_bf16_gradients": all(each.equal(each.bfloat16().float()) for each in gradients),
    }


@pytest.mark.parametrize("name", CASES)
def test_only_the_dense_part_is_bf16_and_it_learns_what_fp32_does(
    small_movielens: Path, tmp_path: Path, name: str
) -> None:
    num_ranks, config_of, overrides = CASES[name]
    configs = [
        config_of(
            small_movielens,
            tmp_path / precision,
            *overrides,
            "training.max_steps=30",
            "training.report_every_steps=30",
            "training.validate_every_steps=30",
            f"training.dense_precision={precision}",
        )
        for precision in ("bf16", "fp32")
    ]
    (half, *_), (full, *_) = run_in_turn(num_ranks, *((train_observed, each) for each in configs))
    both = {True, False}  # in training and in validation
    fp32 = {(is_training, torch.float32) for is_training in both}
    assert half["seen"]["linear"] == {(is_training, torch.bfloat16) for is_training in both}
    assert half["seen"]["lookup"] == half["seen"]["result"] == full["seen"]["linear"] == fp32
    assert half["state"] == {torch.float32}
    assert half["has_bf16_gradients"] == (num_ranks > 1), "they travel as bf16, if they do"
    for metric in ("train/loss", "validation/rmse"):
        found, wanted = half["metrics"][metric], full["metrics"][metric]
        assert found != wanted
        assert found == pytest.approx(wanted, rel=LARGEST_GAP)


def matmul_precisions(config: WorkerConfig) -> list[str]:
    """What CUDA's products of fp32 numbers, its convolutions and recurrent layers are to take."""
    prepare_process(config)
    backends = torch.backends
    return [
        each.fp32_precision
        for each in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    ]


def test_cuda_takes_tf32_for_fp32_numbers_only_where_that_is_asked_for(tmp_path: Path) -> None:
    spec = spec_of(Case(1, 1))
    calls = []
    for precision in ("tf32", "bf16", "fp32"):
        training = spec.training.model_copy(update={"dense_precision": precision})
        asked = spec.model_copy(update={"training": training})
        calls.append((matmul_precisions, WorkerConfig(asked, tmp_path, "job-a0", 0)))
    (tf32,), *others = run_in_turn(1, *calls)
    assert tf32 == ["tf32"] * 3
    assert others == [[["ieee"] * 3]] * 2


def train_counting(config: WorkerConfig, backend: str) -> tuple[dict[str, float], list[str], int]:
    """Train to the end; the metrics, the names in a checkpoint, and how much was compiled."""
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        session = open_session(config)
    metrics = train(session)
    names = list(state_to_save(session.model, session.optimizers.combined))
    return metrics, names, torch._dynamo.utils.counters["stats"]["unique_graphs"]


# The generator and the compiler of the C++ that inductor makes take half a minute.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_networks_learn_the_same_under_the_same_names(
    small_movielens: Path, tmp_path: Path, backend: str
) -> None:
    configs = [
        make_config(
            small_movielens,
            tmp_path / str(is_compiled),
            *ONE,
            "training.max_steps=20",
            "training.report_every_steps=20",
            "training.validate_every_steps=10",
            f"training.dense_compile={str(is_compiled).lower()}",
        )
        for is_compiled in (False, True)
    ]
    calls = [(train_counting, each, backend) for each in configs]
    ((plain,), (compiled,)) = run_in_turn(1, *calls)
    num_networks = 4  # dense, interaction, dropout, over: once, and not for validations
    assert compiled[2] - plain[2] == num_networks
    assert compiled[1] == plain[1]
    for metric in ("train/loss", "validation/rmse"):
        assert compiled[0][metric] == pytest.approx(plain[0][metric], rel=1e-4)


def build_without_compiler(config: WorkerConfig) -> str:
    import torch._inductor.config as inductor

    with inductor.patch({"cpp.cxx": ("missing-compiler",)}), pytest.raises(PlanError) as raised:
        open_session(config)
    return str(raised.value)


def test_hosts_without_a_compiler_are_named(small_movielens: Path, tmp_path: Path) -> None:
    config = make_config(small_movielens, tmp_path, *ONE, "training.dense_compile=true")
    ((message,),) = run_in_turn(1, (build_without_compiler, config))
    assert "training.dense_compile needs a C++ compiler" in message
    assert socket.gethostname() in message
