"""Attention kernels of each device behind one small contract, from which attention.py builds attention with a shared prompt.

Parts are merged by their log-sum-exp (LSE). The gradient of a part of a merged softmax has the form of the part's own gradient,
with the merged output and the merged LSE in place of the part's: p = exp(score - LSE) and dscore = p (dout . v - dout . out). A
flash-attention backward computes exactly this from its arguments, so `backward` takes both.

The tests run the kernels of the devices that are there. The NPU's has not run on one yet; it was written against the documented
calls.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
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


def kernel_for(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Kernel for tensors of this device and dtype.

    Raises `UserError` if there is no attention for this device.
    """
    if device.type == CUDA:
        if has_flash_attention(device) and dtype in (torch.float16, torch.bfloat16):
            return CudaFlash()
        if dtype == torch.bfloat16:
            raise UserError("this GPU has no attention in bfloat16 (compute capability 8.0): set train.dtype to float32.")
        return CudaEfficient()
    if device.type not in (CPU, NPU):
        raise UserError(f"The trainer has no attention for train.device {device.type!r}: set it to {ONE_OF_KINDS}.")
    return CpuFlash() if device.type == CPU else NpuFusion()


class CpuFlash:
    """PyTorch's CPU flash attention. A call is of one long segment, or of all short ones of about one length, padded to it.

    So the bits of a segment do not depend on its neighbours: it has a place of its own in the batch of a call, and its own length
    decides what it is padded to. Within one sequence they would, since the segment's place decides how it is cut into blocks.
    """

    def forward(self, query_QHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        out_QHD = torch.empty_like(query_QHD)
        lse_QH = query_QHD.new_empty(query_QHD.shape[:2], dtype=torch.promote_types(query_QHD.dtype, torch.float32))
        for call in _calls(part.lengths):
            query_NHLD = call.of(query_QHD)
            key_NHMD, value_NHMD = (self._keys(x, query_QHD, call, part) for x in (key_MKD, value_MKD))
            out_NHLD, lse_NHL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query_NHLD, key_NHMD, value_NHMD, 0.0, part.is_causal, scale=part.scale
            )
            call.put(out_NHLD, out_QHD)
            call.put(lse_NHL, lse_QH)
        return out_QHD, lse_QH

    def backward(self, grad_QHD: Tensor, merged: Merged, part: AttentionPart) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        query_QHD, key_MKD, value_MKD, out_QHD, lse_QH = merged
        grad_query_QHD, grad_key_MKD, grad_value_MKD = (torch.empty_like(x) for x in (query_QHD, key_MKD, value_MKD))
        # Keys that all segments see get one sum over all of them, in one call.
        for call in _calls(part.lengths) if part.is_causal else [Segment(slice(None))]:
            grad_NHLD = call.of(grad_QHD, pads_zeros=True)
            query_NHLD, out_NHLD, lse_NHL = (call.of(x) for x in (query_QHD, out_QHD, lse_QH))
            key_NHMD, value_NHMD = (self._keys(x, query_QHD, call, part) for x in (key_MKD, value_MKD))
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_NHLD, query_NHLD, key_NHMD, value_NHMD, out_NHLD, lse_NHL, 0.0, part.is_causal, scale=part.scale
            )
            call.put(grads[0], grad_query_QHD)
            for grad_NHMD, grad_MKD in zip(grads[1:], (grad_key_MKD, grad_value_MKD), strict=True):
                call.put(torch.unflatten(grad_NHMD, 1, (key_MKD.shape[1], -1)).sum(2), grad_MKD)
        return grad_query_QHD, grad_key_MKD, grad_value_MKD

    def _keys(self, x_MKD: Tensor, query_QHD: Tensor, call: Segment, part: AttentionPart) -> Tensor:
        """Keys or values for each query head, copied where several share one: those of the call's own segments, or all for each."""
        x_NKMD = call.of(x_MKD) if part.is_causal else x_MKD.transpose(0, 1)[None]
        num_each = query_QHD.shape[1] // x_MKD.shape[1]
        x_NHMD = x_NKMD if num_each == 1 else x_NKMD.repeat_interleave(num_each, 1)
        return x_NHMD.expand(call.count, -1, -1, -1)


SHORT: Final = 64
"""Tokens of a short segment, at most."""
STEP: Final = 16
"""Tokens of which a short segment is brought to a multiple. So the bits of one do not depend on the others of a call."""


class Segment:
    """Packed tokens of a segment, for a call of its own."""

    count = 1
    """Segments of a call, N."""

    def __init__(self, tokens: slice) -> None:
        self._tokens = tokens

    def of(self, x_THd: Tensor, *, pads_zeros: bool = False) -> Tensor:
        """Rows [T, H, ...] as [N, H, L, ...]."""
        return x_THd[self._tokens].transpose(0, 1)[None]

    def put(self, x_NHLd: Tensor, to_THd: Tensor) -> None:
        """Put rows where they come from."""
        to_THd[self._tokens] = x_NHLd[0].transpose(0, 1)


class ShortSegments(Segment):
    """Packed tokens of N short segments, for one call: each with its last token again and again behind it, L in all.

    Causal, no token sees what is behind it; so a gradient of 0 there changes nothing.
    """

    def __init__(self, segments: Sequence[slice], length: int) -> None:
        self.count = len(segments)
        self._rows_X = torch.cat([torch.arange(s.start, s.start + length).clamp_(max=s.stop - 1) for s in segments])  # X = N L
        self._tokens_T = torch.cat([torch.arange(s.start, s.stop) for s in segments])
        self._places_T = torch.cat([torch.arange(s.stop - s.start) + number * length for number, s in enumerate(segments)])
        self._is_behind_X11 = torch.ones(self.count * length, 1, 1, dtype=torch.bool).index_fill_(0, self._places_T, False)

    def of(self, x_THd: Tensor, *, pads_zeros: bool = False) -> Tensor:
        x_XHd = x_THd.index_select(0, self._rows_X)
        if pads_zeros:
            x_XHd.masked_fill_(self._is_behind_X11, 0.0)
        return torch.unflatten(x_XHd, 0, (self.count, -1)).transpose(1, 2)

    def put(self, x_NHLd: Tensor, to_THd: Tensor) -> None:
        to_THd.index_copy_(0, self._tokens_T, x_NHLd.transpose(1, 2).flatten(0, 1).index_select(0, self._places_T))


@lru_cache(maxsize=64)  # every layer of a model asks again
def _calls(lengths: tuple[int, ...]) -> list[Segment]:
    """Segments of these lengths, in the calls that compute them."""
    calls: list[Segment] = []
    short: dict[int, list[slice]] = {}
    for length, tokens in zip(lengths, _segments(lengths), strict=True):
        if length > SHORT:
            calls.append(Segment(tokens))
        elif length:
            short.setdefault(-(-length // STEP) * STEP, []).append(tokens)
    return [*calls, *(ShortSegments(segments, length) for length, segments in short.items())]


def _segments(lengths: tuple[int, ...]) -> list[slice]:
    return [slice(end - length, end) for length, end in zip(lengths, accumulate(lengths), strict=True)]


class CudaFlash:
    """PyTorch's flash attention over segments of unequal lengths, for float16 and bfloat16."""

    def forward(self, query_QHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        segments = _segments_on(query_QHD, key_MKD, part)
        out_QHD, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
            query_QHD, key_MKD, value_MKD, *segments, 0.0, part.is_causal, False, scale=part.scale
        )
        return out_QHD, lse_HQ.t()

    def backward(self, grad_QHD: Tensor, merged: Merged, part: AttentionPart) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        query_QHD, key_MKD, value_MKD, out_QHD, lse_QH = merged
        segments = _segments_on(query_QHD, key_MKD, part)
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


class CudaEfficient:
    """PyTorch's memory-efficient attention over segments of unequal lengths, for what flash attention does not take, such as
    float32.

    It has as many heads of keys as of queries, so they are repeated, and an LSE [N, H, L] of N segments, each padded to L queries,
    a multiple of `LSE_STEP`.
    """

    def forward(self, query_QHD: Tensor, key_MKD: Tensor, value_MKD: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor]:
        """See `Kernel.forward`."""
        rest = (*_segments_on(query_QHD, key_MKD, part), 0.0, int(part.is_causal), True)
        out_1QHD, lse_NHL, *_ = torch.ops.aten._efficient_attention_forward(
            query_QHD[None], *(x[None] for x in self._repeated(query_QHD, key_MKD, value_MKD)), None, *rest, scale=part.scale
        )
        places_Q = self._places(query_QHD, part)
        assert lse_NHL[:, 0].numel() == _num_places(self._lengths(query_QHD, part)), "the LSE is padded as `LSE_STEP` says"
        return out_1QHD[0], lse_NHL.transpose(1, 2).flatten(0, 1).index_select(0, places_Q)

    def backward(self, grad_QHD: Tensor, merged: Merged, part: AttentionPart) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernel.backward`."""
        query_QHD, key_MKD, value_MKD, out_QHD, lse_QH = merged
        segments = _segments_on(query_QHD, key_MKD, part)
        lse_XH = lse_QH.new_full((_num_places(self._lengths(query_QHD, part)), lse_QH.shape[1]), torch.inf)
        lse_XH.index_copy_(0, self._places(query_QHD, part), lse_QH)
        lse_NHL = torch.unflatten(lse_XH, 0, (len(segments[0]) - 1, -1)).transpose(1, 2).contiguous()
        unused = torch.zeros((), dtype=torch.int64)  # of random numbers: there is no dropout
        repeated = self._repeated(query_QHD, key_MKD, value_MKD)
        tensors = [x[None] for x in (grad_QHD, query_QHD, *repeated)]
        grads = torch.ops.aten._efficient_attention_backward(
            *tensors,
            None,
            out_QHD[None],
            *segments,
            lse_NHL,
            0.0,
            unused,
            unused,
            int(part.is_causal),
            False,
            scale=part.scale,
        )
        grad_key_MKD, grad_value_MKD = (torch.unflatten(x[0], 1, (key_MKD.shape[1], -1)).sum(2) for x in grads[1:3])
        return grads[0][0], grad_key_MKD, grad_value_MKD

    def _repeated(self, query_QHD: Tensor, *keys_or_values: Tensor) -> list[Tensor]:
        num_each = query_QHD.shape[1] // keys_or_values[0].shape[1]
        return [x if num_each == 1 else x.repeat_interleave(num_each, 1) for x in keys_or_values]

    def _lengths(self, query_QHD: Tensor, part: AttentionPart) -> tuple[int, ...]:
        return part.lengths if part.is_causal else (len(query_QHD),)

    def _places(self, query_QHD: Tensor, part: AttentionPart) -> Tensor:
        return _lse_places(self._lengths(query_QHD, part), query_QHD.device)


LSE_STEP: Final = 1 if torch.version.hip else 32
"""Queries to a multiple of which memory-efficient attention pads the LSE of each segment; AMD's pads to the longest."""


@lru_cache(maxsize=16)  # as of `_offsets`
def _lse_places(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Place of each query in a padded LSE whose segments lie one after another: int64 [Q]."""
    padded = _num_places(lengths) // len(lengths)
    return torch.cat([torch.arange(length) + number * padded for number, length in enumerate(lengths)]).to(device)


def _num_places(lengths: tuple[int, ...]) -> int:
    return len(lengths) * -(-max(lengths) // LSE_STEP) * LSE_STEP


def _segments_on(query_QHD: Tensor, key_MKD: Tensor, part: AttentionPart) -> tuple[Tensor, Tensor, int, int]:
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
