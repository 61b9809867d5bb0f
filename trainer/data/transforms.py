"""Raw values to ids and dense numbers as a spec says: the same code in training and in serving.

Pure functions of Arrow arrays, without torch. Id 0 is a missing (null) or unknown value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trainer.data.ragged import IntArray
from trainer.errors import ABOUT_VOCABULARIES, ColumnError, CorruptFileError, SourceMissingError
from trainer.spec.data import BucketizeSpec, FeatureSpec, HashingSpec, VocabularySpec
from trainer.storage import Location

MISSING_ID = 0
_SLICE_BYTES = 2**18  # of text; what is made of it then fits into a processor's cache
_WordArray = NDArray[np.uint64]
# Below it a column is constant but for rounding, which must not be blown up.
_MIN_SPREAD = 1e-9


@dataclass(frozen=True)
class HashEncoder:
    """Ids 1 to `num_ids` - 1 by a hash of 64 bits: splitmix64 of the value plus `seed` * 2**32.

    A string is first made a number: the sum of splitmix64(byte + 256 * place) over its UTF-8
    bytes, mixed with its length. Integer arithmetic only, so equal on all machines and versions.
    """

    num_ids: int
    seed: int
    wanted: str = "a string or an integer"

    def accepts(self, kind: pa.DataType) -> bool:
        return is_text(kind) or pa.types.is_integer(kind)

    def encode(self, values: pa.Array) -> IntArray:
        if is_text(values.type):
            return _by_distinct(values, lambda distinct: self._ids(_string_words(distinct)))
        numbers = pc.fill_null(values, 0) if values.null_count else values
        ids = self._ids(numbers.cast(pa.int64(), safe=False).to_numpy().view(np.uint64))
        return _without_missing(ids, values)

    def _ids(self, words: _WordArray) -> IntArray:
        mixed = splitmix64(words + np.uint64(self.seed << 32))
        return (mixed % np.uint64(self.num_ids - 1)).astype(np.int64) + 1


@dataclass(frozen=True)
class VocabularyEncoder:
    """Value `values[i]` (ascending) has id `ids[i]`; what is not among them is unknown."""

    values: pl.Series
    ids: IntArray
    num_ids: int

    @classmethod
    def of(cls, values: pl.Series | NDArray) -> VocabularyEncoder:
        """The value at position i of `values` (distinct, ascending) has id i + 1."""
        ids = np.arange(1, len(values) + 1, dtype=np.int64)
        return cls(pl.Series("value", values), ids, len(values) + 1)

    @property
    def wanted(self) -> str:
        return "a string" if self.values.dtype == pl.String else "an integer"

    def accepts(self, kind: pa.DataType) -> bool:
        return is_text(kind) if self.values.dtype == pl.String else pa.types.is_integer(kind)

    def encode(self, values: pa.Array) -> IntArray:
        return _by_distinct(values, self._ids)

    def _ids(self, distinct: pa.Array) -> IntArray:
        if self.values.is_empty():
            return np.full(len(distinct), MISSING_ID, dtype=np.int64)
        # What the vocabulary's type cannot hold becomes null, which equals nothing in it.
        wanted = pl.Series(distinct).cast(self.values.dtype, strict=False)
        places = np.minimum(self.values.search_sorted(wanted).to_numpy(), len(self.values) - 1)
        is_known = (self.values.gather(places) == wanted).fill_null(False).to_numpy()
        return np.where(is_known, self.ids[places], MISSING_ID)


@dataclass(frozen=True)
class BucketEncoder:
    """Id 1 plus the number of boundaries that are not above the value."""

    boundaries: tuple[float, ...]
    num_ids: int
    wanted: str = "a number"

    def accepts(self, kind: pa.DataType) -> bool:
        return pa.types.is_integer(kind) or pa.types.is_floating(kind)

    def encode(self, values: pa.Array) -> IntArray:
        """Ids of intervals; 0 for null and NaN."""
        numbers = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        places = np.searchsorted(np.array(self.boundaries), numbers, side="right") + 1
        return np.where(np.isnan(numbers), MISSING_ID, places).astype(np.int64)


# `accepts` says whether values of an Arrow type can be encoded, `wanted` in words which can, and
# `encode` makes ids int64 [n] from 0 to `num_ids` - 1 of n values; null gives 0.
IdEncoder = HashEncoder | VocabularyEncoder | BucketEncoder


def encoder_of(feature: FeatureSpec, num_ids: int, folder: Location) -> IdEncoder | None:
    """What makes ids of a feature's raw values; None where they are ids already.

    `num_ids` are those that its table takes, `folder` is where vocabularies lie. Raises a
    `DataError` for a vocabulary that is missing or cannot be read.
    """
    match feature.encoding:
        case HashingSpec(num_buckets=size, seed=seed):
            return HashEncoder(num_ids if size == "auto" else size, seed)
        case VocabularySpec(min_count=min_count):
            return load_vocabulary(folder / feature.vocabulary_file, min_count)
        case BucketizeSpec(boundaries=boundaries, num_ids=num_intervals):
            return BucketEncoder(boundaries, num_intervals)
        case None:
            return None


def load_vocabulary(path: Location | Path, min_count: int = 1) -> VocabularyEncoder:
    """Read a vocabulary, once per process and version; raises a `DataError` naming the file.

    Values with a `count` below `min_count` are unknown.
    """
    file = Location.parse(path)
    try:
        return _load(file.text, file.fingerprint(), min_count)
    except SourceMissingError as error:
        raise SourceMissingError(f"{error}; {ABOUT_VOCABULARIES}") from None
    except pl.exceptions.PolarsError as error:
        raise ColumnError(f"{file}: 'value' or 'index' holds what it cannot: {error}") from None
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(
            f"{file} is no vocabulary that can be read ({error}); copy or prepare it again"
        ) from None


@cache
def _load(text: str, version: tuple[int, int] | None, min_count: int) -> VocabularyEncoder:
    path = Location.parse(text)
    table = read_vocabulary(path, ["value", "index", *(["count"] if min_count > 1 else [])])
    kind = table.schema.field("value").type
    if min_count > 1:
        table = table.filter(pc.greater_equal(table["count"], min_count))
    # Hashes of 64 bits need all of an uint64.
    number = pl.UInt64 if pa.types.is_uint64(kind) else pl.Int64
    known = pl.Series(table["value"]).cast(pl.String if is_text(kind) else number)
    frame = pl.DataFrame({"value": known, "id": pl.Series(table["index"]).cast(pl.Int64)})
    # A null is what has no value; it has id 0 whatever the vocabulary says.
    frame = frame.drop_nulls("value").sort("value")
    if frame["id"].null_count():
        raise ColumnError(f"{path}: column 'index' holds a null; each value has an id from 1 on")
    # Equal values are neighbours.
    twice = frame.filter(
        pl.col("value") == pl.col("value").shift(), pl.col("id") != pl.col("id").shift()
    )
    if len(twice):
        raise ColumnError(
            f"{path}: column 'value' holds {twice['value'][0]!r} with more than one 'index'; keep "
            "the row with its id, and no other"
        )
    ids = frame["id"].to_numpy()
    if len(ids) and ids.min() < 1:
        raise ColumnError(f"{path}: column 'index' holds {ids.min()}; ids of values begin with 1")
    return VocabularyEncoder(frame["value"], ids, int(ids.max(initial=0)) + 1)


def read_vocabulary(path: Location, wanted: Sequence[str] = ("value", "index")) -> pa.Table:
    """The columns of a vocabulary's file, and nothing else of it.

    Raises `ColumnError` where one that is `wanted` is missing or is none of a vocabulary, what
    `Location.parse_with` does, and pyarrow's errors.
    """
    table = path.parse_with(pq.read_table)
    for name in wanted:
        if name not in table.column_names:
            raise ColumnError(f"{path}: no column '{name}'; a vocabulary has {', '.join(wanted)}")
    kind = table.schema.field("value").type
    if not is_text(kind) and not pa.types.is_integer(kind):
        raise ColumnError(f"{path}: column 'value' is {kind}, neither a string nor an integer")
    named = [name for name in ("value", "index", "count") if name in table.column_names]
    return table.select(named).replace_schema_metadata()


def dense_values(
    values: pa.Array, feature: FeatureSpec | None, *, is_wide: bool = False
) -> NDArray[np.floating]:
    """Numbers as a dense feature asks for them, or as they are without one: float32 [n].

    `is_wide` asks for float64. NaN is what is missing and has no replacement.
    """
    # Differences of large numbers need the digits.
    is_wide |= feature is not None and feature.transform == "standardise"
    kind = pa.float64() if is_wide else pa.float32()
    numbers = values.cast(kind, safe=False).to_numpy(zero_copy_only=False)
    if feature is None:
        return numbers
    if feature.missing is not None:
        numbers = np.where(np.isnan(numbers), numbers.dtype.type(feature.missing), numbers)
    if feature.transform == "log1p":
        numbers = np.copysign(np.log1p(np.abs(numbers)), numbers)
    elif feature.transform == "standardise":
        assert feature.mean is not None and feature.std is not None, "statistics are filled in"
        numbers = ((numbers - feature.mean) / feature.std).astype(np.float32)
    return numbers


@dataclass(frozen=True)
class Moments:
    """Number, mean and sum of squared deviations of values; they add up without cancellation.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances", 1979.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: NDArray) -> Moments:
        known = values[np.isfinite(values)].astype(np.float64, copy=False)
        if not len(known):
            return cls()
        with np.errstate(over="ignore"):  # infinite then
            mean = float(known.mean())
            return cls(len(known), mean, float(((known - mean) ** 2).sum()))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        if not count:
            return self
        gap = other.mean - self.mean
        mean = self.mean + gap * other.count / count
        between = gap * gap * self.count * other.count / count
        return Moments(count, mean, self.squares + other.squares + between)

    @property
    def deviation(self) -> float:
        """Population standard deviation; 0 of no values."""
        return (self.squares / self.count) ** 0.5 if self.count else 0.0

    @property
    def std(self) -> float:
        """The same, but 1 where the values are all alike but for rounding."""
        return self.deviation if self.deviation > _MIN_SPREAD else 1.0


def splitmix64(words: _WordArray) -> _WordArray:
    """Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _string_words(texts: pa.Array) -> _WordArray:
    """A number of 64 bits for each string, many strings at once.

    Mixing makes several words of 8 bytes of each byte, so that it goes through the text in slices.
    """
    if not len(texts):
        return np.empty(0, dtype=np.uint64)
    binary = texts.cast(pa.large_binary())
    _, starts, content = binary.buffers()
    offsets = np.frombuffer(starts, dtype=np.int64)[binary.offset : binary.offset + len(binary) + 1]
    codes = np.frombuffer(content or b"", dtype=np.uint8)
    words = np.empty(len(binary), dtype=np.uint64)
    first = 0
    while first < len(words):
        end = np.searchsorted(offsets, offsets[first] + _SLICE_BYTES, side="right") - 1
        last = max(first + 1, int(end))
        words[first:last] = _words_of(codes, offsets[first : last + 1])
        first = last
    return words


def _words_of(codes: NDArray[np.uint8], offsets: IntArray) -> _WordArray:
    """Of the strings that lie between `offsets` in `codes`."""
    codes = codes[offsets[0] : offsets[-1]]
    offsets = offsets - offsets[0]
    lengths = np.diff(offsets)
    places = np.arange(len(codes), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
    mixed = splitmix64(codes.astype(np.uint64) + (places.astype(np.uint64) << np.uint64(8)))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])
    return splitmix64(sums[offsets[1:]] - sums[offsets[:-1]] + lengths.astype(np.uint64))


def _by_distinct(values: pa.Array, encode: Callable[[pa.Array], IntArray]) -> IntArray:
    """Ids of values, of which each distinct one is encoded once; 0 for null."""
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    ids = encode(encoded.dictionary)
    places = pc.fill_null(encoded.indices, 0) if encoded.null_count else encoded.indices
    if not len(ids):
        return np.full(len(values), MISSING_ID, dtype=np.int64)
    return _without_missing(ids[places.to_numpy()], values)


def _without_missing(ids: IntArray, values: pa.Array) -> IntArray:
    if not values.null_count:
        return ids
    return np.where(values.is_null().to_numpy(zero_copy_only=False), MISSING_ID, ids)


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings, maybe as categories."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)
