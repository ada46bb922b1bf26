"""Cutting a sequence into parts of limited size, such as passes of a step or files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def cut_by_size(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Items in order, in parts whose sizes add up to at most `most`, each as large as can be. A larger item is a part alone."""
    part: list[T] = []
    total = 0
    for item in items:
        own = size(item)
        if part and total + own > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += own
    if part:
        yield part


def cut_evenly(items: Sequence[T], size: Callable[[T], int], most: int, num_parts: int) -> Iterator[list[T]]:
    """Items in order, in parts of at most `most`, as `cut_by_size` makes them, but in multiples of about `num_parts` parts of about
    one size: `num_parts` at least, if there are as many items."""
    sizes = [size(item) for item in items]
    num_rounds = -(-sum(sizes) // (most * num_parts))
    even = -(-sum(sizes) // max(1, num_rounds * num_parts))
    limit = most if num_parts == 1 else min(most, even + max(sizes, default=0) // 2)
    part: list[T] = []
    total = num_cut = 0
    for number, (item, own) in enumerate(zip(items, sizes, strict=True)):
        num_if_joined = num_cut + 1 + len(items) - number - 1
        if part and (total + own > limit or num_if_joined < min(num_parts, len(items))):
            yield part
            part, total, num_cut = [], 0, num_cut + 1
        part.append(item)
        total += own
    if part:
        yield part
