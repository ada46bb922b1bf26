"""Probe of passes: whether on this machine a micro-batch has the same bits among others in a pass as alone.

    micro-batch alone, its loss ------------------------> exact sums --+
    among others that are muted, with the opposite loss -> exact sums --+--> all 0?

It is made once, at the start, by every engine that promises bits and makes passes of several micro-batches (pass_gradients.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from asyncflow.engines.train.accumulate import ExactAccumulator
from asyncflow.engines.train.model.causal_model import CausalModel
from asyncflow.engines.train.model.log_probs import Head, token_local_losses
from asyncflow.engines.train.model.packing import Packed, joined
from asyncflow.engines.train.pass_gradients import PassGradients
from asyncflow.types import LossSums, Ragged

OTHER_BITS = "on this machine a micro-batch among others has other bits than alone"


def one_by_one(why: str) -> str:
    """Remark of an engine that makes no passes of several micro-batches."""
    return f"micro-batches are computed one by one, since train.accumulate=exact promises bits: {why}"


class ProbePass:
    """Passes of the probe: a micro-batch `alone`, and `together` with others that are muted, with the opposite loss."""

    def __init__(self, pack: Callable[[np.ndarray, Ragged], Packed], vocabulary: int, lengths: Sequence[int]) -> None:
        """`lengths`: of the responses of the micro-batch."""

        def packed(first: int, prompt_tokens: int, lengths: Sequence[int]) -> Packed:
            tokens = np.arange(first, first + prompt_tokens + sum(lengths)) * 7919 % vocabulary
            return pack(tokens[:prompt_tokens], Ragged(tokens[prompt_tokens:], np.cumsum([0, *lengths])))

        self.alone = packed(1, 7, lengths)
        self.together = joined([packed(50, 3, (5,)), self.alone, packed(90, 13, (21, 3, 17, 8))])

    def of_log_probs(self, packed: Packed, hidden_TH: Tensor, head: Head) -> Tensor:
        """Loss of one of the two passes, of its log-probs."""

        def of_tokens(_number: int, _part: slice, log_probs_C: Tensor, _entropy_C: Tensor) -> LossSums:
            return LossSums(self._weighted(packed, log_probs_C), {})

        self._mute(head.sums)
        return token_local_losses(hidden_TH, head, packed.targets_T, of_tokens, packed.token_counts)[0]

    def of_values(self, packed: Packed, values_T: Tensor, sums: PassGradients | None) -> Tensor:
        """Loss of one of the two passes, of a number for each response token."""
        self._mute(sums)
        return torch.stack([self._weighted(packed, each) for each in values_T.split_with_sizes(packed.token_counts)]).sum()

    def _weighted(self, packed: Packed, values_C: Tensor) -> Tensor:
        weights_C = torch.arange(len(values_C), device=values_C.device) % 3 - 0.5
        return (-1.0 if packed is self.together else 1.0) * (weights_C * values_C).sum()

    @staticmethod
    def _mute(sums: PassGradients | None) -> None:
        if sums is not None:
            sums.mute(0)
            sums.mute(2)


LENGTHS = ((9, 4, 2), (2, 1))
"""Of two micro-batches; libraries may have kernels of their own for few rows."""
ProbeLoss = Callable[[ProbePass, Packed, PassGradients | None], Tensor]
"""Loss of a pass of the probe, which may be run backward. `PassGradients`: where the pass's gradients go; None: to autograd."""


def probe(model: CausalModel, sums: ExactAccumulator, gradients: PassGradients, loss: ProbeLoss) -> bool:
    """Compute micro-batches alone, and among others with the opposite loss. Returns whether both add up to 0, to the bit.

    The sums are empty before and after.
    """
    vocabulary = model.module.get_input_embeddings().weight.shape[0]
    return all(_is_right(ProbePass(model.pack, vocabulary, lengths), sums, gradients, loss) for lengths in LENGTHS)


def _is_right(passes: ProbePass, sums: ExactAccumulator, gradients: PassGradients, loss: ProbeLoss) -> bool:
    try:
        torch.autograd.backward(loss(passes, passes.alone, None))
        sums.add()
        with gradients.of(passes.together):
            torch.autograd.backward(loss(passes, passes.together, gradients))
        return sums.is_zero()
    finally:
        sums.clear()
