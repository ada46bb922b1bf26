"""The state of one task over rows and columns: a pure state machine. No I/O, no clock (time is an argument), no asyncio.

    waiting --all read columns there--> ready --lease--> leased --outputs there--> done
                                          ^                |  \\--k-th failure--> dead (error kept)
                                          +--expiry, failure+    any state --mark `filtered` or `dead`--> filtered, dead
                                                                (dropped rows are forgotten)

Rows are handed out by group. A task that reads whole groups gets a group only when every live row of it is ready; any other
task gets whichever rows of a group are ready. What is ready goes by priority, then by partition, the lowest
first, then (one interval after the other) in the order of readiness; rows given back go first. Groups that one notice
makes ready count as ready in the order of their numbers.

The rows themselves are in `pages.py`, the leases in `lease_table.py`; `picking.py` says what a request gets of the rows that are
ready. Here: what a notice means, and how a lease begins and ends.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from asyncflow.transfer_queue.lease_table import HeldLease, LeaseTable
from asyncflow.transfer_queue.leases import DeadRow, Lease, Pick, StaleToken, Token, Want
from asyncflow.transfer_queue.pages import ABSENT, DEAD, DONE, FILTERED, LEASED, READY, SCALAR, WAITING, Page, Pages, RowState, span
from asyncflow.transfer_queue.picking import ReadyRows
from asyncflow.transfer_queue.schema import DEAD as DEAD_MARK
from asyncflow.transfer_queue.schema import FILTERED as FILTERED_MARK
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.types import Array, GroupMeta


class Table:
    """State of one task over rows and columns. `ready`: the groups that a request may get. `dead`: the errors of the rows that have
    failed too often here, until they are dropped."""

    def __init__(self, spec: TaskSpec, schema: Schema, incarnation: str) -> None:
        self.spec = spec
        self.incarnation = incarnation
        self.is_closed = False
        self.ended_partitions: set[int] = set()
        self.dead: dict[int, str] = {}
        self.num_redelivered = 0
        self.leases = LeaseTable(spec, incarnation)
        self._pages = Pages(schema.group_bits, spec.whole_groups, self.leases.leave)
        self.ready = ReadyRows(spec, self._pages)
        self._bits = schema.group_bits
        self._reads, self._outputs = schema.mask(spec.reads), schema.mask(spec.outputs)
        self._dead_mark, self._filtered_mark = schema.mask([DEAD_MARK]), schema.mask([FILTERED_MARK])
        self._now = 0.0  # the latest time heard of, for what comes without one

    # -- what there is ------------------------------------------------------------------------------------------------------

    def admit(self, metas: Iterable[GroupMeta], unit: int) -> None:
        """New groups, which live on this storage unit. Those of another topic, and those known already, are passed over."""
        topic = self.spec.topic
        self._pages.admit([m for m in metas if m.topic == topic] if topic else metas, unit)

    def notify(self, rows: Array, mask: int, tokens: Array | None, now: float) -> list[int]:
        """Note that these rows (int64 [n]) now have the columns of `mask`, and `tokens` (integers [n]) altogether.

        Returns the rows that this makes done, sorted. Repeating a notice changes nothing, nor in the end does another order.
        Unknown rows are passed over.
        """
        self._now = max(self._now, now)
        rows, tokens = _sorted_once(rows, tokens)
        done: list[int] = []
        for page, start, stop in self._pages.split(rows) if len(rows) else ():
            here, of_here = rows[start:stop], tokens[start:stop] if tokens is not None else None
            notify = self._notify_few if stop - start <= SCALAR else self._notify_many
            done += notify(page, here, mask, of_here)
        return done

    def drop(self, rows: Array) -> None:
        """Forget rows (int64 [n]): they are no longer part of their groups, for this task. Unknown ones are passed over."""
        rows, _ = _sorted_once(rows, None)
        self._move(rows, ABSENT)
        if self.dead:
            for row in rows.tolist():
                self.dead.pop(row, None)

    def narrow(self, group: int, lowest_version: int) -> None:
        """Let no version below this one generate the group from now on. Nothing if the group is unknown."""
        if (page := self._pages.page_of_group(group)) is not None:
            self._pages.narrow(page, group, lowest_version, self._now)

    def end_partition(self, partition: int) -> None:
        """End a partition: no more rows of it will come."""
        self.ended_partitions.add(partition)

    def is_over(self, want: Want) -> bool:
        """Whether no more rows will come for a request: the table is closed, or the partition that it is limited to has ended."""
        return self.is_closed or want.partition in self.ended_partitions

    def has_nothing_left(self, want: Want) -> bool:
        """Whether a request is to be answered with nothing: no more will come, and nothing is ready."""
        return self.is_over(want) and not self.ready.available(want, 1)

    # -- leases -------------------------------------------------------------------------------------------------------------

    def hand_out(self, worker: str, now: float, pick: Pick) -> Lease:
        """Lease what was picked to a worker. Rows that were done, dead, filtered or dropped since are left out."""
        self._now = max(self._now, now)
        held = self.leases.open(worker, now)
        number = held.number
        lease = Lease(Token(self.spec.name, self.incarnation, number), [], [], [], [])
        for group, rows in pick:
            page = self._pages.page_of_group(group)
            if page is None:
                continue
            first, state, of_lease, deliveries, token = page.first, page.state, page.lease, page.delivery, page.token
            kept, before = [], []
            for row in rows:
                slot = row - first
                if state[slot] != LEASED or of_lease[slot]:
                    continue
                of_lease[slot] = number
                kept.append(row)
                before.append(deliveries[slot])
                deliveries[slot] += 1
                held.num_tokens += token[slot]
            if kept:
                held.rows.extend(kept)
                lease.groups.append(self._pages.meta(page, group))
                lease.rows.append(kept)
                lease.deliveries.append(before)
                lease.units.append(page.unit[group - page.first_group])
        held.num_rows = len(held.rows)
        if held.num_rows:
            self.leases.add(held)
        return lease

    def check(self, token: Token, rows: Iterable[int]) -> None:
        """Check that the lease is alive and holds these rows, none of them done or dropped meanwhile. Raises `StaleToken`."""
        self.leases.of(token)
        for row in rows:
            page = self._pages.page_of(row)
            if page is None or page.lease[row - page.first] != token.lease:
                raise StaleToken(f"lease {token.lease} of task {token.task!r} does not hold row {row}")

    def fail(self, token: Token, rows: Iterable[int], error: str, now: float, *, is_final: bool = False) -> list[DeadRow]:
        """Give rows of a lease back after a failure. Returns those that have now failed too often, all if it `is_final`.

        Raises `StaleToken`."""
        self.leases.of(token)
        self._now = max(self._now, now)
        again: list[int] = []
        dead: list[DeadRow] = []
        for row in dict.fromkeys(rows):
            page = self._pages.page_of(row)
            if page is None or page.lease[row - page.first] != token.lease:
                continue
            slot = row - page.first
            page.failure[slot] += 1
            if page.failure[slot] < self.spec.max_failures and not is_final:
                again.append(row)
            else:
                dead.append(DeadRow(row >> self._bits, row, error))
        self.dead |= {letter.row: error for letter in dead}
        self._move(_array([letter.row for letter in dead]), DEAD)
        self.num_redelivered += self._move(_array(again), READY, lease=token.lease, is_first=True)
        return dead

    def expire(self, now: float) -> list[int]:
        """Deliver again what is held beyond its deadline; silence is no failure. Returns the leases that have ended so."""
        self._now = max(self._now, now)
        ended = self.leases.expired(now)
        self._redeliver(ended)
        return ended

    def give_back(self, token: Token) -> list[int]:
        """Deliver what a lease holds again, last. Returns its number, or nothing if it is over. That is no failure, and the rows do
        not count as delivered again: nobody has worked on them."""
        if token not in self.leases:
            return []
        self._release(token.lease, is_first=False)  # its asker could not use it: others come first
        return [token.lease]

    def abandon(self, worker: str) -> list[int]:
        """Deliver again all that a worker holds (it has gone). Returns the leases that have ended so."""
        ended = self.leases.of_worker(worker)
        self._redeliver(ended)
        return ended

    # -- looking ------------------------------------------------------------------------------------------------------------

    def state_of(self, row: int) -> RowState | None:
        """State of a row; None if it is not known. A row that is picked and not handed out yet counts as leased."""
        page = self._pages.page_of(row)
        state = page.state[row - page.first] if page is not None else ABSENT
        return RowState(state) if state else None

    def holder(self, row: int) -> HeldLease | None:
        """The lease that holds a row, if one does."""
        page = self._pages.page_of(row)
        number = page.lease[row - page.first] if page is not None else 0
        return self.leases[number] if number else None

    def meta(self, group: int) -> GroupMeta | None:
        """Facts of a group; None if it is not known."""
        page = self._pages.page_of_group(group)
        return self._pages.meta(page, group) if page is not None and page.kind[group - page.first_group] else None

    def rows_of(self, unit: int) -> Array:
        """int64: all known rows that live on a unit, sorted."""
        parts = [np.empty(0, np.int64)]
        for page in self._pages:
            known = (page.states > 0) & np.repeat(page.units == unit, 1 << self._bits)
            parts.append(np.flatnonzero(known) + page.first)
        return np.concatenate(parts)

    def beyond(self, rows: Array, mask: int) -> Array:
        """int64: those of the rows that are known to have columns that are not in `mask`."""
        rows, _ = _sorted_once(rows, None)
        parts = [np.empty(0, np.int64)]
        for page, start, stop in self._pages.split(rows) if len(rows) else ():
            here = rows[start:stop]
            parts.append(here[page.masks[here - page.first] & ~np.uint64(mask) != 0])
        return np.concatenate(parts)

    def counts(self) -> dict[str, int]:
        """Rows in each state now; `*_total`: that have ever come into it, dropped ones too; rows redelivered and expired."""
        counts, totals = self._pages.counts, self._pages.totals
        return {
            "waiting": counts[WAITING],
            "ready": counts[READY],
            "leased": counts[LEASED],
            "done": counts[DONE],
            "dead": counts[DEAD],
            "filtered": counts[FILTERED],
            "done_total": totals[DONE],
            "dead_total": totals[DEAD],
            "filtered_total": totals[FILTERED],
            "redelivered": self.num_redelivered,
            "expired": self.leases.num_expired,
        }

    # -- inside -------------------------------------------------------------------------------------------------------------

    def _notify_few(self, page: Page, rows: Array, mask: int, tokens: Array | None) -> list[int]:
        weights = tokens.tolist() if tokens is not None else None
        first, state, masks = page.first, page.state, page.mask
        done: list[int] = []
        touched: dict[int, None] = {}
        for i, row in enumerate(rows.tolist()):
            slot = row - first
            old = state[slot]
            if not old:
                continue
            now_there = masks[slot] = masks[slot] | mask
            if weights is not None and weights[i] > page.token[slot]:
                if page.lease[slot]:
                    self.leases.leave(page.lease[slot], 0, page.token[slot] - weights[i])
                page.token[slot] = weights[i]
            new = max(old, self._state(now_there))
            if new != old:
                self._pages.move_one(page, slot, new)
                touched[row >> self._bits] = None
                if new == DONE:
                    done.append(row)
        if touched:
            self._pages.settle(page, touched, self._now)
        return done

    def _state(self, mask: int) -> int:
        """The least state of a row that has these columns."""
        if mask & self._dead_mark:
            return DEAD
        if mask & self._filtered_mark:
            return FILTERED
        if mask & self._outputs == self._outputs:
            return DONE
        return READY if mask & self._reads == self._reads else WAITING

    def _notify_many(self, page: Page, rows: Array, mask: int, tokens: Array | None) -> list[int]:
        slots = rows - page.first
        old = page.states[slots]
        if not old.all():
            known = np.flatnonzero(old)
            slots, old, tokens = slots[known], old[known], tokens[known] if tokens is not None else None
            if not len(slots):
                return []
        where = span(slots)
        there = page.masks[where] | np.uint64(mask)
        page.masks[where] = there
        if tokens is not None:
            more = np.maximum(tokens - page.tokens[where], 0)
            leases = page.leases[where]
            if leases.any():
                self._pages.report(leases, np.zeros(len(slots), np.int64), -more)
            page.tokens[where] += more.astype(np.int32)
        if (there == there[0]).all() and (old == old[0]).all():  # most batches: rows that have come a way together
            before, after = int(old[0]), self._state(int(there[0]))
            if after > before:
                self._pages.move_alike(page, slots, before, after, self._now)
            return [] if after != DONE or before >= DONE else (slots + page.first).tolist()
        there, of_each = np.unique(there, return_inverse=True)
        new = np.maximum(old, np.array([self._state(columns) for columns in there.tolist()], np.uint8)[of_each])
        changed = np.flatnonzero(new != old)
        if len(changed):
            slots, old, new = slots[changed], old[changed], new[changed]
            self._pages.move_many(page, slots, old, new, self._now)
        done: list[int] = (slots[new == DONE] + page.first).tolist() if len(changed) else []
        return done

    def _move(self, rows: Array, new: int, *, lease: int | None = None, is_first: bool = False) -> int:
        """Sorted rows, each once: those that are known (and, if given, that this lease holds). Returns how many."""
        count = 0
        for page, start, stop in self._pages.split(rows, backwards=is_first) if len(rows) else ():
            slots = rows[start:stop] - page.first
            if stop - start <= SCALAR:
                touched: dict[int, None] = {}
                for slot in slots.tolist():
                    if page.state[slot] and (lease is None or (page.state[slot] == LEASED and page.lease[slot] == lease)):
                        self._pages.move_one(page, slot, new)
                        touched[(page.first + slot) >> self._bits] = None
                        count += 1
                self._pages.settle(page, touched, self._now, is_first=is_first)
            else:
                old = page.states[slots]
                fits = old > 0 if lease is None else (old == LEASED) & (page.leases[slots] == lease)
                slots, old = slots[fits], old[fits]
                if len(slots):
                    self._pages.move_many(page, slots, old, np.full(len(slots), new, np.uint8), self._now, is_first=is_first)
                count += len(slots)
        return count

    def _redeliver(self, leases: list[int]) -> None:
        for lease in reversed(leases):  # each goes to the front: the first of them last
            self.num_redelivered += self._release(lease, is_first=True)

    def _release(self, lease: int, *, is_first: bool) -> int:
        """Rows that a lease holds are ready again. Returns how many."""
        rows = np.frombuffer(self.leases[lease].rows, np.int64)
        return self._move(_sorted_once(rows, None)[0], READY, lease=lease, is_first=is_first)


def _array(rows: list[int]) -> Array:
    return np.array(sorted(rows), np.int64)


def _sorted_once(rows: Array, tokens: Array | None) -> tuple[Array, Array | None]:
    """Rows in order, each once, with the most tokens that are told of it."""
    if len(rows) < 2 or (rows[1:] > rows[:-1]).all():
        return rows, tokens
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 1))
    return rows[starts], np.maximum.reduceat(tokens[order], starts) if tokens is not None else None
