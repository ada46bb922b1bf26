"""1 where a response matches a regular expression, 0 otherwise. One that backtracks without end is ended by the deadline."""

from __future__ import annotations

import re
from typing import Literal

from asyncflow.rewards.base import Sample


class Regex:
    """Python's `re`, over the whole response."""

    is_stateless = True

    def __init__(
        self,
        *,
        pattern: str,
        match: Literal["search", "full"] = "search",
        ignore_case: bool = False,
        multiline: bool = False,
        dot_all: bool = True,
    ) -> None:
        """`match`: anywhere, or the whole response but for spaces at its ends. `multiline`: ^ and $ at every line. `dot_all`: a dot
        is also a line's end. Raises `ValueError` for a pattern that is none."""
        if match not in ("search", "full"):
            raise ValueError(f"match={match!r} is neither 'search' nor 'full'")
        flags = (re.IGNORECASE * ignore_case) | (re.MULTILINE * multiline) | (re.DOTALL * dot_all)
        try:
            self._pattern = re.compile(pattern, flags)
        except re.error as error:
            raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from error
        self._is_full = match == "full"

    def __call__(self, sample: Sample) -> float:
        """Score of a response: 1.0 or 0.0."""
        found = self._pattern.fullmatch(sample.response.strip()) if self._is_full else self._pattern.search(sample.response)
        return float(found is not None)
