"""Packed attention against plain attention over concatenated keys; packed models against separate passes of transformers'."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.engines.families import check_family
from asyncflow.engines.train.model import kernels
from asyncflow.engines.train.model.attention import ATTENTION_NAME, packed_attention
from asyncflow.engines.train.model.causal_model import CausalModel
from asyncflow.engines.train.model.log_probs import Head, log_probs_and_entropy
from asyncflow.engines.train.model.packing import AttentionLayout, Packed, SharedPrompt, pack
from asyncflow.types import Ragged, UserError
from tests.depth import in_gate
from tests.unit.engines.train.training import ModelPath, train_options

FAMILIES = ["qwen2-tiny", "qwen3-tiny", "llama-tiny"]


def load_model(path: Path, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # biases and norms too, and large enough that attention is far from uniform
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = MethodType(plain_norm, module)
    return model.to(dtype)


def plain_norm(self: Any, x: Tensor) -> Tensor:
    """Transformers' own rounds to float32 whatever the dtype."""
    return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def make_group(lengths: tuple[int, ...], prompt_length: int = 6, seed: int = 0) -> tuple[np.ndarray, Ragged]:
    rng = np.random.default_rng(seed)
    responses = Ragged.from_arrays([rng.integers(0, 250, n) for n in lengths], "int64")
    return rng.integers(0, 250, prompt_length), responses


def packed_log_probs(model: Any, packed: Packed) -> Tensor:
    hidden_PH = model.base_model(
        input_ids=packed.tokens_P[None],
        position_ids=packed.positions_P[None],
        attention_mask=None,
        use_cache=False,
        layout=packed.layout,
    ).last_hidden_state[0]
    log_probs_T, _ = log_probs_and_entropy(
        packed.predicting(hidden_PH), Head(model.get_output_embeddings().weight, 16), packed.targets_T
    )
    return log_probs_T


def separate_log_probs(model: Any, prompt: np.ndarray, responses: Ragged) -> Tensor:
    log_probs = []
    for response in responses:
        tokens = torch.tensor(np.concatenate([prompt, response]))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        log_probs.append(logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)])
    return torch.cat(log_probs)


def relative_error(ours: Any, expected: Any) -> float:
    """Over all parameters together."""
    pairs = list(zip(ours.parameters(), expected.parameters(), strict=True))
    difference = sum((a.grad.double() - b.grad.double()).square().sum() for a, b in pairs)
    return float((difference / sum(b.grad.double().square().sum() for _, b in pairs)) ** 0.5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("prompt_length", "lengths"),
    in_gate(
        (1, (5,)),
        (6, (5, 1, 9, 5)),
        (40, (3,) * 16),
        of=[(1, (5,)), (6, (4, 4)), (6, (5, 1, 9, 5)), (1, (2, 3, 1)), (40, (3,) * 16), (3, tuple(range(1, 17)))],
    ),
)
@pytest.mark.parametrize("is_shared", [True, False])
def test_the_gradient_is_the_sum_of_separate_passes_to_the_last_digits(
    family: str, prompt_length: int, lengths: tuple[int, ...], is_shared: bool, model_path: ModelPath
) -> None:
    prompt, responses = make_group(lengths, prompt_length)
    packed_model, separate = (load_model(model_path(family), name, torch.float64) for name in (ATTENTION_NAME, "sdpa"))
    log_probs_T = packed_log_probs(packed_model, pack(prompt, responses, is_shared=is_shared))
    expected_T = separate_log_probs(separate, prompt, responses)
    torch.testing.assert_close(log_probs_T, expected_T, rtol=0, atol=1e-12)
    weight_T = torch.randn(len(expected_T), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for log_probs in (log_probs_T, expected_T):
        (log_probs.exp() * weight_T).sum().backward()
    assert relative_error(packed_model, separate) < 1e-12


@pytest.mark.parametrize(("dtype", "is_shared"), [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
def test_lower_precision_is_as_near_as_separate_passes_are(dtype: torch.dtype, is_shared: bool, model_path: ModelPath) -> None:
    prompt, responses = make_group((30, 7, 19, 25, 12), 20)
    separate = load_model(model_path("qwen2-tiny"), "sdpa", dtype)
    exact = load_model(model_path("qwen2-tiny"), "sdpa", torch.float64)
    exact.load_state_dict({name: weight.double() for name, weight in separate.state_dict().items()})
    exact_T = separate_log_probs(exact, prompt, responses)
    packed_model = load_model(model_path("qwen2-tiny"), ATTENTION_NAME, dtype)
    log_probs_T = packed_log_probs(packed_model, pack(prompt, responses, is_shared=is_shared))
    separate_T = separate_log_probs(separate, prompt, responses)
    for log_probs in (exact_T, log_probs_T, separate_T):
        log_probs.double().sum().backward()

    def error(log_probs: Tensor) -> float:
        return float((log_probs.double() - exact_T).detach().square().mean().sqrt())

    assert error(log_probs_T) < 1.3 * error(separate_T) < (1e-4 if dtype == torch.float32 else 0.2)
    assert relative_error(packed_model, exact) < 1.3 * relative_error(separate, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_response_has_the_same_bits_whatever_its_neighbours_are(
    is_shared: bool, dtype: torch.dtype, model_path: ModelPath
) -> None:
    model = load_model(model_path("qwen2-tiny"), ATTENTION_NAME, dtype)
    rng = np.random.default_rng(1)
    for _ in range(12):
        prompt, responses = make_group(tuple(rng.integers(1, 70, 4)), int(rng.integers(1, 60)), int(rng.integers(100)))
        neighbour = int(rng.integers(0, 4))
        changed = [rng.integers(0, 250, rng.integers(1, 70)) if k == neighbour else r for k, r in enumerate(responses)]
        with torch.no_grad():
            before, after = (
                packed_log_probs(model, pack(prompt, group, is_shared=is_shared)).split(group.lengths.tolist())
                for group in (responses, Ragged.from_arrays(changed, "int64"))
            )
        for k in range(4):
            if k != neighbour:
                assert before[k].equal(after[k]), f"response {k} of lengths {responses.lengths}, {neighbour} changed"
        assert not before[neighbour].equal(after[neighbour])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_two_runs_have_the_same_bits(num_threads: int, model_path: ModelPath, threads: Callable[[int], None]) -> None:
    threads(num_threads)
    packed = pack(*make_group((40, 3, 40, 1, 25, 40, 33, 8), 50), is_shared=True)
    gradients = []
    for _ in range(2):
        model = load_model(model_path("qwen2-tiny"), ATTENTION_NAME)
        packed_log_probs(model, packed).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(a.equal(b) for a, b in zip(*gradients, strict=True))


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_nan_stays_with_its_response(is_shared: bool, model_path: ModelPath) -> None:
    model = load_model(model_path("qwen2-tiny"), ATTENTION_NAME)
    packed = pack(*make_group((5, 4, 6)), is_shared=is_shared)
    before_T = packed_log_probs(model, packed).detach()
    last_of_second = 6 + 5 + 4 - 2 if is_shared else 2 * 6 + 5 + 4 - 2  # the position that predicts its last token

    def spoil(_module: Any, _inputs: Any, embedded_1PH: Tensor) -> Tensor:
        spoilt_1PH = embedded_1PH.clone()
        spoilt_1PH[0, last_of_second] = torch.nan
        return spoilt_1PH

    with model.get_input_embeddings().register_forward_hook(spoil):
        after_T = packed_log_probs(model, packed).detach()
    is_second_T = packed.row_T == 1
    assert after_T[is_second_T][-1].isnan()
    assert after_T[~is_second_T].equal(before_T[~is_second_T])


def oracle(query_PHD: Tensor, key_PKD: Tensor, value_PKD: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    """Plain softmax: each segment over its own keys, or those of prompt and segment concatenated."""
    num_repeats = query_PHD.shape[1] // key_PKD.shape[1]
    queries, keys, values = (x.split_with_sizes(layout.segment_lengths) for x in (query_PHD, key_PKD, value_PKD))
    outs = []
    for i, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        if layout.has_prompt and i:
            key, value = torch.cat([keys[0], key]), torch.cat([values[0], value])
        key, value = (x.repeat_interleave(num_repeats, dim=1) for x in (key, value))
        scores_HQM = torch.einsum("qhd,mhd->hqm", query, key) * scale
        hidden_QM = torch.ones(len(query), len(key), dtype=torch.bool).triu(1 + len(key) - len(query))
        outs.append(torch.einsum("hqm,mhd->qhd", scores_HQM.masked_fill(hidden_QM, -torch.inf).softmax(-1), value))
    return torch.cat(outs)


def make_layout(lengths: tuple[int, ...], has_prompt: bool) -> AttentionLayout:
    prompts = (SharedPrompt(0, len(lengths) - 1),) if has_prompt else ()
    return AttentionLayout(lengths, prompts, torch.arange(sum(lengths)))


def make_qkv(num_tokens: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """[1, heads, tokens, D], as a model has them: tokens are the outermost in memory."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, num_tokens, heads, 16) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def check_against_oracle(layout: AttentionLayout, num_heads: int, num_kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    qkv = make_qkv(len(layout.positions_P), num_heads, num_kv_heads, dtype)
    out, _ = packed_attention(torch.nn.Identity(), *qkv, None, scaling=0.7, layout=layout, position_ids=layout.positions_P[None])
    copies = [x.detach()[0].transpose(0, 1).double().requires_grad_() for x in qkv]
    expected = oracle(*copies, layout, 0.7)
    assert out.dtype == dtype and out.shape == (1, *expected.shape)
    assert (out[0].double() - expected).norm() < tolerance * expected.norm()
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out[0].backward(weight.to(dtype))
    expected.backward(weight)
    for x, copy in zip(qkv, copies, strict=True):
        ours = x.grad[0].transpose(0, 1).double()
        assert (ours - copy.grad).norm() < tolerance * copy.grad.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("lengths", [(7, 3, 3, 3), (1, 4, 1, 9), (300, 70, 20), (9,)])
@pytest.mark.parametrize("has_prompt", [True, False])
def test_attention_is_that_over_concatenated_keys(
    lengths: tuple[int, ...], has_prompt: bool, num_heads: int, num_kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    layout = make_layout(lengths, has_prompt and len(lengths) > 1)
    for are_bits_free in (False, True):
        check_against_oracle(replace(layout, are_bits_free=are_bits_free), num_heads, num_kv_heads, dtype, tolerance)


def test_saved_for_the_backward_are_inputs_output_and_lse_alone() -> None:
    layout = make_layout((300, 70, 20), True)
    query, key, value = make_qkv(390, 4, 2, torch.float32)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        packed_attention(
            torch.nn.Identity(), query, key, value, None, scaling=0.7, layout=layout, position_ids=layout.positions_P[None]
        )
    assert sum(saved.values()) == 4 * (2 * query.numel() + 2 * key.numel() + 390 * 4)


def test_a_default_call_of_the_model_is_refused(model_path: ModelPath) -> None:
    model = load_model(model_path("qwen2-tiny"), ATTENTION_NAME)
    with pytest.raises(ValueError, match="segments None do not make up the packed tokens"):
        model(input_ids=torch.ones(1, 5, dtype=torch.int64), use_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_that_transformers_would_make_are_refused(family: str, model_path: ModelPath) -> None:
    model = load_model(model_path(family), ATTENTION_NAME)
    packed = pack(*make_group((2, 3)), is_shared=True)
    call = partial(model.base_model, packed.tokens_P[None], layout=packed.layout, use_cache=False)
    call(position_ids=packed.positions_P[None])
    with pytest.raises(ValueError, match="position_ids are not those of the layout"):
        call()


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": make_layout((2, 2), False)},
        {"layout": None},
        {"position_ids": None},
        {"position_ids": torch.zeros(1, 5, dtype=torch.int64)},
        {"dropout": 0.1},
        {"sliding_window": 4},
        {"attention_mask": torch.ones(1, 1, 5, 5)},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_attention_refuses_what_packed_tokens_do_not_have(wrong: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 5, 8)
    layout = make_layout((2, 3), False)
    arguments = {"attention_mask": None, "scaling": 1.0, "layout": layout, "position_ids": layout.positions_P[None]}
    packed_attention(torch.nn.Identity(), x, x, x, **arguments)
    with pytest.raises(ValueError):
        packed_attention(torch.nn.Identity(), x, x, x, **{**arguments, **wrong})


def test_keys_of_an_earlier_call_are_refused() -> None:
    x, layout = torch.randn(1, 2, 5, 8), make_layout((2, 3), False)
    longer = torch.randn(1, 2, 7, 8)  # what a cache would make of keys and values
    with pytest.raises(ValueError, match="do not make up"):
        packed_attention(
            torch.nn.Identity(), x, longer, longer, None, scaling=1.0, layout=layout, position_ids=layout.positions_P[None]
        )


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("gpt2", {}, "'gpt2'.*qwen2, qwen3, llama"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 2}, "sliding"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
    ],
)
def test_a_model_that_packing_would_change_is_refused_by_name(model_type: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_family(AutoConfig.for_model(model_type, **options).to_dict())


@pytest.mark.parametrize("accumulate", ["exact", "fp32"])
def test_where_bits_are_free_all_responses_see_their_prompt_in_one_call(
    accumulate: str, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[kernels.AttentionPart] = []
    forward = kernels.CpuFlash.forward

    def noted(own: Any, *arguments: Any) -> Any:
        parts.append(arguments[-1])
        return forward(own, *arguments)

    monkeypatch.setattr(kernels.CpuFlash, "forward", noted)
    model = CausalModel(model_path("qwen2-tiny"), train_options(accumulate=accumulate))
    prompt, responses = make_group((5, 40, 5, 17), prompt_length=30)
    found = model.log_probs(model.pack(prompt, responses))
    seen = {part.lengths for part in parts if not part.is_causal}
    assert seen == {(67,) if accumulate == "fp32" else (5, 40, 5, 17)}
    monkeypatch.undo()
    plain = CausalModel(model_path("qwen2-tiny"), train_options(accumulate="exact"))
    assert found.allclose(plain.log_probs(plain.pack(prompt, responses)), atol=1e-5)
    if accumulate == "exact":
        assert found.equal(plain.log_probs(plain.pack(prompt, responses)))


def test_short_segments_of_about_one_length_are_one_call() -> None:
    lengths = (24, 9, 80, 16, 0, 17, 65, 64)
    calls = kernels._calls(lengths)
    assert [call.count for call in calls] == [1, 1, 2, 2, 1]  # of 80 and 65 tokens; up to 32, up to 16, up to 64
    rows_TH = torch.arange(sum(lengths) * 3.0).view(-1, 3)
    found_TH = torch.full_like(rows_TH, -1.0)
    for call in calls:
        x_NHL = call.of(rows_TH)
        assert x_NHL.shape[2] % kernels.STEP == 0 or x_NHL.shape[2] > kernels.SHORT
        call.put(x_NHL, found_TH)
    assert found_TH.equal(rows_TH)
    padded_NHL = kernels._calls((9,))[0].of(rows_TH[:9])
    assert padded_NHL[0, :, 9:].t().equal(rows_TH[8:9].expand(7, 3)), "its last token again"
    zeros_NHLD = kernels._calls((9,))[0].of(rows_TH[:9, :, None], pads_zeros=True)
    assert zeros_NHLD[:, :, :9].equal(padded_NHL[:, :, :9, None]) and not zeros_NHLD[:, :, 9:].any()
