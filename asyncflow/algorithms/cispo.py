"""CISPO: the clip is on the importance weight, so that no token loses its gradient (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).

    surrogate   sg(clip(R, 1 - clip_low, 1 + clip_high)) A log pi_theta     R = pi_theta / pi_old, token by token
    A           (r - mean r) / (std r + advantage_epsilon), over the group
    normaliser  tokens

sg: without gradient. A rare token that opens a new train of thought has a large ratio after few updates; PPO's clip drops it, this
one lets it pull with a bounded weight. With `train.old: rollout` R is the correction for staleness as well, which is how ScaleRL
(arXiv:2510.13786, eq. 4) uses it.
"""

from __future__ import annotations

from typing import Unpack

from asyncflow.algorithms.shared_advantages import DividedOptions, GroupRelativeLoss
from asyncflow.algorithms.surrogate import WeightedLogProb


class CISPO(GroupRelativeLoss):
    """CISPO (arXiv:2506.13585): the importance weight is clipped, and every token keeps its gradient."""

    def __init__(
        self,
        *,
        clip_low: float = 1.0,
        clip_high: float = 4.0,
        **shared: Unpack[DividedOptions],
    ) -> None:
        """By default the weight has no bound from below, as in the paper, and 5 for the one from above, which the paper does not
        say: ScaleRL found 4, 5 and 8 alike (appendix A.17).

        Raises `UserError` if an option lies outside its range.
        """
        super().__init__(WeightedLogProb(clip_low, clip_high), **shared)
