"""Losses of the Tinker API: sums over tokens, from each target's log-prob and the inputs that the client computed.

    cross_entropy         - w log pi                          w: weights, of any sign; the SDK's custom losses are this one, too
    importance_sampling   - R A                               R = pi / pi_sampled, A: advantages
    ppo                   - min(R A, clip(R) A)               PPO, arXiv:1707.06347, eq. 7
    cispo                 - sg(clip(R)) A log pi              CISPO, arXiv:2506.13585, eq. 4 and 5

sg: without gradient. clip: to [clip_low_threshold, clip_high_threshold], 0.8 and 1.2 unless the request says. A custom loss is the
client's own: the SDK asks for log-probs by `forward`, and sends its gradient as the weights of a cross entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from asyncflow.algorithms import functional
from asyncflow.types import Array, LossSums, Objective, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"


class Loss(Objective, Protocol):
    """Loss that a request names. `TokenBatch.advantages_T` holds its coefficients, `rollout_logprobs_T` the sampled log-probs."""

    coefficients: str
    """Name of the input that weighs each token."""
    sampling_logprobs: str | None
    """Name of the input with the log-probs of the engine that sampled; None: the loss uses none."""


class CrossEntropy(Loss):
    """See the module's head."""

    coefficients, sampling_logprobs = "weights", None
    is_token_local = True

    def loss(self, batch: TokenBatch) -> LossSums:
        return LossSums(-(batch.advantages_T * batch.logprobs_T).sum(), {})


class _RatioLoss(Loss):
    coefficients, sampling_logprobs = "advantages", "logprobs"
    is_token_local = True

    def loss(self, batch: TokenBatch) -> LossSums:
        log_ratio_T = functional.log_ratio(batch.logprobs_T, batch.rollout_logprobs_T, batch.mask_T)
        return LossSums(-self.objective(batch, log_ratio_T).sum(), {})

    def objective(self, batch: TokenBatch, log_ratio_T: Tensor) -> Tensor:
        """Objective of each token, float32 [T], to be maximised."""
        raise NotImplementedError


class ImportanceSampling(_RatioLoss):
    """See the module's head."""

    def objective(self, batch: TokenBatch, log_ratio_T: Tensor) -> Tensor:
        return log_ratio_T.exp() * batch.advantages_T


@dataclass(frozen=True, slots=True)
class _ClippedLoss(_RatioLoss):
    """`clip_low`, `clip_high`: distances of the two thresholds from 1."""

    clip_low: float
    clip_high: float


class ClippedSurrogateLoss(_ClippedLoss):
    """See the module's head."""

    def objective(self, batch: TokenBatch, log_ratio_T: Tensor) -> Tensor:
        return functional.clipped_surrogate(log_ratio_T.exp(), batch.advantages_T, self.clip_low, self.clip_high)


class ClippedWeightLoss(_ClippedLoss):
    """See the module's head."""

    def objective(self, batch: TokenBatch, log_ratio_T: Tensor) -> Tensor:
        weight_T = log_ratio_T.detach().exp()
        return functional.weighted_log_prob(
            batch.logprobs_T, weight_T, batch.advantages_T, batch.mask_T, self.clip_low, self.clip_high
        )


CLIPPED: Final[dict[str, type[_ClippedLoss]]] = {"ppo": ClippedSurrogateLoss, "cispo": ClippedWeightLoss}
PLAIN: Final[dict[str, type[Loss]]] = {"cross_entropy": CrossEntropy, "importance_sampling": ImportanceSampling}


def make_loss(name: str, options: Mapping[str, float | str]) -> Loss:
    """Loss of this name. Raises `ValueError` for one that there is not, or an option that it does not have."""
    if name not in (*PLAIN, *CLIPPED):
        raise ValueError(f"there is no loss {name!r} here: choose one of {', '.join((*PLAIN, *CLIPPED))}, or a custom one")
    known = (CLIP_LOW, CLIP_HIGH) if name in CLIPPED else ()
    if strangers := sorted(options.keys() - set(known)):
        raise ValueError(f"the loss {name} has no option {strangers[0]}; it has {', '.join(known) or 'none'}")
    if name in PLAIN:
        return PLAIN[name]()
    low, high = (options.get(key, default) for key, default in ((CLIP_LOW, 0.8), (CLIP_HIGH, 1.2)))
    if isinstance(low, str) or isinstance(high, str) or not 0 <= low <= 1 <= high < np.inf:
        raise ValueError(f"{CLIP_LOW} lies in 0..1 and {CLIP_HIGH} from 1 up, but they are {low} and {high}")
    return CLIPPED[name](1 - low, high - 1)


class Recording(Objective):
    """Objective that keeps the log-probs that it is given: they are part of the answer."""

    def __init__(self, loss: Loss) -> None:
        self.is_token_local = loss.is_token_local
        self._loss = loss
        self._pieces: list[Tensor] = []

    def loss(self, batch: TokenBatch) -> LossSums:
        self._pieces.append(batch.logprobs_T.detach())
        return self._loss.loss(batch)

    def take(self) -> Array:
        """Log-probs since the last call, float32 [T], in the order of the tokens."""
        taken: Array = np.concatenate([piece.float().cpu().numpy() for piece in self._pieces])
        self._pieces.clear()
        return taken
