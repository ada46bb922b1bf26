"""Losses of the Tinker API: sums over tokens, from each target's log-prob and the inputs that the client computed.

    cross_entropy         - w log pi                          w: weights, of any sign; the SDK's custom losses are this one, too
    importance_sampling   - R A                               R = pi / pi_sampled, A: advantages
    ppo                   - min(R A, clip(R) A)               PPO, arXiv:1707.06347, eq. 7
    cispo                 - sg(clip(R)) A log pi              CISPO, arXiv:2506.13585, eq. 4 and 5

sg: without gradient. clip: to [clip_low_threshold, clip_high_threshold], 0.8 and 1.2 unless the request says. A custom loss is the
client's own: the SDK asks for log-probs by `forward`, and sends its gradient as the weights of a cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncflow.algorithms import functional
from asyncflow.types import Array, LossSums, Objective, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True, slots=True)
class Loss(Objective):
    """Loss that a request names: the sum over tokens of `objective`, [T], which is maximised. `TokenBatch.advantages_T` holds its
    coefficients, `rollout_logprobs_T` the sampled log-probs."""

    objective: Callable[[TokenBatch, float, float], Tensor]
    coefficients: str
    """Name of the input that weighs each token."""
    sampling_logprobs: str | None = None
    """Name of the input with the log-probs of the engine that sampled; None: the loss uses none."""
    clip_low: float = 0.0
    clip_high: float = 0.0
    """Distances of the two thresholds from 1."""
    is_token_local = True

    def loss(self, batch: TokenBatch) -> LossSums:
        return LossSums(-self.objective(batch, self.clip_low, self.clip_high).sum(), {})


def _cross_entropy(batch: TokenBatch, low: float, high: float) -> Tensor:
    return batch.advantages_T * batch.logprobs_T


def _importance_sampling(batch: TokenBatch, low: float, high: float) -> Tensor:
    return _log_ratio(batch).exp() * batch.advantages_T


def _ppo(batch: TokenBatch, low: float, high: float) -> Tensor:
    return functional.clipped_surrogate(_log_ratio(batch).exp(), batch.advantages_T, low, high)


def _cispo(batch: TokenBatch, low: float, high: float) -> Tensor:
    weight_T = _log_ratio(batch).detach().exp()
    return functional.weighted_log_prob(batch.logprobs_T, weight_T, batch.advantages_T, batch.mask_T, low, high)


def _log_ratio(batch: TokenBatch) -> Tensor:
    return functional.log_ratio(batch.logprobs_T, batch.rollout_logprobs_T, batch.mask_T)


LOSSES: Final = {
    "cross_entropy": Loss(_cross_entropy, "weights"),
    "importance_sampling": Loss(_importance_sampling, "advantages", "logprobs"),
    "ppo": Loss(_ppo, "advantages", "logprobs"),
    "cispo": Loss(_cispo, "advantages", "logprobs"),
}
CLIPPED: Final = ("ppo", "cispo")


def make_loss(name: str, options: Mapping[str, float | str]) -> Loss:
    """Loss of this name. Raises `ValueError` for one that there is not, or an option that it does not have."""
    if name not in LOSSES:
        raise ValueError(f"there is no loss {name!r} here: choose one of {', '.join(LOSSES)}, or a custom one")
    known = (CLIP_LOW, CLIP_HIGH) if name in CLIPPED else ()
    if strangers := sorted(options.keys() - set(known)):
        raise ValueError(f"the loss {name} has no option {strangers[0]}; it has {', '.join(known) or 'none'}")
    if name not in CLIPPED:
        return LOSSES[name]
    low, high = (options.get(key, default) for key, default in ((CLIP_LOW, 0.8), (CLIP_HIGH, 1.2)))
    if isinstance(low, str) or isinstance(high, str) or not 0 <= low <= 1 <= high < np.inf:
        raise ValueError(f"{CLIP_LOW} lies in 0..1 and {CLIP_HIGH} from 1 up, but they are {low} and {high}")
    return replace(LOSSES[name], clip_low=1 - low, clip_high=high - 1)


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
