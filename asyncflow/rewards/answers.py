"""Search for an answer: in a data set's row, and in a response.

| marked by | as in |
|---|---|
| hash | `#### 72`, the rest of the line (GSM8K, arXiv 2110.14168) |
| boxed | `\\boxed{72}` or `\\fbox{72}`, braces balanced (MATH, arXiv 2103.03874) |
| tag | `<answer>72</answer>` |
| phrase | `The answer is 72.`, `Answer: 72` |
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from asyncflow.rewards.base import Sample
from asyncflow.rows import ANSWER, ANSWERS

MARKS: Final = ("hash", "boxed", "tag", "phrase")
"""Ways of finding an answer, all that are known."""

_HASH = re.compile(r"####[ \t]*([^\n]*)")
# A box with braces or with one character, an escaped character, a brace.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|([^\s{\\]))|\\.|[{}]", re.DOTALL)
_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL | re.IGNORECASE)
# A full stop ends the phrase, unless a digit follows, and so does a reason. Possessive: it must not be tried in other ways.
_PHRASE = re.compile(
    r"(?:answer\s*+(?:is|are|=|:)|answer\*++\s*+:)\s*+(?::\s*+)?+((?:(?!\s(?:because|since)\s)[^.\n]|\.(?=\d))++)",
    re.IGNORECASE,
)


def reference(sample: Sample, column: str | None = None) -> Any:
    """The right answer. Without a column: verl's `reward_model.ground_truth`, or the first of `ANSWERS` that there is.

    Raises `ValueError` showing the row if there is none: a broken row must never look like a wrong response.
    """
    example = sample.example
    if column is not None:
        if column not in example:
            raise ValueError(f"no column {column!r} in the row {dict(example)!r:.400}")
        return example[column]
    if ANSWER in example:
        return example[ANSWER]
    model = example.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    for name in ANSWERS:
        if name in example:
            return example[name]
    raise ValueError(f"no column {ANSWER!r}, or another with the answer, in the row {dict(example)!r:.400}")


def text_of(reference: Any) -> str:
    """A reference as text. A JSON number is as good as its text; a bool is a number only to Python. Of a list, its only entry."""
    if isinstance(reference, list) and len(reference) == 1:
        return text_of(reference[0])
    if isinstance(reference, bool) or not isinstance(reference, str | int | float):
        raise ValueError(f"no text and no number to compare with: {reference!r:.400}")
    return str(reference)


def answer_in(text: str, marks: Sequence[str] = MARKS) -> str | None:
    """Answer that is marked in a text, stripped: by the last mark asked for that is not a mere phrase, else by the last phrase.

    Of two marks, one inside the other, the inner one counts. None: nothing is marked. An empty text: a mark with nothing in it.
    """
    strong = [span for mark in marks if mark != "phrase" for span in _FINDERS[mark](text)]
    if not strong and "phrase" in marks:
        strong = list(_FINDERS["phrase"](text))
    if not strong:
        return None
    _, begin, end = max(strong)
    return text[begin:end].strip()


def reference_answer(reference: Any) -> str:
    """The answer in a reference: what a solution marks as such, or else all of it."""
    text = text_of(reference)
    marked = answer_in(text, ("hash", "boxed", "tag"))
    return text.strip() if marked is None else marked


MarkSpan = tuple[int, int, int]
"""Place of a mark, and begin and end of the answer in it."""


def _boxes(text: str) -> Iterator[MarkSpan]:
    """Boxed answers, found in one pass: a model may write nothing else."""
    open_boxes: list[tuple[int, int] | None] = []
    for found in _BRACES.finditer(text):
        if found[1] is not None:  # \boxed 5
            yield found.start(), *found.span(1)
        elif found[0] == "}":
            if open_boxes and (box := open_boxes.pop()) is not None:
                yield *box, found.start()
        elif found[0].endswith("{") and found[0] != "\\{":
            open_boxes.append((found.start(), found.end()) if len(found[0]) > 1 else None)


def _by(pattern: re.Pattern[str]) -> Callable[[str], Iterator[MarkSpan]]:
    return lambda text: ((found.start(), *found.span(1)) for found in pattern.finditer(text))


_FINDERS: Final[dict[str, Callable[[str], Iterator[MarkSpan]]]] = {
    "hash": _by(_HASH),
    "boxed": _boxes,
    "tag": _by(_TAG),
    "phrase": _by(_PHRASE),
}


class AnswerScorer(ABC):
    """Scorer that compares the answer in a response with the reference in the row: 1.0 where it is right, else 0.0."""

    def __init__(self, answer_column: str | None, marks: Sequence[str], require_end: bool, *, needs_mark: bool = False) -> None:
        """`marks`: where the answer is (see the module's head). `require_end`: a response that was cut off gets 0. Raises
        `ValueError` for a mark that is not known, or none where the scorer `needs_mark`."""
        if isinstance(marks, str) or not set(marks) <= set(MARKS) or (needs_mark and not marks):
            raise ValueError(f"marks={marks!r} must be a list of some of {', '.join(MARKS)}")
        self._answer_column, self._marks, self._require_end = answer_column, tuple(marks), require_end

    def __call__(self, sample: Sample) -> float:
        """1.0 or 0.0. Raises `ValueError` for a reference that cannot be compared with, whatever the response: a broken row must
        never look like a wrong response."""
        right = self._right(reference(sample, self._answer_column))
        if self._require_end and not sample.is_finished:
            return 0.0
        answer = self._answer(sample.response)
        return float(answer is not None and self._is_right(answer, right))

    def _answer(self, response: str) -> str | None:
        """The answer that a response marks; None: there is none."""
        return answer_in(response, self._marks)

    @abstractmethod
    def _right(self, reference: Any) -> Any:
        """The right answer in a form to compare with. Raises `ValueError`."""

    @abstractmethod
    def _is_right(self, answer: str, right: Any) -> bool:
        """Whether an answer is the right one."""
