"""What `shardloom data prepare movielens` is told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, PositiveInt

Split = Literal["global", "per_user"]
OnDuplicate = Literal["fail", "last"]


def _one_of_ascii(text: object) -> object:
    if not isinstance(text, str) or len(text) != 1 or not text.isascii():
        raise ValueError(f"{text!r} is not one character of ASCII")
    return text


class MovieLensOptions(BaseModel, extra="forbid", frozen=True, use_attribute_docstrings=True):
    """Recorded in the manifest.

    Of `user_mean`, `training` counts the rating itself; of `validation_past`, `all` is what one who
    serves knows, `training` what static models do that are compared with.
    """

    split: Split = "per_user"
    """Hold out the last ratings of all, or of each user."""
    validation_fraction: Annotated[float, Field(ge=0.001, le=0.999)] = 0.1
    """Share of the ratings to hold out."""
    user_mean: Literal["past", "training"] = "past"
    """Labels are relative to a user's earlier, or all training ratings."""
    validation_past: Literal["all", "training"] = "all"
    """Held-out rows look back at all earlier ratings, or training ones."""
    history_length: Annotated[int, Field(ge=1, le=2**31)] = 10
    """Earlier movies per row."""
    min_token_count: PositiveInt = 2
    """Rarer words are unknown."""
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] = 20_000
    """Largest token vocabulary."""
    max_tokens_per_movie: PositiveInt = 24
    on_duplicate: OnDuplicate = "fail"
    """A movie rated twice by a user: fail, or keep the latest rating."""
    on_missing_movie: Literal["keep", "fail"] = "keep"
    """A rated movie without metadata: keep it without genres, or fail."""
    delimiter: Annotated[str, BeforeValidator(_one_of_ascii)] = ","
    """What splits the cells of the csv files."""
    num_partitions: PositiveInt = 32
    """Most files per split."""
    row_group_rows: PositiveInt = 8192
    unit_rows: Annotated[int, Field(ge=100, le=2**31)] = 1 << 20
    """Ratings held in memory at a time."""
