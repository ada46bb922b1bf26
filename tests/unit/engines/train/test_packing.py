"""Packed rows against separate, unpadded forward passes of the model as transformers computes it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.engines.base import MicroBatch
from asyncflow.engines.train.model.attention import ATTENTION_NAME, check_packable, packed_attention
from asyncflow.engines.train.model.log_probs import log_probs_and_entropy
from asyncflow.engines.train.model.packing import pack_rows
from asyncflow.types import Ragged, UserError


def load_model(path: Path, attention: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # biases and norms too, and large enough that attention is far from uniform
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def packed_log_probs(model: Any, batch: MicroBatch, chunk_tokens: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    rows = pack_rows(batch.prompt_ids, batch.response_ids)
    hidden_PH = model.base_model(
        input_ids=rows.tokens_P[None],
        position_ids=rows.positions_P[None],
        attention_mask=None,
        use_cache=False,
        row_lengths=rows.row_lengths,
    ).last_hidden_state[0]
    return log_probs_and_entropy(hidden_PH[rows.predict_T], model.lm_head.weight, rows.targets_T, chunk_tokens=chunk_tokens)


def separate_log_probs(model: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    log_probs, entropies = [], []
    for response in batch.response_ids:
        tokens = torch.tensor(np.concatenate([batch.prompt_ids, response]))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        log_p = logits[len(batch.prompt_ids) - 1 : -1].double().log_softmax(-1)
        log_probs.append(log_p[torch.arange(len(response)), torch.tensor(response)])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def test_rows_lie_end_to_end_and_positions_start_again() -> None:
    rows = pack_rows(np.array([1, 2, 3]), Ragged.from_arrays([np.array([4, 5]), np.array([6])], "int64"))
    assert rows.tokens_P.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6]
    assert rows.positions_P.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert rows.row_lengths == (5, 4) and rows.num_tokens == 9
    assert rows.predict_T.tolist() == [2, 3, 7]
    assert rows.targets_T.tolist() == [4, 5, 6]
    assert rows.row_T.tolist() == [0, 0, 1]


@pytest.mark.parametrize(("num_prompt_tokens", "lengths"), [(0, (3, 2)), (4, (3, 0)), (4, ())])
def test_what_cannot_be_predicted_is_refused(num_prompt_tokens: int, lengths: tuple[int, ...]) -> None:
    responses = Ragged.from_arrays([np.ones(n, np.int64) for n in lengths], "int64")
    with pytest.raises(ValueError, match="cannot pack"):
        pack_rows(np.ones(num_prompt_tokens, np.int64), responses)


@pytest.mark.parametrize(
    ("family", "chunk_tokens"), [("qwen2-tiny", 1), ("qwen2-tiny", 20), ("qwen2-tiny", 1000), ("qwen3-tiny", 7), ("llama-tiny", 7)]
)
def test_log_probs_and_gradients_are_those_of_separate_passes(
    family: str, chunk_tokens: int, model_path: Callable[[str], Path], make_micro_batch: Callable[..., MicroBatch]
) -> None:
    batch = make_micro_batch()
    packed, separate = load_model(model_path(family), ATTENTION_NAME), load_model(model_path(family), "eager")
    log_probs_T, entropy_T = packed_log_probs(packed, batch, chunk_tokens)
    expected_T, expected_entropy_T = separate_log_probs(separate, batch)
    torch.testing.assert_close(log_probs_T.double(), expected_T, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy_T.double(), expected_entropy_T, rtol=0, atol=1e-5)
    assert not entropy_T.requires_grad

    weight_T = torch.randn(len(expected_T), generator=torch.Generator().manual_seed(0))
    (log_probs_T * weight_T).sum().backward()
    (expected_T * weight_T).sum().backward()
    gradients = {name: p.grad for name, p in separate.named_parameters()}
    for name, parameter in packed.named_parameters():
        scale = gradients[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_a_row_does_not_see_its_neighbours(model_path: Callable[[str], Path], make_micro_batch: Callable[..., MicroBatch]) -> None:
    model = load_model(model_path("qwen2-tiny"), ATTENTION_NAME)
    batch = make_micro_batch()
    before_T, _ = packed_log_probs(model, batch)
    batch.response_ids[1][:] += 1
    after_T, _ = packed_log_probs(model, batch)
    is_second_T = pack_rows(batch.prompt_ids, batch.response_ids).row_T == 1
    assert after_T[~is_second_T].equal(before_T[~is_second_T])
    assert not after_T[is_second_T].equal(before_T[is_second_T])


def test_no_logits_of_all_tokens_are_kept() -> None:
    num_tokens, vocabulary_size, chunk_tokens = 64, 1000, 4
    hidden_TH = torch.randn(num_tokens, 8, requires_grad=True)
    head_VH = torch.randn(vocabulary_size, 8, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        log_probs_T, _ = log_probs_and_entropy(hidden_TH, head_VH, torch.arange(num_tokens), chunk_tokens=chunk_tokens)
        log_probs_T.sum().backward()
    assert 0 < largest <= head_VH.numel() < num_tokens * vocabulary_size


def test_attention_without_lengths_is_refused(model_path: Callable[[str], Path]) -> None:
    model = load_model(model_path("qwen2-tiny"), ATTENTION_NAME)
    with pytest.raises(ValueError, match="row_lengths None"):
        model(input_ids=torch.ones(1, 5, dtype=torch.int64), use_cache=False)


@pytest.mark.parametrize(
    "wrong",
    [{"row_lengths": (2, 2)}, {"dropout": 0.1}, {"sliding_window": 4}, {"attention_mask": torch.ones(1, 1, 5, 5)}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_attention_refuses_what_packed_rows_do_not_have(wrong: dict[str, Any]) -> None:
    x = torch.randn(1, 2, 5, 8)
    arguments: dict[str, Any] = {"attention_mask": None, "scaling": 1.0, "row_lengths": (2, 3)}
    packed_attention(torch.nn.Identity(), x, x, x, **arguments)
    with pytest.raises(ValueError):
        packed_attention(torch.nn.Identity(), x, x, x, **{**arguments, **wrong})


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
        check_packable(AutoConfig.for_model(model_type, **options))
