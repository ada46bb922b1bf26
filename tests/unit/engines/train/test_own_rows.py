"""Models whose attention is not ours: which way the probe takes, what it refuses, and rows on both sides of a rope's limit.

Families: tests/unit/engines/test_families.py.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig, Phi3Config, PretrainedConfig, StableLmConfig, xLSTMConfig

from asyncflow.engines.base import MicroBatch, MicroBatchResult
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.transformers_engine import TransformersEngine
from asyncflow.engines.train.critic_engine import ValueModel
from asyncflow.engines.train.model import own_rows
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.types import Ragged, UserError
from tests.families import CONFIGS, micro_batch, plain_log_probs, write_model
from tests.unit.engines.train.training import Sum, frozen_engine, one_rank, policy_gradient, torch_engine, train_options

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def saved(folder: Path, config: PretrainedConfig) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def test_rows_that_depend_on_their_batch_go_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, batch = saved(tmp_path, StableLmConfig(**SIZES, num_key_value_heads=2)), micro_batch()
    plain = OneRank(path, train_options())
    assert plain.policy.way == "batched" and "in batches" in plain.remark

    def filled_at_the_left(rows: list[Tensor], batch_first: bool) -> Tensor:
        longest = max(map(len, rows))
        return torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])

    monkeypatch.setattr(own_rows, "pad_sequence", filled_at_the_left)
    broken = OneRank(path, train_options())
    assert broken.policy.way == "alone" and "one by one: in a batch they differ by" in broken.remark
    expected, found = (training.log_probs(batch.prompt_ids, batch.response_ids) for training in (plain, broken))
    monkeypatch.undo()
    np.testing.assert_allclose(found.values, plain.log_probs(batch.prompt_ids, batch.response_ids).values, atol=1e-5)
    assert np.abs(expected.values - found.values).max() > 1e-3  # what filling at the left would have made of it


def test_a_model_that_sees_what_is_behind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = saved(tmp_path, StableLmConfig(**SIZES, num_key_value_heads=2)), torch.nn.functional.scaled_dot_product_attention

    def both_ways(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return plain(query, key, value, scale=options.get("scale"), enable_gqa=options.get("enable_gqa", False))

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", both_ways)
    with pytest.raises(UserError, match="this model of type 'stablelm' is not causal"):
        OneRank(path, train_options())


def test_a_deep_rwkv_keeps_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would halve those of each sixth layer in the first forward pass."""
    monkeypatch.setitem(CONFIGS, "deep", ("rwkv", {**CONFIGS["rwkv"][1], "num_hidden_layers": 8}, ""))
    path, batch = write_model("deep", tmp_path), micro_batch()
    weights = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    training = OneRank(path, train_options())
    first, second = (training.log_probs(batch.prompt_ids, batch.response_ids).values for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert all(torch.equal(training.policy.parameters[name], tensor) for name, tensor in weights.items())
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.rescale_every = 0
    ids = batch.response_ids.values[: batch.response_ids.offsets[1]]
    np.testing.assert_allclose(first[: len(ids)], plain_log_probs(model, batch.prompt_ids, ids).detach().numpy(), atol=1e-5)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, BertConfig(**SIZES, max_position_embeddings=64))
    with pytest.raises(UserError, match="this model of type 'bert'"):
        OneRank(path, train_options())


def test_logits_that_are_more_than_is_known_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, StableLmConfig(**SIZES, num_key_value_heads=2))
    monkeypatch.setattr("asyncflow.engines.train.model.causal_model.logit_scale", lambda config: 2.0)
    with pytest.raises(UserError, match="does not get the log-probs that this model of type 'stablelm' gives to a row"):
        OneRank(path, train_options())


LIMIT = 32  # positions beyond which a row has other rotary frequencies
ROPES: dict[str, PretrainedConfig] = {
    "longrope": Phi3Config(
        **SIZES,
        max_position_embeddings=128,
        original_max_position_embeddings=LIMIT,
        pad_token_id=0,
        rope_parameters={
            **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT},
            **{"short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
        },
    ),
    "dynamic": LlamaConfig(
        **SIZES,
        max_position_embeddings=LIMIT,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    ),
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("has_recomputation", [False, True])
def test_rows_on_both_sides_of_a_rope_s_limit_have_their_own_log_probs_and_gradients(
    rope: str, has_recomputation: bool, tmp_path: Path
) -> None:
    path, rng = saved(tmp_path, ROPES[rope]), np.random.default_rng(0)
    training = OneRank(path, train_options(activation_checkpointing=has_recomputation))
    assert training.policy.way == "alone" and f"one by one: under the rope type {rope!r}" in training.remark
    prompt, tokens = rng.integers(1, 61, 6), [rng.integers(1, 61, length) for length in (10, 60, 40, 10)]
    # The last two are the first two again, so that what a long row leaves behind is seen.
    rows = Ragged.from_arrays([*tokens, tokens[1], tokens[0]], "int64")

    def fresh() -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    expected = [plain_log_probs(fresh(), prompt, row).detach().numpy() for row in rows]
    for _ in range(2):
        found = training.log_probs(prompt, rows)
        for theirs, own in zip(expected, found, strict=True):
            np.testing.assert_allclose(own, theirs, atol=1e-5)
    model = fresh()
    torch.cat([plain_log_probs(model, prompt, row) for row in [tokens[0]]]).sum().backward()
    of_short = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model = fresh()
    plain_log_probs(model, prompt, tokens[1]).sum().backward()
    training.policy.log_probs(training.policy.pack(prompt, Ragged.from_arrays(tokens[:2], "int64"))).sum().backward()
    for name, weight in model.named_parameters():
        own = training.policy.parameters[name].grad
        torch.testing.assert_close(own, weight.grad + of_short[name], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("rope", ROPES)
def test_generation_across_a_rope_s_limit_is_refused(rope: str, tmp_path: Path) -> None:
    path = saved(tmp_path, ROPES[rope])
    TransformersEngine(path, num_slots=1, max_context=LIMIT, stop_ids=())
    words = "max_context 33 exceeds" if rope == "dynamic" else "'longrope' a row that exceeds 32 positions.*max_context_tokens=32"
    with pytest.raises(ValueError, match=words):
        TransformersEngine(path, num_slots=1, max_context=LIMIT + 1, stop_ids=())
    with pytest.raises(ValueError, match=f"rope scaling {rope!r} is not one of"):
        SlotEngine(path, num_slots=1, max_context=LIMIT, stop_ids=())


@pytest.mark.parametrize("frozen_dtype", [None, "bfloat16"])
def test_a_reference_apart_and_a_critic_take_the_trainer_s_way(
    frozen_dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, StableLmConfig(**SIZES, num_key_value_heads=2))
    real = own_rows.row_states

    def of_batches_otherwise(states: Any, packed: Any, way: str) -> Tensor:
        found = real(states, packed, way)
        return found * 1.5 if way == "batched" and found.dtype == torch.float32 else found

    monkeypatch.setattr("asyncflow.engines.train.model.causal_model.row_states", of_batches_otherwise)
    options = {"frozen_dtype": frozen_dtype, "has_reference": True}
    trained, apart = OneRank(path, train_options(**options)), frozen_engine(path, **options)
    assert trained.policy.way == apart._model.way == ValueModel(path, train_options()).way == "alone"
    batch = micro_batch()
    found = asyncio.run(apart.log_probs(batch.prompt_ids, batch.response_ids))
    reference = trained.models.reference
    assert reference is not None
    expected = reference.log_probs(trained.policy.pack(batch.prompt_ids, batch.response_ids))
    assert np.array_equal(found.values, expected.numpy())
    asyncio.run(apart.close())


def test_rows_that_a_model_computes_without_gradients_are_refused(tmp_path: Path) -> None:
    config = xLSTMConfig(vocab_size=61, hidden_size=128, num_hidden_layers=1, num_heads=2, max_inference_chunksize=20)
    training, rng = OneRank(saved(tmp_path, config), train_options()), np.random.default_rng(0)
    policy, prompt = training.policy, rng.integers(1, 61, 6)
    short, long = (policy.pack(prompt, Ragged.from_arrays([rng.integers(1, 61, n)], "int64")) for n in (14, 15))
    policy.log_probs(short)
    with pytest.raises(UserError, match="a row of 21 tokens has no gradients in this xlstm"):
        policy.log_probs(long)


async def summed(
    path: Path, batches: list[MicroBatch], **changes: Any
) -> tuple[dict[str, Tensor], list[MicroBatchResult], list[int]]:
    """Gradients of micro-batches, their results, and the rows of each batch that went through the model."""
    engine = torch_engine(path, has_reference=True, **changes)
    sizes: list[int] = []
    real = own_rows.row_states

    def noted(states: Any, packed: Any, way: str) -> Tensor:
        sizes.append(len(packed.layout.segment_lengths))
        return real(states, packed, way)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("asyncflow.engines.train.model.causal_model.row_states", noted)
        results = await engine.forward_backward(batches, Sum(policy_gradient))
    gradients = {name: p.grad.clone() for name, p in one_rank(engine).policy.parameters.items() if p.grad is not None}
    await engine.close()
    return gradients, results, sizes


@pytest.mark.parametrize("family", ["stablelm", "mamba", "mixtral"])
async def test_rows_of_several_micro_batches_are_one_batch(family: str, tmp_path: Path) -> None:
    path, batches = write_model(family, tmp_path), [micro_batch(seed=seed) for seed in range(4)]
    alone, each, sizes = await summed(path, batches, accumulate="fp32")
    rows = len(batches[0].indices)
    assert sizes == [rows] * 8  # the reference's, and the policy's
    together, results, sizes = await summed(path, batches, accumulate="fp32", tokens_per_pass=100_000)
    assert sizes == [4 * rows] * 2
    for name, gradient in alone.items():
        torch.testing.assert_close(together[name], gradient, rtol=1e-3, atol=1e-5)
    for found, expected in zip(results, each, strict=True):
        assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-4, abs=1e-5)
        assert (found.loss_tokens, found.physical_tokens) == (expected.loss_tokens, expected.physical_tokens)


async def test_of_a_batch_the_micro_batch_that_is_not_finite_adds_nothing(tmp_path: Path) -> None:
    path, batches = write_model("stablelm", tmp_path), [micro_batch(seed=seed) for seed in range(3)]
    bad = replace(batches[1], advantages=np.full_like(batches[1].advantages, np.inf))
    good, _, _ = await summed(path, [batches[0], batches[2]], accumulate="fp32")
    found, results, _ = await summed(path, [batches[0], bad, batches[2]], accumulate="fp32", tokens_per_pass=100_000)
    assert [result.is_finite for result in results] == [True, False, True]
    for name, gradient in good.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5)


async def test_with_exact_sums_rows_of_their_own_have_no_company(tmp_path: Path) -> None:
    path, batches = write_model("stablelm", tmp_path), [micro_batch(seed=seed) for seed in range(2)]
    _, _, sizes = await summed(path, batches, accumulate="exact", tokens_per_pass=100_000)
    assert sizes == [len(batches[0].indices)] * 4
