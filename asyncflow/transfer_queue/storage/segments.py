"""One column in memory: its entries lie end to end in segments, and a locator says where each of them is.

    key --page--> locator = segment number << 32 | position --segment--> values[offsets[position] : offsets[position + 1]]

A large write is a segment of its own, as it came; small writes are appended to the open segment, which is closed when it is full.
A closed segment of which less than half is still wanted is copied and let go. There is no Python object per entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import prod

import numpy as np

from asyncflow.transfer_queue.index import LOW, PAGE_BITS, split
from asyncflow.types import Array, Column, Ragged, Values

LARGE_BYTES = 64 << 10
"""Bytes from which on values are kept, and handed out, as they lie; below, a copy costs less than what a view would keep alive."""
OPEN_BYTES = 256 << 10
OPEN_ENTRIES = 16 << 10
POSITION_BITS = 32
POSITION_MASK = (1 << POSITION_BITS) - 1
ENTRY_BYTES = 16  # the key and the offset of an entry: what an entry without values costs its segment
SLICED_VALUES = 128  # values in a run from which copying slices (0.25 us each) beats gathering by index (1.5 ns a value)
SLICED_BYTES = 4 << 10  # and bytes in a run of few, large values


class Keys:
    """Keys int64 [n], split once into the pages that they fall into."""

    __slots__ = ("array", "parts")

    def __init__(self, keys: Array) -> None:
        self.array = keys
        self.parts = list(split(keys))  # page, where in `keys`, the slots in the page

    def __len__(self) -> int:
        return len(self.array)


class _LocatorPage:
    """The locators of the 4,096 keys of a page, -1 where there is no entry."""

    __slots__ = ("live", "locators")

    def __init__(self) -> None:
        self.locators = np.full(1 << PAGE_BITS, -1, np.int64)
        self.live = 0


class _ColumnSegment:
    """`count` entries in `values` [>= used, *shape]; ragged ones also in `offsets` int64 [> count]. `keys` int64 [>= count]."""

    __slots__ = ("base", "count", "is_open", "keys", "live", "live_bytes", "offsets", "used", "values")

    def __init__(self, number: int, values: Array, offsets: Array | None, keys: Array) -> None:
        self.base = number << POSITION_BITS
        self.values, self.offsets, self.keys = values, offsets, keys
        self.count = self.used = self.live = self.live_bytes = 0
        self.is_open = False

    @property
    def held_bytes(self) -> int:
        return self.values.nbytes + self.keys.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def resize(self, num_values: int, num_entries: int) -> None:
        """Room for this many. Readers may hold views of the arrays until now, which therefore stay as they are."""
        self.values = _resized(self.values, self.used, num_values)
        self.keys = _resized(self.keys, self.count, num_entries)
        if self.offsets is not None:
            self.offsets = _resized(self.offsets, self.count + 1, num_entries + 1)


def _resized(array: Array, used: int, size: int) -> Array:
    if size == len(array):
        return array
    larger = np.empty((size, *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


def kept(array: Array) -> Array:
    """`array` if nobody can write to it, or else a copy; read-only. A small part of something larger is copied, too: keeping it
    would keep all of that."""
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    if array.flags.writeable or not array.flags.c_contiguous or root.nbytes > 2 * array.nbytes:
        array = np.array(array, order="C")
        array.flags.writeable = False
    return array


class ColumnSegments:
    """The entries of one column. `nbytes`: of the values that are there; `held_bytes`: of all that is kept for them."""

    def __init__(self, column: Column) -> None:
        self.per = column.per
        self.nbytes = 0
        self._is_ragged = column.ragged
        self._dtype, self._shape = np.dtype(column.dtype), column.shape
        self._value_bytes = self._dtype.itemsize * prod(column.shape)
        self._open_values = max(1, OPEN_BYTES // max(1, self._value_bytes))
        self._pages: defaultdict[int, _LocatorPage] = defaultdict(_LocatorPage)
        self._segments: dict[int, _ColumnSegment] = {}
        self._num_segments = 0  # ever
        self._open: _ColumnSegment | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes that the column takes, free room in its segments included."""
        return sum(s.held_bytes for s in self._segments.values()) + len(self._pages) * (8 << PAGE_BITS)

    def add_one(self, key: int, values: Values) -> None:
        """The single entry of `values` for `key`. Called for every column of every response: no more than it needs."""
        array = values.values if isinstance(values, Ragged) else values
        size = len(array)
        num_bytes = size * self._value_bytes
        if num_bytes >= LARGE_BYTES:
            self.add(Keys(np.array([key], np.int64)), values)
            return
        segment = self._open
        if segment is None or segment.used + size > len(segment.values) or segment.count == len(segment.keys):
            segment = self._with_room(size, 1)
        page = self._pages[key >> PAGE_BITS]
        position, used = segment.count, segment.used + size
        segment.values[segment.used : used] = array
        segment.keys[position] = key
        if segment.offsets is not None:
            segment.offsets[position + 1] = used
        page.locators[key & LOW] = segment.base | position
        page.live += 1
        segment.count = position + 1
        segment.used = used
        segment.live += 1
        segment.live_bytes += num_bytes
        self.nbytes += num_bytes

    def add(self, keys: Keys, values: Values) -> None:
        """An entry for each key, none of which has one. When memory runs out nothing has been added."""
        pages = [self._pages[number] for number, _, _ in keys.parts]
        locators = np.arange(len(keys), dtype=np.int64)
        segment, position = self._placed(keys, values)
        locators += segment.base | position
        for page, (_, where, slots) in zip(pages, keys.parts, strict=True):
            page.locators[slots] = locators[where]
            page.live += len(slots)
        num_bytes = values.nbytes
        segment.live += len(keys)
        segment.live_bytes += num_bytes
        self.nbytes += num_bytes

    def read(self, keys: Keys) -> Values:
        """The entries of keys, in their order. Raises `LookupError` when one is not there."""
        locators = self._located(keys)
        if len(locators) and int(locators.min()) < 0:
            raise LookupError(f"{self.per} {keys.array[locators.argmin()]} is not there")
        return self._gathered(locators)

    def remove(self, keys: Keys) -> None:
        """Let the entries of keys go, each key once; those that have none are passed over."""
        found = []
        for number, _, slots in keys.parts:
            page = self._pages.get(number)
            if page is None:
                continue
            locators = page.locators[slots]
            locators = locators[locators >= 0]
            page.locators[slots] = -1
            page.live -= len(locators)
            if not page.live:
                del self._pages[number]
            found.append(locators)
        if not found:
            return
        concerned = list(self._by_segment(np.concatenate(found)))
        for segment, positions in concerned:
            num_bytes = len(positions) * self._value_bytes
            if segment.offsets is not None:
                num_bytes = int((segment.offsets[positions + 1] - segment.offsets[positions]).sum()) * self._value_bytes
            segment.live -= len(positions)
            segment.live_bytes -= num_bytes
            self.nbytes -= num_bytes
        for segment, _ in concerned:
            self._tidy(segment)

    def _located(self, keys: Keys) -> Array:
        """int64 [n]: locators, -1 for a key that has no entry."""
        if len(keys.parts) == 1:
            number, _, slots = keys.parts[0]
            page = self._pages.get(number)
            return np.full(len(slots), -1, np.int64) if page is None else page.locators[slots]
        locators = np.full(len(keys), -1, np.int64)
        for number, where, slots in keys.parts:
            if (page := self._pages.get(number)) is not None:
                locators[where] = page.locators[slots]
        return locators

    def _by_segment(self, locators: Array) -> Iterator[tuple[_ColumnSegment, Array]]:
        """Each segment concerned with the positions in it."""
        numbers = locators >> POSITION_BITS
        for number in np.unique(numbers).tolist():
            yield self._segments[number], locators[numbers == number] & POSITION_MASK

    def _new_segment(self, values: Array, offsets: Array | None, keys: Array) -> _ColumnSegment:
        segment = _ColumnSegment(self._num_segments, values, offsets, keys)
        self._segments[self._num_segments] = segment
        self._num_segments += 1
        return segment

    def _placed(self, keys: Keys, values: Values) -> tuple[_ColumnSegment, int]:
        """Place of entries: a segment, and the position of the first in it."""
        array, offsets = (values.values, values.offsets) if isinstance(values, Ragged) else (values, None)
        if array.nbytes >= LARGE_BYTES or len(keys) > OPEN_ENTRIES // 4:
            segment = self._new_segment(kept(array), None if offsets is None else kept(offsets), kept(keys.array))
            segment.count, segment.used = len(keys), len(array)
            return segment, 0
        segment = self._with_room(len(array), len(keys))
        position, end = segment.count, segment.count + len(keys)
        used = segment.used + len(array)
        segment.values[segment.used : used] = array
        segment.keys[position:end] = keys.array
        if segment.offsets is not None and offsets is not None:
            segment.offsets[position + 1 : end + 1] = offsets[1:] + segment.used
        segment.count, segment.used = end, used
        return segment, position

    def _with_room(self, num_values: int, num_entries: int) -> _ColumnSegment:
        """The open segment, grown if need be; a new one when it would become too large."""
        segment = self._open
        if segment is None:
            values = np.empty((max(num_values, self._open_values // 64), *self._shape), self._dtype)
            keys = np.empty(max(num_entries, 64), np.int64)
            offsets = np.zeros(len(keys) + 1, np.int64) if self._is_ragged else None
            self._open = segment = self._new_segment(values, offsets, keys)
            segment.is_open = True
            return segment
        used, count = segment.used + num_values, segment.count + num_entries
        if used > self._open_values or count > OPEN_ENTRIES:
            segment.resize(segment.used, segment.count)
            segment.is_open, self._open = False, None
            self._tidy(segment)
            return self._with_room(num_values, num_entries)
        if used > len(segment.values):
            segment.resize(min(max(used, 2 * len(segment.values)), self._open_values), len(segment.keys))
        if count > len(segment.keys):
            segment.resize(len(segment.values), min(max(count, 2 * len(segment.keys)), OPEN_ENTRIES))
        return segment

    def _tidy(self, segment: _ColumnSegment) -> None:
        """Let a segment go that has no entry any more; copy out those of a closed one of which they are less than half."""
        number = segment.base >> POSITION_BITS
        if number not in self._segments:  # it went when another one's entries were moved
            return
        if not segment.live:
            del self._segments[number]
            self._open = None if self._open is segment else self._open
            return
        wanted = segment.live_bytes + ENTRY_BYTES * segment.live
        if segment.is_open or 2 * wanted >= segment.used * self._value_bytes + ENTRY_BYTES * segment.count:
            return
        here = np.arange(segment.base, segment.base + segment.count, dtype=np.int64)
        live = here[self._located(Keys(segment.keys[: segment.count])) == here]
        values = self._gathered(live, may_view=False)
        for array in (values.values, values.offsets) if isinstance(values, Ragged) else (values,):
            array.flags.writeable = False  # they are the new segment's own
        keys = Keys(segment.keys[live & POSITION_MASK])
        target, position = self._placed(keys, values)
        target.live += segment.live
        target.live_bytes += segment.live_bytes
        moved = np.arange(target.base | position, (target.base | position) + len(keys), dtype=np.int64)
        for page, where, slots in keys.parts:
            self._pages[page].locators[slots] = moved[where]
        del self._segments[number]

    def _gathered(self, locators: Array, may_view: bool = True) -> Values:
        """The entries at locators, in order: a read-only view when they are a large run, else a copy."""
        size = len(locators)
        if not size:
            empty = np.empty((0, *self._shape), self._dtype)
            return Ragged(empty, np.zeros(1, np.int64)) if self._is_ragged else empty
        first = int(locators[0])
        if int(locators[-1]) - first == size - 1 and bool((locators[1:] - locators[:-1] == 1).all()):
            segment, position = self._segments[first >> POSITION_BITS], first & POSITION_MASK
            if segment.offsets is None:
                return _part(segment.values, position, position + size, may_view)
            offsets = segment.offsets[position : position + size + 1]
            low, high = int(offsets[0]), int(offsets[-1])
            return Ragged(_part(segment.values, low, high, may_view), offsets - low)
        numbers, positions = locators >> POSITION_BITS, locators & POSITION_MASK
        distinct = [first >> POSITION_BITS] if bool((numbers == numbers[0]).all()) else np.unique(numbers).tolist()
        if not self._is_ragged:
            return self._copied(distinct, numbers, positions, np.ones(size, np.int64), np.arange(size + 1))
        starts, lengths = np.empty(size, np.int64), np.empty(size, np.int64)
        for number in distinct:
            where = slice(None) if len(distinct) == 1 else np.flatnonzero(numbers == number)
            bounds, inside = self._segments[number].offsets, positions[where]
            assert bounds is not None
            starts[where] = bounds[inside]
            lengths[where] = bounds[inside + 1] - bounds[inside]
        offsets = np.zeros(size + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return Ragged(self._copied(distinct, numbers, starts, lengths, offsets), offsets)

    def _copied(self, distinct: list[int], numbers: Array, starts: Array, lengths: Array, offsets: Array) -> Array:
        """Copy, for each entry, `lengths` values of segment `numbers` from `starts` on to `offsets`, neighbours together."""
        ends = starts + lengths
        breaks = np.flatnonzero((starts[1:] != ends[:-1]) | (numbers[1:] != numbers[:-1]))
        total, num_runs = int(offsets[-1]), len(breaks) + 1
        worth_slicing = SLICED_VALUES if len(distinct) == 1 else SLICED_VALUES // 4  # gathering from several costs several passes
        if total >= worth_slicing * num_runs or total * self._value_bytes >= SLICED_BYTES * num_runs:
            lows = starts[np.concatenate(([0], breaks + 1))].tolist()
            highs = ends[np.concatenate((breaks, [len(ends) - 1]))].tolist()
            if len(distinct) == 1:
                values = self._segments[distinct[0]].values
                return np.concatenate([values[low:high] for low, high in zip(lows, highs, strict=True)])
            arrays = {number: self._segments[number].values for number in distinct}
            runs = numbers[np.concatenate(([0], breaks + 1))].tolist()
            return np.concatenate([arrays[n][low:high] for n, low, high in zip(runs, lows, highs, strict=True)])
        shifts = starts - offsets[:-1]
        if len(distinct) == 1:
            return self._segments[distinct[0]].values[np.repeat(shifts, lengths) + np.arange(total)]
        copied = np.empty((total, *self._shape), self._dtype)
        owners, sources = np.repeat(numbers, lengths), np.repeat(shifts, lengths) + np.arange(total)
        for number in distinct:
            where = np.flatnonzero(owners == number)
            copied[where] = self._segments[number].values[sources[where]]
        return copied


def _part(values: Array, low: int, high: int, may_view: bool) -> Array:
    part = values[low:high]
    if not may_view or part.nbytes < LARGE_BYTES:
        return part.copy()
    part.flags.writeable = False
    return part
