"""What `shardloom data prepare movielens` is told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt

Split = Literal["global", "per_user"]


class MovieLensOptions(BaseModel, extra="forbid", frozen=True, use_attribute_docstrings=True):
    """Recorded in the manifest."""

    split: Split = "per_user"
    """Hold out the last ratings of all, or of each user."""
    validation_fraction: Annotated[float, Field(ge=0.001, le=0.999)] = 0.1
    """Share of the ratings to hold out."""
    history_length: Annotated[int, Field(ge=1, le=2**31)] = 10
    """Earlier movies per row."""
    min_token_count: PositiveInt = 2
    """Rarer words are unknown."""
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] = 20_000
    """Largest token vocabulary."""
    max_tokens_per_movie: PositiveInt = 24
    num_partitions: PositiveInt = 32
    """Most files per split."""
    row_group_rows: PositiveInt = 8192
    unit_rows: Annotated[int, Field(ge=100, le=2**31)] = 1 << 20
    """Ratings held in memory at a time."""
