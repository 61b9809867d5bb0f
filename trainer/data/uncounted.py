"""Rows that do not count have no ids in dynamic tables: nothing is to be learnt from them there.

Rows that fill up a batch repeat others, and bad ones hold made-up ids. In a table whose rows are
the ids that weighs nothing, as their gradients are 0; a dynamic table would count them as seen,
keep their ids for it, and evict others.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torchrec import KeyedJaggedTensor


def without_uncounted(
    ids: KeyedJaggedTensor, keys: Collection[str], row_weight: torch.Tensor
) -> KeyedJaggedTensor:
    """`ids` without those that the features `keys` have in rows of weight 0: `row_weight` [B]."""
    names = ids.keys()
    is_chosen = torch.tensor([name in keys for name in names], dtype=torch.bool)
    is_dropped = (is_chosen[:, None] & (row_weight == 0)).ravel()
    if not is_dropped.any():
        return ids
    lengths = ids.lengths()
    is_kept = ~is_dropped.repeat_interleave(lengths)
    weights = ids.weights_or_none()
    return KeyedJaggedTensor(
        keys=names,
        values=ids.values()[is_kept],
        lengths=lengths.masked_fill(is_dropped, 0),
        weights=None if weights is None else weights[is_kept],
    )
