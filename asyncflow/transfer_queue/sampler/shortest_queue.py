"""The least busy worker first: each group goes to the requesting worker that has the fewest tokens outstanding.

Workers of unequal speed, or with rows of unequal length, then finish at about the same time, where `oldest` would fill the one that
asks first. Ties (as where no tokens are counted) go to the fewest rows, then to the oldest request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from asyncflow.transfer_queue.leases import Pick, Want
from asyncflow.transfer_queue.sampler.base import is_enough
from asyncflow.transfer_queue.schema import TaskSpec
from asyncflow.transfer_queue.table import Table


class ShortestQueue:
    """Sampler that gives each group to the worker which holds the fewest tokens."""

    def check(self, spec: TaskSpec, want: Want) -> None:
        """Accept every request."""

    def assign(self, table: Table, wants: Sequence[tuple[str, Want]]) -> Iterator[tuple[int, Pick]]:
        """See `Sampler.assign`."""
        open_ = [position for position, (_, want) in enumerate(wants) if is_enough(table, want)]
        load = {wants[position][0]: table.leases.outstanding(wants[position][0]) for position in open_}
        given: dict[int, Pick] = {position: [] for position in open_}
        spent = dict.fromkeys(open_, (0, 0))
        while open_:
            position = min(open_, key=lambda p: (load[wants[p][0]][::-1], p))
            worker, want = wants[position]
            group = _next_group(table, want, given[position], spent[position])
            if group is None:
                open_.remove(position)
                continue
            number, rows, num_tokens = group
            if given[position] and given[position][-1][0] == number:
                given[position][-1][1].extend(rows)
            else:
                given[position].append((number, rows))
            spent[position] = (spent[position][0] + len(rows), spent[position][1] + num_tokens)
            load[worker] = (load[worker][0] + len(rows), load[worker][1] + num_tokens)
        yield from ((position, pick) for position, pick in given.items() if pick)


def _next_group(table: Table, want: Want, given: Pick, spent: tuple[int, int]) -> tuple[int, list[int], int] | None:
    """Next group for a want, or as much of it as fits into what is left of the want: number, rows, tokens. None if nothing fits."""
    rows_left, tokens_left = want.rows - spent[0], want.tokens - spent[1]
    head = table.ready.peek(want, 1)
    if not head or (want.groups and len(given) >= want.groups):
        return None
    if given:
        first = slice(None if table.spec.whole_groups else 1)
        if (want.rows and len(head[0].rows[first]) > rows_left) or (want.tokens and sum(head[0].tokens[first]) > tokens_left):
            return None
    left = msgspec.structs.replace(
        want, groups=1, rows=max(rows_left, 1) if want.rows else 0, tokens=max(tokens_left, 1) if want.tokens else 0
    )
    pick = table.ready.take(left)
    assert pick is not None
    tokens = dict(zip(head[0].rows, head[0].tokens, strict=True))
    return *pick[0], sum(tokens[row] for row in pick[0][1])
