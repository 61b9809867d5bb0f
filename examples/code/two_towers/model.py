"""Users on one side, movies on the other: the rating is the scalar product of two vectors."""

from __future__ import annotations

import torch
from torch import nn

from trainer.data.batches import Batch
from trainer.models.sparse import SparseArch
from trainer.spec.job import JobSpec


class TwoTowers(nn.Module):
    """Predicts one task with `mse`.

    `model.options`: `user_features`, the names of the features of the user's tower (the others are
    the movie's), and `width`, the size of both vectors.
    """

    def __init__(self, spec: JobSpec, device: torch.device) -> None:
        super().__init__()
        # Holds every table of the spec, pooled and sequences, sharded by Shardloom.
        self.sparse = SparseArch(spec, device)
        names = self.sparse.sparse_feature_names
        of_user = set(spec.model.options["user_features"])
        self.user_places = [i for i, name in enumerate(names) if name in of_user]
        self.movie_places = [i for i, name in enumerate(names) if name not in of_user]
        dim = spec.embedding_tables[0].embedding_dim
        width = int(spec.model.options.get("width", 32))
        num_dense = len(spec.dense_features)
        self.user_tower = _tower(len(self.user_places) * dim, width, device)
        self.movie_tower = _tower(len(self.movie_places) * dim + num_dense, width, device)
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Losses by name, and predictions [B, 1] in the unit that the model learns."""
        vectors = self.sparse(batch.sparse, batch.sequences)  # [B, F, D]
        user = self.user_tower(vectors[:, self.user_places].flatten(1))
        movie = self.movie_tower(
            torch.cat([vectors[:, self.movie_places].flatten(1), batch.dense], dim=1)
        )
        predictions = (user * movie).sum(dim=1, keepdim=True) + self.bias
        errors = (predictions[:, 0] - batch.label[:, 0]) ** 2
        # Rows of weight 0 only fill up the batch, and some row weighs more.
        loss = (errors * batch.weight).sum() / batch.weight.sum()
        return {"rating": loss}, predictions


def _tower(num_inputs: int, width: int, device: torch.device) -> nn.Module:
    return nn.Sequential(
        nn.Linear(num_inputs, 2 * width, device=device),
        nn.ReLU(),
        nn.Linear(2 * width, width, device=device),
    )
