"""Off-policy correction: how much a token counts that another policy drew than the loss takes it for.

    loss = - sum over tokens of weight min(R A, clip(R) A)        R = pi_theta / pi_old        rho = pi_old / pi_rollout

    correction   weight (a constant: no gradient)       the field's names
    none         1                                      PPO, GRPO: pi_old is taken for the policy that sampled
    truncated    min(rho, high)                         truncated importance sampling: TIS; by sequence, Seq-TIS
    masked       rho inside [low, high], 0 outside      masked importance sampling: IcePop, MIS; by sequence, Seq-MIS
    decoupled    min(rho, high), rho of each token      decoupled PPO: pi_old is the proximal policy, pi_rollout the behaviour

    level        rho of a token
    token        of that token
    sequence     of its whole response: the product over the response's masked tokens
    geometric    the geometric mean of its response's masked tokens: the product's |o|-th root

`decoupled` is `truncated` by token under a promise: pi_old is newer than what sampled. Then rho is what staleness did, R what the
step's own updates do, and only the second is clipped. The normaliser is the same with all of them: importance sampling divides by
what was drawn. docs/off_policy.md says why, what each mode does by itself, and where all this comes from.

Left out: weights normalised over a batch, which would depend on what arrived together; rejection without a weight.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, get_args

from asyncflow.algorithms import functional
from asyncflow.types import SAMPLED_UP_TO, Old, TokenBatch, UserError

if TYPE_CHECKING:
    from torch import Tensor

Correction = Literal["none", "truncated", "masked", "decoupled"]
Level = Literal["token", "sequence", "geometric"]

DEFAULT_HIGH: Final[dict[Correction, float]] = {"truncated": 2.0, "masked": 2.0, "decoupled": 5.0}


class ImportanceWeights:
    """The weights of an algorithm's options `correction`, `correction_level`, `correction_low` and `correction_high`."""

    def __init__(self, correction: Correction, level: Level = "token", low: float | None = None, high: float | None = None) -> None:
        """`high` is by default 2, for `decoupled` 5, and has no default for `geometric`; `low` is 1 / high, for `masked` alone.

        Raises `UserError` if an option lies outside its range, or says nothing or two things together with the others.
        """
        if correction not in get_args(Correction):
            raise UserError(f"algorithm.correction must be one of {', '.join(get_args(Correction))}, but is {correction!r}.")
        if level not in get_args(Level):
            raise UserError(f"algorithm.correction_level must be one of {', '.join(get_args(Level))}, but is {level!r}.")
        if correction == "none" and (level != "token" or low is not None or high is not None):
            raise UserError("algorithm.correction is none, so its level and bounds mean nothing: choose one, or leave them out.")
        if correction == "decoupled" and level != "token":
            raise UserError(
                f"algorithm.correction=decoupled weighs token by token, not by {level}: take correction=truncated for that."
            )
        if low is not None and correction != "masked":
            raise UserError(f"algorithm.correction_low is for correction=masked: {correction} is bounded from above alone.")
        if level == "geometric" and high is None:
            raise UserError(
                "algorithm.correction_level=geometric needs correction_high: a mean over tokens lies close to 1, so take one near "
                "1.001."
            )
        self.high = DEFAULT_HIGH.get(correction, math.inf) if high is None else high
        if not self.high >= 1:
            raise UserError(f"algorithm.correction_high must be a number from 1 up, the ratio on policy, but is {high}.")
        self.low = (1 / self.high if low is None else low) if correction == "masked" else 0.0
        if not 0 <= self.low <= 1:
            raise UserError(f"algorithm.correction_low must lie in [0, 1], below the ratio on policy, but is {low}.")
        self.correction: Correction = correction
        self.level: Level = level
        self.is_token_local = level == "token"
        """Whether a token's weight needs no other token, see `Objective.is_token_local`."""

    def weigh(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The weights (float32 [T], no gradient) of what is not `none`, and their metrics.

        Metrics, over the masked tokens: `importance_weight/mean` and `/square`, sums of the weights and of their squares;
        `/outside_ratio`, the tokens that were truncated or masked; `/max`, the largest rho before that.
        """
        mask_T = batch.mask_T
        log_ratio_T = functional.log_ratio(batch.old_logprobs_T, batch.rollout_logprobs_T, mask_T)
        if self.level != "token":
            is_mean = self.level == "geometric"
            log_ratio_T = functional.sequence_log_ratio(log_ratio_T, batch.row_T, batch.sequence_tokens_R, is_mean=is_mean)
        ratio_T = functional.importance_ratio(log_ratio_T)
        outside_T = functional.is_outside(ratio_T, self.low, self.high)
        if self.correction == "masked":
            weights_T = functional.masked(ratio_T, self.low, self.high)
        else:
            weights_T = functional.truncated(ratio_T, self.high)
        return weights_T, {
            "importance_weight/mean": (mask_T * weights_T).sum(),
            "importance_weight/square": (mask_T * weights_T**2).sum(),
            "importance_weight/outside_ratio": (mask_T * outside_T).sum(),
            "importance_weight/max": (mask_T * ratio_T).max(),
        }


def default_correction(old: Old, max_staleness: int, *, is_truncated: bool = False) -> Correction:
    """Correction of a run that sets none: `none` while the old policy (`train.old`) is the one that sampled, else `decoupled`.

    `is_truncated`: the engine samples from the likeliest tokens only (`rollout.top_p` and its like); then `truncated` for `none`.
    """
    if max_staleness > SAMPLED_UP_TO.get(old, max_staleness):
        return "decoupled"
    return "truncated" if is_truncated and old != "rollout" else "none"


def check_correction(correction: Correction, old: Old, max_staleness: int, *, is_truncated: bool = False) -> None:
    """Check that the old policy (`train.old`) is one that the correction is right with, for rows of so many versions.

    `is_truncated`: see `default_correction`. Raises `UserError` if it would leave uncorrected what the old policy is not right for,
    or correct what the ratio corrects already.
    """
    if correction == "none" and is_truncated and old != "rollout":
        raise UserError(
            f"rollout.top_p, top_k and min_p have tokens drawn from a part of the policy's distribution, which train.old={old} is "
            f"not, and algorithm.correction is none: take correction=truncated, or train.old=rollout."
        )
    limit = SAMPLED_UP_TO.get(old, max_staleness)
    if correction == "none" and max_staleness > limit:
        raise UserError(
            f"the schedule trains on rows of staleness up to {max_staleness}, train.old={old} is the policy that sampled up to "
            f"{limit} only, and algorithm.correction is none: take train.old=rollout, or a correction (decoupled is made for it)."
        )
    if correction != "none" and old == "rollout":
        raise UserError(
            "train.old=rollout puts the ratio to the engine that sampled into the loss already, so "
            f"algorithm.correction={correction} has nothing left to correct: leave out one of the two."
        )
    if correction == "decoupled" and old == "previous":
        raise UserError(
            "algorithm.correction=decoupled needs a proximal policy that is newer than what sampled, and train.old=previous is the "
            "very policy that made rows of staleness 1: take train.old=current, or correction=truncated."
        )
