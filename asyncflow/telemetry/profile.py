"""Profile of a model's layers from the spans of `asyncflow check --profile`: seconds of each piece of work, by its amount.

    spans of all ranks -> Cost (task, tokens, bytes) -> rows of a table

A task's seconds are the median of its repetitions on the rank where that is largest, since the others wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from asyncflow.telemetry.idle import WAIT
from asyncflow.telemetry.spans import Span

UNMEASURED = (WAIT, "warm_up", "between")


@dataclass(frozen=True, slots=True)
class Cost:
    """`tokens`, `bytes` and `slots`: how much was done at once, 0 where that is not what it depends on."""

    task: str
    tokens: int
    bytes: int
    seconds: float
    repeats: int
    slots: int = 0


def costs(spans: Iterable[Span]) -> list[Cost]:
    """Costs of every task and amount: tasks in the order in which they were first measured, the smallest amount of each first."""
    seconds: dict[tuple[str, int, int, int], dict[str, list[float]]] = {}
    for span in spans:
        if span.task not in UNMEASURED:
            is_step = span.task == "decode_step"  # as many slots as are active: those of about one number together
            calls = max(span.calls, 1)
            key = (span.task, 0, 0, _power(-(-span.rows // calls))) if is_step else (span.task, span.tokens, span.bytes, 0)
            seconds.setdefault(key, {}).setdefault(span.worker, []).append((span.end - span.start) / calls)
    tasks = list(dict.fromkeys(task for task, *_ in seconds))
    return [
        Cost(*key[:3], max(map(statistics.median, seconds[key].values())), min(map(len, seconds[key].values())), key[3])
        for key in sorted(seconds, key=lambda key: (tasks.index(key[0]), key[1:]))
    ]


def table(found: Sequence[Cost]) -> list[tuple[str, str, str, str]]:
    """Rows of (what, how much at once, seconds, rate), ready to be shown."""
    return [(cost.task.replace("_", " "), _amount(cost), _seconds(cost.seconds), _rate(cost)) for cost in found]


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()


def _amount(cost: Cost) -> str:
    if cost.slots:
        return f"{cost.slots // 2 + 1} to {cost.slots} slots" if cost.slots > 2 else f"{cost.slots} slots"
    if cost.tokens:
        return f"{cost.tokens:,} tokens"
    if not cost.bytes:
        return ""
    return f"{cost.bytes / 4:,.0f} parameters" if cost.task in ("accumulate", "optim_step") else _bytes(cost.bytes)


def _rate(cost: Cost) -> str:
    if cost.slots:
        return f"{_seconds(cost.seconds / cost.slots)} a slot"
    if cost.tokens:
        return f"{_seconds(cost.seconds / cost.tokens)} a token"
    if cost.task in ("accumulate", "optim_step"):
        return f"{_seconds(cost.seconds / (cost.bytes / 4))} a parameter"
    return f"{_bytes(cost.bytes / cost.seconds)}/s" if cost.bytes else ""


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} B"
