"""Ready rows of a task, and which of them a request gets. Pure.

By priority, then by partition, the lowest first, then (one interval after the other) in the order of readiness. What is picked is
leased from then on, by no lease yet: it is to be handed out (`Table.hand_out`).
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncflow.transfer_queue.leases import Pick, ReadyGroup, Want
from asyncflow.transfer_queue.pages import Page, Pages
from asyncflow.transfer_queue.schema import TaskSpec

_NO_LIMIT = 1 << 62


class ReadyRows:
    """Ready rows of one task's pages. Nothing here ends a lease, or makes a row ready."""

    def __init__(self, spec: TaskSpec, pages: Pages) -> None:
        self._spec, self._pages, self._bits = spec, pages, pages.group_bits

    # -- looking ------------------------------------------------------------------------------------------------------------

    def available(self, want: Want, at_most: int) -> int:
        """Rows that the want could have but for its limits, counted up to `at_most`. As many operations as kinds of groups."""
        count = 0
        for kind in self._pages.queues.matching(want.partition, want.installed):
            count += kind.num_available
            if count >= at_most:
                return at_most
        return count

    def peek(self, want: Want, count: int) -> list[ReadyGroup]:
        """The first `count` groups that the want could have but for its limits, in order."""
        pages, found = self._pages, list[ReadyGroup]()
        for kind in pages.queues.matching(want.partition, want.installed):
            for group in pages.first(kind, count - len(found)):
                page = pages.page_of_group(group)
                assert page is not None
                slots = pages.ready_slots(page, group)
                found.append(ReadyGroup(group, [page.first + slot for slot in slots], [page.token[slot] for slot in slots]))
            if len(found) == count:
                break
        return found

    def for_none_after(self, version: int) -> int:
        """Rows that are ready and that no policy version after `version` may generate. As many operations as kinds of groups."""
        return sum(kind.num_available for kind in self._pages.queues.matching(None, None) if kind.interval.high <= version)

    def last_version(self, at_least: int) -> int | None:
        """The lowest upper end of the ready rows' intervals, but not below `at_least`; None without any. As many operations."""
        return min((k.interval.high for k in self._pages.queues.matching(None, None) if k.interval.high >= at_least), default=None)

    def waiting_seconds(self, now: float) -> float:
        """Seconds for which the rows that have waited longest have been ready, to within a tenth; 0 if none are."""
        pages, since = self._pages, now
        for kind in pages.queues.matching(None, None):
            pages.head(kind)  # drops entries that do not count any more
            since = min(since, kind.since)
        return now - since

    # -- picking ------------------------------------------------------------------------------------------------------------

    def take(self, want: Want) -> Pick | None:
        """The next rows for a want, until the first of its limits; None if there are none.

        One row (or, where groups are not split, one group) is taken even if it alone exceeds a limit. Raises `ValueError` for a
        want without a limit.
        """
        if want.groups <= 0 and want.rows <= 0 and want.tokens <= 0:
            raise ValueError("a request needs a limit: groups, rows or tokens")
        pages, pick = self._pages, Pick()
        groups, rows_left, tokens_left = (limit or _NO_LIMIT for limit in (want.groups, want.rows, want.tokens))
        for kind in pages.queues.matching(want.partition, want.installed):
            while kind.num_queued:
                if len(pick) == groups:
                    return pick
                page, group = pages.head(kind)
                token, slots = page.token, pages.ready_slots(page, group)
                if self._spec.whole_groups:
                    num_fitting, weight = len(slots), sum([token[slot] for slot in slots]) if want.tokens else 0
                    if pick and (num_fitting > rows_left or weight > tokens_left):
                        return pick
                else:
                    num_fitting = weight = 0
                    for slot in slots[:rows_left]:
                        if weight + token[slot] > tokens_left and (pick or num_fitting):
                            break
                        weight += token[slot]
                        num_fitting += 1
                    if not num_fitting:
                        return pick
                rows_left -= num_fitting
                tokens_left -= weight
                pick.append((group, pages.pick(page, group, slots[:num_fitting])))
                if num_fitting < len(slots) or rows_left <= 0 or tokens_left <= 0:
                    return pick
        return pick or None

    def take_exactly(self, groups: Sequence[int]) -> Pick:
        """Take all ready rows of these groups, in or out of turn. Raises `ValueError`, and takes none, if one is not ready."""
        page_of = {group: self._page_of_ready(group) for group in groups}
        return [(group, self._pages.pick(page, group, self._pages.ready_slots(page, group))) for group, page in page_of.items()]

    def take_rows(self, rows: Sequence[int]) -> Pick:
        """Take these ready rows, in or out of turn. Raises `ValueError` where a row is not ready, or where a group that is to be
        handed out as a whole would be split; none is taken then."""
        by_group: dict[int, list[int]] = {}
        for row in rows:
            by_group.setdefault(row >> self._bits, []).append(row)
        pick = Pick()
        for group, chosen in by_group.items():
            page = self._page_of_ready(group)
            ready = {page.first + slot for slot in self._pages.ready_slots(page, group)}
            if not ready.issuperset(chosen) or len(set(chosen)) < len(ready if self._spec.whole_groups else chosen):
                raise ValueError(f"rows {chosen} of group {group} are not ready, or not to be had without the rest of it")
            pick.append((group, chosen))
        for group, chosen in pick:
            page = self._page_of_ready(group)
            self._pages.pick(page, group, [row - page.first for row in chosen])
        return pick

    def _page_of_ready(self, group: int) -> Page:
        page = self._pages.page_of_group(group)
        if page is None or not page.queued[group - page.first_group]:
            raise ValueError(f"group {group} is not ready for task {self._spec.name!r}")
        return page
