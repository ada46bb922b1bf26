"""Sampler for ranks of other people's trainers, which wait for each other: rounds of equal weight, max / mean tokens near 1.

waits for: a request of every rank for the same partition, and enough ready rows for all; or the end of the partition, for what is
left

A round has `per_rank` items for each rank: rows where the request limits rows and the task may split groups, otherwise groups. It
is made of layers of one item per rank. Each layer starts from the oldest item left and takes the `ranks - 1` others of most similar
length among the next `window` items that are ready. Layers are then dealt out, heaviest first, the longest item of each to the
rank that is lightest so far (longest processing time first: Graham, 1969), and pairs are swapped between ranks while that lightens
the heaviest. If the round is uneven all the same, the item least like its fellows is held back until there are others like it: odd
items gather in the window, so none waits longer than a window of odd ones, or than the partition.

Where no more is ready than the round needs (the tail of a partition, a slow producer) there is nothing to choose among: everything
is dealt out as well as swaps can.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from asyncflow.transfer_queue.leases import Pick, Want
from asyncflow.transfer_queue.schema import TaskSpec
from asyncflow.transfer_queue.table import Table

MAX_SWAPS = 200
UNEVENNESS = 1.05
"""Max / mean tokens of a round above which an odd item is held back."""
MAX_HELD_BACK = 32


class TokenBalanced:
    """`ranks`: how many there are; a request says its own in `Want.rank`. `window`: how many items a round may look beyond its own
    number. A request needs a limit of rows or groups; where ranks ask for different numbers the least counts. A limit of tokens is
    not looked at."""

    def __init__(self, ranks: int, window: int = 256) -> None:
        if ranks < 1 or window < 0:
            raise ValueError(f"{ranks} ranks and a window of {window}: at least 1 rank is needed, and no less than 0")
        self.ranks, self.window = ranks, window

    def check(self, spec: TaskSpec, want: Want) -> None:
        """Raises `ValueError` for a request of a rank that is not, or without a limit of rows or groups."""
        if not 0 <= want.rank < self.ranks:
            raise ValueError(f"a request of rank {want.rank}: there are {self.ranks}")
        if not want.rows and not want.groups:
            raise ValueError("token_balanced needs a request to limit its rows or its groups")

    def assign(self, table: Table, wants: Sequence[tuple[str, Want]]) -> Iterator[tuple[int, Pick]]:
        """See `Sampler.assign`."""
        parked: dict[tuple[int | None, int | None], list[list[int]]] = {}
        for position, (_, want) in enumerate(wants):
            parked.setdefault((want.partition, want.installed), [[] for _ in range(self.ranks)])[want.rank].append(position)
        for by_rank in parked.values():
            for together in zip(*by_rank, strict=False):
                picks = self._round(table, [wants[position][1] for position in together])
                if picks is None:
                    break
                yield from ((position, pick) for position, pick in zip(together, picks, strict=True) if pick)

    def _round(self, table: Table, wants: list[Want]) -> list[Pick] | None:
        """Pick of each rank; None while there is too little for all."""
        is_last = table.is_over(wants[0])
        needed = 1 if is_last else max(self.ranks, *(want.at_least for want in wants))
        if table.ready.available(wants[0], needed) < needed:
            return None
        of_rows = not table.spec.whole_groups and all(want.rows for want in wants)
        per_rank = min(_num_items(table, want, of_rows) for want in wants)
        ready = table.ready.peek(wants[0], self.ranks * per_rank + self.window)
        if of_rows:
            items = [pair for group in ready for pair in zip(group.rows, group.tokens, strict=True)]
            items = items[: self.ranks * per_rank + self.window]
        else:
            items = [(group.group, sum(group.tokens)) for group in ready]
        if len(items) < self.ranks * per_rank and not is_last:
            return None
        bins = balance([weight for _, weight in items], self.ranks, per_rank)
        take = table.ready.take_rows if of_rows else table.ready.take_exactly
        return [take([items[i][0] for i in bin_]) for bin_ in bins]


def _num_items(table: Table, want: Want, of_rows: bool) -> int:
    if of_rows:
        return want.rows
    head = table.ready.peek(want, 1)
    by_rows = max(1, want.rows // len(head[0].rows)) if want.rows else want.groups
    return min(by_rows, want.groups) if want.groups else by_rows


def balance(weights: Sequence[int], ranks: int, per_rank: int) -> list[list[int]]:
    """Positions in `weights` (oldest first) for each rank: `per_rank` each, or all, evenly, where there are no more than that.

    While a round is uneven, the item that is least like its fellows is held back and the round is made anew.
    """
    if len(weights) <= ranks * per_rank:
        order = sorted(range(len(weights)), key=lambda i: -weights[i])
        return _dealt(weights, [order[start : start + ranks] for start in range(0, len(order), ranks)], ranks)[0]
    held_back: set[int] = set()
    best: tuple[float, list[list[int]]] | None = None
    while len(held_back) <= MAX_HELD_BACK and len(weights) - len(held_back) >= ranks * per_rank:
        layers = _layers(weights, ranks, per_rank, held_back)
        bins, loads = _dealt(weights, layers, ranks)
        unevenness = max(loads) * ranks / max(1, sum(loads))
        if best is None or unevenness < best[0]:
            best = unevenness, bins
        if unevenness <= UNEVENNESS:
            break
        _, odd = max((abs(weights[i] - sorted(weights[j] for j in layer)[ranks // 2]), i) for layer in layers for i in layer)
        held_back.add(odd)
    assert best is not None
    return best[1]


def _dealt(weights: Sequence[int], layers: list[list[int]], ranks: int) -> tuple[list[list[int]], list[int]]:
    """(positions, tokens) for each rank."""
    bins: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for layer in sorted(layers, key=lambda layer: -sum(weights[i] for i in layer)):
        lightest = sorted(range(ranks), key=loads.__getitem__)
        for i, rank in zip(sorted(layer, key=lambda i: -weights[i]), lightest, strict=False):
            bins[rank].append(i)
            loads[rank] += weights[i]
    _swap(weights, bins, loads)
    return [sorted(bin_) for bin_ in bins], loads


def _layers(weights: Sequence[int], ranks: int, per_rank: int, held_back: set[int]) -> list[list[int]]:
    """`per_rank` times the oldest item left and its `ranks - 1` fellows in the narrowest run of lengths that it is in."""
    left = sorted((weight, i) for i, weight in enumerate(weights) if i not in held_back)
    is_used = [i in held_back for i in range(len(weights))]
    layers: list[list[int]] = []
    oldest = 0
    for _ in range(per_rank):
        while is_used[oldest]:
            oldest += 1
        at = bisect_left(left, (weights[oldest], oldest))
        starts = range(max(0, at - ranks + 1), min(at, len(left) - ranks) + 1)
        start = min(starts, key=lambda s: left[s + ranks - 1][0] - left[s][0])
        layer = [i for _, i in left[start : start + ranks]]
        del left[start : start + ranks]
        for i in layer:
            is_used[i] = True
        layers.append(layer)
    return layers


def _swap(weights: Sequence[int], bins: list[list[int]], loads: list[int]) -> None:
    """Swap an item of the heaviest rank for a lighter one of another, the best pair each time, while the heavier gets lighter."""
    for _ in range(MAX_SWAPS):
        heavy = max(range(len(bins)), key=loads.__getitem__)
        best = (loads[heavy], 0, 0, 0)
        for rank, bin_ in enumerate(bins):
            for a, i in enumerate(bins[heavy]):
                for b, j in enumerate(bin_):
                    less = weights[i] - weights[j]
                    if less > 0 and (after := max(loads[heavy] - less, loads[rank] + less)) < best[0]:
                        best = (after, rank, a, b)
        after, rank, a, b = best
        if after == loads[heavy]:
            return
        less = weights[bins[heavy][a]] - weights[bins[rank][b]]
        bins[heavy][a], bins[rank][b] = bins[rank][b], bins[heavy][a]
        loads[heavy] -= less
        loads[rank] += less
