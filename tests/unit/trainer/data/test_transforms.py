"""Raw values to ids and dense numbers: against plain Python, and fixed for all machines."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.builders import spec
from trainer.data import transforms
from trainer.data.decode import layout_of
from trainer.data.transforms import HashEncoder, dense_values, encoder_of, load_vocabulary
from trainer.errors import ColumnError, CorruptFileError, SourceMissingError
from trainer.spec.data import FeatureSpec

WORD = 2**64


def feature(**fields) -> FeatureSpec:
    base = {"name": "f", "type": "id", "table": "t"}
    return FeatureSpec.model_validate(base | fields)


def dense(**fields) -> FeatureSpec:
    return FeatureSpec.model_validate({"name": "f", "type": "dense"} | fields)


def apply(feature: FeatureSpec, values: pa.Array, *, num_rows: int = 0, folder: Path = Path()):
    """What the model sees of a feature's raw values."""
    encoder = encoder_of(feature, num_rows, folder) if feature.is_sparse else None
    return encoder.encode(values) if encoder else dense_values(values, feature)


def splitmix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) % WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % WORD
    return word ^ (word >> 31)


def expected_id(value: int | str | None, num_buckets: int, seed: int) -> int:
    """The hash as its docstring says it, in plain Python."""
    if value is None:
        return 0
    if isinstance(value, str):
        content = value.encode()
        total = sum(splitmix(byte + 256 * place) for place, byte in enumerate(content))
        value = splitmix((total + len(content)) % WORD)
    return splitmix((value + (seed << 32)) % WORD) % (num_buckets - 1) + 1


SIZES = st.integers(2, 2**40)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(
    ("kind", "value"),
    [(pa.string(), st.text(max_size=9)), (pa.int64(), st.integers(-(2**63), 2**63 - 1))],
    ids=str,
)
@given(data=st.data(), size=SIZES, seed=SEEDS, skipped=st.integers(0, 3))
def test_values_hash_as_in_plain_arithmetic(kind, value, data, size, seed, skipped):
    values = data.draw(st.lists(st.none() | value, max_size=20))
    found = HashEncoder(size, seed).encode(pa.array(values, kind).slice(skipped))
    assert found.tolist() == [expected_id(value, size, seed) for value in values[skipped:]]


def test_hashed_ids_never_change():
    """Fixed for good: a checkpoint is worth nothing once ids move."""
    hashed = feature(hashing={"num_buckets": 1000})
    texts = pa.array(["", "a", "movie", "grüße", None])
    assert apply(hashed, texts).tolist() == [271, 738, 141, 195, 0]
    assert apply(hashed, pa.array([0, 1, -1, 2**40])).tolist() == [737, 546, 459, 994]


def test_a_hash_spreads_values_evenly_and_another_seed_moves_them():
    values = pa.array(np.arange(100_000))
    ids = HashEncoder(101, 0).encode(values)
    counts = np.bincount(ids, minlength=101)
    assert counts[0] == 0
    assert counts[1:].min() > 850
    assert counts[1:].max() < 1150
    assert (HashEncoder(101, 1).encode(values) == ids).mean() < 0.02


def test_auto_buckets_are_the_rows_of_the_table():
    ids = apply(feature(hashing={}), pa.array(np.arange(1000)), num_rows=7)
    assert set(ids.tolist()) == set(range(1, 7))


def test_auto_buckets_of_a_dynamic_table_are_all_ids_that_it_takes():
    dynamic = {"name": "users", "num_embeddings": 64, "embedding_dim": 8, "dynamic": {}}
    users = {"name": "user_id", "type": "id", "table": "users", "hashing": {}}
    age = {"name": "age", "type": "dense"}
    layout = layout_of(
        spec(features=[users, age], embedding_tables=[dynamic], parallelism={"workers": 1})
    )
    assert layout.sparse[0].encoder == HashEncoder(2**62, 0)


@pytest.fixture
def vocabulary(tmp_path):
    """A function that writes a vocabulary and gives its folder."""

    def write(values, index, **columns):
        (tmp_path / "vocab").mkdir(exist_ok=True)
        table = pa.table({"value": values, "index": index, **columns})
        pq.write_table(table, tmp_path / "vocab" / "f.parquet")
        return tmp_path

    return write


@given(
    known=st.lists(st.integers(-50, 50), unique=True, max_size=20),
    values=st.lists(st.one_of(st.none(), st.integers(-60, 60)), max_size=20),
)
def test_a_vocabulary_gives_each_known_value_its_index(tmp_path_factory, known, values):
    folder = tmp_path_factory.mktemp("v")
    (folder / "vocab").mkdir()
    index = list(range(1, len(known) + 1))
    table = pa.table({"value": pa.array(known, pa.int32()), "index": pa.array(index, pa.int64())})
    pq.write_table(table, folder / "vocab" / "f.parquet")
    found = apply(feature(vocabulary={}), pa.array(values, pa.int64()), folder=folder)
    ids = dict(zip(known, index, strict=True))
    assert found.tolist() == [ids.get(value, 0) for value in values]


def test_strings_rarer_than_the_threshold_are_unknown(vocabulary):
    folder = vocabulary(["b", "a", "c"], [1, 2, 3], count=[5, 1, 9])
    rare = feature(vocabulary={"min_count": 5})
    values = pa.array(["a", "b", "c", "d", None])
    assert apply(rare, values, folder=folder).tolist() == [0, 1, 3, 0, 0]
    # A null in a vocabulary names nothing, and a row that stands twice nothing else.
    folder = vocabulary(["b", None, "a", "b"], [1, 2, 3, 1])
    found = apply(feature(vocabulary={}), pa.array(["a", None, "b"]), folder=folder)
    assert found.tolist() == [3, 0, 1]
    folder = vocabulary(["b", "a", "c"], [1, 2, 3], count=[5, 1, 9])
    named = feature(vocabulary={"path": "vocab/f.parquet"})
    assert apply(named, values.dictionary_encode(), folder=folder).tolist() == [2, 1, 3, 0, 0]


def test_a_vocabulary_that_cannot_be_used_is_named(vocabulary, tmp_path):
    with pytest.raises(SourceMissingError, match=r"vocab/f\.parquet is missing.* value, index"):
        apply(feature(vocabulary={}), pa.array([1]), folder=tmp_path)
    path = vocabulary(["a"], [1]) / "vocab" / "f.parquet"
    with pytest.raises(ColumnError, match="no column 'count'"):
        load_vocabulary(path, min_count=2)
    for values, index, message in (
        (["a"], [0], "column 'index' holds 0"),
        ([0.5], [1], "column 'value' is double"),
        (["a", "b"], [1, None], "holds a null"),
        (["a", "b"], ["one", "two"], "holds what it cannot"),
        (["b", "a", "b"], [1, 2, 3], "column 'value' holds 'b' with more than one 'index'; keep"),
    ):
        vocabulary(values, index)
        with pytest.raises(ColumnError, match=message):
            load_vocabulary(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(CorruptFileError, match="no vocabulary that can be read"):
        load_vocabulary(path)


@given(
    boundaries=st.lists(st.integers(-20, 20), min_size=1, max_size=6, unique=True).map(sorted),
    values=st.lists(st.one_of(st.none(), st.floats(-30, 30), st.just(math.nan)), max_size=12),
)
def test_a_bucket_is_one_more_than_the_boundaries_not_above(boundaries, values):
    bucketized = feature(bucketize={"boundaries": boundaries})
    found = apply(bucketized, pa.array(values, pa.float64()))
    assert found.tolist() == [
        0 if value is None or math.isnan(value) else 1 + sum(b <= value for b in boundaries)
        for value in values
    ]
    assert found.max(initial=0) < bucketized.bucketize.num_ids


def test_dense_values_are_replaced_then_transformed():
    values = pa.array([None, math.nan, -3, 0, 7], pa.float64())
    logs = apply(dense(transform="log1p", missing=0), values)
    assert logs.dtype == np.float32
    assert logs.tolist() == pytest.approx([0, 0, -math.log(4), 0, math.log(8)], rel=1e-6)
    standard = dense(transform="standardise", missing=10, mean=10, std=2)
    assert apply(standard, values).tolist() == [0, 0, -6.5, -5, -1.5]
    # Large numbers keep their differences.
    seconds = dense(transform="standardise", mean=1_700_000_000, std=60)
    assert apply(seconds, pa.array([1_700_000_000, 1_700_000_030])).tolist() == [0, 0.5]
    plain = apply(dense(), values)
    assert np.isnan(plain[:2]).all()
    assert plain[2:].tolist() == [-3, 0, 7]


BIG = 2**64 - 5


@pytest.mark.parametrize("held", [pa.uint64(), pa.int64()])
@pytest.mark.parametrize("sent", [pa.uint64(), pa.int64()])
def test_ids_of_64_bits_are_looked_up_whatever_type_holds_them(tmp_path, held, sent) -> None:
    known = [7, BIG] if held == pa.uint64() else [7, -5]
    table = pa.table({"value": pa.array(known, held), "index": [1, 2]})
    pq.write_table(table, tmp_path / "v.parquet")
    encoder = load_vocabulary(tmp_path / "v.parquet")
    values = [7, BIG, None, 8] if sent == pa.uint64() else [7, -5, None, 8]
    # -5 is another number than 2**64 - 5, though their bits are equal.
    second = 2 if held == sent else 0
    assert encoder.encode(pa.array(values, sent)).tolist() == [1, second, 0, 0]


def test_strings_hash_alike_in_slices_of_any_size(monkeypatch) -> None:
    texts = pa.array(["", "a", "", "long enough to need a slice of its own", "é", "b" * 7, "", ""])
    whole = HashEncoder(1000, 3).encode(texts.slice(1))
    for slice_bytes in (1, 7, 64):
        monkeypatch.setattr(transforms, "_SLICE_BYTES", slice_bytes)
        assert HashEncoder(1000, 3).encode(texts.slice(1)).tolist() == whole.tolist()


def test_hashing_strings_takes_no_multiple_of_the_text() -> None:
    texts = pa.array([f"{number:0200d}" for number in range(50_000)])
    tracemalloc.start()
    try:
        HashEncoder(1000, 0).encode(texts)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2 * texts.nbytes
