"""What a user did before, read by a transformer encoder next to the candidate.

    ratings   r_1 ... r_N            candidate
    movies    e_1 ... e_N                c           x_i = W [e_i, r_i e_i] + position(i)
               |       |                 |           position counts from the most recent
              x_1 ... x_N               x_0
               '---- encoder, padding masked ---'
              h_1 ... h_N               h_0 -> first output: the candidate among the history
               '---- sum_i a_i r_i h_i ---------> second output, a = softmax(h_0 . h_i)

After Behavior Sequence Transformer (Chen et al. 2019), where the candidate enters the encoder as
one more item; the second output weighs what was rated before by how it was rated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from trainer.spec import TransformerSpec


@dataclass(frozen=True)
class History:
    """B users' histories, most recent last and padded at the end.

    `vectors` [B, N, D], `lengths` [B] of what is there, `ratings` [B, N], anything at padding.
    """

    vectors: torch.Tensor
    lengths: torch.Tensor
    ratings: torch.Tensor

    @property
    def is_padding(self) -> torch.Tensor:
        """[B, N] bool."""
        return self._places >= self.lengths[:, None]

    @property
    def recency(self) -> torch.Tensor:
        """[B, N] int64: 0 for the most recent one, 1 for the one before; N - 1 at padding."""
        recency = self.lengths[:, None].long() - 1 - self._places
        return torch.where(recency < 0, self.vectors.shape[1] - 1, recency)

    @property
    def _places(self) -> torch.Tensor:
        return torch.arange(self.vectors.shape[1], device=self.vectors.device)


class HistoryEncoder(nn.Module):
    """Transformer encoder over a history and a candidate; an empty history is legal.

    The candidate is never masked, so that no softmax is over nothing. What an empty history adds
    is exactly zero.
    """

    num_outputs = 2

    def __init__(
        self, spec: TransformerSpec, dim: int, max_length: int, device: torch.device
    ) -> None:
        super().__init__()
        self.max_length = max_length
        self.project = nn.Linear(2 * dim, dim, device=device)
        self.position = nn.Parameter(torch.zeros(max_length + 1, dim, device=device))
        layer = nn.TransformerEncoderLayer(
            dim,
            spec.num_heads,
            spec.feedforward_dim,
            spec.dropout,
            batch_first=True,
            norm_first=True,
            device=device,
        )
        self.encoder = nn.TransformerEncoder(
            layer, spec.num_layers, nn.LayerNorm(dim, device=device), enable_nested_tensor=False
        )

    def forward(self, history: History, candidate: torch.Tensor) -> torch.Tensor:
        """Histories and candidates [B, D] -> [B, 2, D]: candidate in context, rated history."""
        is_padding = history.is_padding
        ratings = history.ratings.masked_fill(is_padding, 0.0)
        rated = torch.cat([history.vectors, history.vectors * ratings.unsqueeze(2)], dim=2)
        alone = torch.cat([candidate, torch.zeros_like(candidate)], dim=1)
        tokens = torch.cat(
            [
                self.project(alone).unsqueeze(1) + self.position[-1],
                self.project(rated) + self.position[:-1][history.recency],
            ],
            dim=1,
        )
        mask = nn.functional.pad(is_padding, (1, 0), value=False)
        encoded = self.encoder(tokens, src_key_padding_mask=mask)
        return torch.stack([encoded[:, 0], _rated_sum(encoded, ratings, is_padding)], dim=1)


def _rated_sum(
    encoded: torch.Tensor, ratings: torch.Tensor, is_padding: torch.Tensor
) -> torch.Tensor:
    """sum_i a_i r_i h_i with a = softmax(h_0 . h_i / sqrt(D)) over the history, [B, D]."""
    query, items = encoded[:, 0], encoded[:, 1:]
    scores = (items @ query.unsqueeze(2)).squeeze(2) / math.sqrt(query.shape[1])
    # The least finite number instead of -inf: softmax of an empty history must not be NaN.
    scores = scores.masked_fill(is_padding, torch.finfo(scores.dtype).min)
    # The ratings are 0 at padding, where the vectors may be anything finite.
    shares = scores.softmax(dim=1) * ratings
    return (shares.unsqueeze(1) @ items).squeeze(1)
