"""Surrogates: what of a token is maximised, from the ratio R = pi_theta / pi_old and its advantage A.

    ClippedRatio            min(R A, clip(R) A)          token by token                   PPO, GRPO, and most others
    ClippedSequenceRatio    min(s A, clip(s) A)          s: of the whole response         GSPO
    WeightedLogProb         sg(clip(R)) A log pi         every token keeps a gradient     CISPO

sg: without gradient. An algorithm is put together from one of them, its advantages, and what all have (policy_loss.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from asyncflow.algorithms import functional
from asyncflow.types import TokenBatch, UserError

if TYPE_CHECKING:
    from torch import Tensor


class SurrogateResult(NamedTuple):
    """float32 [T] with gradient, and bool [T]: where the clip has taken that gradient, or cut it off."""

    objective_T: Tensor
    is_clipped_T: Tensor


class Surrogate(ABC):
    """Built once with an algorithm; stateless."""

    is_token_local: bool
    """See `Objective.is_token_local`."""

    @abstractmethod
    def __call__(self, batch: TokenBatch, log_ratio_T: Tensor) -> SurrogateResult:
        """`log_ratio_T` float32 [T]: log R with gradient, 0 where the mask is. Where the advantage is 0, so is the objective, with
        its gradient."""


class ClippedRatio(Surrogate):
    """See `functional.clipped_surrogate` (PA 2)."""

    is_token_local = True

    def __init__(self, clip_low: float, clip_high: float) -> None:
        """Raises `UserError` if an option lies outside its range."""
        check_clip(clip_low, clip_high)
        self.clip_low, self.clip_high = clip_low, clip_high

    def __call__(self, batch: TokenBatch, log_ratio_T: Tensor) -> SurrogateResult:
        return self._clipped(log_ratio_T.exp(), batch.advantages_T)

    def _clipped(self, ratio_T: Tensor, advantages_T: Tensor) -> SurrogateResult:
        return SurrogateResult(
            functional.clipped_surrogate(ratio_T, advantages_T, self.clip_low, self.clip_high),
            functional.is_clipped(ratio_T.detach(), advantages_T, self.clip_low, self.clip_high),
        )


class ClippedSequenceRatio(ClippedRatio):
    """Clipped ratio of a whole response, `functional.sequence_ratio_of_tokens`: it is clipped as a whole, or not at all (GSPO)."""

    is_token_local = False

    def __call__(self, batch: TokenBatch, log_ratio_T: Tensor) -> SurrogateResult:
        log_s_T = functional.sequence_ratio_of_tokens(log_ratio_T, batch.row_T, batch.sequence_tokens_R)
        return self._clipped(log_s_T.exp(), batch.advantages_T)


class WeightedLogProb(Surrogate):
    """See `functional.weighted_log_prob` (CISPO). It counts tokens whose weight is cut off as clipped."""

    is_token_local = True

    def __init__(self, clip_low: float, clip_high: float) -> None:
        """`clip_low` 1: no bound from below. Raises `UserError` if an option lies outside its range."""
        check_clip(clip_low, clip_high, largest_low=1.0)
        self.clip_low, self.clip_high = clip_low, clip_high

    def __call__(self, batch: TokenBatch, log_ratio_T: Tensor) -> SurrogateResult:
        ratio_T = log_ratio_T.detach().exp()
        return SurrogateResult(
            functional.weighted_log_prob(
                batch.logprobs_T, ratio_T, batch.advantages_T, batch.mask_T, self.clip_low, self.clip_high
            ),
            functional.is_outside(ratio_T, 1 - self.clip_low, 1 + self.clip_high),
        )


def check_clip(clip_low: float, clip_high: float, *, largest_low: float = math.nextafter(1.0, 0.0)) -> None:
    """Check that a ratio is bounded by 1 - clip_low and 1 + clip_high. Raises `UserError`."""
    if not 0 <= clip_low <= largest_low:
        end = "]" if largest_low == 1 else ")"
        raise UserError(f"algorithm.clip_low must lie in [0, 1{end}, because a ratio is never negative, but is {clip_low}.")
    if not 0 <= clip_high < math.inf:
        raise UserError(f"algorithm.clip_high must be a number from 0 up, but is {clip_high}.")
