"""Sums of two numbers: a seeded data set for language models that can add, and are to learn how to answer.

    What is 17 + 5? Reply with only the number.         22

Each pair of numbers from 1 to 50 belongs to one split, which a hash decides, so no held-out question is trained on.
"""

from __future__ import annotations

from hashlib import blake2b
from random import Random
from typing import Any, Final

from asyncflow.data.arithmetic import ProblemSplit

LARGEST: Final = 50
PROMPT: Final = "What is {a} + {b}? Reply with only the number."
_PARTS: Final[dict[ProblemSplit, range]] = {"heldout": range(0, 2), "warmstart": range(2, 4), "train": range(4, 10)}


def as_examples(seed: int, split: ProblemSplit, num_examples: int) -> list[dict[str, Any]]:
    """Rows of a split, drawn by seed with replacement: `prompt`, and `answer` as the plain number. A pair's order counts."""
    rng = Random(f"sums/{split}/{seed}")
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1) if _part(a, b) in _PARTS[split]]
    drawn = rng.sample(pairs, len(pairs)) + rng.choices(pairs, k=max(0, num_examples - len(pairs)))
    return [{"prompt": PROMPT.format(a=a, b=b), "answer": str(a + b)} for a, b in drawn[:num_examples]]


def _part(a: int, b: int) -> int:
    """Part of the pairs, 0 to 9, in which both orders of two numbers lie."""
    name = f"{min(a, b)}+{max(a, b)}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "big") % 10
