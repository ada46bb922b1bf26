"""Common part of the losses of a policy, whatever they maximise.

    loss = - sum over tokens of w (c surrogate - kl_coefficient KL + entropy_coefficient H)

    surrogate   of the algorithm: surrogate.py
    c           1, or the importance weight of off_policy.py: from the engine that sampled to the old policy
    KL          to a frozen reference, by an estimator: k1, k2, k3 (functional.py says which gradient each has)
    H           the entropy of the policy's distribution over all tokens, in nats
    w           of the loss normaliser:

    loss_normaliser   w               the step divides by     so that
    tokens            1               its masked tokens       every token weighs the same
    sequences         1 / |o|         its responses           every response weighs the same
    constant          1 / constant    its responses           every token weighs the same, and in every step (Dr. GRPO)

KL and H have no importance weight: they hold the policy, whichever engine drew the token.

With `kl_place: reward` the KL term is not in the loss: it is taken off the rewards before they become advantages, and has no
gradient of its own. It is then from the policy that drew the tokens to the reference, which is needed ahead of training.

An algorithm is a class below `PolicyLoss` that chooses a surrogate and says what an advantage is. None is below another algorithm:
what two of them share is a function, a part that both are given, or a class of shared_advantages.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypedDict, Unpack, get_args

import numpy as np

from asyncflow.algorithms import functional
from asyncflow.algorithms.base import Algorithm, Normaliser
from asyncflow.algorithms.functional import Estimator
from asyncflow.algorithms.off_policy import Correction, ImportanceWeights, Level
from asyncflow.algorithms.surrogate import Surrogate
from asyncflow.types import Array, LossSums, ScoredGroup, TokenBatch, UserError

if TYPE_CHECKING:
    from torch import Tensor

LossNormaliser = Literal["tokens", "sequences", "constant"]
DivergencePlace = Literal["loss", "reward"]
ESTIMATORS: Final = {"k1": functional.k1_divergence, "k2": functional.k2_divergence, "k3": functional.k3_divergence}


class SharedOptions(TypedDict, total=False):
    """The options that every algorithm here takes, by name: those of `LossOptions`."""

    kl_coefficient: float
    kl_estimator: Estimator
    kl_place: DivergencePlace
    entropy_coefficient: float
    loss_normaliser: LossNormaliser
    loss_constant: float | None
    correction: Correction
    correction_level: Level
    correction_low: float | None
    correction_high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Options of a `PolicyLoss`. `loss_constant` is in tokens, and for `loss_normaliser: constant` alone, which has no other.

    Raises `UserError` if an option lies outside its range, or contradicts another (`correction...`: `ImportanceWeights`).
    """

    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_place: DivergencePlace = "loss"
    entropy_coefficient: float = 0.0
    loss_normaliser: LossNormaliser = "tokens"
    loss_constant: float | None = None
    correction: Correction = "none"
    correction_level: Level = "token"
    correction_low: float | None = None
    correction_high: float | None = None

    def __post_init__(self) -> None:
        check_from_zero(kl_coefficient=self.kl_coefficient, entropy_coefficient=self.entropy_coefficient)
        check_choice("kl_estimator", self.kl_estimator, get_args(Estimator))
        check_choice("kl_place", self.kl_place, get_args(DivergencePlace))
        check_choice("loss_normaliser", self.loss_normaliser, get_args(LossNormaliser))
        if self.loss_normaliser == "constant" and self.loss_constant is None:
            raise UserError(
                "algorithm.loss_normaliser=constant needs loss_constant, a number of tokens, such as rollout.max_new_tokens."
            )
        if self.loss_normaliser != "constant" and self.loss_constant is not None:
            raise UserError(f"algorithm.loss_constant is for loss_normaliser=constant, and it is {self.loss_normaliser}.")
        if self.loss_constant is not None:
            check_above_zero(loss_constant=self.loss_constant)

    @property
    def has_kl_in_loss(self) -> bool:
        """Whether a KL term is in the loss itself."""
        return self.kl_coefficient > 0 and self.kl_place == "loss"


class PolicyLoss(Algorithm):
    """Base of the algorithms here, see the module's head. A subclass says what `advantages` are, from `rewards`."""

    def __init__(self, surrogate: Surrogate, **shared: Unpack[SharedOptions]) -> None:
        """Raises as `LossOptions`."""
        self.surrogate, self.loss_options = surrogate, LossOptions(**shared)
        options = self.loss_options
        self.normaliser: Normaliser = "tokens" if options.loss_normaliser == "tokens" else "sequences"
        self.needs_reference = options.kl_coefficient > 0
        self.needs_reference_ahead = options.kl_coefficient > 0 and options.kl_place == "reward"
        has_own_loss = type(self).loss is not PolicyLoss.loss  # which may add what it likes
        self.is_zero_without_advantages = not (has_own_loss or options.entropy_coefficient > 0 or options.has_kl_in_loss)
        self.correction: Correction = options.correction
        bounds = options.correction_low, options.correction_high
        self.importance_weights = ImportanceWeights(options.correction, options.correction_level, *bounds)
        self.is_token_local = surrogate.is_token_local and self.importance_weights.is_token_local

    def rewards(self, group: ScoredGroup) -> Array:
        """float32 [R]: the rewards, less the KL term of each whole response if that is in the reward.

        Raises `UserError` if it is, but the group has no reference log-probs.
        """
        kl = self.kl_of_tokens(group)
        if kl is None:
            return group.rewards
        totals = [of_row.sum() for of_row in kl]
        return (group.rewards.astype(np.float64) - totals).astype(np.float32)

    def kl_of_tokens(self, group: ScoredGroup) -> list[Array] | None:
        """kl_coefficient KL of each token (float64) of each response, 0 where the mask is; None unless it is in the reward.

        Raises as `rewards`.
        """
        if not self.needs_reference_ahead:
            return None
        if group.ref_logprobs is None:
            raise UserError(
                "algorithm.kl_place=reward needs the reference's log-probs ahead of training: set train.reference=task."
            )
        rows = zip(group.ref_logprobs, group.rollout_logprobs, group.loss_mask, strict=True)
        coefficient, estimator = self.loss_options.kl_coefficient, self.loss_options.kl_estimator
        return [coefficient * functional.sampled_divergence(*row, estimator) for row in rows]

    def loss(self, batch: TokenBatch) -> LossSums:
        """The sum of the module's head over the masked tokens of one micro-batch, or of a piece of it.

        Metrics, sums over the masked tokens: `policy/kl` in nats by k3, from the policy to the reference if there is one, else
        from the old policy to the policy; `policy/rollout_kl` in nats, from the engine that sampled to the policy;
        `policy/entropy` in nats; `policy/clip_ratio`, the tokens that are clipped; those of `ImportanceWeights.weigh`.
        Of each token: whether it is clipped, and its importance weight where there are any.

        Raises `UserError` if a KL term is asked for, but the batch has no reference log-probs.
        """
        options, mask_T = self.loss_options, batch.mask_T
        log_ratio_T = functional.log_ratio(batch.logprobs_T, batch.old_logprobs_T, mask_T)
        objective_T, clipped_T = self.surrogate(batch, log_ratio_T)
        weighing: dict[str, Tensor] = {}
        tokens = {"clipped": clipped_T}
        if self.correction != "none":
            importance_T, weighing = self.importance_weights.weigh(batch)
            objective_T = importance_T * objective_T
            tokens["importance weight"] = importance_T
        log_s_T = self._log_ratio_to_reference(batch, log_ratio_T)
        if options.has_kl_in_loss:
            objective_T = objective_T - options.kl_coefficient * ESTIMATORS[options.kl_estimator](log_s_T)
        if options.entropy_coefficient:
            objective_T = objective_T + options.entropy_coefficient * batch.entropy_T
        kl_T = functional.k3_divergence(log_s_T.detach())
        rollout_kl_T = functional.k3_divergence(functional.log_ratio(batch.logprobs_T.detach(), batch.rollout_logprobs_T, mask_T))
        return LossSums(
            loss=-(self._weights(batch) * objective_T).sum(),
            metrics={
                "policy/kl": (mask_T * kl_T).sum(),
                "policy/rollout_kl": (mask_T * rollout_kl_T).sum(),
                "policy/entropy": (mask_T * batch.entropy_T.detach()).sum(),
                "policy/clip_ratio": (mask_T * clipped_T).sum(),
                **weighing,
            },
            tokens=tokens,
        )

    def _log_ratio_to_reference(self, batch: TokenBatch, log_ratio_T: Tensor) -> Tensor:
        """log pi_ref - log pi_theta, float32 [T] with gradient; without a reference log pi_theta - log pi_old, for the metric."""
        if batch.ref_logprobs_T is not None:
            return functional.log_ratio(batch.ref_logprobs_T, batch.logprobs_T, batch.mask_T)
        if self.loss_options.has_kl_in_loss:
            raise UserError("algorithm.kl_coefficient needs a reference model's log-probs, and none are computed: set it to 0.")
        return log_ratio_T

    def _weights(self, batch: TokenBatch) -> Tensor:
        """w of the module's head, float32 [T], 0 where the mask is."""
        if self.loss_options.loss_normaliser == "sequences":
            return functional.sequence_weights(batch.mask_T, batch.row_T, batch.row_tokens_R)
        constant = self.loss_options.loss_constant
        return batch.mask_T if constant is None else batch.mask_T / constant


def check_from_zero(**options: float) -> None:
    """Raises `UserError` for an option that is no number from 0 up."""
    for name, value in options.items():
        if not 0 <= value < math.inf:
            raise UserError(f"algorithm.{name} must be a number from 0 up, but is {value}.")


def check_above_zero(**options: float) -> None:
    """Raises `UserError` for an option that is no number above 0."""
    for name, value in options.items():
        if not 0 < value < math.inf:
            raise UserError(f"algorithm.{name} must be a number above 0, but is {value}.")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises `UserError` for an option that is none of its choices."""
    if value not in choices:
        raise UserError(f"algorithm.{name} must be {', '.join(choices[:-1])} or {choices[-1]}, but is {value!r}.")
