"""The rows of one task, without a Python object per row or per group: pages of flat arrays. Pure.

    page      2^page_bits rows and their groups; made by the first group admitted into it, freed with its last row. It holds the
              number of each group's kind, whose queue has those that are ready (`ready.py`).
    move      the one way in which a row changes its state. It keeps every count, and every queue, in agreement.

A column has two faces on the same memory: the singular is an `array.array`, whose items are read and written three times faster
than numpy's; the plural is a numpy array for whole batches. Up to `SCALAR` rows go one by one, more go through numpy.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from itertools import pairwise

import numpy as np

from asyncflow.transfer_queue.ready import Kind, KindKey, ReadyQueues
from asyncflow.types import Array, GroupMeta

SCALAR = 16
MIN_PAGE_BITS = 12


class RowState(IntEnum):
    """Ordered: a notice only ever raises a row's state, so the order in which notices arrive does not matter."""

    WAITING = 1
    READY = 2
    LEASED = 3
    DONE = 4
    FILTERED = 5
    DEAD = 6


ABSENT = 0
WAITING, READY, LEASED, DONE, FILTERED, DEAD = (int(state) for state in RowState)


class Page:
    """`first`: the index of its first row, `first_group`: the number of its first group, `num_rows`: the rows that are known."""

    def __init__(self, number: int, page_bits: int, group_bits: int) -> None:
        self.first, self.first_group = number << page_bits, number << (page_bits - group_bits)
        self.num_rows = 0
        rows, groups = 1 << page_bits, 1 << (page_bits - group_bits)
        self.mask, self.masks = _column("Q", rows)
        self.state, self.states = _column("B", rows)
        self.lease, self.leases = _column("q", rows)  # 0: none; of a LEASED row: picked, and not handed out yet
        self.token, self.tokens = _column("i", rows)
        self.delivery, self.deliveries = _column("I", rows)
        self.failure, self.failures = _column("H", rows)
        count = "H" if group_bits < 16 else "I"
        self.size, self.sizes = _column(count, groups)
        self.known, self.knowns = _column(count, groups)  # rows not dropped
        self.live, self.lives = _column(count, groups)  # rows waiting, ready or leased
        self.ready, self.readies = _column(count, groups)
        self.kind, self.kinds = _column("i", groups)  # 0: an unknown group
        self.unit, self.units = _column("i", groups)
        self.queued, self.queueds = _column("B", groups)


def _column(typecode: str, length: int) -> tuple[array[int], Array]:
    flat = array(typecode, [0]) * length  # made from bytes it would have room to spare
    return flat, np.frombuffer(flat, flat.typecode)


def span(positions: Array) -> slice | Array:
    """Sorted positions that follow each other as a slice, which is several times faster (rows put together do)."""
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first == len(positions) - 1 else positions


_FIRST = np.zeros(1, np.int64)


class Pages:
    """Rows of a task, in pages of neighbouring numbers. `on_leave(lease, rows, tokens)` is called when rows of so many tokens
    have left a lease."""

    def __init__(self, group_bits: int, whole_groups: bool, on_leave: Callable[[int, int, int], None]) -> None:
        self.group_bits = group_bits
        self.page_bits = max(MIN_PAGE_BITS, group_bits)
        self.counts = [0] * (len(RowState) + 1)  # rows by state; the first is of no meaning
        self.totals = [0] * (len(RowState) + 1)  # how many rows ever came into each state
        self._whole = whole_groups
        self._on_leave = on_leave
        self._pages: dict[int, Page] = {}
        self.queues = ReadyQueues(self._is_queued)
        self._kinds = self.queues.kinds

    # -- finding ------------------------------------------------------------------------------------------------------------

    def page_of(self, row: int) -> Page | None:
        """Page of a row, if there is one."""
        return self._pages.get(row >> self.page_bits)

    def page_of_group(self, group: int) -> Page | None:
        """Page of a group's rows, if there is one."""
        return self._pages.get(group >> (self.page_bits - self.group_bits))

    def __iter__(self) -> Iterator[Page]:
        """Pages in the order of their rows."""
        return (self._pages[number] for number in sorted(self._pages))

    def split(self, rows: Array, *, backwards: bool = False) -> Iterator[tuple[Page, int, int]]:
        """The known pages of sorted rows, each with the position of its first row and the one after its last."""
        numbers = rows >> self.page_bits
        inner = [] if numbers[0] == numbers[-1] else (np.flatnonzero(np.diff(numbers)) + 1).tolist()
        parts = list(pairwise([0, *inner, len(rows)]))
        for start, stop in reversed(parts) if backwards else parts:
            page = self._pages.get(int(numbers[start]))
            if page is not None:
                yield page, start, stop

    def meta(self, page: Page, group: int) -> GroupMeta:
        """Facts of a group, out of its page."""
        position = group - page.first_group
        kind = self._kinds[page.kind[position]]
        return GroupMeta(group, page.size[position], kind.key[1], kind.interval, kind.key[4], kind.key[0])

    # -- admitting ----------------------------------------------------------------------------------------------------------

    def admit(self, metas: Iterable[GroupMeta], unit: int) -> None:
        """Groups that are known already are passed over, and so are repetitions."""
        by_key: dict[KindKey, list[GroupMeta]] = {}
        for m in metas:
            key = (m.priority, m.partition, m.interval.low, m.interval.high, m.topic)
            if key in by_key:
                by_key[key].append(m)
            else:
                by_key[key] = [m]
        for key, of_key in by_key.items():
            if len(of_key) <= SCALAR:
                for m in of_key:
                    self._admit_one(key, m.group, m.size, unit)
            else:
                self._admit_many(key, of_key, unit)

    def _admit_one(self, key: KindKey, group: int, size: int, unit: int) -> None:
        first = group << self.group_bits
        page = self._pages.get(first >> self.page_bits) or self._new_page(first >> self.page_bits)
        position = group - page.first_group
        if page.kind[position]:
            return
        kind = self.queues.kind(key)
        kind.num_groups += 1
        page.kind[position], page.unit[position] = kind.number, unit
        page.size[position] = page.known[position] = page.live[position] = size
        page.states[first - page.first : first - page.first + size] = WAITING
        page.num_rows += size
        self.counts[WAITING] += size

    def _admit_many(self, key: KindKey, metas: list[GroupMeta], unit: int) -> None:
        numbers, at = np.unique(np.fromiter((m.group for m in metas), np.int64, len(metas)), return_index=True)
        sizes = np.fromiter((m.size for m in metas), np.int64, len(metas))[at]
        pages = numbers >> (self.page_bits - self.group_bits)
        for number in np.unique(pages).tolist():
            page = self._pages.get(number) or self._new_page(number)
            here = pages == number
            positions, size = numbers[here] - page.first_group, sizes[here]
            new = page.kinds[positions] == 0
            positions, size = positions[new], size[new]
            if not len(positions):
                continue
            kind = self.queues.kind(key)
            kind.num_groups += len(positions)
            page.kinds[positions], page.units[positions] = kind.number, unit
            page.sizes[positions] = page.knowns[positions] = page.lives[positions] = size
            samples = np.arange(int(size.max()))
            slots = ((positions << self.group_bits)[:, None] + samples)[samples < size[:, None]]
            page.states[slots] = WAITING
            page.num_rows += len(slots)
            self.counts[WAITING] += len(slots)

    def narrow(self, page: Page, group: int, low: int, now: float) -> None:
        """Let no version below `low` generate a group; a worker that has it already keeps it. Nothing if it is unknown."""
        position = group - page.first_group
        if not page.kind[position]:
            return
        old, was_queued = self._kinds[page.kind[position]], page.queued[position]
        if old.interval.low >= low:
            return
        if was_queued:
            page.queued[position] = 0
            old.num_available -= page.ready[position]
            self.queues.unqueue(old, 1)
        priority, partition, _, high, topic = old.key
        new = self.queues.kind((priority, partition, low, high, topic))
        new.num_groups += 1
        page.kind[position] = new.number
        self.queues.forget(old, 1)
        self.settle(page, [group], now)

    def _new_page(self, number: int) -> Page:
        page = self._pages[number] = Page(number, self.page_bits, self.group_bits)
        return page

    # -- moving -------------------------------------------------------------------------------------------------------------

    def move_one(self, page: Page, slot: int, new: int) -> None:
        """Give a known row another state; ABSENT forgets it. `settle` its group afterwards (a batch settles once)."""
        old = page.state[slot]
        page.state[slot] = new
        self.counts[old] -= 1
        self.counts[new] += 1
        self.totals[new] += 1
        position = slot >> self.group_bits
        if old == LEASED:
            lease = page.lease[slot]
            if lease:
                page.lease[slot] = 0
                self._on_leave(lease, 1, page.token[slot])
        if (old == READY) != (new == READY):
            change = 1 if new == READY else -1
            page.ready[position] += change
            if page.queued[position]:
                self._kinds[page.kind[position]].num_available += change
        if old <= LEASED and not WAITING <= new <= LEASED:
            page.live[position] -= 1
        if new == ABSENT:
            page.mask[slot] = page.token[slot] = page.delivery[slot] = page.failure[slot] = 0
            page.known[position] -= 1
            page.num_rows -= 1

    def settle(self, page: Page, groups: Iterable[int], now: float, *, is_first: bool = False) -> None:
        """Settle groups of a page after their rows have moved: queue those that are ready now, at the front of their queue if
        `is_first`, unqueue those that are not any more, and forget those (and a page) without rows."""
        ready: dict[int, list[int]] = {}
        for group in groups:
            position = group - page.first_group
            number, num_ready = page.kind[position], page.ready[position]
            is_ready = num_ready > 0 and (not self._whole or num_ready == page.live[position])
            if is_ready and not page.queued[position]:
                page.queued[position] = 1
                ready.setdefault(number, []).append(group)
                self._kinds[number].num_available += num_ready
            elif not is_ready and page.queued[position]:
                page.queued[position] = 0
                self._kinds[number].num_available -= num_ready
                self.queues.unqueue(self._kinds[number], 1)
            if number and not page.known[position]:
                page.kind[position] = 0
                self.queues.forget(self._kinds[number], 1)
        for number, of_kind in ready.items():
            self.queues.queue(self._kinds[number], of_kind, now, is_first)
        self._free_if_empty(page)

    def move_many(self, page: Page, slots: Array, old: Array, new: Array, now: float, *, is_first: bool = False) -> None:
        """`move_one` and `settle` for many rows: sorted slots of one page, each once, with their states before and after."""
        pairs = old << 3 | new
        for pair in np.unique(pairs).tolist():
            self.move_alike(page, slots[pairs == pair], pair >> 3, pair & 7, now, is_first=is_first)

    def move_alike(self, page: Page, slots: Array, old: int, new: int, now: float, *, is_first: bool = False) -> None:
        """`move_many` for rows that are all in one state and are all to be in one other."""
        num_rows, where = len(slots), span(slots)
        page.states[where] = new
        self.counts[old] -= num_rows
        self.counts[new] += num_rows
        self.totals[new] += num_rows
        if old == LEASED:
            leases = page.leases[where].copy()
            page.leases[where] = 0
            self.report(leases, np.ones(num_rows, np.int64), page.tokens[where])
        groups = slots >> self.group_bits
        starts = np.concatenate((_FIRST, np.flatnonzero(groups[1:] != groups[:-1]) + 1))
        of_group = np.diff(starts, append=num_rows) if len(starts) < num_rows else 1
        touched = groups[starts] if len(starts) < num_rows else groups
        at = span(touched)
        num_before, was_queued = page.readies[at].copy(), page.queueds[at] != 0
        num_ready = num_before + of_group if new == READY else num_before - of_group if old == READY else num_before
        page.readies[at] = num_ready
        if old <= LEASED and not WAITING <= new <= LEASED:
            page.lives[at] -= np.asarray(of_group, page.lives.dtype)
        is_ready = num_ready > 0
        if self._whole:
            is_ready &= num_ready == page.lives[at]
        kinds = page.kinds[at].copy()
        is_gone = None
        if new == ABSENT:
            page.masks[where] = page.tokens[where] = page.deliveries[where] = page.failures[where] = 0
            page.num_rows -= num_rows
            page.knowns[at] -= np.asarray(of_group, page.knowns.dtype)
            is_gone = page.knowns[at] == 0
            page.kinds[touched[is_gone]] = 0
        if is_gone is not None or was_queued.any() or is_ready.any():
            page.queueds[at] = is_ready
            is_one = bool((kinds == kinds[0]).all())
            for number in [int(kinds[0])] if is_one else np.unique(kinds).tolist():
                here = slice(None) if is_one else kinds == number
                kind, was, now_ready = self._kinds[number], was_queued[here], is_ready[here]
                kind.num_available += int(num_ready[here].sum(where=now_ready)) - int(num_before[here].sum(where=was))
                fresh = touched[here][now_ready & ~was]
                if len(fresh):
                    self.queues.queue(kind, array("q", (fresh + page.first_group).tobytes()), now, is_first)
                if num_off := int((was & ~now_ready).sum()):
                    self.queues.unqueue(kind, num_off)
                if is_gone is not None and (num_gone := int(is_gone[here].sum())):
                    self.queues.forget(kind, num_gone)
        self._free_if_empty(page)

    def pick(self, page: Page, group: int, slots: list[int]) -> list[int]:
        """Ready rows of a queued group become leased, by no lease yet: `move_one` and `settle`, and faster. Returns the rows."""
        num_rows, position = len(slots), group - page.first_group
        if num_rows <= SCALAR:
            state = page.state
            for slot in slots:
                state[slot] = LEASED
        else:
            page.states[slots] = LEASED
        self.counts[READY] -= num_rows
        self.counts[LEASED] += num_rows
        page.ready[position] -= num_rows
        kind = self._kinds[page.kind[position]]
        kind.num_available -= num_rows
        if not page.ready[position]:
            page.queued[position] = 0
            if kind.head() == group:
                kind.pop()
            self.queues.unqueue(kind, 1)
        first = page.first
        return [first + slot for slot in slots]

    def report(self, leases: Array, num_rows: Array, tokens: Array) -> None:
        """Tell `on_leave` of rows and tokens, added up by lease; of those of no lease nobody hears."""
        held = leases > 0
        found, at = np.unique(leases[held], return_inverse=True)
        rows, weights = np.bincount(at, num_rows[held]), np.bincount(at, tokens[held])  # exact: far below 2^53
        for lease, n, weight in zip(found.tolist(), rows.tolist(), weights.tolist(), strict=True):
            self._on_leave(lease, int(n), int(weight))

    def _free_if_empty(self, page: Page) -> None:
        if not page.num_rows:
            self._pages.pop(page.first >> self.page_bits, None)

    # -- what is ready ------------------------------------------------------------------------------------------------------

    def head(self, kind: Kind) -> tuple[Page, int]:
        """The first ready group of a kind that has one, and its page."""
        shift, number = self.page_bits - self.group_bits, kind.number
        while True:
            chunk = kind.chunks[0]
            group = chunk.groups[chunk.head]
            page = self._pages.get(group >> shift)
            if page is not None:
                position = group - page.first_group
                if page.queued[position] and page.kind[position] == number:
                    return page, group
            kind.pop()

    def first(self, kind: Kind, count: int) -> list[int]:
        """The first `count` ready groups of a kind."""
        found: dict[int, None] = {}  # a group that was chosen out of turn and came back has two entries
        for group in kind.entries():
            if len(found) == count:
                break
            if self._is_queued(kind, group):
                found[group] = None
        return list(found)

    def ready_slots(self, page: Page, group: int) -> list[int]:
        """Positions in the page of the ready rows of a group."""
        start = (group << self.group_bits) - page.first
        size = page.size[group - page.first_group]
        if size == 1:
            return [start] if page.state[start] == READY else []
        stop = start + size
        if size > SCALAR:
            slots: list[int] = (np.flatnonzero(page.states[start:stop] == READY) + start).tolist()
            return slots
        state = page.state
        return [slot for slot in range(start, stop) if state[slot] == READY]

    def _is_queued(self, kind: Kind, group: int) -> bool:
        page = self._pages.get(group >> (self.page_bits - self.group_bits))
        if page is None:
            return False
        position = group - page.first_group
        return bool(page.queued[position]) and page.kind[position] == kind.number
