"""User modules: loading and building a user's network, its contract, and errors of its code.

The class that `model.module` names is built as `Class(spec, device)`, with the resolved `JobSpec`.
It holds the tables of the spec in TorchRec collections (`trainer.models.sparse.SparseArch` builds
them; collections of its own belong on the meta device, as sharding fills them) and whatever else
on `device`. Its `forward(batch)` takes a `trainer.data.batches.Batch` of B rows and gives

    losses        a scalar, or a dict of scalars by name; those named like a task count
                  `tasks[].weight` times, others once
    predictions   [B, K] for the K tasks in order (or [B] where K is 1), in the unit that the model
                  learns: the normalised label for `mse`, the logit for `bce`

With `training.dense_precision: bf16` it runs under torch.autocast: Linear layers and matrix
products give bfloat16, torch's own losses float32; any other loss starts from `.float()`. Lookups
are float32 in any case. Predictions may be of any precision, losses not of half precision.

Rows with `batch.weight` 0 only fill up a batch: they must not count in a loss. Some row weighs
more: where a rank has none that counts, all weigh 1 for the network, and its losses count 0 times.
Each parameter gets a gradient in every step or in none, but with `training.accumulate_steps`, where
that may vary.

What goes wrong inside the user's code is a `UserCodeError` with the user's own lines; what only
passes through it (a lost peer, too little memory) stays what it is.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torchrec import EmbeddingBagCollection, PoolingType
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from trainer import failures
from trainer.data.batches import Batch
from trainer.failures import EndReason, UserCodeError, user_lines
from trainer.models.managed_collision import BucketedIds, configs_of
from trainer.spec.job import JobSpec
from trainer.spec.model import TaskSpec

_TORCH = Path(torch.__file__).parent
# What gloo and NCCL take.
_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
    | {torch.complex64, torch.complex128}
)
# Words in errors of collectives.
_COLLECTIVES = ("gloo", "nccl", "c10d")


class UserRecommender(nn.Module):
    """A user's network in the place of ours: `forward(batch)` gives (loss, outputs [B, K])."""

    def __init__(self, network: nn.Module, module: str, tasks: tuple[TaskSpec, ...]) -> None:
        super().__init__()
        self.network = network
        self._module = module
        self._tasks = tasks

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and outputs of one batch; raises `UserCodeError` for what breaks the contract."""
        counts = batch.weight.any()  # else a mean by weight is 0 / 0
        weight = torch.where(counts, batch.weight, 1.0)
        with users_code(self._module):
            answer = self.network(replace(batch, weight=weight))
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise self._error(f"forward must return (losses, predictions), not {_kind(answer)}")
        losses, predictions = answer
        loss = self._total(losses)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self._error("the loss depends on no parameter: it was detached on its way")
        outputs = self._outputs(predictions, batch.num_rows).detach()
        # A copy: they are kept until a report, and may be a part of much, or of a buffer.
        return loss * counts, outputs.to(torch.float32, copy=True)

    def _total(self, losses: Any) -> torch.Tensor:
        named = losses if isinstance(losses, Mapping) else {"": losses}
        weights = {task.name: task.weight for task in self._tasks}
        terms = []
        for name, loss in named.items():
            spoken = f"loss {name!r}" if name else "the loss"
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise self._error(f"{spoken} must be a tensor with one number, not {_kind(loss)}")
            if loss.dtype in (torch.bfloat16, torch.float16):
                raise self._error(f"{spoken} is {loss.dtype}; compute it from outputs.float()")
            terms.append(weights.get(name, 1.0) * loss.reshape(()))
        if not terms:
            raise self._error("losses is empty; give at least one")
        return torch.stack(terms).sum()

    def _outputs(self, predictions: Any, num_rows: int) -> torch.Tensor:
        wanted = (num_rows, len(self._tasks))
        if isinstance(predictions, torch.Tensor):
            if predictions.shape == wanted:
                return predictions
            if predictions.shape == (num_rows,) and len(self._tasks) == 1:
                return predictions.unsqueeze(1)
        raise self._error(
            f"predictions must be a tensor [B, K] = {list(wanted)}, one column for each of "
            f"model.tasks; got {_kind(predictions)}"
        )

    def _error(self, message: str) -> UserCodeError:
        return UserCodeError(f"model.module '{self._module}': {message}")


def build_user_model(spec: JobSpec, device: torch.device) -> UserRecommender:
    """The user's model of `spec`; raises `UserCodeError`."""
    module = spec.model.module
    assert module is not None, "the spec names no module"
    kind = load_class(module, is_shipped=spec.model.code is not None)
    with users_code(module):
        network = kind(spec, device)
    if not isinstance(network, nn.Module):
        raise UserCodeError(f"model.module '{module}' must give a torch.nn.Module")
    _check_tables(network, spec, module)
    if fault := next(_faults(network, spec), None):
        raise UserCodeError(f"model.module '{module}': {fault}")
    # Collectives take a tensor's memory as one piece, which that of a view may not be.
    for tensor in (*network.parameters(), *network.buffers()):
        tensor.data = tensor.data.contiguous()
    return UserRecommender(network, module, spec.model.tasks)


def load_class(module: str, *, is_shipped: bool = False) -> Any:
    """What `module` names; raises `UserCodeError`."""
    name, _, kind = module.partition(":")
    with users_code(module):
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            mend = (
                "the folder given with --code must hold it, as a package or a file"
                if is_shipped
                else "ship it with --code DIR, or install it on every host of the cluster"
            )
            raise UserCodeError(
                f"model.module '{module}': there is no module '{error.name}'; {mend}"
            ) from None
    if not hasattr(found, kind):
        raise UserCodeError(f"model.module '{module}': module '{name}' has no '{kind}'")
    return getattr(found, kind)


@contextmanager
def users_code(module: str) -> Iterator[None]:
    """Raise what goes wrong inside as `UserCodeError`, with the user's own lines as evidence."""
    try:
        yield
    except UserCodeError:
        raise
    except (Exception, SystemExit) as error:
        if _is_foreign(error):
            raise
        raise _user_error(error, module) from error


def users_error(error: Exception, module: str) -> UserCodeError | None:
    """`error` as the fault of the code of `module`; None where it did not come through that code.

    For what runs without `users_code`: the user's part of a backward pass, or of a hook.
    """
    root = _code_of(module)[0]
    is_theirs = root and any(Path(file).is_relative_to(root) for file in _files_of(error))
    return _user_error(error, module) if is_theirs and not _is_foreign(error) else None


def _is_foreign(error: BaseException) -> bool:
    """Whether an error only passes through the user's code: a lost peer, a broken GPU, no memory.

    What a collective says comes from PyTorch; the user's own connections may fail in like words.
    """
    reason = failures.reason_of(error)
    if reason != EndReason.WORKERS_LOST:
        return reason != EndReason.TRAINING_ERROR
    if not isinstance(error, RuntimeError):
        return False
    names = (*_COLLECTIVES, *failures.BROKEN_SIGNS)
    is_named = any(each in str(error).lower() for each in names)
    if is_named or isinstance(error, dist.DistError):
        return True
    deepest = Path(_files_of(error)[-1])  # who raised it, and not who called them
    return any(deepest.is_relative_to(_TORCH.with_name(name)) for name in ("torch", "torchrec"))


def _user_error(error: BaseException, module: str) -> UserCodeError:
    lines = user_lines(error, *_code_of(module))
    places = [line.strip() for line in lines if line.lstrip().startswith("File ")]
    at = f" ({places[-1].replace('File ', 'at ', 1)})" if places else ""
    found = UserCodeError(f"model.module '{module}': {failures.described(error)}{at}", lines)
    found.__cause__ = error
    return found


def _files_of(error: BaseException) -> list[str]:
    """Files that the traceback of an error goes through, the deepest one last."""
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]


def _code_of(module: str) -> tuple[Path | None, Path | None]:
    """(what counts as the user's code, the folder that holds it).

    The first is the top-level package of `module`, or where that is a file by itself, all beside
    it: what was shipped together. A file among the installed packages is alone.
    """
    top = module.partition(":")[0].partition(".")[0]
    spec = getattr(sys.modules.get(top), "__spec__", None)
    with suppress(ImportError, ValueError):
        spec = spec or importlib.util.find_spec(top)
    if spec and spec.submodule_search_locations:
        package = Path(next(iter(spec.submodule_search_locations)))
        return package, package.parent
    if not (spec and spec.origin):
        return None, None
    file = Path(spec.origin)
    return (file if _TORCH.is_relative_to(file.parent) else file.parent), file.parent


def _check_tables(network: nn.Module, spec: JobSpec, module: str) -> None:
    """The tables that the network holds are those of the spec, which sharding is planned for."""
    held = Counter(
        (config.name, config.num_embeddings, config.embedding_dim, config.data_type.name.lower())
        for _, each in network.named_modules(remove_duplicate=False)
        for config in configs_of(each)
    )
    wanted = Counter(
        (t.name, t.num_embeddings, t.embedding_dim, t.data_type) for t in spec.embedding_tables
    )
    if held != wanted:
        missing, unknown = sorted(wanted - held, key=str), sorted(held - wanted, key=str)
        raise UserCodeError(
            f"model.module '{module}': the tables of the network must be embedding_tables of the "
            "spec, each once and under one name of the network (name, rows, dimension, data type); "
            f"missing: {missing or 'none'}, unknown: {unknown or 'none'}. "
            "trainer.models.sparse.SparseArch(spec, device) holds them all"
        )
    dynamic = {
        table
        for each in network.modules()
        if isinstance(each, BaseManagedCollisionEmbeddingCollection)
        for table, ids in each._managed_collision_collection._managed_collision_modules.items()
        if isinstance(ids, BucketedIds)
    }
    if plain := sorted(spec.dynamic_tables.keys() - dynamic):
        raise UserCodeError(
            f"model.module '{module}': the tables {', '.join(map(repr, plain))} (dynamic) must lie "
            "in a collection of trainer.models.managed_collision: a plain one takes raw ids. "
            "trainer.models.sparse.SparseArch(spec, device) holds them all"
        )


def _faults(network: nn.Module, spec: JobSpec) -> Iterator[str]:
    """Parts of a network that collectives or optimizers do not take, in words."""
    optimizer = spec.optimizer.dense.name
    for name, each in network.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse:
            yield f"{name} has sparse gradients, which are not averaged; leave sparse=True out"
        if configs_of(each) and not all(table.requires_grad for table in each.parameters()):
            yield f"tables in {name} learn whatever requires_grad says; detach what they give"
        is_weighted = isinstance(each, EmbeddingBagCollection) and each.is_weighted()
        if is_weighted and any(table.pooling == PoolingType.MEAN for table in configs_of(each)):
            yield f"means of weighted ids in {name} have wrong gradients on CPUs; divide sums"
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(tensor):
            yield f"{name} gets its size from the first batch; give it to a module that is not lazy"
        elif tensor.dtype not in _DTYPES:
            yield f"{name} is {tensor.dtype}, which ranks cannot exchange; take another, as int32"
        elif tensor.requires_grad and tensor.is_complex() and optimizer != "adagrad":
            yield (
                f"{name} is {tensor.dtype}, which optimizer.dense.name {optimizer} does not train; "
                "keep its real and imaginary parts, or take adagrad"
            )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else type(value).__name__
