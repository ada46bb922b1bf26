"""1 where a response has its sections, each in its tags, in order and once, 0 otherwise (the format reward of arXiv 2501.12948)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncflow.rewards.base import Sample


class Format:
    """`<think> ... </think> <answer> ... </answer>`, and nothing but spaces around them."""

    is_stateless = True

    def __init__(self, *, tags: Sequence[str] = ("think", "answer"), is_strict: bool = True, require_end: bool = True) -> None:
        """`tags`: the sections, in order. `is_strict`: nothing else is in the response. `require_end`: a response that was cut off
        gets 0. Raises `ValueError` for tags that are no words, or the same."""
        if isinstance(tags, str) or not tags or len(set(tags)) < len(tags) or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
            raise ValueError(f"tags={tags!r} must be a list of different words, such as [think, answer]")
        self._tags, self._is_strict, self._require_end = tuple(tags), is_strict, require_end

    def __call__(self, sample: Sample) -> float:
        """Score of a response: 1.0 or 0.0."""
        return float((sample.is_finished or not self._require_end) and self._is_well_formed(sample.response))

    def _is_well_formed(self, text: str) -> bool:
        at, between = 0, ""
        for tag in self._tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if text.count(opening) != 1 or text.count(closing) != 1:
                return False
            start, end = text.find(opening, at), text.find(closing, at)
            if start < 0 or end < start or not text[start + len(opening) : end].strip():
                return False
            between += text[at:start]
            at = end + len(closing)
        return not (self._is_strict and (between + text[at:]).strip())
