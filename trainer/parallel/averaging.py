"""Means over a replica group, summed in a fixed order, so that the copies end bitwise equal.

Each of the M ranks sums 1/M of the elements (all-to-all), in fp32 and pair by pair in rank order,
and hands the means to the others (all-gather): the bytes of a ring all-reduce, 2 (M - 1) / M of
the elements. A stock all-reduce sums in an order that depends on where an element lies; here the
mean of an element depends on its M values alone. So a row has the same mean whether it travels
alone or with its whole table, and for M a power of two the mean of M equal values is that value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

# One exchange at a time, so this is all the memory that averaging in place takes. Gloo is fastest
# with chunks that stay in the processor's cache, NCCL with larger ones.
_CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 32 * 2**20}


def pairwise_mean(parts: torch.Tensor) -> torch.Tensor:
    """Mean over the first dimension of [M, n], as float [n], in at least fp32.

    Neighbours are added first, then neighbouring sums, and so on. For M a power of two the sum of
    M equal values is exact that way, which a sum in a row is not (3 w may need one bit more).
    """
    sums = list(parts.to(torch.promote_types(parts.dtype, torch.float32)).unbind(0))
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [a + b for a, b in pairs] + (sums[-1:] if len(sums) % 2 else [])
    return sums[0] / parts.shape[0]


@dataclass(frozen=True)
class Block:
    """Rows of a contiguous tensor [n, ...]: those of `rows` (int64, sorted), or all when None."""

    tensor: torch.Tensor
    rows: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        """How many rows the block has."""
        return self.tensor.shape[0] if self.rows is None else self.rows.numel()

    @property
    def row_numel(self) -> int:
        """Elements of one row."""
        return self.tensor[:1].numel()

    @property
    def numel(self) -> int:
        """Elements of all rows."""
        return self.num_rows * self.row_numel

    def read(self) -> torch.Tensor:
        """The rows, flat; a view when they are all rows."""
        if self.rows is None:
            return self.tensor.view(-1)
        return self.tensor.index_select(0, self.rows).view(-1)

    def write(self, flat: torch.Tensor) -> None:
        """Overwrite the rows."""
        if self.rows is None:
            self.tensor.view(-1).copy_(flat)
        else:
            values = flat.view(self.num_rows, *self.tensor.shape[1:])
            self.tensor.index_copy_(0, self.rows, values.to(self.tensor.dtype))

    def split(self, max_numel: int) -> Iterator[Block]:
        """The block in pieces of at most `max_numel` elements (but at least a row)."""
        step = max(1, max_numel // max(1, self.row_numel))
        if self.num_rows <= step:
            yield self
        elif self.rows is None:
            yield from (Block(part) for part in self.tensor.split(step))
        else:
            yield from (Block(self.tensor, part) for part in self.rows.split(step))


class ReplicaCollectives:
    """The collectives of a sync over one replica group; counts the bytes that this rank sends."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.num_replicas = group.size()
        self.device = device
        self.chunk_bytes = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cuda"])
        self.num_bytes = 0

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copies' 1-D tensors, equally long, as [M, n]. Collective."""
        gathered = tensor.new_empty(self.num_replicas * tensor.numel())
        dist.all_gather_single(gathered, tensor, group=self.group)
        self.num_bytes += (self.num_replicas - 1) * tensor.nbytes
        return gathered.view(self.num_replicas, -1)

    def average(self, flat: torch.Tensor, out: torch.Tensor) -> None:
        """Write the mean of the copies' `flat` [n], n a multiple of M, into `out`. Collective.

        `out` may be `flat` itself.
        """
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=self.group)
        mean = pairwise_mean(received.view(self.num_replicas, -1)).to(flat.dtype)
        dist.all_gather_single(out, mean, group=self.group)
        self.num_bytes += 2 * (self.num_replicas - 1) * mean.nbytes

    def average_in_place(self, blocks: Iterable[Block]) -> None:
        """Write the mean of the copies into every row of `blocks`. Collective.

        Large whole tensors are averaged where they lie; everything else is packed on the way.
        """
        packed = []
        for block in blocks:
            packed.append(self._average_bulk(block) if block.rows is None else block)
        for batch in batches(packed, self.chunk_bytes):
            flat = pack([block.read() for block in batch], self.num_replicas)
            self.average(flat, flat)
            unpack(flat, batch)

    def _average_bulk(self, block: Block) -> Block:
        """Average all of a large tensor but a tail that does not divide by M; return what is left.

        Small tensors are left whole: packed, they share a message.
        """
        flat = block.tensor.view(-1)
        chunk = self.chunk_bytes // flat.itemsize // self.num_replicas * self.num_replicas
        bulk = flat.numel() // chunk * chunk
        for piece in flat[:bulk].split(chunk):
            self.average(piece, piece)
        return Block(flat[bulk:])


def batches(blocks: Iterable[Block], max_bytes: int) -> Iterator[list[Block]]:
    """Blocks, split where they are larger, in lists of one dtype and at most `max_bytes`."""
    open_batches: dict[torch.dtype, list[Block]] = {}
    sizes: dict[torch.dtype, int] = {}
    for whole in blocks:
        dtype = whole.tensor.dtype
        max_numel = max_bytes // dtype.itemsize
        for block in whole.split(max_numel):
            if sizes.get(dtype, 0) + block.numel > max_numel:
                yield open_batches.pop(dtype)
                sizes[dtype] = 0
            open_batches.setdefault(dtype, []).append(block)
            sizes[dtype] = sizes.get(dtype, 0) + block.numel
    yield from open_batches.values()


def pack(parts: Sequence[torch.Tensor], multiple: int) -> torch.Tensor:
    """Flat parts end to end, with zeros up to a multiple of `multiple` elements."""
    missing = -sum(part.numel() for part in parts) % multiple
    return torch.cat([*parts, parts[0].new_zeros(missing)])


def unpack(flat: torch.Tensor, blocks: Sequence[Block]) -> None:
    """Write what `pack` put end to end back into `blocks`."""
    place = 0
    for block in blocks:
        block.write(flat[place : place + block.numel])
        place += block.numel
