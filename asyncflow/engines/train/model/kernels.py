"""Attention kernels of each device behind one small contract, from which attention.py builds attention with a shared prompt.

Parts are merged by their log-sum-exp (LSE). The gradient of a part of a merged softmax has the form of the part's own gradient,
with the merged output and the merged LSE in place of the part's: p = exp(score - LSE) and dscore = p (dout . v - dout . out). A
flash-attention backward computes exactly this from its arguments, so `backward` takes both.

The tests run the CPU kernel. The two others have not run on a device yet; they were written against the documented calls.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from asyncflow.devices import CPU, CUDA, NPU, ONE_OF_KINDS
from asyncflow.engines.devices import has_flash_attention
from asyncflow.types import UserError

# Q query tokens, M key tokens, H query heads, K key and value heads, G = H / K query heads of one of them, D elements per head.


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Pairs of queries and keys that one kernel call computes, and the scale of their scores.

    Causal: queries and keys have the same segments, and each segment attends causally to itself. Otherwise every query attends to
    every key, whatever the segments are.
    """

    lengths: tuple[int, ...]  # of the segments of the queries: they add up to Q
    is_causal: bool
    scale: float


class Merged(NamedTuple):
    """Inputs of a part, with output and LSE of the whole, merged softmax."""

    query_QHD: Tensor
    key_MKD: Tensor
    value_MKD: Tensor
    out_QHD: Tensor
    lse_QH: Tensor


class Kernel(Protocol):
    """Attention kernel of one device, forward and backward.

    The LSE is float32, or float64 if the queries are float64. Keys and values have K heads: they are not repeated for the query
    heads.
    """

    def forward(self, query_QHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor]:
        """Attention output [Q, H, D] and LSE [Q, H] of the scaled scores."""

    def backward(self, grad_QHD: Tensor, merged: Merged, part: AttentionPart) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values. `grad_QHD`: that of the output of the whole, merged softmax."""


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel | None:
    """Kernel for tensors of this device and dtype; None: use flex_attention (flex.py).

    Raises `UserError` if there is no attention for this device.
    """
    if device.type == CUDA:
        return CudaFlash() if has_flash_attention(device) and dtype in (torch.float16, torch.bfloat16) else None
    if device.type not in (CPU, NPU):
        raise UserError(f"The trainer has no attention for train.device {device.type!r}: set it to {ONE_OF_KINDS}.")
    return CpuFlash() if device.type == CPU else NpuFusion()


class CpuFlash:
    """PyTorch's CPU flash attention; the forward pass makes one call for each segment.

    So the bits of a segment do not depend on its neighbours. Within one call they would, since the segment's place decides how it
    is cut into the call's blocks.
    """

    def forward(self, query_QHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        out_QHD = torch.empty_like(query_QHD)
        lse_QH = query_QHD.new_empty(query_QHD.shape[:2], dtype=torch.promote_types(query_QHD.dtype, torch.float32))
        query_KGQD, out_KGQD, lse_KGQ = (_by_head(x, key_MKD) for x in (query_QHD, out_QHD, lse_QH))
        key_KGMD, value_KGMD = (_expanded(x, query_QHD) for x in (key_MKD, value_MKD))
        for queries in _segments(part.lengths):
            keys = queries if part.is_causal else slice(None)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_KGQD[:, :, queries], key_KGMD[:, :, keys], value_KGMD[:, :, keys], 0.0, part.is_causal, scale=part.scale
            )
            out_KGQD[:, :, queries] = out
            lse_KGQ[:, :, queries] = lse
        return out_QHD, lse_QH

    def backward(self, grad_QHD: Tensor, merged: Merged, part: AttentionPart) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        query_QHD, key_MKD, value_MKD, out_QHD, lse_QH = merged
        grad_query_QHD, grad_key_MKD, grad_value_MKD = (torch.empty_like(x) for x in (query_QHD, key_MKD, value_MKD))
        grad_query_KGQD = _by_head(grad_query_QHD, key_MKD)
        grad_KGQD, query_KGQD, out_KGQD, lse_KGQ = (_by_head(x, key_MKD) for x in (grad_QHD, query_QHD, out_QHD, lse_QH))
        key_KGMD, value_KGMD = (_expanded(x, query_QHD) for x in (key_MKD, value_MKD))
        # Keys that all segments see get one sum over all of them, in one call.
        for queries in _segments(part.lengths) if part.is_causal else [slice(None)]:
            keys = queries if part.is_causal else slice(None)
            grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_KGQD[:, :, queries],
                query_KGQD[:, :, queries],
                key_KGMD[:, :, keys],
                value_KGMD[:, :, keys],
                out_KGQD[:, :, queries],
                lse_KGQ[:, :, queries],
                0.0,
                part.is_causal,
                scale=part.scale,
            )
            grad_query_KGQD[:, :, queries] = grad_query
            torch.sum(grad_key, 1, out=grad_key_MKD[keys].transpose(0, 1))
            torch.sum(grad_value, 1, out=grad_value_MKD[keys].transpose(0, 1))
        return grad_query_QHD, grad_key_MKD, grad_value_MKD


def _by_head(x_QHd: Tensor, key_MKD: Tensor) -> Tensor:
    """View of [Q, H, ...] as [K, G, Q, ...], which groups the query heads by their key head."""
    return torch.unflatten(x_QHd, 1, (key_MKD.shape[1], -1)).movedim(0, 2)


def _expanded(x_MKD: Tensor, query_QHD: Tensor) -> Tensor:
    """Keys or values as [K, G, M, D], where all G share the same memory."""
    return x_MKD.transpose(0, 1)[:, None].expand(-1, query_QHD.shape[1] // x_MKD.shape[1], -1, -1)


def _segments(lengths: tuple[int, ...]) -> list[slice]:
    return [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]


class CudaFlash:
    """PyTorch's flash attention over segments of unequal lengths, for float16 and bfloat16."""

    def forward(self, query_QHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        segments = self._segments(query_QHD, key_MKD, part)
        out_QHD, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
            query_QHD, key_MKD, value_MKD, *segments, 0.0, part.is_causal, False, scale=part.scale
        )
        return out_QHD, lse_HQ.t()

    def backward(self, grad_QHD: Tensor, merged: Merged, part: AttentionPart) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        query_QHD, key_MKD, value_MKD, out_QHD, lse_QH = merged
        segments = self._segments(query_QHD, key_MKD, part)
        lse_HQ = lse_QH.t().contiguous()
        rng_state, unused = query_QHD.new_zeros(2, dtype=torch.uint64), query_QHD.new_empty(0)  # there is no dropout
        grad_query_QHD, grad_key_MKD, grad_value_MKD = torch.ops.aten._flash_attention_backward(
            grad_QHD,
            query_QHD,
            key_MKD,
            value_MKD,
            out_QHD,
            lse_HQ,
            *segments,
            0.0,
            part.is_causal,
            rng_state,
            unused,
            scale=part.scale,
        )
        return grad_query_QHD, grad_key_MKD, grad_value_MKD

    def _segments(self, query_QHD: Tensor, key_MKD: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor, int, int]:
        """Offsets of the segments of queries and of keys (int32), and the longest segment of each, in tokens."""
        of_queries, of_keys = (part.lengths, part.lengths) if part.is_causal else ((len(query_QHD),), (len(key_MKD),))
        device = query_QHD.device
        return _offsets(of_queries, device), _offsets(of_keys, device), max(of_queries), max(of_keys)


@lru_cache(maxsize=16)  # every layer of a model asks again, and each new tensor would be a copy to the device
def _offsets(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


class NpuFusion:
    """torch_npu's fused attention on Ascend, in its layout for segments of unequal lengths (TND)."""

    def forward(self, query_QHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        segments = self._segments(query_QHD, key_MKD, part)
        # The softmax's maxima and sums are [Q, H, 8], each number eight times.
        out_QHD, max_QH8, sum_QH8, *_ = importlib.import_module("torch_npu").npu_fusion_attention(
            query_QHD, key_MKD, value_MKD, query_QHD.shape[1], "TND", scale=part.scale, **segments
        )
        return out_QHD, max_QH8[..., 0] + sum_QH8[..., 0].log()

    def backward(self, grad_QHD: Tensor, merged: Merged, part: AttentionPart) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        query_QHD, key_MKD, value_MKD, out_QHD, lse_QH = merged
        segments = self._segments(query_QHD, key_MKD, part)
        # exp(score - max) / sum is exp(score - LSE) with the LSE as the maximum and 1 as the sum.
        lse_QH8 = lse_QH[..., None].expand(-1, -1, 8).contiguous()
        grad_query_QHD, grad_key_MKD, grad_value_MKD, *_ = importlib.import_module("torch_npu").npu_fusion_attention_grad(
            query_QHD,
            key_MKD,
            value_MKD,
            grad_QHD,
            query_QHD.shape[1],
            "TND",
            softmax_max=lse_QH8,
            softmax_sum=torch.ones_like(lse_QH8),
            attention_in=out_QHD,
            scale_value=part.scale,
            **segments,
        )
        return grad_query_QHD, grad_key_MKD, grad_value_MKD

    def _segments(self, query_QHD: Tensor, key_MKD: Tensor, part: AttentionPart) -> dict[str, Any]:
        if not part.is_causal:
            return {"actual_seq_qlen": [len(query_QHD)], "actual_seq_kvlen": [len(key_MKD)]}
        ends = list(accumulate(part.lengths))
        mask = _npu_causal_mask(query_QHD.device)
        return {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, "atten_mask": mask, "sparse_mode": _NPU_CAUSAL}


_NPU_CAUSAL: Final = 3  # aligned at the lower right; the mask is then this triangle, whatever the lengths


@lru_cache(maxsize=8)
def _npu_causal_mask(device: torch.device) -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
