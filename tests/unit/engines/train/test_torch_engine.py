"""What the torch engine promises beyond the suite that all train engines pass (tests/contract/test_train_engine.py)."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from asyncflow.types import LossSums, TokenBatch, UserError
from tests.unit.engines.train.training import (
    MakeMicroBatch,
    ModelPath,
    Sum,
    assert_same,
    one_rank,
    policy_gradient,
    torch_engine,
    train_on,
    weights_of,
)


@pytest.mark.parametrize("is_token_local", [True, False])
async def test_a_loss_sees_the_micro_batch_and_the_policy_itself_as_old(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, is_token_local: bool
) -> None:
    seen: list[TokenBatch] = []

    def loss(batch: TokenBatch) -> LossSums:
        seen.append(batch)
        return policy_gradient(batch)

    micro_batch = make_micro_batch(0, (5, 1, 3))
    for column in (micro_batch.prompt_ids, micro_batch.response_ids.values, micro_batch.loss_mask.values, micro_batch.advantages):
        column.flags.writeable = False  # as they come out of a received frame
    engine = torch_engine(model_path("qwen2-tiny"))
    result = await train_on(engine, micro_batch, Sum(loss, is_token_local))
    (batch,) = seen
    assert batch.row_T.tolist() == [0] * 5 + [1] + [2] * 3 and batch.row_tokens_R.tolist() == [
        m.sum() for m in micro_batch.loss_mask
    ]
    assert batch.mask_T.tolist() == micro_batch.loss_mask.values.tolist()
    assert batch.advantages_T.tolist() == np.repeat(micro_batch.advantages, [5, 1, 3]).tolist()
    assert batch.rollout_logprobs_T.tolist() == micro_batch.rollout_logprobs.values.tolist()
    assert batch.ref_logprobs_T is None
    assert batch.old_logprobs_T.equal(batch.logprobs_T) and not batch.old_logprobs_T.requires_grad
    assert batch.logprobs_T.requires_grad and batch.entropy_T.requires_grad
    assert all(getattr(batch, f"{n}_T").dtype == torch.float32 for n in ("logprobs", "entropy", "mask", "advantages"))
    assert micro_batch.logical_tokens == 3 * 6 + 9 and result.physical_tokens == 6 + 9  # the prompt once
    assert result.loss_tokens == micro_batch.loss_mask.values.sum()
    assert result.metrics["policy/entropy"] == pytest.approx((batch.mask_T * batch.entropy_T).sum().item())
    ragged = await engine.log_probs(micro_batch.prompt_ids, micro_batch.response_ids)
    assert ragged.values.dtype == np.float32 and ragged.offsets.tolist() == [0, 5, 6, 9]
    np.testing.assert_array_equal(ragged.values, batch.old_logprobs_T.numpy())


async def test_a_log_prob_that_is_not_finite_is_not_accumulated(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    norms = []
    for has_bad in (False, True):
        engine = torch_engine(model_path("qwen2-tiny"))
        await train_on(engine, make_micro_batch(0), Sum(policy_gradient))
        if has_bad:
            weight = one_rank(engine).policy.parameters["model.norm.weight"].detach()
            kept = weight.clone()
            weight[0] = math.inf
            result = await train_on(engine, make_micro_batch(1), Sum(lambda b: LossSums(loss=0 * b.logprobs_T.sum(), metrics={})))
            assert not result.is_finite
            weight.copy_(kept)
        norms.append((await engine.optim_step(10)).grad_norm)
    assert norms[0] == norms[1] > 0


async def test_training_makes_a_rewarded_response_likelier(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    engine = torch_engine(model_path("qwen2-tiny"), learning_rate=3e-3)
    batch = make_micro_batch(0, (6, 6))
    batch.loss_mask.values[:] = 1
    batch.advantages[:] = [1, -1]
    before = await engine.log_probs(batch.prompt_ids, batch.response_ids)
    for _ in range(5):
        await train_on(engine, batch, Sum(policy_gradient))
        await engine.optim_step(12)
    after = await engine.log_probs(batch.prompt_ids, batch.response_ids)
    assert after[0].mean() > before[0].mean() + 0.5 and after[1].mean() < before[1].mean()


@pytest.mark.parametrize("family", ["qwen2-tiny", "qwen3-tiny", "llama-tiny"])
async def test_exported_names_are_those_of_the_file_and_save_gives_the_same_model(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, tmp_path: Path, family: str
) -> None:
    engine = torch_engine(model_path(family), learning_rate=1e-2)
    await train_on(engine, make_micro_batch(), Sum(policy_gradient))
    await engine.optim_step(5)
    await engine.save(tmp_path / "saved")
    weights = await weights_of(engine)
    for path in (model_path(family), tmp_path / "saved"):
        with safe_open(path / "model.safetensors", "pt") as file:
            assert set(file.keys()) == set(weights)
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.requires_grad for tensor in weights.values())
    again = torch_engine(tmp_path / "saved")
    assert_same(await weights_of(again), weights)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "asyncflow" not in json.dumps(saved) and (tmp_path / "saved" / "generation_config.json").exists()
    assert saved["tie_word_embeddings"] is True


async def test_untied_weights_are_both_exported(model_path: ModelPath, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_path("llama-tiny"), tie_word_embeddings=False)
    torch.nn.init.ones_(model.lm_head.weight)
    model.save_pretrained(tmp_path)
    weights = await weights_of(torch_engine(tmp_path))
    assert weights["lm_head.weight"].eq(1).all() and not weights["model.embed_tokens.weight"].eq(1).any()


async def test_dropout_is_off(model_path: ModelPath, make_micro_batch: MakeMicroBatch, tmp_path: Path) -> None:
    shutil.copytree(model_path("qwen2-tiny"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    batch = make_micro_batch()
    with_dropout, without = torch_engine(tmp_path / "model"), torch_engine(model_path("qwen2-tiny"))
    log_probs = [(await engine.log_probs(batch.prompt_ids, batch.response_ids)).values for engine in (with_dropout, without)]
    assert np.array_equal(*log_probs)


async def test_a_model_that_cannot_be_trained_is_refused_in_one_sentence(model_path: ModelPath, tmp_path: Path) -> None:
    shutil.copytree(model_path("qwen2-tiny"), tmp_path / "bert")
    (tmp_path / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    shutil.copytree(model_path("qwen2-tiny"), tmp_path / "deeper")
    config = json.loads((tmp_path / "deeper" / "config.json").read_text())
    (tmp_path / "deeper" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (tmp_path / "empty").mkdir()
    for name, message in (("bert", "lacks"), ("deeper", "lacks 12 of its weights"), ("empty", "no model"), ("none", "no model")):
        with pytest.raises(UserError, match=message) as caught:
            torch_engine(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["foo", "npu:0"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(device: str) -> None:
    with pytest.raises(UserError, match=r"train\.device"):
        torch_engine("/nowhere", device=device)


async def test_the_numbers_do_not_depend_on_whether_a_loss_is_given_pieces(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    results = []
    for is_token_local in (True, False):
        engine = torch_engine(model_path("qwen2-tiny"), log_prob_chunk_tokens=7)
        result = await train_on(engine, make_micro_batch(), Sum(policy_gradient, is_token_local))
        results.append((result.loss_sum, result.metrics["policy/entropy"], (await engine.optim_step(10)).grad_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize("accumulate", ["exact", "fp32"])
async def test_exact_sums_do_not_depend_on_the_order_of_micro_batches(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, accumulate: Any
) -> None:
    fingerprints = []
    for seeds in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
        engine = torch_engine(model_path("qwen2-tiny"), learning_rate=1e-3, accumulate=accumulate)
        for _ in range(2):
            for seed in seeds:
                await train_on(engine, make_micro_batch(seed), Sum(policy_gradient))
            await engine.optim_step(60)
        fingerprints.append(await engine.fingerprint())
    names = [name for name in fingerprints[0] if name.startswith("weights/")]
    assert len(fingerprints[0]) == 4 * len(names) == 4 * len(await weights_of(engine))
    assert (fingerprints[0] == fingerprints[1]) is (accumulate == "exact")


async def test_the_log_probs_that_equal_the_rollout_engines_are_counted(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    engine, batch = torch_engine(model_path("qwen2-tiny")), make_micro_batch()
    own = await engine.log_probs(batch.prompt_ids, batch.response_ids)
    own.values[4] += 0.25
    batch.loss_mask.values[:] = 1
    batch.loss_mask.values[7] = 0
    result = await train_on(engine, replace(batch, rollout_logprobs=own), Sum(policy_gradient))
    assert result.logprob_differences == (len(own.values) - 2, 0.25)
    assert result.metrics["mismatch/tokens"] == len(own.values) - 1
    assert result.metrics["mismatch/logprob_difference"] == pytest.approx(0.25)
    assert result.metrics["policy/rollout_logprob_difference"] == pytest.approx(0.25)
    assert result.metrics["mismatch/kl"] == pytest.approx(np.exp(-0.25) - 1 + 0.25)
    # The row that differs is of another policy.
    stale = replace(batch, rollout_logprobs=own, staleness=np.array([1, 1, 1, 0]))
    result = await train_on(torch_engine(model_path("qwen2-tiny"), is_corrected=True), stale, Sum(policy_gradient))
    assert result.metrics["mismatch/tokens"] == batch.loss_mask[3].sum() and result.metrics["mismatch/kl"] == 0.0
    assert result.metrics["policy/rollout_logprob_difference"] == pytest.approx(0.25)
