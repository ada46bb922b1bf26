"""Attention over packed prompts with their responses: each segment attends causally to itself, and responses to their prompt.

    prompt              -> prompt, causal
    response k          -> response k, causal  +  its prompt, whole    merged by their log-sum-exp (LSE)

No mask is built, and the prompt's keys and values are there once for all its responses; the CPU's kernel alone pads short segments
within a call (kernels.py). The layout (which token attends to which) is passed as an extra argument (`layout`) through the model's
forward. Transformers builds no mask for an attention implementation that it does not know, and infers packing from position ids
only for its own ones. So only this file separates a response from its neighbours; it refuses to run without a layout or with other
positions.

In rows (a prompt for each response) no segment is a prompt for others: only the first part, each segment to itself, is computed.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface

from asyncflow.engines.train.model.kernels import AttentionPart, Kernel, Merged, kernel_for
from asyncflow.engines.train.model.packing import AttentionLayout

# P packed tokens, S of the responses behind one shared prompt; H query heads, K key and value heads, D elements per head.

ATTENTION_NAME: Final = "asyncflow_packed"


def packed_attention(
    module: nn.Module,
    query_1HPD: Tensor,
    key_1KPD: Tensor,
    value_1KPD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: AttentionLayout | None = None,
    position_ids: Tensor | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output [1, P, H, D], and None for the attention weights, as transformers' attention interface has it.

    Raises `ValueError` if the layout is missing or its lengths do not add up to P, `position_ids` are not those of the layout, or
    the call asks for a mask, dropout or a sliding window, which packed attention does not have.
    """
    shape = query_1HPD.shape
    if layout is None or shape[0] != 1 or not sum(layout.segment_lengths) == shape[2] == key_1KPD.shape[2]:
        lengths = None if layout is None else layout.segment_lengths
        raise ValueError(
            f"the layout's segments {lengths} do not make up the packed tokens {tuple(shape)}, {tuple(key_1KPD.shape)}"
        )
    if attention_mask is not None or dropout or sliding_window is not None:
        raise ValueError("packed attention has no mask, no dropout and no sliding window")
    # In the first layer alone: the positions are those of all layers, and a comparison waits for the device.
    if not getattr(module, "layer_idx", 0) and (position_ids is None or not position_ids[0].equal(layout.positions_P)):
        raise ValueError("position_ids are not those of the layout: give the model the packed positions")
    query_PHD, key_PKD, value_PKD = (x[0].transpose(0, 1) for x in (query_1HPD, key_1KPD, value_1KPD))
    kernel = kernel_for(query_PHD.device, query_PHD.dtype)
    apply: Any = _PackedAttention.apply  # torch has no types for it
    return apply(query_PHD, key_PKD, value_PKD, layout, scaling, kernel)[None], None


SPARE: Final = 64
"""Numbers behind those of an element-wise call: its last ones on a CPU, which do not fill vector registers, are rounded
differently."""


def _merge(own_out_SHD: Tensor, own_lse_SH: Tensor, out_SHD: Tensor, lse_SH: Tensor) -> None:
    """Merge another part's output and LSE into a part's own, in place, in the precision of the LSE. The bits of a row do not depend
    on the others."""
    own_lse_X, lse_X = (functional.pad(x.flatten(), (0, SPARE)) for x in (own_lse_SH, lse_SH))
    weight_SH = (lse_X - own_lse_X).sigmoid_()[:-SPARE].view_as(lse_SH)
    own_out_SHD.copy_(torch.lerp(own_out_SHD.to(lse_SH.dtype), out_SHD.to(lse_SH.dtype), weight_SH[..., None]))
    own_lse_SH.copy_(torch.logaddexp(own_lse_X, lse_X)[:-SPARE].view_as(lse_SH))


class _PackedAttention(torch.autograd.Function):
    """Attention over two parts of the keys, merged: the own segment and, for responses, the shared prompt.

    The softmax over a part's keys has the weight exp(lse_part - lse) in the softmax over all keys, with lse = log sum exp lse_part.
    Besides the inputs, the backward needs only the merged output [P, H, D] and its LSE [P, H]: see kernels.py.
    """

    @staticmethod
    def forward(
        ctx: Any, query_PHD: Tensor, key_PKD: Tensor, value_PKD: Tensor, layout: AttentionLayout, scale: float, kernel: Kernel
    ) -> Tensor:
        """Merged attention output [P, H, D]."""
        own = AttentionPart(layout.segment_lengths, is_causal=True, scale=scale)
        out_PHD, lse_PH = kernel.forward(query_PHD, key_PKD, value_PKD, own)
        shared = layout.shared()
        for each in shared:
            # All in one call, as if they were one response, takes half as long as a call for each length.
            lengths = (sum(each.response_lengths),) if layout.are_bits_free else each.response_lengths
            part = AttentionPart(lengths, is_causal=False, scale=scale)
            out_SHD, lse_SH = kernel.forward(query_PHD[each.responses], key_PKD[each.prompt], value_PKD[each.prompt], part)
            _merge(out_PHD[each.responses], lse_PH[each.responses], out_SHD, lse_SH)
        ctx.save_for_backward(query_PHD, key_PKD, value_PKD, out_PHD, lse_PH)
        ctx.own, ctx.shared, ctx.kernel = own, shared, kernel
        return out_PHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PHD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Gradients of query, key and value; the shared prompt's gradients are the sum over both parts."""
        query_PHD, key_PKD, value_PKD, out_PHD, lse_PH = merged = Merged(*ctx.saved_tensors)
        grads = ctx.kernel.backward(grad_PHD, merged, ctx.own)
        for each in ctx.shared:
            keys, queries = each.prompt, each.responses
            part = AttentionPart(each.response_lengths, is_causal=False, scale=ctx.own.scale)
            merged = Merged(query_PHD[queries], key_PKD[keys], value_PKD[keys], out_PHD[queries], lse_PH[queries])
            shared_grads = ctx.kernel.backward(grad_PHD[queries], merged, part)
            for grad, tokens, shared_grad in zip(grads, (queries, keys, keys), shared_grads, strict=True):
                grad[tokens] += shared_grad
        return *grads, None, None, None


AttentionInterface.register(ATTENTION_NAME, packed_attention)
