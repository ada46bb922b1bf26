"""Index of a storage unit: its groups, and for every row the columns that are there and those being written. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from asyncflow.transfer_queue.schema import MAX_COLUMNS
from asyncflow.types import Array, GroupMeta

PAGE_BITS = 12
LOW = (1 << PAGE_BITS) - 1
PRESENT = np.uint64(1 << (MAX_COLUMNS))  # the bit that says that a row is there; the lower ones are the columns'


class _IndexPage:
    """4,096 neighbouring rows."""

    __slots__ = ("claims", "masks", "num_rows", "tokens")

    def __init__(self) -> None:
        self.masks = np.zeros(1 << PAGE_BITS, np.uint64)
        self.claims = np.zeros(1 << PAGE_BITS, np.uint64)
        self.tokens = np.zeros(1 << PAGE_BITS, np.int32)
        self.num_rows = 0


class Index:
    """Rows are int64 arrays without repetition. A column is *claimed* while it is being written and *there* afterwards."""

    def __init__(self, group_bits: int) -> None:
        self._group_bits = group_bits
        self._pages: defaultdict[int, _IndexPage] = defaultdict(_IndexPage)
        self._groups: dict[int, list[int]] = {}  # group -> [rows left, mask of its group columns, claimed ones]
        self.metas: dict[int, GroupMeta] = {}
        self.num_rows = 0

    def admit(self, metas: Iterable[GroupMeta]) -> list[GroupMeta]:
        """Add groups with all their rows. Returns those that are new."""
        new = [meta for meta in {meta.group: meta for meta in metas}.values() if meta.group not in self.metas]
        for meta in new:
            self.metas[meta.group] = meta
            self._groups[meta.group] = [meta.size, 0, 0]
            self.num_rows += meta.size
            at = meta.group << self._group_bits
            end = at + meta.size
            while at < end:  # a group may lie on two pages
                page = self._pages[at >> PAGE_BITS]
                stop = min(end, ((at >> PAGE_BITS) + 1) << PAGE_BITS)
                page.masks[at & LOW : (at & LOW) + stop - at] = PRESENT
                page.num_rows += stop - at
                at = stop
        return new

    def rows_of(self, groups: Iterable[int]) -> Array:
        """int64: the rows of groups that are there."""
        metas = [self.metas[group] for group in groups if group in self.metas]
        parts = [np.arange(m.size, dtype=np.int64) + (m.group << self._group_bits) for m in metas]
        return self.present(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    def present(self, rows: Array) -> Array:
        """int64: those that are there."""
        return rows[self._masks(rows) >= PRESENT]

    def first_without(self, rows: Array, mask: int) -> tuple[int, int] | None:
        """(row, the bits of `mask` that it lacks) for the first row that lacks any; a row that is not there lacks all."""
        wanted = np.uint64(mask)
        lacking = wanted & ~self._masks(rows)
        found = np.flatnonzero(lacking)
        return (int(rows[found[0]]), int(lacking[found[0]])) if len(found) else None

    def claim(self, rows: Array, mask: int) -> Array:
        """Claim columns. Returns bool [n]: False where the row is not there, or one of the columns is there or claimed."""
        wanted, free = np.uint64(mask), np.zeros(len(rows), bool)
        for where, page, at in self._split(rows):
            if page is not None:
                is_free = (page.masks[at] >= PRESENT) & ((page.masks[at] | page.claims[at]) & wanted == 0)
                page.claims[at[is_free]] |= wanted
                free[where] = is_free
        return free

    def is_claimed(self, rows: Array, mask: int, groups: Sequence[int], group_mask: int) -> bool:
        """Whether one of these columns, of rows or of groups, is being written."""
        bits = np.uint64(mask)
        if any(page is not None and (page.claims[at] & bits).any() for _, page, at in self._split(rows)):
            return True
        return any(number in self._groups and self._groups[number][2] & group_mask for number in groups)

    def settle(self, rows: Array, mask: int, *, is_written: bool) -> None:
        """End a claim: the columns are there now, or they are not. Rows dropped meanwhile are passed over."""
        bits = np.uint64(mask)
        for _, page, at in self._split(rows):
            if page is not None:
                page.claims[at] &= ~bits
                if is_written:
                    there = at[page.masks[at] >= PRESENT]
                    page.masks[there] |= bits

    def claim_groups(self, groups: Sequence[int], mask: int) -> list[bool]:
        """Mark columns of groups as being written, as `claim` does for rows."""
        free = []
        for number in groups:
            group = self._groups.get(number)
            free.append(group is not None and not (group[1] | group[2]) & mask)
            if group is not None and free[-1]:
                group[2] |= mask
        return free

    def settle_groups(self, groups: Sequence[int], mask: int, *, is_written: bool) -> None:
        """End the writing of columns of groups, as `settle` does for rows; the rows of the groups have these columns too."""
        for number in groups:
            group = self._groups.get(number)
            if group is not None:
                group[2] &= ~mask
                group[1] |= mask if is_written else 0
        if is_written:
            self.settle(self.rows_of(groups), mask, is_written=True)

    def add_tokens(self, rows: Array, counts: Array) -> None:
        """Rows weigh so many tokens more (int64 [n])."""
        for where, page, at in self._split(rows):
            if page is not None:
                page.tokens[at] += counts[where].astype(np.int32)

    def tokens(self, rows: Array) -> Array:
        """int32 [n]: what rows weigh by now."""
        tokens = np.zeros(len(rows), np.int32)
        for where, page, at in self._split(rows):
            if page is not None:
                tokens[where] = page.tokens[at]
        return tokens

    def drop(self, rows: Array) -> tuple[Array, list[GroupMeta]]:
        """Forget rows. Returns those that were there (int64), and the groups whose last row this was."""
        dropped, gone = self.present(rows), []
        for _, page, at in self._split(dropped):
            if page is not None:
                page.masks[at], page.claims[at], page.tokens[at] = 0, 0, 0
                page.num_rows -= len(at)
        for number in np.unique(dropped >> PAGE_BITS).tolist():
            if not self._pages[number].num_rows:
                del self._pages[number]
        numbers, counts = np.unique(dropped >> self._group_bits, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            group = self._groups[number]
            group[0] -= count
            if not group[0]:
                del self._groups[number]
                gone.append(self.metas.pop(number))
        self.num_rows -= len(dropped)
        return dropped, gone

    def group_records(self) -> Iterator[tuple[list[GroupMeta], int]]:
        """Groups, those that have the same columns together, and the mask of these columns."""
        by_mask: dict[int, list[GroupMeta]] = {}
        for number, (_, mask, _) in self._groups.items():
            by_mask.setdefault(mask, []).append(self.metas[number])
        yield from ((metas, mask) for mask, metas in by_mask.items())

    def records(self) -> Iterator[tuple[Array, int, Array]]:
        """Rows, in the order of pages: (rows int64, mask of the columns that all of them have, tokens int32)."""
        for number, page in sorted(self._pages.items()):
            there = np.flatnonzero(page.masks)
            for mask in np.unique(page.masks[there]).tolist():
                at = there[page.masks[there] == np.uint64(mask)]
                yield at.astype(np.int64) + (number << PAGE_BITS), mask & ~int(PRESENT), page.tokens[at]

    def _masks(self, rows: Array) -> Array:
        masks = np.zeros(len(rows), np.uint64)
        for where, page, at in self._split(rows):
            if page is not None:
                masks[where] = page.masks[at]
        return masks

    def _split(self, rows: Array) -> Iterator[tuple[Array | slice, _IndexPage | None, Array]]:
        """(positions in `rows`, their page if there is one, positions in the page)."""
        for number, where, at in split(rows):
            yield where, self._pages.get(number), at


def split(keys: Array) -> Iterator[tuple[int, Array | slice, Array]]:
    """The pages that keys (int64 [n]) fall into, in order: (number of the page, positions in `keys`, positions in the page)."""
    if len(keys) < 2:
        for key in keys.tolist():
            yield key >> PAGE_BITS, slice(None), keys & LOW
        return
    pages, at = keys >> PAGE_BITS, keys & LOW
    if pages[0] == pages[-1] and (pages == pages[0]).all():
        yield int(pages[0]), slice(None), at
        return
    order = np.argsort(pages, kind="stable")
    starts = np.flatnonzero(np.diff(pages[order])) + 1
    for where in np.split(order, starts):
        yield int(pages[where[0]]), where, at[where]
