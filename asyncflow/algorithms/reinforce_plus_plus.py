"""REINFORCE++: no critic and no group, but advantages normalised over the whole batch (arXiv:2501.03262v9, eq. 4 to 8).

    surrogate   min(R A, clip(R, 1 - clip_low, 1 + clip_high) A)     R = pi_theta / pi_old, token by token
    A           (G - mean G) / (std G + advantage_epsilon), over all masked tokens of the step
    normaliser  tokens

    baseline   G of a token                                               KL, if there is any
    none       r - the KL terms of this token and all after it            in the reward, by k1
    group      r - mean r over the group (REINFORCE++ with baseline)      in the loss, by k2

Mean and deviation are those of a whole step, so no group can be trained on before the last one is scored: nothing of a step's
training overlaps its generation. Two runs are still equal to the bit, since the sums are (`Algorithm.waits_for_batch`).
"""

from __future__ import annotations

from typing import Literal, Unpack, get_args

from asyncflow.algorithms import functional
from asyncflow.algorithms.policy_loss import check_choice
from asyncflow.algorithms.shared_advantages import DividedOptions, StandardisedLoss
from asyncflow.algorithms.surrogate import ClippedRatio
from asyncflow.types import Advantages, Ragged, ScoredGroup

Baseline = Literal["none", "group"]


class ReinforcePlusPlus(StandardisedLoss):
    """REINFORCE++ (arXiv:2501.03262): no critic; advantages are standardised over the whole batch."""

    waits_for_batch = True

    def __init__(
        self,
        *,
        baseline: Baseline = "none",
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        **shared: Unpack[DividedOptions],
    ) -> None:
        """Raises `UserError` if an option lies outside its range, or contradicts another."""
        check_choice("baseline", baseline, get_args(Baseline))
        options: DividedOptions = {"kl_place": "reward", "kl_estimator": "k1", **shared}
        if baseline == "group":
            options = {"kl_place": "loss", "kl_estimator": "k2", **shared}
        super().__init__(ClippedRatio(clip_low, clip_high), **options)
        self.baseline = baseline

    def advantages(self, group: ScoredGroup) -> Advantages:
        """G of the module's head: float32 [R], or, with a KL term in the reward, ragged."""
        rewards = functional.centred_advantages(group.rewards) if self.baseline == "group" else group.rewards
        kl = self.kl_of_tokens(group)
        if kl is None:
            return rewards
        returns = [functional.returns_to_go(float(reward), of_row) for reward, of_row in zip(rewards, kl, strict=True)]
        return Ragged.from_arrays(returns, "float32")
