"""What `shardloom data prepare movielens` is told.

Fields with a description are options of the command; the others are for callers in Python.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, PositiveInt

Split = Literal["global", "per_user"]
OnDuplicate = Literal["fail", "last"]


def _one_of_ascii(text: object) -> object:
    if not isinstance(text, str) or len(text) != 1 or not text.isascii():
        raise ValueError(f"{text!r} is not one character of ASCII")
    return text


class MovieLensOptions(BaseModel, extra="forbid", frozen=True):
    """Recorded in the manifest.

    Of `user_mean`, `training` counts the rating itself; of `validation_past`, `all` is what one who
    serves knows, `training` what static models do that are compared with.
    """

    split: Annotated[
        Split, Field(description="Hold out the last ratings of all, or of each user.")
    ] = "per_user"
    validation_fraction: Annotated[
        float, Field(ge=0.001, le=0.999, description="Share of the ratings to hold out.")
    ] = 0.1
    user_mean: Annotated[
        Literal["past", "training"],
        Field(description="Labels are relative to a user's earlier, or all training ratings."),
    ] = "past"
    validation_past: Annotated[
        Literal["all", "training"],
        Field(description="Held-out rows look back at all earlier ratings, or training ones."),
    ] = "all"
    history_length: Annotated[int, Field(ge=1, le=2**31, description="Earlier movies per row.")] = (
        10
    )
    min_token_count: Annotated[int, Field(ge=1, description="Rarer words are unknown.")] = 2
    max_tokens: Annotated[int, Field(ge=1, le=2**31, description="Largest token vocabulary.")] = (
        20_000
    )
    max_tokens_per_movie: PositiveInt = 24
    on_duplicate: Annotated[
        OnDuplicate,
        Field(description="A movie rated twice by a user: fail, or keep the latest rating."),
    ] = "fail"
    on_missing_movie: Annotated[
        Literal["keep", "fail"],
        Field(description="A rated movie without metadata: keep it without genres, or fail."),
    ] = "keep"
    delimiter: Annotated[
        str,
        BeforeValidator(_one_of_ascii),
        Field(description="What splits the cells of the csv files."),
    ] = ","
    num_partitions: Annotated[int, Field(ge=1, description="Most files per split.")] = 32
    row_group_rows: PositiveInt = 8192
    unit_rows: Annotated[
        int, Field(ge=1, le=2**31, description="Ratings held in memory at a time.")
    ] = 1 << 20
