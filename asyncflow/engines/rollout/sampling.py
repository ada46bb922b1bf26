"""Sampling noise that depends on what is sampled, never on where or when.

    (seed, prompt index, sample)  --splitmix64-->  key  --(key, token position)-->  uniform in (0, 1)  --inverse CDF-->  token

Counter-based: there is no generator state to carry, so a lost response is made again from its key alone, in any worker, in any
batch and at any attempt.

N = rows, V = vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncflow.types import Array

WEYL = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: the increment of splitmix64


def stream_keys(seed: int, prompt_index: int, samples: Array) -> Array:
    """Keys of a prompt, one for each sample number: int64 [n] -> uint64 [n]."""
    key: Array = np.full(len(samples), seed % 2**64, np.uint64)
    for word in (np.full(len(samples), prompt_index, np.int64), np.asarray(samples, np.int64)):
        key = _mix(key + WEYL) ^ word.astype(np.uint64)
    return _mix(key + WEYL)


def uniforms(keys: Array, positions: Array) -> Array:
    """Uniform numbers strictly between 0 and 1 for tokens at `positions` (int64 [n]) of the streams `keys`: float64 [n]."""
    bits = _mix(keys + positions.astype(np.uint64) * WEYL)
    # 52 bits and a half: with 53 the largest value would round to 1.
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def inverse_cdf(probs_NV: Tensor, uniforms_N: Tensor) -> Tensor:
    """The tokens (int64 [N]) at quantiles `uniforms_N` (float64) of the distributions `probs_NV` (need not be normalised).

    A token of probability 0 is never drawn. Sums are float64: a float32 one loses the tail of a large vocabulary.
    """
    cdf_NV = probs_NV.cumsum(-1, dtype=torch.float64)
    total_N1 = cdf_NV[:, -1:]
    quantile_N1 = uniforms_N[:, None] * total_N1
    below_total_N1 = torch.nextafter(total_N1, torch.zeros_like(total_N1))
    return torch.searchsorted(cdf_NV, torch.minimum(quantile_N1, below_total_N1), right=True).squeeze(-1)


def draw_tokens(logits_NV: Tensor, temperatures_N: Array, uniforms_N: Array) -> tuple[Array, Array]:
    """Tokens (int64 [N]) and their log-probs (float32 [N]), temperature applied; at temperature 0 the likeliest, as if at 1."""
    is_greedy = temperatures_N == 0
    temperatures = torch.from_numpy(np.where(is_greedy, np.float32(1), temperatures_N)).to(logits_NV.device)
    logits_NV = logits_NV / temperatures[:, None]
    # `torch.logsumexp` in its own steps: training takes log-probs by it, so both round alike.
    most_N1 = logits_NV.amax(-1, keepdim=True)
    weights_NV = (logits_NV - most_N1).exp_()
    lse_N1 = weights_NV.sum(-1, keepdim=True).log_().add_(most_N1)
    if is_greedy.all():
        tokens_N = logits_NV.argmax(-1)
    else:
        tokens_N = inverse_cdf(weights_NV, torch.from_numpy(uniforms_N).to(logits_NV.device))
        tokens_N.clamp_(max=logits_NV.shape[1] - 1)  # only where the logits are not finite: the log-prob tells the caller
        if is_greedy.any():
            tokens_N = torch.where(torch.from_numpy(is_greedy).to(logits_NV.device), logits_NV.argmax(-1), tokens_N)
    logprobs_N = (logits_NV.gather(1, tokens_N[:, None]) - lse_N1).squeeze(1)
    return tokens_N.cpu().numpy(), logprobs_N.cpu().numpy()


def _mix(z: Array) -> Array:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of uint64, every output bit of which mixes all."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
