"""Losses of the API beside their formulas, values and gradients."""

import math

import numpy as np
import pytest
import torch

from asyncflow.service.tinker.losses import Recording, make_loss
from asyncflow.types import TokenBatch

LOGPROBS = [-0.5, -1.0, -2.0, -0.1, -3.0]
SAMPLED = [-0.7, -0.8, -2.0, -0.9, 0.0]
ADVANTAGES = [1.0, -0.5, 2.0, 0.7, 0.0]


def batch() -> tuple[TokenBatch, torch.Tensor]:
    logprobs_T = torch.tensor(LOGPROBS, requires_grad=True)
    sampled_T, advantages_T = torch.tensor(SAMPLED), torch.tensor(ADVANTAGES)
    row_T = torch.tensor([0, 0, 1, 1, 1])
    return TokenBatch(
        logprobs_T=logprobs_T,
        old_logprobs_T=sampled_T,
        rollout_logprobs_T=sampled_T,
        ref_logprobs_T=None,
        entropy_T=torch.zeros(5),
        advantages_T=advantages_T,
        mask_T=(advantages_T != 0).float(),
        row_T=row_T,
        row_tokens_R=torch.tensor([2.0, 2.0]),
    ), logprobs_T


def expected(name: str, low: float, high: float) -> tuple[float, list[float]]:
    """Value and gradient, token by token, as the API's documentation writes the losses."""
    total, gradient = 0.0, []
    for logprob, sampled, advantage in zip(LOGPROBS, SAMPLED, ADVANTAGES, strict=True):
        ratio = math.exp(logprob - sampled)
        clipped = min(max(ratio, low), high)
        if name == "cross_entropy":
            total, slope = total - advantage * logprob, -advantage
        elif name == "importance_sampling":
            total, slope = total - ratio * advantage, -ratio * advantage
        elif name == "ppo":
            total -= min(ratio * advantage, clipped * advantage)
            slope = -ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
        else:
            total, slope = total - clipped * logprob * advantage, -clipped * advantage
        gradient.append(slope)
    return total, gradient


@pytest.mark.parametrize("thresholds", [None, (0.9, 1.1)])
@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_a_loss_is_what_the_documentation_says(name: str, thresholds: tuple[float, float] | None) -> None:
    if thresholds is not None and name in ("cross_entropy", "importance_sampling"):
        with pytest.raises(ValueError, match="no option clip_low_threshold"):
            make_loss(name, {"clip_low_threshold": 0.9})
        return
    low, high = thresholds or (0.8, 1.2)
    options = {} if thresholds is None else {"clip_low_threshold": low, "clip_high_threshold": high}
    made, logprobs_T = batch()
    loss = make_loss(name, options).loss(made).loss
    loss.backward()
    value, gradient = expected(name, low, high)
    assert loss.item() == pytest.approx(value, rel=1e-5)
    assert logprobs_T.grad is not None and logprobs_T.grad.tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-7)


def test_what_is_no_loss_or_no_option_is_refused() -> None:
    for name, options, sentence in (
        ("dro", {}, "no loss 'dro' here: choose one of cross_entropy, importance_sampling, ppo, cispo"),
        ("ppo", {"beta": 1.0}, "has no option beta"),
        ("ppo", {"clip_low_threshold": 1.5}, "lies in 0..1"),
        ("cispo", {"clip_high_threshold": "much"}, "from 1 up"),
    ):
        with pytest.raises(ValueError, match=sentence):
            make_loss(name, options)


def test_a_recording_keeps_the_log_probs_of_all_pieces_until_they_are_taken() -> None:
    recording = Recording(make_loss("importance_sampling", {}))
    for _ in range(2):
        recording.loss(batch()[0])
    taken = recording.take()
    assert taken.dtype == np.float32 and taken.tolist() == pytest.approx(LOGPROBS * 2)
