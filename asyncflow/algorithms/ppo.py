"""PPO with a critic: a learned value of every token in the place of a group's mean (arXiv:1707.06347).

    surrogate   min(R A, clip(R, 1 - clip_low, 1 + clip_high) A), eq. 7     R = pi_theta / pi_old, token by token
    A           generalised advantages of the tokens' rewards and values: functional.generalised_advantages
    rewards     the response's, with its last token; less the KL term of each token, if there is one (`kl_place: reward`):
                arXiv:1909.08593, eq. 2
    critic      1/2 (V - G)^2 with G = A + V_old, clipped around V_old by `value_clip`

As six tasks on the queue: rollout, reference (where there is a KL term), values, reward, training, critic_update. The critic is a
model of its own, in a worker of its own (`train.critic`), which begins as the policy does.

`held_steps` train the critic alone: until its values mean something, they only add noise. `normalise_advantages` standardises them
over the masked tokens of the whole step, which nothing of a step's training can then overlap (`Algorithm.waits_for_batch`).

Left out: values after the end of a response that the length limit cut off (functional.py says why), and a critic that shares
weights with the policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import numpy as np

from asyncflow.algorithms import functional
from asyncflow.algorithms.base import Critic, Normaliser
from asyncflow.algorithms.policy_loss import check_above_zero
from asyncflow.algorithms.shared_advantages import DividedOptions, StandardisedLoss
from asyncflow.algorithms.surrogate import ClippedRatio
from asyncflow.types import Array, LossSums, Ragged, ScoredGroup, UserError, ValueBatch

if TYPE_CHECKING:
    from collections.abc import Callable


class PPO(StandardisedLoss):
    """PPO (arXiv:1707.06347): a clipped ratio, and advantages from a critic's value of each token."""

    def __init__(
        self,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        discount: float = 1.0,
        decay: float = 0.95,
        value_clip: float | None = 0.2,
        normalise_advantages: bool = False,
        held_steps: int = 0,
        **shared: Unpack[DividedOptions],
    ) -> None:
        """`discount`: gamma; `decay`: lambda. `value_clip`: how far a value may move in a step's loss; None: as it likes.

        Raises `UserError` if an option lies outside its range, or contradicts another.
        """
        options: DividedOptions = {"kl_place": "reward", "kl_estimator": "k1", **shared}
        super().__init__(ClippedRatio(clip_low, clip_high), **options)
        for name, value in {"discount": discount, "decay": decay}.items():
            if not 0 <= value <= 1:
                raise UserError(f"algorithm.{name} must lie in [0, 1], but is {value}.")
        if value_clip is not None:
            check_above_zero(value_clip=value_clip)
        if isinstance(held_steps, bool) or not isinstance(held_steps, int) or held_steps < 0:
            raise UserError(f"algorithm.held_steps must be a whole number from 0 up, but is {held_steps!r}.")
        self.discount, self.decay = discount, decay
        self.waits_for_batch = normalise_advantages
        self.held_steps = held_steps
        self.critic: Critic = ValueLoss(lambda group: self.estimates(group)[1], value_clip)

    def estimates(self, group: ScoredGroup) -> tuple[Ragged, Ragged]:
        """A and G of every token.

        Raises `UserError` if the group has no values, or lacks what a KL term in the reward needs.
        """
        if group.values is None:
            raise UserError("algorithm ppo needs a critic's values, and none are computed: no task of this queue adds them.")
        kl = self.kl_of_tokens(group)
        estimates: list[tuple[Array, Array]] = []
        for i, (values, mask) in enumerate(zip(group.values, group.loss_mask, strict=True)):
            rewards = np.zeros(len(values)) if kl is None else -kl[i]
            if mask.any():
                rewards[np.flatnonzero(mask)[-1]] += group.rewards[i]
            estimates.append(functional.generalised_advantages(rewards, values, mask, self.discount, self.decay))
        advantages, returns = (Ragged.from_arrays([of_row[i] for of_row in estimates], "float32") for i in (0, 1))
        return advantages, returns

    def advantages(self, group: ScoredGroup) -> Ragged:
        """A of the module's head, a number for each token."""
        return self.estimates(group)[0]


class ValueLoss(Critic):
    """Implements `Critic`: the values are to become the returns that `estimates` gives."""

    normaliser: Normaliser = "tokens"

    def __init__(self, returns: Callable[[ScoredGroup], Ragged], clip: float | None) -> None:
        self._returns, self._clip = returns, clip

    def advantages(self, group: ScoredGroup) -> Ragged:
        """G of the module's head, a number for each token."""
        return self._returns(group)

    def loss(self, batch: ValueBatch) -> LossSums:
        """The sum of `functional.value_error` over the masked tokens.

        Metrics, sums over the masked tokens: `critic/value`, the values that the step began with; `critic/return`, G;
        `critic/clip_ratio`, the tokens whose value is clipped; `critic/error_square` and `critic/return_square`, of G - V_old and
        of G, and `critic/error`: what the explained variance is made from.
        """
        error_T, clipped_T = functional.value_error(batch.values_T, batch.old_values_T, batch.returns_T, self._clip)
        mask_T, left_T = batch.mask_T, batch.returns_T - batch.old_values_T
        return LossSums(
            loss=(mask_T * error_T).sum(),
            metrics={
                "critic/value": (mask_T * batch.old_values_T).sum(),
                "critic/return": (mask_T * batch.returns_T).sum(),
                "critic/return_square": (mask_T * batch.returns_T**2).sum(),
                "critic/error": (mask_T * left_T).sum(),
                "critic/error_square": (mask_T * left_T**2).sum(),
                "critic/clip_ratio": (mask_T * clipped_T).sum(),
            },
        )
