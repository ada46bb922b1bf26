"""The kernels of devices that are not here, over stand-ins that keep to the documented calls; flex_attention's mask; the choice.

The stand-ins compute in plain PyTorch on the CPU what the calls are documented to compute, and refuse what those would refuse:
what is tested is that the calls are made as documented. The CPU's kernel is held against plain attention in test_attention.py.
"""

import sys
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from asyncflow.engines.train.model import flex
from asyncflow.engines.train.model.attention import _PackedAttention
from asyncflow.engines.train.model.kernels import CpuFlash, CudaFlash, Kernel, NpuFusion, kernel_for
from asyncflow.engines.train.model.packing import AttentionLayout, SharedPrompt
from asyncflow.types import UserError

LENGTHS = [(7, 3, 3, 3), (1, 4, 1, 9), (150, 130, 20), (9,), (128, 128, 128), (300, 5, 260)]


def make_layout(lengths: tuple[int, ...], has_prompt: bool) -> AttentionLayout:
    prompts = (SharedPrompt(0, len(lengths) - 1),) if has_prompt and len(lengths) > 1 else ()
    return AttentionLayout(lengths, prompts, torch.arange(sum(lengths)))


class Segments:
    """Attention of query segments to the key segments beside them, and its backward for a given output and LSE."""

    def __init__(self, query_ends: Sequence[int], key_ends: Sequence[int], is_causal: bool, scale: float) -> None:
        assert len(query_ends) == len(key_ends) and query_ends[0] == key_ends[0] == 0
        self.pairs = [
            (slice(*queries), slice(*keys)) for queries, keys in zip(pairwise(query_ends), pairwise(key_ends), strict=True)
        ]
        self.is_causal, self.scale = is_causal, scale

    def scores(self, query_QHD: Tensor, key_MHD: Tensor) -> Tensor:
        scores_HQM = torch.einsum("qhd,mhd->hqm", query_QHD, key_MHD) * self.scale
        num_queries, num_keys = scores_HQM.shape[1:]
        if self.is_causal:  # aligned at the lower right
            hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(1 + num_keys - num_queries)
            scores_HQM = scores_HQM.masked_fill(hidden, -torch.inf)
        return scores_HQM

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output [Q, H, D], maxima and sums of the softmax [Q, H]."""
        num_repeats = query.shape[1] // key.shape[1]
        out, maxima, sums = torch.full_like(query, torch.nan), *(query.new_full(query.shape[:2], torch.nan) for _ in range(2))
        for queries, keys in self.pairs:
            scores = self.scores(query[queries], key[keys].repeat_interleave(num_repeats, 1))
            out[queries] = torch.einsum("hqm,mhd->qhd", scores.softmax(-1), value[keys].repeat_interleave(num_repeats, 1))
            maxima[queries] = scores.amax(-1).t()
            sums[queries] = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1).t()
        return out, maxima, sums

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, maxima: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_repeats = query.shape[1] // key.shape[1]
        grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for queries, keys in self.pairs:
            repeated_key, repeated_value = (x[keys].repeat_interleave(num_repeats, 1) for x in (key, value))
            scores = self.scores(query[queries], repeated_key)
            p = (scores - maxima[queries].t()[..., None]).exp() / sums[queries].t()[..., None]
            grad_p = torch.einsum("qhd,mhd->hqm", grad[queries], repeated_value)
            grad_scores = p * (grad_p - (grad[queries] * out[queries]).sum(-1).t()[..., None]) * self.scale
            grads[0][queries] += torch.einsum("hqm,mhd->qhd", grad_scores, repeated_key)
            for grad_kv, repeated in (
                (grads[1], torch.einsum("hqm,qhd->mhd", grad_scores, query[queries])),
                (grads[2], torch.einsum("hqm,qhd->mhd", p, grad[queries])),
            ):
                grad_kv[keys] += torch.unflatten(repeated, 1, (-1, num_repeats)).sum(2)
        return grads


def stand_in_flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """aten::_flash_attention_forward on [tokens, heads, D] with offsets: the LSE is float32 [heads, tokens]."""
    check_offsets(query, cum_seq_q, max_q)
    check_offsets(key, cum_seq_k, max_k)
    assert dropout_p == 0.0 and not return_debug_mask
    segments = Segments(cum_seq_q.tolist(), cum_seq_k.tolist(), is_causal, scale)
    out, maxima, sums = segments.forward(query, key, value)
    lse = (maxima + sums.log()).t().contiguous().float()
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def stand_in_flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    check_offsets(query, cum_seq_q, max_q)
    check_offsets(key, cum_seq_k, max_k)
    assert logsumexp.shape == (query.shape[1], len(query)) and logsumexp.dtype == torch.float32 and logsumexp.is_contiguous()
    assert dropout_p == 0.0 and rng_state.dtype == torch.uint64 and rng_state.shape == (2,) and not unused.numel()
    segments = Segments(cum_seq_q.tolist(), cum_seq_k.tolist(), is_causal, scale)
    return segments.backward(grad_out, query, key, value, out, logsumexp.t(), torch.ones_like(logsumexp.t()))


def check_offsets(x: Tensor, offsets: Tensor, longest: int) -> None:
    assert offsets.dtype == torch.int32 and offsets[0] == 0 and offsets[-1] == len(x)
    assert longest == offsets.diff().max()
    assert x.stride(-1) == 1


def npu_segments(head_num: int, layout: str, query: Tensor, scale: float, **options: Any) -> Segments:
    assert head_num == query.shape[1] and layout == "TND"
    is_causal = options.get("sparse_mode", 0) == 3
    mask = options.get("atten_mask")
    if is_causal:  # the compressed mask: True is masked out
        assert mask is not None and mask.dtype == torch.bool and mask.equal(torch.ones(2048, 2048).triu(1).bool())
    else:
        assert mask is None
    return Segments([0, *options["actual_seq_qlen"]], [0, *options["actual_seq_kvlen"]], is_causal, scale)


def stand_in_npu(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, scale: float, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """npu_fusion_attention: maxima and sums are float32 [tokens, heads, 8]."""
    out, maxima, sums = npu_segments(head_num, input_layout, query, scale, **options).forward(query, key, value)
    eight = [x.float()[..., None].expand(-1, -1, 8).contiguous() for x in (maxima, sums)]
    return out, *eight, torch.empty(0), 0, 0, 0


def stand_in_npu_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    softmax_max: Tensor,
    softmax_sum: Tensor,
    attention_in: Tensor,
    scale_value: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for x in (softmax_max, softmax_sum):
        assert x.shape == (*query.shape[:2], 8) and x.dtype == torch.float32 and x.is_contiguous()
    segments = npu_segments(head_num, input_layout, query, scale_value, **options)
    grads = segments.backward(dy, query, key, value, attention_in, softmax_max[..., 0], softmax_sum[..., 7])
    return *grads, torch.empty(0)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", stand_in_flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", stand_in_flash_backward)
    fake = SimpleNamespace(npu_fusion_attention=stand_in_npu, npu_fusion_attention_grad=stand_in_npu_grad)
    monkeypatch.setitem(sys.modules, "torch_npu", fake)


def run(kernel: Kernel, layout: AttentionLayout, heads: tuple[int, int]) -> list[Tensor]:
    """Output and the gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = len(layout.positions_P)
    qkv = [torch.randn(num_tokens, n, 8, generator=generator, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
    apply: Any = _PackedAttention.apply
    out = apply(*qkv, layout, 0.6, kernel)
    return [out, *torch.autograd.grad(out, qkv, torch.randn(out.shape, generator=generator))]


SEVERAL = AttentionLayout(
    (130, 20, 5, 7, 3, 200, 9, 40), (SharedPrompt(0, 2), SharedPrompt(3, 1), SharedPrompt(5, 1)), torch.arange(414)
)
"""A pass of three micro-batches that share their prompts, and one that does not."""


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kernel", [CudaFlash(), NpuFusion()], ids=["cuda", "npu"])
def test_each_device_computes_a_pass_of_several_micro_batches(kernel: Kernel) -> None:
    for ours, expected in zip(run(kernel, SEVERAL, (4, 2)), run(CpuFlash(), SEVERAL, (4, 2)), strict=True):
        assert (ours - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kernel", [CudaFlash(), NpuFusion()], ids=["cuda", "npu"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("has_prompt", [True, False])
def test_each_device_is_called_as_documented_and_computes_what_the_cpu_does(
    has_prompt: bool, lengths: tuple[int, ...], heads: tuple[int, int], kernel: Kernel
) -> None:
    layout = make_layout(lengths, has_prompt)
    for ours, expected in zip(run(kernel, layout, heads), run(CpuFlash(), layout, heads), strict=True):
        assert (ours - expected).norm() < 1e-5 * expected.norm()


def plain_mask(layout: AttentionLayout) -> Tensor:
    """bool [P, P]: True where a query (row) sees a key (column)."""
    lengths = layout.segment_lengths
    mask = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()
    for each in layout.shared():
        mask[each.responses, each.prompt] = True
    return mask


@pytest.mark.parametrize("lengths", [*LENGTHS, (1, *[40] * 20), (127, 1, 1, 127)])
@pytest.mark.parametrize("has_prompt", [True, False])
def test_the_block_mask_holds_the_blocks_that_are_needed_and_no_others(has_prompt: bool, lengths: tuple[int, ...]) -> None:
    check_block_mask(make_layout(lengths, has_prompt))


def test_the_block_mask_of_a_pass_of_several_micro_batches() -> None:
    check_block_mask(SEVERAL)


def check_block_mask(layout: AttentionLayout) -> None:
    expected = plain_mask(layout)
    num_tokens = len(expected)
    mask = flex.block_mask(layout.segment_lengths, layout.prompts, torch.device("cpu"))
    tokens = torch.arange(num_tokens)
    assert mask.mask_mod(torch.tensor(0), torch.tensor(0), tokens[:, None], tokens[None]).equal(expected)
    num_blocks = -(-num_tokens // 128)
    padded = torch.zeros(num_blocks * 128, num_blocks * 128, dtype=torch.bool)
    padded[:num_tokens, :num_tokens] = expected
    is_needed = padded.view(num_blocks, 128, num_blocks, 128).any(3).any(1)
    assert mask.to_dense()[0, 0].bool().equal(is_needed)
    assert mask.seq_lengths == (num_tokens, num_tokens)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("lengths", [(150, 130, 20), (7, 3, 3, 3)])
@pytest.mark.parametrize("has_prompt", [True, False])
def test_flex_attention_computes_what_the_cpu_kernel_does(
    has_prompt: bool, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Uncompiled, which computes the same from the scores of all pairs; there is no backward of it on the CPU.
    monkeypatch.setattr(flex, "_compiled", lambda: flex_attention)
    layout = make_layout(lengths, has_prompt)
    query, key, value = (torch.randn(sum(lengths), n, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
    out = flex.flex_attend(query, key, value, layout, 0.6)
    apply: Any = _PackedAttention.apply
    torch.testing.assert_close(out, apply(query, key, value, layout, 0.6, CpuFlash()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "expected"),
    [
        ("cpu", torch.float32, None, CpuFlash),
        ("cpu", torch.bfloat16, None, CpuFlash),
        ("cuda", torch.bfloat16, (9, 0), CudaFlash),
        ("cuda", torch.float16, (8, 0), CudaFlash),
        ("cuda", torch.float32, (9, 0), type(None)),
        ("cuda", torch.float16, (7, 5), type(None)),
        ("npu", torch.bfloat16, None, NpuFusion),
    ],
)
def test_the_kernel_is_chosen_by_device_and_dtype(
    device: str, dtype: torch.dtype, capability: Any, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    stand_in: Any = SimpleNamespace(type=device)  # torch knows no npu without torch_npu
    assert type(kernel_for(stand_in, dtype)) is expected


def test_a_device_without_attention_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'meta'"):
        kernel_for(torch.device("meta"), torch.float32)
