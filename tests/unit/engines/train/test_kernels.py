"""The kernels of devices, over stand-ins that keep to the documented calls, and over the devices that are there; the choice.

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

from asyncflow.engines.train.model.attention import _PackedAttention
from asyncflow.engines.train.model.kernels import CpuFlash, CudaEfficient, CudaFlash, Kernel, NpuFusion, kernel_for
from asyncflow.engines.train.model.packing import AttentionLayout, SharedPrompt
from asyncflow.types import UserError
from tests.contract.devices import needed_devices

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


LSE_STEP = 32


def stand_in_efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """aten::_efficient_attention_forward on [1, tokens, heads, D] with offsets: the LSE is float32 [segments, heads, queries]."""
    assert bias is None and dropout_p == 0.0 and compute_log_sumexp and custom_mask_type in (0, 1)
    for x, offsets, longest in ((query, cu_seqlens_q, max_seqlen_q), (key, cu_seqlens_k, max_seqlen_k)):
        assert x.shape[0] == 1 and x.shape[2] == query.shape[2], "each query head has keys of its own"
        check_offsets(x[0], offsets, longest)
    segments = Segments(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), custom_mask_type == 1, scale)
    out, maxima, sums = segments.forward(query[0], key[0], value[0])
    lse = torch.full((len(segments.pairs), query.shape[2], -(-max_seqlen_q // LSE_STEP) * LSE_STEP), torch.inf)
    for number, (queries, _) in enumerate(segments.pairs):
        lse[number, :, : queries.stop - queries.start] = (maxima + sums.log())[queries].t()
    return out[None], lse, torch.empty(0), torch.empty(0), max_seqlen_q, max_seqlen_k


def stand_in_efficient_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: None,
    out: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Tensor,
    philox_offset: Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert bias is None and not bias_requires_grad and dropout_p == 0.0
    for x, offsets, longest in ((query, cu_seqlens_q, max_seqlen_q), (key, cu_seqlens_k, max_seqlen_k)):
        check_offsets(x[0], offsets, longest)
    segments = Segments(cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), custom_mask_type == 1, scale)
    assert logsumexp.shape == (len(segments.pairs), query.shape[2], -(-max_seqlen_q // LSE_STEP) * LSE_STEP)
    assert logsumexp.dtype == torch.float32 and logsumexp.is_contiguous()
    lse = query.new_full(query.shape[1:3], torch.nan)
    for number, (queries, _) in enumerate(segments.pairs):
        lse[queries] = logsumexp[number, :, : queries.stop - queries.start].t()
        assert logsumexp[number, :, queries.stop - queries.start :].isinf().all(), "padding has no weight"
    grads = segments.backward(grad_out[0], query[0], key[0], value[0], out[0], lse, torch.ones_like(lse))
    return *(grad[None] for grad in grads), torch.empty(0)


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
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", stand_in_efficient_forward)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", stand_in_efficient_backward)
    fake = SimpleNamespace(npu_fusion_attention=stand_in_npu, npu_fusion_attention_grad=stand_in_npu_grad)
    monkeypatch.setitem(sys.modules, "torch_npu", fake)


def run(
    kernel: Kernel,
    layout: AttentionLayout,
    heads: tuple[int, int],
    *,
    size: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Tensor]:
    """Output and the gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(layout.positions_P), n, size) for n in (heads[0], heads[1], heads[1], heads[0])]
    *qkv, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    apply: Any = _PackedAttention.apply
    out = apply(*(x.requires_grad_() for x in qkv), layout, 4.8 / size, kernel)
    return [out, *torch.autograd.grad(out, qkv, grad)]


SEVERAL = AttentionLayout(
    (130, 20, 5, 7, 3, 200, 9, 40), (SharedPrompt(0, 2), SharedPrompt(3, 1), SharedPrompt(5, 1)), torch.arange(414)
)
"""A pass of three micro-batches that share their prompts, and one that does not."""


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kernel", [CudaFlash(), CudaEfficient(), NpuFusion()], ids=["cuda", "cuda-efficient", "npu"])
def test_each_device_computes_a_pass_of_several_micro_batches(kernel: Kernel) -> None:
    for ours, expected in zip(run(kernel, SEVERAL, (4, 2)), run(CpuFlash(), SEVERAL, (4, 2)), strict=True):
        assert (ours - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("kernel", [CudaFlash(), CudaEfficient(), NpuFusion()], ids=["cuda", "cuda-efficient", "npu"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("has_prompt", [True, False])
def test_each_device_is_called_as_documented_and_computes_what_the_cpu_does(
    has_prompt: bool, lengths: tuple[int, ...], heads: tuple[int, int], kernel: Kernel
) -> None:
    layout = make_layout(lengths, has_prompt)
    for ours, expected in zip(run(kernel, layout, heads), run(CpuFlash(), layout, heads), strict=True):
        assert (ours - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_device_itself_computes_what_the_cpu_does(
    device: str, heads: tuple[int, int], size: int, dtype: torch.dtype, error: float
) -> None:
    needed_devices(device)
    for layout in (SEVERAL, *(make_layout(lengths, has_prompt=True) for lengths in LENGTHS)):
        expected = run(CpuFlash(), layout, heads, size=size, dtype=torch.float64)
        ours = run(kernel_for(torch.device(device), dtype), layout, heads, size=size, dtype=dtype, device=device)
        for mine, plain in zip(ours, expected, strict=True):
            assert (mine.double().cpu() - plain).norm() < error * plain.norm()


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "expected"),
    [
        ("cpu", torch.float32, None, CpuFlash),
        ("cpu", torch.bfloat16, None, CpuFlash),
        ("cuda", torch.bfloat16, (9, 0), CudaFlash),
        ("cuda", torch.float16, (8, 0), CudaFlash),
        ("cuda", torch.float32, (9, 0), CudaEfficient),
        ("cuda", torch.float16, (7, 5), CudaEfficient),
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
