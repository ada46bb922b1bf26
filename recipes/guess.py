"""A guessing game: the environment of guess.yaml. The range and the number follow from the episode's seed.

environment   Guess a number from 21 to 35.
policy        28
environment   higher
policy        32
"""

from collections.abc import Mapping
from random import Random
from typing import Any

SIZE = 15
GUESSES = 4  # enough for whoever halves what is left each time


class Guess:
    """A game of `GUESSES` guesses; the reward is 1.0 for a number that is found, and 0.0 at the end of one that is not."""

    episodes_per_process = 64

    def reset(self, example: Mapping[str, Any], seed: int) -> str:
        """Choose a range and a number in it."""
        rng = Random(seed)
        low = 10 * rng.randrange(9) + 1
        self._number, self._left = rng.randrange(low, low + SIZE), GUESSES
        return f"Guess a number from {low} to {low + SIZE - 1}.\n"

    def step(self, action: str) -> tuple[str, float | None, bool, dict[str, int]]:
        """Say where the number is. A guess that is no number is a guess, too."""
        self._left -= 1
        if action == str(self._number):
            return "right\n", 1.0, True, {}
        answer = "no number" if not action.isdecimal() else "higher" if int(action) < self._number else "lower"
        return f" {answer}\n", 0.0 if not self._left else None, not self._left, {}
