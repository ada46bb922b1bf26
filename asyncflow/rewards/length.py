"""A penalty for responses that are too long, rising softly (DAPO, arXiv 2503.14476, equation 13)."""

from __future__ import annotations

from asyncflow.rewards.base import Sample


class Length:
    """0 up to `max_tokens - soft_tokens` tokens, then falling in a straight line to -1 at `max_tokens`, and -1 beyond.

    R = 0                                    |y| <= L_max - L_cache
        ((L_max - L_cache) - |y|) / L_cache  L_max - L_cache < |y| <= L_max
        -1                                   L_max < |y|
    """

    is_stateless = True

    def __init__(self, *, max_tokens: int, soft_tokens: int = 0, min_tokens: int = 0) -> None:
        """`max_tokens`: the paper's L_max; `soft_tokens`: its L_cache. A response of fewer than `min_tokens` gets -1 too. The end
        token counts. Raises `ValueError` for numbers that leave no room."""
        if not 0 <= soft_tokens <= max_tokens or not 0 <= min_tokens <= max_tokens - soft_tokens or max_tokens < 1:
            raise ValueError(
                f"soft_tokens <= max_tokens and min_tokens <= max_tokens - soft_tokens must hold, not max_tokens={max_tokens}, "
                f"soft_tokens={soft_tokens}, min_tokens={min_tokens}"
            )
        self._max, self._soft, self._min = max_tokens, soft_tokens, min_tokens

    def __call__(self, sample: Sample) -> float:
        """Penalty of a response's length, from -1.0 to 0.0."""
        length, free = len(sample.token_ids), self._max - self._soft
        if length < self._min or length > self._max:
            return -1.0
        return 0.0 if length <= free else (free - length) / self._soft
