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


def even_part(sizes: Sequence[int], most: int, num_parts: int) -> int:
    """Size for `cut_by_size` by which parts of at most `most` come in multiples of about `num_parts`, of about one size."""
    if num_parts == 1:
        return most
    num_rounds = -(-sum(sizes) // (most * num_parts))
    even = -(-sum(sizes) // max(1, num_rounds * num_parts))
    return min(most, even + max(sizes, default=0) // 2)
