"""GSPO: the ratio of the whole response, its length taken out, clipped as a whole (arXiv:2507.18071, eq. 5 to 7, 13 and 14).

    surrogate   min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)     s = (pi_theta(o) / pi_old(o)) ^ (1 / |o|)
    A           (r - mean r) / (std r + advantage_epsilon), over the group
    normaliser  sequences: s, which all tokens of a response have, counts once

s lies within thousandths of 1, so the clip range is a thousandth of a token's. The gradient is taken token by token (GSPO-token),
which is the same where a response has one advantage. It needs whole responses: the loss is not token-local, logits are made twice.
"""

from __future__ import annotations

from typing import Unpack

from asyncflow.algorithms.shared_advantages import DividedOptions, GroupRelativeLoss
from asyncflow.algorithms.surrogate import ClippedSequenceRatio


class GSPO(GroupRelativeLoss):
    """GSPO (arXiv:2507.18071): one ratio for a whole response, clipped as a whole."""

    def __init__(
        self,
        *,
        clip_low: float = 3e-4,
        clip_high: float = 4e-4,
        **shared: Unpack[DividedOptions],
    ) -> None:
        """The clip range is the paper's (section 5.1). Raises `UserError` if an option lies outside its range."""
        options: DividedOptions = {"loss_normaliser": "sequences", **shared}
        super().__init__(ClippedSequenceRatio(clip_low, clip_high), **options)
