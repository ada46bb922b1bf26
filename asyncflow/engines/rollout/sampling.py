"""Sampling noise that depends on what is sampled, never on where or when.

    (seed, prompt index, sample)  --splitmix64-->  key  --(key, token position)-->  uniform in (0, 1)  --inverse CDF-->  token

Truncated sampling (min-p, top-k, top-p) gives the tokens that are left out the weight 0 in the cumulative distribution; a token's
log-prob is that of the distribution of the rest.

Counter-based: there is no generator state to carry, so a lost response is made again from its key alone, in any worker, in any
batch and at any delivery.

N = rows, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncflow.types import Array

SORTED = 256  # of a distribution's likeliest tokens; a row whose top-p takes more of them is sorted as a whole
WEYL = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: the increment of splitmix64


def stream_keys(seed: int, prompt_index: int, samples: Array) -> Array:
    """Keys of a prompt, one for each sample number: int64 [n] -> uint64 [n]."""
    key: Array = np.full(len(samples), seed % 2**64, np.uint64)
    for word in (np.full(len(samples), prompt_index, np.int64), np.asarray(samples, np.int64)):
        key = _mix(key + WEYL) ^ word.astype(np.uint64)
    return _mix(key + WEYL)


def later_keys(keys: Array, position: int) -> Array:
    """Keys of the turn that begins at a token position, for engines that take one seed a request: uint64 [n] -> uint64 [n]."""
    return _mix(keys + np.array([position], np.uint64) * WEYL) if position else keys


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


@dataclass(frozen=True, slots=True)
class Truncation:
    """Cuts of each row's distribution, see `Sampling`: top_p and min_p float32 [N], top_k int64 [N]."""

    top_p: Array
    top_k: Array
    min_p: Array

    @property
    def is_none(self) -> bool:
        """Whether every row has all of its tokens."""
        return bool((self.top_p == 1).all() and not self.top_k.any() and not self.min_p.any())


def truncated(weights_NV: Tensor, by: Truncation) -> Tensor:
    """The weights with 0 for tokens that truncation leaves out. In each row the largest weight is 1.

    Tokens of the same weight are left out, or not, together, so a row does not depend on how a sort orders them.
    """
    device, vocabulary = weights_NV.device, weights_NV.shape[1]
    top_p_N1, top_k_N1, floor_N1 = (torch.from_numpy(array).to(device)[:, None] for array in (by.top_p, by.top_k, by.min_p))
    sorted_NK = weights_NV.topk(min(vocabulary, max(SORTED, int(by.top_k.max())))).values
    last_N1 = sorted_NK.gather(1, (top_k_N1 - 1).clamp_(0, sorted_NK.shape[1] - 1))
    floor_N1 = torch.where(top_k_N1 > 0, torch.maximum(floor_N1, last_N1), floor_N1)
    weights_NV = weights_NV.where(weights_NV >= floor_N1, 0.0)
    if (by.top_p == 1).all():
        return weights_NV
    # As few as have the part top_p: a token stays while those before it have less.
    enough_N1 = top_p_N1 * weights_NV.sum(-1, keepdim=True, dtype=torch.float64)
    sorted_NK = sorted_NK.where(sorted_NK >= floor_N1, 0.0)
    nucleus_N1 = _nucleus_floor(sorted_NK, enough_N1)
    for row in (sorted_NK.sum(-1, keepdim=True, dtype=torch.float64) < enough_N1).flatten().nonzero().flatten().tolist():
        whole_1V = weights_NV[row : row + 1].sort(descending=True).values
        nucleus_N1[row] = _nucleus_floor(whole_1V, enough_N1[row : row + 1])[0]
    return weights_NV.where((weights_NV >= nucleus_N1) | (top_p_N1 == 1), 0.0)


def _nucleus_floor(sorted_NK: Tensor, enough_N1: Tensor) -> Tensor:
    """The least of each row's largest weights, in falling order, before which there is less than enough: float32 [N, 1]."""
    sums_NK = sorted_NK.cumsum(-1, dtype=torch.float64)
    count_N1 = (sums_NK - sorted_NK < enough_N1).sum(-1, keepdim=True)
    return sorted_NK.gather(1, (count_N1 - 1).clamp_(0))


def draw_tokens(
    logits_NV: Tensor, temperatures_N: Array, uniforms_N: Array, truncation: Truncation | None = None
) -> tuple[Array, Array]:
    """Tokens (int64 [N]) and their log-probs (float32 [N]) in the distribution they are drawn from, temperature and truncation
    applied; at temperature 0 the likeliest, as if at 1 and of all."""
    is_greedy = temperatures_N == 0
    temperatures = torch.from_numpy(np.where(is_greedy, np.float32(1), temperatures_N)).to(logits_NV.device)
    logits_NV = logits_NV / temperatures[:, None]
    # `torch.logsumexp` in its own steps: training takes log-probs by it, so both round alike.
    most_N1 = logits_NV.amax(-1, keepdim=True)
    weights_NV = (logits_NV - most_N1).exp_()
    if truncation is not None:
        weights_NV = truncated(weights_NV, truncation)
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
