"""Optimizers of sharded tables, data-parallel tables and the dense part; schedule, accumulation.

In 2D the second moment v of a row grows M times faster than in 1D, because each of the M groups
divides its gradient by L instead of T. Algorithm 1 of the 2D sparse parallelism paper divides it
by c again: w -= lr / (sqrt(v / c) + eps) * g. That is FBGEMM's stock kernel with lr * sqrt(c) and
eps * sqrt(c), for AdaGrad and row-wise AdaGrad alike; SGD has no moments and c is 1.

    sgd                w -= lr * g
    adagrad            v += g^2          (v [rows, dim])    w -= lr / (sqrt(v / c) + eps) * g
    row_wise_adagrad   v += mean_d(g^2)  (v [rows])         w -= lr / (sqrt(v / c) + eps) * g

Tables sharded data_parallel are whole on each rank and have ordinary gradients, so a torch
optimizer with the same formula updates them after the backward pass.

Where only M' of the M groups train, each of their steps is one of M' that are averaged and not one
of M: for the same rows of data weights would move M / M' as far, and v grow M / M' as much. With
the share s = M' / M learning rates are therefore multiplied by s; of the AdaGrads by sqrt(s), and
gradients too (of the dense part with the decay that torch adds to them), so that v grows as with
all M. What is stored means the same at any M' that way: nothing is to be rescaled when a group is
lost or joins, nor in a copy or a checkpoint.

Accumulation makes the gradients of several batches those of one: their mean, weighted by what each
batch weighs. Backward passes add gradients up, each the mean over its batch's rows. With
S = sum(w_i g_i) and w the weight of the newest batch, what is held is S / w: before a batch of
weight w' adds its own gradient, that is scaled by w / w'. Divided by sum(w_i) / w it is the mean
over all rows. Batches of equal weight are added as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from trainer.parallel.collectives import Part
from trainer.parallel.model import TwoDParallel, as_real, stored_buffers
from trainer.spec.job import JobSpec
from trainer.spec.training import DenseOptimizerSpec, ScheduleSpec, SparseOptimizerSpec

Gradients = Sequence[torch.Tensor]
_FUSED_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
# The same of tables that are whole.
_WHOLE_TABLE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, lr, eps: torch.optim.SGD(parameters, lr=lr),
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
}
_DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, fused=True),
    "adagrad": torch.optim.Adagrad,  # torch fuses it on CPUs only
    "sgd": partial(torch.optim.SGD, fused=True),
}


class GradientAccumulator:
    """Accumulated gradients as those of one batch (see above). Nothing waits for the device."""

    def __init__(self) -> None:
        self._newest: torch.Tensor | None = None
        self._total: torch.Tensor | None = None

    def add(self, held: Gradients, weight: torch.Tensor) -> None:
        """Scale the gradients held for a batch to add its own: call it before its backward pass.

        `weight` is the sum of its rows' weights over all ranks, a scalar. A batch that weighs 0 has
        gradients of 0.
        """
        weight = weight.detach().double()
        if self._newest is None or self._total is None:
            self._newest, self._total = weight, weight
            return
        counts = weight > 0
        scale = torch.where(counts, self._newest / weight, 1.0)
        if held:
            torch._foreach_mul_(list(held), scale.to(held[0].real.dtype))
        self._newest = torch.where(counts, weight, self._newest)
        self._total = self._total + weight

    def close(self, held: Gradients) -> None:
        """Make the gradients held the weighted mean, and begin anew."""
        if self._newest is not None and self._total is not None and held:
            share = torch.where(self._newest > 0, self._total / self._newest, 1.0)
            torch._foreach_div_(list(held), share.to(held[0].real.dtype))
        self._newest = self._total = None


def factor(step: int, total_steps: int, spec: ScheduleSpec | None, shift: int = 0) -> float:
    """What the learning rates are multiplied by at `step`, counted from 1 to `total_steps`.

    Between min_ratio (or 1 / warmup_steps) and 1; 1 without a schedule. A run that is shorter
    than its warm-up never decays, and steps past the last one keep its factor. After a resize
    steps of another size count in decay as if all had been of this one: that is `shift` more.
    """
    if spec is None:
        return 1.0
    if step <= spec.warmup_steps:
        return step / spec.warmup_steps
    if spec.decay == "constant":
        return 1.0
    peak = max(spec.warmup_steps, 1)
    step, total_steps = max(step + shift, peak), total_steps + shift
    progress = min((step - peak) / max(total_steps - peak, 1), 1.0)
    half_cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
    left = 1.0 - progress if spec.decay == "linear" else half_cosine
    return spec.min_ratio + (1.0 - spec.min_ratio) * left


def fused_optimizer_params(spec: SparseOptimizerSpec, moment_scale: float) -> dict[str, Any]:
    """FBGEMM parameters of the sparse optimizer with moment scale c = `moment_scale`."""
    root = math.sqrt(moment_scale)
    clipping = {"gradient_clipping": True, "max_gradient": spec.max_gradient}
    return {
        "optimizer": _FUSED_OPTIMIZERS[spec.name],
        "learning_rate": spec.lr * root,
        "eps": spec.eps * root,
        **(clipping if spec.max_gradient is not None else {}),
    }


def dense_optimizer(model: TwoDParallel, spec: DenseOptimizerSpec) -> KeyedOptimizerWrapper:
    """Optimizer of every parameter outside the tables, whatever way these are sharded."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    for name in _table_parameters(model):
        del dense[name]
    kind = _DENSE_OPTIMIZERS[spec.name]
    return KeyedOptimizerWrapper(
        dense,
        # As a group, which may be without parameters.
        lambda params: kind([{"params": params}], lr=spec.lr, weight_decay=spec.weight_decay),
    )


def _table_parameters(model: TwoDParallel) -> dict[str, nn.Parameter]:
    """Data-parallel tables by their full parameter name."""
    tables = {id(parameter) for parameter in model.data_parallel_tables().values()}
    return {name: p for name, p in model.named_parameters() if id(p) in tables}


class DataParallelTables(KeyedOptimizer):
    """Optimizer of the tables that are whole on every rank, by the formula of the fused one.

    Its state has the names, shapes and dtype (fp32) of the fused optimizer's, so that a
    checkpoint can be loaded where the planner shards the same table in another way.
    """

    def __init__(self, model: TwoDParallel, spec: SparseOptimizerSpec, moment_scale: float) -> None:
        parameters = _table_parameters(model)
        names = {id(parameter): name for name, parameter in model.data_parallel_tables().items()}
        # torch would keep the moments of a half-precision table in half, where squares vanish.
        self._updated = {
            p: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for p in parameters.values()
        }
        root = math.sqrt(moment_scale)
        kind = _WHOLE_TABLE_OPTIMIZERS[spec.name]
        self._inner = kind(self._updated.values(), lr=spec.lr * root, eps=spec.eps * root)
        state: dict[nn.Parameter, dict[str, torch.Tensor]] = {p: {} for p in self._updated}
        if spec.has_state:
            for parameter, updated in self._updated.items():
                # The one moment of an AdaGrad; [rows, 1] where FBGEMM keeps [rows].
                moment = self._inner.state[updated]["sum"]
                view = moment.view(-1) if spec.is_state_by_row else moment
                state[parameter][f"{names[id(parameter)]}.momentum1"] = view
        self._group: dict[str, Any] = {"params": list(self._updated), "lr": spec.lr * root}
        self.gradient_scale = 1.0
        super().__init__(parameters, state, [self._group])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self._updated:
            parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every row from the averaged gradients; those without one stay as they are."""
        _set_lr(self._inner, self._group["lr"])
        copies = [(p, updated) for p, updated in self._updated.items() if updated is not p]
        for parameter, updated in copies:
            updated.copy_(parameter)
            updated.grad = None if parameter.grad is None else parameter.grad.float()
        _scale_gradients(self._updated.values(), self.gradient_scale)
        self._inner.step(closure)
        for parameter, updated in copies:
            parameter.copy_(updated)
            updated.grad = None


class Optimizers:
    """Everything that changes a model's parameters, driven together.

    Each step is `begin_step`, forward and backward (which updates the sharded tables), `step`.
    `combined` is the state dict of all for checkpoints: tables under `sparse_`, however they
    are sharded, and the rest under `dense_`; `dense` is the optimizer of that rest.

    Accumulated gradients may be this rank's alone until the last batch of their window
    (`TwoDParallel.averaging`): what is done to them before is linear. `clip_norm` bounds the norm
    of their mean: the dense part is whole on every rank, so its norm is the true one everywhere.
    """

    def __init__(self, model: TwoDParallel, job: JobSpec) -> None:
        spec, moment_scale = job.optimizer, job.moment_scale
        self._spec = spec
        self._clip_norm = job.training.clip_norm
        self._gradient_norm: torch.Tensor | None = None
        self.is_accumulating = False
        """Whether gradients are held that the dense part has not learned from yet."""
        self._window = GradientAccumulator()
        self._lr_scale = math.sqrt(moment_scale)
        self._factor = 1.0
        self._share = 1.0
        self._module = model.module
        self._kernels = model.embedding_kernels()
        for kernel in self._kernels:
            kernel.register_forward_hook(self._scale_gradient_of)
        self._fused = model.fused_optimizer
        self.dense = dense_optimizer(model, spec.dense)
        tables = list(model.data_parallel_tables().values())
        # torch refuses optimizers without parameters.
        self._whole = [DataParallelTables(model, spec.sparse, moment_scale)] if tables else []
        self._shards = model.table_shards()
        self._tables = [shard.weight for shard in self._shards] + [p.data for p in tables]
        # Where a row of a table is cached, that is what counts.
        self._tables += [each.lxu_cache_weights for each in self._kernels]
        self.combined = CombinedOptimizer(
            [
                ("sparse_", self._fused),
                *(("sparse_", optimizer) for optimizer in self._whole),
                ("dense_", self.dense),
            ]
        )
        self._begin_dense_state()

    def _begin_dense_state(self) -> None:
        """Create the state of all dense parameters as it is before the first step.

        Left alone, torch would create it with a parameter's first gradient, which may never come,
        and a checkpoint is loaded into what is there. Nothing else changes.
        """
        (group,) = self.dense.param_groups
        rates = {name: group[name] for name in ("lr", "weight_decay")}
        group.update(dict.fromkeys(rates, 0.0))
        self.dense.init_state()  # a step, by gradients of 0
        group.update(rates)
        self.dense.zero_grad()
        for state in self.dense.state.values():
            if "step" in state:
                state["step"].zero_()

    def begin_step(self, step: int, total_steps: int, shift: int = 0) -> None:
        """Set the rates of `step` (counted from 1; see `factor`), also in FBGEMM, drop gradients.

        Gradients of the dense part only where it has taken its step.
        """
        self._factor = factor(step, total_steps, self._spec.schedule, shift)
        sparse, dense = self._spec.sparse, self._spec.dense
        table_rate = self._share / self._gradient_scale(sparse.has_growing_moments)
        for optimizer in (self._fused, *self._whole):
            _set_lr(optimizer, sparse.lr * self._factor * self._lr_scale * table_rate)
            optimizer.zero_grad()  # of the fused one: hands its learning rate to the kernels
        dense_scale = self._gradient_scale(dense.has_growing_moments)
        _set_lr(self.dense, dense.lr * self._factor * self._share / dense_scale)
        for group in self.dense.param_groups:
            group["weight_decay"] = dense.weight_decay * dense_scale
        if not self.is_accumulating:
            for parameter in self.dense.params.values():
                parameter.grad = None

    def set_share(self, share: float) -> None:
        """Train as one of M' groups instead of M, of which `share` is M' / M, from the next step.

        See the top of the file. Groups need not change it at the same step.
        """
        self._share = share
        scale = self._gradient_scale(self._spec.sparse.has_growing_moments)
        for optimizer in self._whole:
            optimizer.gradient_scale = scale
        if self._spec.sparse.max_gradient is not None:
            bound = self._spec.sparse.max_gradient * scale
            for kernel in self._kernels:
                kernel.optimizer_args = kernel.optimizer_args._replace(max_gradient=bound)

    def _gradient_scale(self, has_growing_moments: bool) -> float:
        return math.sqrt(self._share) if has_growing_moments else 1.0

    def _scale_gradient_of(self, kernel: nn.Module, _: Any, looked_up: torch.Tensor) -> None:
        """Let the gradient of what a kernel `looked_up` reach it scaled."""
        scale = self._gradient_scale(self._spec.sparse.has_growing_moments)
        if scale != 1 and looked_up.requires_grad:
            looked_up.register_hook(lambda gradient: gradient * scale)

    def weigh(self, weight: torch.Tensor) -> None:
        """Say, before the backward pass, what the step's rows weigh in the mean of its window.

        `weight` is their sum over all ranks, a scalar. Steps that do not accumulate need not.
        """
        self._window.add(self._dense_gradients(), weight)

    def step(self, is_dense_step: bool = True) -> None:
        """Update what the backward pass did not: data-parallel tables, decay, the dense part.

        The latter where `is_dense_step`; else its gradients add up. Decay is decoupled, of every
        row: w *= 1 - lr * weight_decay, by the rate as the spec means it, without the root of c.
        """
        for optimizer in self._whole:
            optimizer.step()
        self.is_accumulating = not is_dense_step
        if is_dense_step:
            self._step_dense()
        sparse = self._spec.sparse
        if self._tables and sparse.weight_decay:
            scale = 1.0 - sparse.lr * self._factor * self._share * sparse.weight_decay
            with torch.no_grad():
                torch._foreach_mul_(self._tables, scale)

    def _step_dense(self) -> None:
        self._window.close(self._dense_gradients())
        if self._clip_norm is not None:
            parameters = list(self.dense.params.values())
            self._gradient_norm = nn.utils.clip_grad_norm_(parameters, self._clip_norm)
        scale = self._gradient_scale(self._spec.dense.has_growing_moments)
        _scale_gradients(self.dense.params.values(), scale)
        self.dense.step()

    def _dense_gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.dense.params.values() if p.grad is not None]

    def rates(self) -> dict[str, float]:
        """Rates of the current step in the spec's units."""
        return {
            "optimizer/lr_sparse": self._spec.sparse.lr * self._factor,
            "optimizer/lr_dense": self._spec.dense.lr * self._factor,
        }

    def parts(self) -> Iterator[Part]:
        """The norm that was clipped last, if any; the highest of groups that train apart."""
        if self._gradient_norm is not None:
            norm = self._gradient_norm.double().reshape(1)
            name = "optimizer/gradient_norm"
            yield Part(norm[:0], lambda _, peaks: {name: peaks.item()}, peaks=norm)

    @torch.no_grad()
    def rescale_moments(self, factor: float) -> None:
        """Multiply the second moments of all tables by `factor`.

        Moments grow in proportion to M, which c divides out again. A run that goes on with another
        c must find them as they would have grown under it, or its steps change by sqrt(factor).
        """
        if factor == 1:
            return
        for shard in self._shards:
            for moment in shard.states.values():
                moment.mul_(factor)
        _, whole = self.synced_whole(dense=False)
        for moment in whole:
            moment.mul_(factor)

    def synced_whole(self, dense: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(weights, optimizer state) that every rank holds whole and a sync must average.

        Data-parallel tables always, and the dense part with its buffers when `dense` (it is
        averaged at syncs), its counters of steps among the state: groups may use a parameter in
        unequally many. Scalars come as views [1], flags as bytes, complex numbers as pairs, and
        what is transposed as it lies in memory.
        """
        optimizers = [*self._whole, *([self.dense] if dense else [])]
        parameters = [(p, o.state.get(p, {})) for o in optimizers for p in o.params.values()]
        states = [
            _as_it_lies(state)
            for parameter, named in parameters
            for state in named.values()
            if state.device == parameter.device  # Adagrad counts on the host, and for nothing
        ]
        weights = [_as_it_lies(parameter.data) for parameter, _ in parameters]
        for buffer in stored_buffers(self._module) if dense else ():
            values = _as_it_lies(buffer)
            weights.append(values.view(torch.uint8) if values.dtype == torch.bool else values)
        return weights, states


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """A view of real numbers with at least one dimension, those with the largest strides first."""
    tensor = as_real(tensor)
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return torch.atleast_1d(tensor if tensor.is_contiguous() else tensor.permute(order))


def _scale_gradients(parameters: Iterable[torch.Tensor], scale: float) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None] if scale != 1 else []
    if gradients:
        torch._foreach_mul_(gradients, scale)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
