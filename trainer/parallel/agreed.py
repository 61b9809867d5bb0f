"""What all copies last agreed on: the base of the changes that travel in bf16 or fp16.

After a sync the copies of a row are equal, and stay so until a copy touches it. `AgreedRows` saves
a row's values when it is first touched in a window, before they change; a row that this rank did
not touch still holds them. `AgreedTables` keeps a second copy of every table instead, for mode
full: as much memory as the tables (and their element-wise moments) take.

Only fp32 matrices travel as changes: tables and element-wise moments. Tables in half precision
travel as they are in any case, and a row-wise moment is one number a row, not worth the rounding.
Moments travel in bf16 even where weights travel in fp16, whose range squared gradients leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from trainer.parallel.averaging import Block
from trainer.parallel.touched_rows import RowNumbers
from trainer.parallel.two_d import TableShard


class Agreed(Protocol):
    """Makes blocks that know what the copies last agreed on."""

    def block(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> Block:
        """The `rows` of a tensor of a shard, ready to travel."""

    def landed(self, blocks: Sequence[Block]) -> None:
        """The copies now agree on the bases of `blocks`, which was found after their snapshot."""

    def begin_window(self) -> None:
        """The blocks of a sync are made: what is touched from here on belongs to the next."""

    def renew(self) -> None:
        """All rows are equal on all copies now, whatever happened to them."""


class Exact:
    """Everything travels as it is, so nothing needs to be kept."""

    def block(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> Block:
        return Block(tensor, rows)

    def landed(self, blocks: Sequence[Block]) -> None:
        """Nothing is kept."""

    def begin_window(self) -> None:
        """Nothing is kept."""

    def renew(self) -> None:
        """Nothing is kept."""


def wires(
    shards: Sequence[TableShard], weight_wire: torch.dtype, include_moments: bool
) -> dict[int, tuple[torch.Tensor, torch.dtype]]:
    """Tensors of `shards` that travel as changes, each with its dtype on the way, by address."""
    found = [(shard.weight, weight_wire) for shard in shards]
    if include_moments:
        moments = (state for shard in shards for state in shard.states.values())
        found += [(moment, torch.bfloat16) for moment in moments]
    return {
        tensor.data_ptr(): (tensor, wire)
        for tensor, wire in found
        if tensor.dtype == torch.float32 and tensor.dim() == 2 and tensor.numel()
    }


class AgreedRows:
    """Bases of the rows touched in this window."""

    def __init__(
        self, numbers: RowNumbers, tensors: dict[int, tuple[torch.Tensor, torch.dtype]]
    ) -> None:
        self._numbers = numbers
        self._tensors = tensors
        self._saved: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def save(self, row_numbers: torch.Tensor) -> None:
        """Save the values of rows (int64, sorted numbers) that are about to change."""
        for shard, rows in self._numbers.by_shard(row_numbers):
            for tensor in (shard.weight, *shard.states.values()):
                if tensor.data_ptr() in self._tensors:
                    saved = (rows, tensor.index_select(0, rows))
                    self._saved.setdefault(tensor.data_ptr(), []).append(saved)

    def block(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> Block:
        """The `rows` of a tensor of a shard; they must hold all that were touched."""
        _, wire = self._tensors.get(tensor.data_ptr(), (tensor, None))
        if wire is None:
            return Block(tensor, rows)
        assert rows is not None, "rows of tables that travel as changes are always listed"
        base = tensor.index_select(0, rows)
        for saved_rows, values in self._saved.get(tensor.data_ptr(), []):
            base[torch.searchsorted(rows, saved_rows)] = values
        return Block(tensor, rows, base, wire)

    def landed(self, blocks: Sequence[Block]) -> None:
        """Rows touched between a round's snapshot and its landing have its mean as their base."""
        for block in blocks:
            if block.base is None or block.rows is None:
                continue
            for saved_rows, values in self._saved.get(block.tensor.data_ptr(), []):
                place = torch.searchsorted(block.rows, saved_rows)
                place.clamp_(max=block.num_rows - 1)
                hit = block.rows[place] == saved_rows
                values[hit] = block.base[place[hit]]

    def begin_window(self) -> None:
        """No row is touched."""
        self._saved.clear()

    def renew(self) -> None:
        """No row is touched."""
        self._saved.clear()


class AgreedTables:
    """Bases of whole tables, as second copies."""

    def __init__(self, tensors: dict[int, tuple[torch.Tensor, torch.dtype]]) -> None:
        self._tensors = tensors
        self._copies = {key: tensor.clone() for key, (tensor, _) in tensors.items()}

    def block(self, tensor: torch.Tensor, rows: torch.Tensor | None) -> Block:
        """All rows of a tensor of a shard."""
        key = tensor.data_ptr()
        if key not in self._tensors:
            return Block(tensor, rows)
        return Block(tensor, rows, self._copies[key], self._tensors[key][1])

    def landed(self, blocks: Sequence[Block]) -> None:
        """The blocks' bases are views of the copies, and hold the means already."""

    def begin_window(self) -> None:
        """The copies change when the means are there."""

    def renew(self) -> None:
        """Copy all tables again."""
        for key, (tensor, _) in self._tensors.items():
            self._copies[key].copy_(tensor)
