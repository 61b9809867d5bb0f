"""The order of an epoch's rows, and reading them by their number in it.

The order is a function of (seed, epoch) and the row groups, of nothing else.
Row groups are permuted, then cut into windows of neighbouring groups; rows are shuffled inside a
window. So an epoch is well mixed while only one window has to be in memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from trainer.data.decode import check_kinds, check_schema, decode, layout_of, raw_kind
from trainer.data.manifest import MANIFEST_NAME, FileContents, read_manifest
from trainer.data.parquet import ParquetSource, known_contents, read_schema
from trainer.data.position import Span
from trainer.data.quarantine import FaultLog, FaultMarks, QuarantinedRows, check_share
from trainer.data.ragged import IntArray, cut_at, offsets_of
from trainer.data.rows import Rows, concat_rows
from trainer.errors import CorruptFileError
from trainer.protocol.worker_config import FoundData
from trainer.spec.job import JobSpec
from trainer.storage import Location

# Keeps the random streams of group order and of each window's rows apart.
_GROUP_STREAM, _ROW_STREAM = 0, 1
_Place = tuple[int, int]  # of a window: epoch, number


class EpochOrder:
    """The windows of one epoch. Rows are numbered 0 .. num_rows - 1 in the epoch's order."""

    def __init__(
        self,
        group_rows: Sequence[int] | IntArray,
        *,
        window_rows: int,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
    ) -> None:
        """`group_rows` holds the rows of each row group; a window has at least `window_rows`."""
        self._key = (seed, epoch)
        self._shuffle = shuffle
        self._group_rows = np.asarray(group_rows, dtype=np.int64)
        groups = self._permutation(len(group_rows), _GROUP_STREAM)
        self._windows = _cut(groups, self._group_rows, window_rows)
        self._starts = offsets_of(
            np.array([self._group_rows[window].sum() for window in self._windows], dtype=np.int64)
        )

    @property
    def bounds(self) -> tuple[int, ...]:
        """First row of each window, and the number of rows at the end."""
        return tuple(self._starts.tolist())

    def window(self, number: int) -> tuple[tuple[int, ...], IntArray]:
        """Its row groups, one after the other, and the place among their rows of its i-th row."""
        num_rows = int(self._starts[number + 1] - self._starts[number])
        order = self._permutation(num_rows, _ROW_STREAM, number)
        return tuple(self._windows[number].tolist()), order

    def pieces(self, rows: range) -> list[tuple[int, slice]]:
        """Cut consecutive rows of the epoch at window bounds: (window, slice of its rows)."""
        return cut_at(rows, self._starts)

    def _permutation(self, size: int, *stream: int) -> IntArray:
        if not self._shuffle:
            return np.arange(size, dtype=np.int64)
        return np.random.default_rng([*self._key, *stream]).permutation(size)


def _cut(groups: IntArray, group_rows: IntArray, window_rows: int) -> list[IntArray]:
    """Cut the permuted groups as soon as a window has `window_rows` rows."""
    windows, begin, num_rows = [], 0, 0
    for position, group in enumerate(groups):
        num_rows += int(group_rows[group])
        if num_rows >= window_rows:
            windows.append(groups[begin : position + 1])
            begin, num_rows = position + 1, 0
    if begin < len(groups):
        windows.append(groups[begin:])
    return windows


logger = logging.getLogger(__name__)
# Of decoded rows: a smaller split is kept whole; of a larger one so much is decoded ahead.
CACHE_BYTES = 256 * 2**20
WINDOW_ROWS = 65_536
# So many rows of a kept split are picked at once, for several batches.
_PICKED_ROWS = 16_384
# Windows decoded at once, beside the one in use. A GPU can take rows faster than one core decodes.
_NUM_DECODERS = 2


def open_source(
    spec: JobSpec,
    folder: Location | Path,
    train: ParquetSource | None = None,
    contents: Mapping[str, FileContents] | None = None,
) -> ParquetSource:
    """Open a split's folder with the columns that a resolved spec reads.

    `train` is the training split, if this is another; `contents` are those that somebody found
    before, as of `ParquetSource`. Raises a `DataError`; a missing or ill-typed column is named by
    the spec field that asks for it, and so is one whose raw values are text here and numbers in
    `train`, or vice versa.
    """
    layout, folder = layout_of(spec), Location.parse(folder)
    contents = contents or known_contents(Location.parse(spec.data.path), folder)
    schema = read_schema(folder, contents or ())
    check_schema(layout, schema, folder)
    if train is not None:
        check_kinds(layout, schema, folder, {f.name: raw_kind(f.type) for f in train.schema})
    return ParquetSource(folder, [column.name for column in layout.columns], contents)


def find_data(spec: JobSpec) -> FoundData:
    """What all workers of an attempt read, whatever comes into the folders as it runs.

    Raises as `open_source`.
    """
    data = spec.data
    train = open_source(spec, Location.parse(data.path) / data.split.train)
    contents = {data.split.train: train.contents}
    if validation := data.split.validation:
        held_out = open_source(spec, Location.parse(data.path) / validation, train)
        contents[validation] = held_out.contents
    return FoundData(contents, encodings_digest(spec))


def lease_windows(
    source: ParquetSource, spec: JobSpec
) -> Sequence[int] | Callable[[int], tuple[int, ...]]:
    """Windows for a `LeaseBook`: row bounds of an epoch's, as `RowReader` decodes them.

    None of them, `()`, for a split that every reader keeps whole.
    """
    if source.decoded_bytes <= CACHE_BYTES:
        return ()
    return lambda epoch: _order_of(source, spec, spec.data.shuffle, epoch).bounds


def _order_of(source: ParquetSource, spec: JobSpec, shuffle: bool, epoch: int) -> EpochOrder:
    return EpochOrder(
        source.group_rows,
        window_rows=WINDOW_ROWS,
        seed=spec.training.seed,
        epoch=epoch,
        shuffle=shuffle,
    )


def order_digest(source: ParquetSource, spec: JobSpec) -> str:
    """A checksum of all that decides which row has which number in a training epoch."""
    decisive = [
        source.file_names,
        source.group_rows.tolist(),
        WINDOW_ROWS,
        spec.training.seed,
        spec.data.shuffle,
    ]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


def encodings_digest(spec: JobSpec) -> str:
    """A checksum of what decides which value each id in the data stands for: vocabularies, and how
    many ids each column of a prepared folder may hold, and its seed, by which they are hashed.

    Raises a `DataError`.
    """
    data, decisive = Location.parse(spec.data.path), list[object]()
    if (data / MANIFEST_NAME).exists():
        manifest = read_manifest(data / MANIFEST_NAME)
        known = {name: entry.sha256 for name, entry in manifest.vocabularies.items()}
        decisive = [manifest.vocab_sizes, known]
        # With vocabularies it is that of the order of rows alone. Early digests had none of it.
        if not known and (seed := manifest.options.get("seed")):
            decisive.append(seed)
    files = [data / feature.vocabulary_file for feature in spec.features if feature.vocabulary]
    decisive += [file.size_and_sha256() for file in files]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


@dataclass
class _Opened:
    """A window's decoded rows: `rows` in that `order`, or as they lie where None."""

    rows: Rows
    order: IntArray | None = None

    def __post_init__(self) -> None:
        self._first = 0
        self._picked = self.rows.slice(0, 0)  # in order, from the place `_first` on

    def read(self, piece: slice, num_following: int) -> Rows:
        """The rows of `piece`; as many as are expected to be read after it may be picked, too."""
        if self.order is None:
            return self.rows.slice(piece.start, piece.stop)
        if piece.start < self._first or piece.stop > self._first + len(self._picked):
            stop = min(piece.stop + num_following, piece.start + _PICKED_ROWS)
            self._first = piece.start
            self._picked = self.rows.take(self.order[piece.start : max(piece.stop, stop)])
        return self._picked.slice(piece.start - self._first, piece.stop - self._first)


class RowReader:
    """Gives rows of a split in the order of an epoch, which (seed, epoch) alone decides.

    Of a split of at most `CACHE_BYTES` (decoded) each row group is kept once it is decoded, and
    what is read of a window is picked from there. Of a larger split only the newest window is kept,
    shuffled at once, and the next ones of those expected are decoded ahead by threads of the
    reader's own. The order is the same either way. Where bad rows are quarantined
    they are marked in `Rows.faults` by their numbers in `fault_log`, up to `data.max_bad_share` of
    an epoch's; more are `TooManyBadRowsError`. Else they raise. For one thread at a time.
    """

    def __init__(self, source: ParquetSource, spec: JobSpec, *, shuffle: bool = True) -> None:
        """Rows are shuffled where the spec says so, too."""
        self.fault_log = FaultLog() if spec.data.on_bad_rows == "quarantine" else None
        self._max_bad_share = spec.data.max_bad_share
        self._bad_rows: dict[int, int] = {}
        self._layout = layout_of(spec)
        self._source = source
        shuffle = shuffle and spec.data.shuffle
        self._order_of = lru_cache(2)(lambda epoch: _order_of(source, spec, shuffle, epoch))
        self._keep_all = source.decoded_bytes <= CACHE_BYTES
        self._kept: dict[int, Rows] = {}
        self._epoch = -1
        self._place: _Place | None = None
        self._window: _Opened
        self._expected: deque[_Place] = deque()
        self._spans: Sequence[Span] = ()  # expected last
        self._decoders = ThreadPoolExecutor(_NUM_DECODERS, "decode")
        self._decoding: dict[_Place, Future[_Opened]] = {}
        window_rows = max(WINDOW_ROWS, int(source.group_rows.max()))
        window_bytes = source.decoded_bytes * window_rows // source.num_rows
        self._most_ahead = min(_NUM_DECODERS, max(1, CACHE_BYTES // max(1, window_bytes)))

    def expect(self, epoch: int, spans: Sequence[Span]) -> None:
        """Rows that will be read, perhaps, after those that were expected before."""
        self._spans = spans
        if self._keep_all:
            return
        pieces = (piece for span in spans for piece in self._order_of(epoch).pieces(range(*span)))
        places = list(dict.fromkeys((epoch, number) for number, _ in pieces))
        last = self._expected[-1] if self._expected else self._place
        self._expected.extend(places[places[:1] == [last] :])
        if places[:1] == [self._place]:
            self._decode_ahead()

    def read(self, epoch: int, spans: Sequence[Span]) -> Rows:
        """Decoded rows of some non-empty spans of the order of `epoch`; raises `DataError`."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._bad_rows.clear()
        parts = [
            self._open_window(number).read(piece, self._num_following(span))
            for span in spans
            for number, piece in self._order_of(epoch).pieces(range(*span))
        ]
        return concat_rows(parts)

    def _num_following(self, rows: Span) -> int:
        """How many rows right after these are expected to be read."""
        stops = (stop for start, stop in self._spans if start <= rows[0] < stop)
        return next(stops, rows[1]) - rows[1]

    def close(self) -> None:
        """End the threads. Harmless when called again."""
        self._decoders.shutdown(wait=True, cancel_futures=True)

    def _open_window(self, number: int) -> _Opened:
        place = (self._epoch, number)
        if place == self._place:
            return self._window
        # The first has the link and the cores to itself, as a step waits for it.
        ahead = self._decoding.pop(place, None)
        self._window = ahead.result() if ahead else self._read_window(*place)
        if self.fault_log is not None:
            faults = self._window.rows.faults
            assert faults is not None, "where faults are logged rows are marked"
            self._count_bad_rows(number, self.fault_log.count(faults))
        self._place = place
        if place in self._expected:
            while self._expected.popleft() != place:
                pass
        self._decode_ahead()
        return self._window

    def _decode_ahead(self) -> None:
        """Let the next of the windows that are expected be decoded, and no others."""
        following = list(islice(self._expected, self._most_ahead))
        self._decoding = {
            place: self._decoding.get(place) or self._decoders.submit(self._read_window, *place)
            for place in following
        }

    def _read_window(self, epoch: int, number: int) -> _Opened:
        groups, order = self._order_of(epoch).window(number)
        if not self._keep_all:
            return _Opened(self._decode(groups).take(order))
        self._keep(groups)
        return _Opened(concat_rows([self._kept[group] for group in groups]), order)

    def _keep(self, row_groups: tuple[int, ...]) -> None:
        """Decode those of these row groups that are not yet."""
        if missing := tuple(group for group in row_groups if group not in self._kept):
            rows, start = self._decode(missing), 0
            for group in missing:
                stop = start + int(self._source.group_rows[group])
                self._kept[group] = rows.slice(start, stop)
                start = stop

    def _count_bad_rows(self, window: int, found: QuarantinedRows) -> None:
        """Count a window's bad rows, once however often it is read; raises `TooManyBadRowsError`.

        A reader counts what it decodes itself; the sum over the ranks is checked at reports.
        """
        self._bad_rows[window] = found.total()
        total = sum(self._bad_rows.values())
        check_share(total, self._source.num_rows, self._max_bad_share, found)

    def _decode(self, row_groups: tuple[int, ...]) -> Rows:
        """Row groups one after the other.

        Where bad rows are marked, a group that cannot be read is blank, and all its rows are bad.
        """
        rows = self._source.row_numbers(row_groups)

        def locate(row: int) -> tuple[str, int]:
            return self._source.locate(int(rows[row]))

        marks = None
        if self.fault_log is not None:
            marks = FaultMarks(rows, self.fault_log, self._source.files_of)
        tables, start = [], 0
        reading = self._source.begin_reading(row_groups)
        for group, read in zip(row_groups, reading, strict=True):
            try:
                table = read()
            except CorruptFileError as error:
                if marks is None:
                    raise
                logger.warning("%s", error)
                table = self._source.blank_group(group)
                reason = "row group cannot be read, or has changed"
                marks.add(np.arange(start, start + len(table)), reason)
            tables.append(table)
            start += len(table)
        # Of files, and of blank groups, that differ in where null may stand.
        rows_read = pa.concat_tables(tables, promote_options="default")
        return decode(rows_read, self._layout, locate, marks)
