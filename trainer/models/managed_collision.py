"""Dynamic tables: ids that get rows as they turn up, in buckets that reshard exactly.

    raw id ──mix──► 62-bit id ──top bits──► bucket ──known?──► its own row
                                                └──not (yet)──► the bucket's last row, shared

*Mixing* is a bijection of the 62-bit numbers, so that ids spread evenly over the buckets and no two
ever fall together. Ranks exchange mixed ids by bucket (TorchRec's row-wise input distribution), so
a bucket's ids are all seen by the rank that holds its rows. Every `eviction_interval` steps each
bucket admits what it saw: TorchRec's `MCHManagedCollisionModule` and its eviction policies decide
on a bucket what stays and who gets which row. Admitted rows start anew: random weights that depend
on (step, row) only, moments 0.

TorchRec keeps one such module for each *shard*, so that its ids fit no other number of shards. A
bucket is the same rows whatever the number, hence any sharding group size that divides the number
of buckets loads a checkpoint bitwise. What was seen since the last admission is not stored: a save
admits it first (`trainer.parallel.sharding.settle`), so that an interrupted run goes on exactly as
an uninterrupted one.

One replica of the tables only (M = 1): replicas would give the same row to different ids. HashZch
modules of TorchRec have a sync for that, but their kernel trains on CUDA alone ("Expected readonly
to be true", fbgemm 1.8). No collectives here; `trainer.parallel.sharding` shards the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, JaggedTensor
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)

from trainer.spec.tables import MAX_INPUT_HASH_SIZE, MAX_SEEN, DynamicSpec

META = torch.device("meta")
NO_ID = torch.iinfo(torch.int64).max
_MASK = MAX_INPUT_HASH_SIZE - 1
_POLICIES: dict[str, type[MCHEvictionPolicy]] = {
    "lru": LRU_EvictionPolicy,
    "lfu": LFU_EvictionPolicy,
    "distance_lfu": DistanceLFU_EvictionPolicy,
}


def mix(ids: torch.Tensor) -> torch.Tensor:
    """A bijection of 0 to 2^62 - 1: int64 [n] -> int64 [n], spread evenly.

    Xor-shifts and odd multiplications modulo 2^62, each of which can be undone.
    """
    mixed = ids ^ (ids >> 32)
    mixed = (mixed * 0x2545F4914F6CDD1D) & _MASK
    mixed = mixed ^ (mixed >> 29)
    mixed = (mixed * 0x369DEA0F31A53F85) & _MASK
    return mixed ^ (mixed >> 32)


@dataclass
class Tally:
    """What happened to the ids of a shard since the last report."""

    num_lookups: int = 0
    num_shared: int | torch.Tensor = 0
    num_admitted: int = 0
    num_evicted: int = 0


@dataclass(frozen=True)
class _Seen:
    """Ids, how often each was looked up, and the step of the last time: int64 [n] each."""

    ids: torch.Tensor
    counts: torch.Tensor
    steps: torch.Tensor


def _folded(seen: Sequence[_Seen]) -> _Seen:
    """The same with each id once, sorted."""
    ids, inverse = torch.unique(torch.cat([each.ids for each in seen]), return_inverse=True)
    counts, steps = torch.zeros_like(ids), torch.zeros_like(ids)
    counts.scatter_add_(0, inverse, torch.cat([each.counts for each in seen]))
    steps.scatter_reduce_(0, inverse, torch.cat([each.steps for each in seen]), reduce="amax")
    return _Seen(ids, counts, steps)


class BucketedIds(ManagedCollisionModule):
    """The ids of buckets `first_bucket` to `end_bucket` - 1 of one table of `num_rows` rows.

    Its buffers hold a place for each row of the buckets, int64 [rows]: `ids` (mixed; `NO_ID` where
    a row is free), `rows` (the id's row in the whole table) and what the policy remembers. Inside a
    bucket the places are sorted by id; the last one belongs to ids that have no row of their own.
    """

    ids: torch.Tensor
    rows: torch.Tensor

    def __init__(
        self,
        num_rows: int,
        spec: DynamicSpec,
        device: torch.device,
        first_bucket: int = 0,
        end_bucket: int | None = None,
    ) -> None:
        self._spec = spec
        self._num_rows = num_rows
        self._bucket_rows = num_rows // spec.num_buckets
        bounds = [bucket * self._bucket_rows for bucket in range(spec.num_buckets + 1)]
        super().__init__(device, bounds)
        self._first = first_bucket
        self._end = spec.num_buckets if end_bucket is None else end_bucket
        start, end = self._first * self._bucket_rows, self._end * self._bucket_rows
        size = end - start
        self.register_buffer("ids", torch.full((size,), NO_ID, device=device))
        self.register_buffer("rows", torch.arange(start, end, device=device))
        self._policy = _POLICIES[spec.eviction]()
        for name in self._remembered:
            self.register_buffer(name, torch.zeros(size, dtype=torch.int64, device=device))
        self.tally = Tally()
        self._evicted: list[torch.Tensor] = []
        self.reload()

    @property
    def _remembered(self) -> list[str]:
        """What the policy remembers of each id."""
        return [each.metadata_name for each in self._policy.metadata_info if each.is_mch_metadata]

    def reload(self) -> None:
        """Take the buffers as they are: after a load, or after they have changed."""
        self._seen: list[_Seen] = []
        self._num_seen, self._num_folded = 0, 0
        self._step: int | None = None
        self._find_known()

    def has_sound_places(self) -> bool:
        """Whether the buffers are what buckets of this size hold; other buckets write others.

        In each bucket the ids are its own and sorted, and so are the rows its own; the last place
        is free, for the ids that have no row.
        """
        ids, rows = (each.view(-1, self._bucket_rows) for each in (self.ids, self.rows))
        buckets = torch.arange(self._first, self._end, device=ids.device)[:, None]
        own_ids = (ids == NO_ID) | (self._buckets_of(ids) == buckets)
        is_sorted = ids.diff(dim=1) >= 0
        start = buckets * self._bucket_rows
        places = torch.arange(self._bucket_rows, device=ids.device)
        own_rows = rows.sort(dim=1).values == start + places
        has_shared = (ids[:, -1] == NO_ID) & (rows[:, -1] == start[:, 0] + self._bucket_rows - 1)
        return all(bool(each.all()) for each in (own_ids, is_sorted, own_rows, has_shared))

    def _find_known(self) -> None:
        if self.device.type == "meta":
            return
        # Buckets are in order of their ids, as the top bits of an id name its bucket.
        is_known = self.ids != NO_ID
        self._known, self._known_rows = self.ids[is_known], self.rows[is_known]

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return {name: _with_values(each, mix(each.values())) for name, each in features.items()}

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Remember the mixed ids of a training step; admit what was seen when that is due."""
        if self.training:
            if self._step is None:
                self._step = int(self._current_iter_tensor.item())
            self._step += 1
            self._current_iter_tensor.fill_(self._step)
            for each in features.values():
                self._see(each.values(), self._step)
            if self._step % self._spec.eviction_interval == 0:
                self.admit()
        return features

    def _see(self, ids: torch.Tensor, step: int) -> None:
        self._seen.append(_Seen(ids, torch.ones_like(ids), torch.full_like(ids, step)))
        self._num_seen += ids.numel()
        # Admissions may be far apart; what is held then is twice the distinct ids at most.
        if self._num_seen > max(MAX_SEEN, 2 * self._num_folded):
            self._seen = [_folded(self._seen)]
            self._num_seen = self._num_folded = self._seen[0].ids.numel()

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: torch.Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Mixed ids to rows of the whole table."""
        return {name: _with_values(each, self._rows_of(each)) for name, each in features.items()}

    def _rows_of(self, feature: JaggedTensor) -> torch.Tensor:
        ids = feature.values()
        shared = (self._buckets_of(ids) + 1) * self._bucket_rows - 1
        found = shared
        if self._known.numel():
            places = torch.searchsorted(self._known, ids).clamp_(max=self._known.numel() - 1)
            found = torch.where(self._known[places] == ids, self._known_rows[places], shared)
        if self.training:
            self.tally.num_lookups += ids.numel()
            # Not brought to the host here: on CUDA each step would wait for it.
            self.tally.num_shared = self.tally.num_shared + (found == shared).sum()
        return found

    def _buckets_of(self, ids: torch.Tensor) -> torch.Tensor:
        """As TorchRec's input distribution finds them."""
        size = -(-MAX_INPUT_HASH_SIZE // self._spec.num_buckets)
        return torch.div(ids, size, rounding_mode="floor")

    def forward(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """Raw ids to rows, in one go: what an unsharded module does."""
        return self.remap(self.profile(self.preprocess(features)))

    @torch.no_grad()
    def admit(self) -> None:
        """Give rows to what was seen since the last time, by the policy."""
        if not self._seen:
            return
        seen = _folded(self._seen)
        self._seen, self._num_seen, self._num_folded = [], 0, 0
        assert self._step is not None, "nothing is seen outside a step"
        # Sorted by id, and thereby by bucket.
        unique, counts = seen.ids, seen.counts
        inverse = torch.arange(unique.numel(), device=unique.device)
        history = {"last_access_iter": seen.steps}
        metadata = self._policy.coalesce_history_metadata(self._step, history, counts, inverse)
        starts = torch.arange(self._first, self._end + 1, device=unique.device)
        bounds = torch.searchsorted(self._buckets_of(unique), starts).tolist()
        num_free, num_given = self._num_free(), 0
        for bucket, (start, end) in enumerate(pairwise(bounds), self._first):
            if end > start:
                of_bucket = {name: each[start:end] for name, each in metadata.items()}
                given = self._admit_to(bucket, unique[start:end], counts[start:end], of_bucket)
                if given.numel():
                    self._evicted.append(given)
                num_given += given.numel()
        self.tally.num_admitted += num_given
        self.tally.num_evicted += num_given - (num_free - self._num_free())
        self._find_known()

    def _num_free(self) -> int:
        return int((self.ids == NO_ID).sum())

    def _admit_to(
        self, bucket: int, ids: torch.Tensor, counts: torch.Tensor, seen: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """The rows of the whole table that other ids have now."""
        start = (bucket - self._first) * self._bucket_rows
        place = slice(start, start + self._bucket_rows)
        # TorchRec's module over the rows of one bucket: its buffers are parts of ours.
        module = MCHManagedCollisionModule(
            zch_size=self._bucket_rows,
            device=self.device,
            eviction_policy=self._policy,
            eviction_interval=self._spec.eviction_interval,
            output_global_offset=bucket * self._bucket_rows,
        )
        module._current_iter = self._step or 0
        module._mch_sorted_raw_ids = self.ids[place]
        module._mch_remapped_ids_mapping = self.rows[place]
        module._mch_metadata = {name: getattr(self, name)[place] for name in self._remembered}
        module._update_and_evict(ids, counts, seen)
        return module._evicted_emb_indices

    def evict(self) -> torch.Tensor | None:
        """Rows of the whole table that have another id now than at the last call."""
        rows = torch.unique(torch.cat(self._evicted)) if self._evicted else None
        self._evicted = []
        return rows

    # What TorchRec asks.

    def output_size(self) -> int:
        return (self._end - self._first) * self._bucket_rows

    def input_size(self) -> int:
        return MAX_INPUT_HASH_SIZE

    def buckets(self) -> int:
        return self._spec.num_buckets

    @property
    def num_own_rows(self) -> int:
        """Rows that an id may have for itself: all but one of each bucket."""
        return self.output_size() - (self._end - self._first)

    def open_slots(self) -> torch.Tensor:
        """Free rows, int64 [1]; the shared ones are none."""
        num_taken = (self.ids != NO_ID).sum().reshape(1)
        return self.num_own_rows - num_taken

    def validate_state(self) -> None:
        self.reload()

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> BucketedIds:
        """The shard of these rows, empty."""
        first, end = (row // self._bucket_rows for row in output_id_range)
        return BucketedIds(self._num_rows, self._spec, device or self.device, first, end)


def _with_values(feature: JaggedTensor, values: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(values=values, lengths=feature.lengths(), offsets=feature.offsets_or_none())


def configs_of(module: nn.Module) -> list[Any]:
    """Configurations of the tables of a TorchRec collection; none of any other module."""
    if isinstance(module, EmbeddingBagCollection):
        return list(module.embedding_bag_configs())
    return list(module.embedding_configs()) if isinstance(module, EmbeddingCollection) else []


def with_dynamic_ids(
    tables: EmbeddingBagCollection | EmbeddingCollection, specs: Mapping[str, DynamicSpec]
) -> ManagedCollisionEmbeddingBagCollection | ManagedCollisionEmbeddingCollection:
    """`tables`, each with the ids of its spec; sharding fills those on META.

    Called with raw ids it gives (KeyedTensor or vectors by feature, None), a collective where it is
    sharded.
    """
    ids = {
        each.name: BucketedIds(each.num_embeddings, specs[each.name], tables.device)
        for each in configs_of(tables)
    }
    collection = ManagedCollisionCollection(ids, configs_of(tables))
    if isinstance(tables, EmbeddingBagCollection):
        return ManagedCollisionEmbeddingBagCollection(tables, collection)
    return ManagedCollisionEmbeddingCollection(tables, collection)
