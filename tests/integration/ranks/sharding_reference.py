"""M whole copies of the tables as plain tensors: no sharding, no TorchRec, no FBGEMM."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import JaggedTensor, KeyedJaggedTensor

from tests.integration.ranks.sharding_cases import (
    DENSE_LR,
    EPS,
    LR,
    POOLED,
    SEQUENCES,
    TABLES,
    Head,
    ShardingCase,
    initial_table,
    make_rows,
)
from trainer.protocol import events


class Reference:
    """Trains `case` in one process, by the formulas.

    From the `plans` it takes where column shards begin and end, and nothing else: a row-wise
    moment is a mean over the columns of its shard.
    """

    def __init__(self, case: ShardingCase, plans: list[events.TablePlan]) -> None:
        self.case = case
        self.groups = case.mesh.sharding_groups
        self.columns = {
            plan.name: sorted({(s.column_offset, s.num_columns) for s in plan.shards})
            for plan in plans
        }
        self.head = Head()
        self.tables = [{name: initial_table(name) for name in TABLES} for _ in self.groups]
        self.moments = [
            {name: torch.zeros_like(table) for name, table in copy.items()} for copy in self.tables
        ]

    def run(self) -> None:
        """Train all copies, averaging weights and moments at each sync."""
        for step in range(1, self.case.num_steps + 1):
            self._step(step)
            if step % self.case.sync_every == 0:
                _average(self.tables)
                _average(self.moments)

    def _step(self, step: int) -> None:
        head_grad = torch.zeros_like(self.head.weight)
        for copy, ranks in enumerate(self.groups):
            leaves = {n: t.clone().requires_grad_() for n, t in self.tables[copy].items()}
            losses = [self._loss(leaves, *make_rows(self.case, step, rank)) for rank in ranks]
            *grads, to_head = torch.autograd.grad(
                torch.stack(losses).sum(), [*leaves.values(), self.head.weight]
            )
            for name, grad in zip(leaves, grads, strict=True):
                self._update(copy, name, grad / len(ranks))
            head_grad += to_head
        with torch.no_grad():
            self.head.weight -= DENSE_LR * head_grad / self.case.world_size

    def _loss(
        self,
        tables: dict[str, torch.Tensor],
        pooled: KeyedJaggedTensor,
        sequences: KeyedJaggedTensor,
        label: torch.Tensor,
    ) -> torch.Tensor:
        bags = [
            nn.functional.embedding_bag(
                pooled[feature].values(),
                tables[table],
                pooled[feature].offsets().long()[:-1],
                mode="sum",
                per_sample_weights=pooled[feature].weights() if self.case.weighted else None,
            )
            for feature, table in POOLED.items()
        ]
        vectors = [
            JaggedTensor(tables[table][sequences[f].values()], lengths=sequences[f].lengths())
            for f, table in SEQUENCES.items()
        ]
        return self.head(bags, vectors, label)

    @torch.no_grad()
    def _update(self, copy: int, name: str, grad: torch.Tensor) -> None:
        """Algorithm 1 of the paper with c = M: w -= lr / (sqrt(v / c) + eps) * g."""
        table, moment = self.tables[copy][name], self.moments[copy][name]
        if self.case.optimizer == "sgd":
            table -= LR * grad
            return
        if self.case.optimizer == "adagrad":
            moment += grad.square()
        else:
            for start, width in self.columns[name]:
                shard = slice(start, start + width)
                moment[:, shard] += grad[:, shard].square().mean(dim=1, keepdim=True)
        table -= LR / ((moment / len(self.groups)).sqrt() + EPS) * grad


def _average(copies: list[dict[str, torch.Tensor]]) -> None:
    for name in copies[0]:
        mean = torch.stack([copy[name] for copy in copies]).mean(dim=0)
        for copy in copies:
            copy[name] = mean.clone()
