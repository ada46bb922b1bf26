"""Draft tokens for the steps of few slots: tokens that probably come next, verified together in one pass (arXiv:2211.17192).

    text of a group --continuation--> drafts of each slot --chosen--> one pass --draws--> accepted, and one token more
                                                                                   |
                             acceptance and seconds of passes so far <---learn-----+

There is no second model: a draft goes on as the same few tokens did the last time, in the prompt, in the response itself or in
another response to the prompt (arXiv:2304.04487). A token's noise belongs to its position, so a draft is right exactly if it is the
token that is drawn there, and a response's bits do not depend on drafts: right ones are drawn sooner, wrong ones are forgotten.

`auto` verifies as many drafts as give the most tokens a second, by the acceptance of the last steps and by the seconds that
passes of so many rows took: none where a pass is compute-bound. What is measured here decides when a token is drawn, never which.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from asyncflow.engines.base import NO_TOKENS
from asyncflow.engines.rollout.linears import padded
from asyncflow.engines.rollout.slot_options import Speculation
from asyncflow.types import Array

LONGEST: Final = 4
"""Tokens that are compared, at most, to find where a text goes on as it did before."""
MOST_DRAFTS: Final = 8
"""Most drafts of a slot in one step, with `auto`."""
KEPT_TOKENS: Final = 1 << 18
"""Tokens of finished responses that are kept: drafts may come from them."""
SEPARATOR: Final = -1
ACCEPTANCE: Final = np.array([0.2, 0.3, 0.4, 0.5])
"""Share of drafts that are taken to be right before any are seen, by tokens in common; counts as much as one draft."""
FORGETTING: Final = (0.999, 0.99)
"""Share of the acceptance seen so far that still counts after a step: one without drafts, and one with some."""
REMEMBERED: Final = 0.99
"""Weight of a pass's seconds one step later."""
OUTLIER: Final = 2.0
"""Times what it was expected to take that a pass counts as at most: what else the machine did is no property of the pass."""


class Draft(NamedTuple):
    """Drafts of one slot: `tokens` (int64), and how many tokens before them were found again, up to `LONGEST`; 0: no drafts."""

    tokens: Array
    matched: int


NO_DRAFT: Final = Draft(NO_TOKENS, 0)


def joined(texts: Sequence[Array]) -> Array:
    """Texts (int64), the one that goes on last, in one array that `continuation` takes."""
    separators = np.full(LONGEST, SEPARATOR)
    return np.concatenate([part for text in texts for part in (separators, text)])


def continuation(text: Array, most: int) -> Draft:
    """Tokens that followed the latest earlier occurrence of the last ones of `text` (int64, from `joined`), `most` of them at most.

    The occurrence is the latest of those that have most tokens in common. A text that repeats itself is drafted as going on so.
    """
    at = np.flatnonzero((text[:-1] == text[-1]) & (text[1:] != SEPARATOR))
    if not len(at):
        return NO_DRAFT
    matched = 1
    while matched < LONGEST and text[-1 - matched] != SEPARATOR:
        longer = at[text[at - matched] == text[-1 - matched]]
        if not len(longer):
            break
        at, matched = longer, matched + 1
    begin = int(at[-1]) + 1
    tokens = text[begin + np.arange(most) % (len(text) - begin)]
    ends = np.flatnonzero(tokens == SEPARATOR)
    return Draft(tokens[: ends[0]] if len(ends) else tokens, matched)


class FinishedTexts:
    """Finished responses by their prompt (its bytes), the most recent `KEPT_TOKENS` tokens of them."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, list[Array]] = OrderedDict()
        self._num_tokens = 0

    def add(self, prompt: bytes, tokens: Array) -> None:
        """Add a response's tokens (int64)."""
        self._texts.setdefault(prompt, []).append(tokens)
        self._texts.move_to_end(prompt)
        self._num_tokens += len(tokens)
        while self._num_tokens > KEPT_TOKENS:
            _, oldest = self._texts.popitem(last=False)
            self._num_tokens -= sum(map(len, oldest))

    def of(self, prompt: bytes) -> Sequence[Array]:
        """The responses to a prompt, in the order in which they ended."""
        return self._texts.get(prompt, ())


class PassSeconds:
    """Seconds of a pass by its rows: a line through those so far, of which recent ones count most."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of weights w, and of w x, w y, w x x, w x y: x rows, filled up as a product's are, y seconds

    def add(self, num_rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        x, y = float(padded(num_rows)), seconds
        if self._sums[0] > 8:
            y = min(y, OUTLIER * float(self.of(np.array([num_rows]))[0]))
        self._sums = REMEMBERED * self._sums + np.array([1.0, x, y, x * x, x * y])

    def of(self, num_rows: Array) -> Array:
        """Seconds of passes of so many rows (int64 [n]), float64 [n]: all alike, until passes of several sizes were seen."""
        total, x, y, xx, xy = self._sums
        if not total:
            return np.ones(len(num_rows))
        mean_x, mean_y = x / total, y / total
        variance, slope = xx / total - mean_x**2, 0.0
        if variance > 0.01:
            slope = min(max(0.0, (xy / total - mean_x * mean_y) / variance), mean_y / mean_x)  # no time below no rows
        sizes = np.array([padded(rows) for rows in num_rows.tolist()])
        seconds: Array = mean_y + slope * (sizes - mean_x)
        return seconds


class Drafting:
    """Decides the number of drafts that the slots of a step get. It knows what has become of earlier ones, and no text."""

    def __init__(self, speculation: Speculation, num_slots: int) -> None:
        """`num_slots`: rows that a pass has at most, drafts included: as many as the engine has rows that generate."""
        self._speculation, self._num_slots = speculation, num_slots
        self._hits, self._tries = ACCEPTANCE.copy(), np.ones(LONGEST)  # by tokens in common, less one
        self._seconds = PassSeconds()
        self._search_seconds = 0.0  # of the search for one slot's drafts
        self.most = MOST_DRAFTS if speculation == "auto" else speculation
        """Drafts of a slot, at most."""

    def may_pay(self, num_active: int) -> bool:
        """Whether to search for drafts at all, of a step with so many slots."""
        room = min(self._num_slots - num_active, num_active * self.most)
        if room <= 0 or self._speculation != "auto":
            return room > 0
        best = float((self._hits / self._tries).max())
        return self._best(num_active, np.full(room, best), num_active * self._search_seconds) > 0

    def chosen(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Drafts to verify, by slot: the first ones of each slot's, or none."""
        room = self._num_slots - len(drafts)
        if self._speculation != "auto":
            lengths = np.array([len(draft.tokens) for draft in drafts])
            lengths = np.minimum(lengths, np.maximum(0, room - np.cumsum(lengths) + lengths))
            return [Draft(draft.tokens[:length], draft.matched) for draft, length in zip(drafts, lengths, strict=True)]
        rates = self._hits / self._tries
        # A draft counts if those before it are right, so of one slot each is less likely than the one before it.
        found = [np.cumprod(rates[_places(draft)]) for draft in drafts]
        slots = np.repeat(np.arange(len(drafts)), [len(each) for each in found])
        gains = np.concatenate(found)
        order = np.argsort(-gains, kind="stable")[:room]
        count = self._best(len(drafts), gains[order])
        taken = np.bincount(slots[order[:count]], minlength=len(drafts))
        return [Draft(draft.tokens[:length], draft.matched) for draft, length in zip(drafts, taken, strict=True)]

    def learn(self, draft: Draft, num_tried: int, num_accepted: int) -> None:
        """Count the drafts of a slot that were compared with what was drawn, and those that were right: the first ones, or all."""
        places = _places(draft)[:num_tried]
        np.add.at(self._tries, places, 1.0)
        np.add.at(self._hits, places[:num_accepted], 1.0)

    def searched(self, num_slots: int, seconds: float) -> None:
        """The drafts of so many slots took so long to find."""
        self._search_seconds = seconds / num_slots

    def passed(self, num_rows: int, seconds: float, *, has_drafts: bool) -> None:
        """Take note of the seconds of a step without prompts, of so many rows."""
        left = FORGETTING[has_drafts]
        self._hits, self._tries = ACCEPTANCE + left * (self._hits - ACCEPTANCE), 1.0 + left * (self._tries - 1.0)
        self._seconds.add(num_rows, seconds)
        self._search_seconds *= REMEMBERED  # one that took long once is made again

    def _best(self, num_active: int, gains: Array, extra_seconds: float = 0.0) -> int:
        """Number of drafts that give the most tokens a second, of drafts that add `gains` tokens each (falling); none at equal
        rates. With any, a step takes `extra_seconds` more."""
        counts = np.arange(len(gains) + 1)
        tokens = num_active + np.append(0.0, np.cumsum(gains))
        return int(np.argmax(tokens / (self._seconds.of(num_active + counts) + extra_seconds * (counts > 0))))


def _places(draft: Draft) -> Array:
    """Index of the acceptance of each draft: by the tokens in common before it, if those between are right."""
    return np.minimum(draft.matched + np.arange(len(draft.tokens)), LONGEST) - 1
