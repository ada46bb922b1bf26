"""GRPO: group-relative advantages, a clipped ratio, and optionally a KL term to a frozen reference (PA 1-3).

    loss = - sum over tokens of w (c min(R A, clip(R, 1 - clip_low, 1 + clip_high) A) - kl_coefficient KL)

    tokens      w = 1         the step divides by its masked tokens: every token weighs the same
    sequences   w = 1 / |o|   the step divides by its responses: every response weighs the same

c is 1, or the importance weight of off_policy.py: from the engine that sampled to the old policy of R. The KL term has none: it
keeps the policy near the reference, whoever drew the token.

Left out: the constant normaliser, and a critic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, get_args

from asyncflow.algorithms import functional
from asyncflow.algorithms.base import Normaliser
from asyncflow.algorithms.off_policy import Correction, ImportanceWeights, Level
from asyncflow.types import Array, LossSums, TokenBatch, UserError

if TYPE_CHECKING:
    from torch import Tensor


class GRPO:
    """See the module's head."""

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        kl_coefficient: float = 0.0,
        loss_normaliser: Normaliser = "tokens",
        advantage_epsilon: float = 1e-6,
        correction: Correction = "none",
        correction_level: Level = "token",
        correction_low: float | None = None,
        correction_high: float | None = None,
    ) -> None:
        """`clip_high` above `clip_low` lets an unlikely token that did well grow further than one that did badly shrinks.

        Raises:
            UserError: an option lies outside its range, or a `correction...` contradicts the others (`ImportanceWeights`).
        """
        if not 0 <= clip_low < 1:
            raise UserError(f"algorithm.clip_low must lie in [0, 1), because a ratio is never negative, but is {clip_low}.")
        if not 0 <= clip_high < math.inf:
            raise UserError(f"algorithm.clip_high must be a number from 0 up, but is {clip_high}.")
        if not 0 <= kl_coefficient < math.inf:
            raise UserError(f"algorithm.kl_coefficient must be a number from 0 up, but is {kl_coefficient}.")
        if not 0 < advantage_epsilon < math.inf:
            raise UserError(f"algorithm.advantage_epsilon must be a number above 0, but is {advantage_epsilon}.")
        if loss_normaliser not in get_args(Normaliser):
            choices = " or ".join(get_args(Normaliser))
            raise UserError(f"algorithm.loss_normaliser must be {choices}, but is {loss_normaliser!r}.")
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.kl_coefficient = kl_coefficient
        self.advantage_epsilon = advantage_epsilon
        self.normaliser: Normaliser = loss_normaliser
        self.needs_reference = kl_coefficient > 0
        self.correction: Correction = correction
        self.importance_weights = ImportanceWeights(correction, correction_level, correction_low, correction_high)
        self.is_token_local = self.importance_weights.is_token_local

    def advantages(self, rewards: Array) -> Array:
        """float32 [R] -> float32 [R], see `functional.group_advantages` (PA 1)."""
        return functional.group_advantages(rewards, self.advantage_epsilon)

    def loss(self, batch: TokenBatch) -> LossSums:
        """The sum of the module's head over the masked tokens of one micro-batch, or of a piece of it.

        Metrics, sums over the masked tokens: `policy/kl` in nats, from the policy to the reference if there is one, else
        from the old policy to the policy; `policy/rollout_kl` in nats, from the engine that sampled to the policy;
        `policy/entropy` in nats; `policy/clip_ratio`, the tokens that are clipped; those of `ImportanceWeights.weigh`.

        Raises:
            UserError: a KL term is asked for, but the batch has no reference log-probs.
        """
        if self.kl_coefficient and batch.ref_logprobs_T is None:
            raise UserError("algorithm.kl_coefficient needs a reference model's log-probs, and none are computed: set it to 0.")
        mask_T, advantages_T = batch.mask_T, batch.advantages_T
        log_ratio_T = functional.log_ratio(batch.logprobs_T, batch.old_logprobs_T, mask_T)
        ratio_T = log_ratio_T.exp()
        objective_T = functional.clipped_surrogate(ratio_T, advantages_T, self.clip_low, self.clip_high)
        weighing: dict[str, Tensor] = {}
        if self.correction != "none":
            importance_T, weighing = self.importance_weights.weigh(batch)
            objective_T = importance_T * objective_T
        kl_T = self._kl(batch, log_ratio_T)
        if self.kl_coefficient:
            objective_T = objective_T - self.kl_coefficient * kl_T
        weight_T = mask_T
        if self.normaliser == "sequences":
            weight_T = functional.sequence_weights(mask_T, batch.row_T, batch.row_tokens_R)
        clipped_T = functional.is_clipped(ratio_T.detach(), advantages_T, self.clip_low, self.clip_high)
        rollout_kl_T = functional.k3_divergence(functional.log_ratio(batch.logprobs_T.detach(), batch.rollout_logprobs_T, mask_T))
        return LossSums(
            loss=-(weight_T * objective_T).sum(),
            metrics={
                "policy/kl": (mask_T * kl_T.detach()).sum(),
                "policy/rollout_kl": (mask_T * rollout_kl_T).sum(),
                "policy/entropy": (mask_T * batch.entropy_T).sum(),
                "policy/clip_ratio": (mask_T * clipped_T).sum(),
                **weighing,
            },
        )

    def _kl(self, batch: TokenBatch, log_ratio_T: Tensor) -> Tensor:
        if batch.ref_logprobs_T is None:
            return functional.k3_divergence(log_ratio_T.detach())
        return functional.k3_divergence(functional.log_ratio(batch.ref_logprobs_T, batch.logprobs_T, batch.mask_T))
