"""The engine against the same training written down with transformers, separate forward passes and plain AdamW."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from asyncflow.engines.base import MicroBatch
from asyncflow.types import LossSums, TokenBatch, UserError
from tests.unit.engines.train.training import one_rank, torch_engine, train_on, weights_of

ModelPath = Callable[[str], Path]
MakeMicroBatch = Callable[..., MicroBatch]


@dataclass(frozen=True)
class Sum:
    """An objective of a loss function alone."""

    loss: Callable[[TokenBatch], LossSums]
    is_token_local: bool = True


def policy_gradient(batch: TokenBatch) -> LossSums:
    """- sum mask A ratio: its gradient at ratio 1 is that of - sum mask A log p."""
    ratio_T = (batch.logprobs_T - batch.old_logprobs_T).exp()
    return LossSums(
        loss=-(batch.mask_T * batch.advantages_T * ratio_T).sum(),
        metrics={"policy/entropy": (batch.mask_T * batch.entropy_T).sum()},
    )


def reference_log_probs(model: Any, batch: MicroBatch, temperature: float = 1.0) -> list[torch.Tensor]:
    log_probs = []
    for response in batch.response_ids:
        tokens = torch.tensor(np.concatenate([batch.prompt_ids, response]))
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(batch.prompt_ids) - 1 : -1] / temperature
        log_probs.append(logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)])
    return log_probs


def reference_steps(path: Path, steps: list[list[MicroBatch]], normalisers: list[int], lrs: list[float], clip: float) -> Any:
    """The weights after these steps, and the gradient norms before the clip."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    norms = []
    for batches, normaliser, lr in zip(steps, normalisers, lrs, strict=True):
        loss = torch.zeros(())
        for batch in batches:
            for k, log_probs in enumerate(reference_log_probs(model, batch)):
                loss = loss - (torch.tensor(batch.loss_mask[k]) * float(batch.advantages[k]) * log_probs).sum()
        (loss / normaliser).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), norms


def assert_same(left: Any, right: Any) -> None:
    assert left.keys() == right.keys()
    assert all(left[name].equal(right[name]) for name in left)


@pytest.mark.parametrize("clip", [1e9, 0.05])
async def test_two_steps_are_those_of_plain_training(model_path: ModelPath, make_micro_batch: MakeMicroBatch, clip: float) -> None:
    path = model_path("qwen2-tiny")
    steps = [[make_micro_batch(0), make_micro_batch(1, (3, 8))], [make_micro_batch(2)]]
    expected, norms = reference_steps(path, steps, [25, 16], [0.5e-3, 1e-3], clip)
    engine = torch_engine(path, learning_rate=1e-3, warmup_steps=2, max_grad_norm=clip)
    results = []
    for batches, normaliser in zip(steps, [25, 16], strict=True):
        for batch in batches:
            assert (await train_on(engine, batch, Sum(policy_gradient))).is_finite
        results.append(await engine.optim_step(normaliser))
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-4)
    assert clip > 1 or min(norms) > clip
    assert [r.learning_rate for r in results] == [0.5e-3, 1e-3]
    assert not any(r.skipped for r in results)
    weights = await weights_of(engine)
    before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    for name, tensor in weights.items():
        moved = (expected[name] - before[name]).norm()
        # Adam divides by the gradient's own size: where that is rounding error alone, the direction is too (the key biases)
        if not name.endswith("k_proj.bias"):
            assert (tensor - expected[name]).norm() < 2e-2 * moved, name


async def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    whole = make_micro_batch(0)
    parts = [rows_of(whole, slice(0, 1)), rows_of(whole, slice(1, 4))]
    norms, losses = [], []
    for batches in ([whole], parts):
        engine = torch_engine(model_path("qwen2-tiny"))
        losses.append(sum([(await train_on(engine, batch, Sum(policy_gradient))).loss_sum for batch in batches]))
        norms.append((await engine.optim_step(7)).grad_norm)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def rows_of(batch: MicroBatch, rows: slice) -> MicroBatch:
    chosen = range(len(batch.indices))[rows]
    return MicroBatch(
        indices=batch.indices[rows],
        prompt_ids=batch.prompt_ids,
        response_ids=batch.response_ids.take(chosen),
        loss_mask=batch.loss_mask.take(chosen),
        rollout_logprobs=batch.rollout_logprobs.take(chosen),
        advantages=batch.advantages[rows],
        staleness=batch.staleness[rows],
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
    assert batch.logprobs_T.requires_grad and not batch.entropy_T.requires_grad
    assert all(getattr(batch, f"{n}_T").dtype == torch.float32 for n in ("logprobs", "entropy", "mask", "advantages"))
    assert micro_batch.logical_tokens == 3 * 6 + 9 and result.physical_tokens == 6 + 9  # the prompt once
    assert result.loss_tokens == micro_batch.loss_mask.values.sum()
    assert result.metrics == {"policy/entropy": pytest.approx((batch.mask_T * batch.entropy_T).sum().item())}
    ragged = await engine.log_probs(micro_batch.prompt_ids, micro_batch.response_ids)
    assert ragged.values.dtype == np.float32 and ragged.offsets.tolist() == [0, 5, 6, 9]
    np.testing.assert_array_equal(ragged.values, batch.old_logprobs_T.numpy())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_of_the_distribution_sampled_from(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, temperature: float
) -> None:
    batch = make_micro_batch()
    model = AutoModelForCausalLM.from_pretrained(model_path("qwen3-tiny"), dtype=torch.float32).eval()
    engine = torch_engine(model_path("qwen3-tiny"), temperature=temperature, log_prob_chunk_tokens=7)
    with torch.no_grad():
        expected = torch.cat(reference_log_probs(model, batch, temperature)).numpy()
    np.testing.assert_allclose((await engine.log_probs(batch.prompt_ids, batch.response_ids)).values, expected, atol=1e-5)


@pytest.mark.parametrize("what", ["loss", "log-prob"])
async def test_what_is_not_finite_is_not_accumulated(model_path: ModelPath, make_micro_batch: MakeMicroBatch, what: str) -> None:
    def infinite_loss(batch: TokenBatch) -> LossSums:
        return LossSums(loss=batch.logprobs_T.sum() * math.inf, metrics={})

    norms = []
    for has_bad in (False, True):
        engine = torch_engine(model_path("qwen2-tiny"))
        await train_on(engine, make_micro_batch(0), Sum(policy_gradient))
        if has_bad and what == "loss":
            assert not (await train_on(engine, make_micro_batch(1), Sum(infinite_loss))).is_finite
        if has_bad and what == "log-prob":
            weight = one_rank(engine).policy.parameters["model.norm.weight"].detach()
            kept = weight.clone()
            weight[0] = math.inf
            result = await train_on(engine, make_micro_batch(1), Sum(lambda b: LossSums(loss=0 * b.logprobs_T.sum(), metrics={})))
            assert not result.is_finite
            weight.copy_(kept)
        norms.append((await engine.optim_step(10)).grad_norm)
    assert norms[0] == norms[1] > 0


async def test_a_gradient_that_is_not_finite_is_skipped(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    def infinite_gradient(batch: TokenBatch) -> LossSums:
        return LossSums(loss=(batch.logprobs_T - batch.old_logprobs_T).abs().sqrt().sum(), metrics={})

    results = []
    for has_bad in (False, True):
        engine = torch_engine(model_path("qwen2-tiny"), learning_rate=1e-3, warmup_steps=3)
        before = await weights_of(engine)
        if has_bad:
            assert (await train_on(engine, make_micro_batch(1), Sum(infinite_gradient))).is_finite
            assert (await engine.optim_step(10)).skipped
            assert_same(await weights_of(engine), before)
        await train_on(engine, make_micro_batch(0), Sum(policy_gradient))
        results.append((await engine.optim_step(10), await weights_of(engine)))
    assert results[0][0] == results[1][0] and not results[0][0].skipped
    assert_same(results[0][1], results[1][1])


async def test_a_step_without_gradients_is_skipped(model_path: ModelPath) -> None:
    engine = torch_engine(model_path("qwen2-tiny"), weight_decay=0.1)
    before = await weights_of(engine)
    assert (await engine.optim_step(3)).skipped
    assert_same(await weights_of(engine), before)
    with pytest.raises(ValueError, match="divided by 0"):
        await engine.optim_step(0)


async def test_weight_decay_spares_biases_and_norms(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    def no_gradient(batch: TokenBatch) -> LossSums:
        return LossSums(loss=0 * batch.logprobs_T.sum(), metrics={})

    engine = torch_engine(model_path("qwen2-tiny"), learning_rate=1e-2, weight_decay=0.5)
    before = await weights_of(engine)
    await train_on(engine, make_micro_batch(), Sum(no_gradient))
    await engine.optim_step(1)
    for name, tensor in (await weights_of(engine)).items():
        torch.testing.assert_close(tensor, before[name] * (1 - 1e-2 * 0.5 if tensor.ndim > 1 else 1), msg=name)


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


async def test_bfloat16_products_keep_float32_weights(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    norms, log_probs = [], []
    for dtype in ("float32", "bfloat16"):
        engine = torch_engine(model_path("qwen2-tiny"), dtype=dtype)
        assert (await train_on(engine, make_micro_batch(), Sum(policy_gradient))).is_finite
        batch = make_micro_batch()
        log_probs.append((await engine.log_probs(batch.prompt_ids, batch.response_ids)).values)
        norms.append((await engine.optim_step(20)).grad_norm)
        assert {tensor.dtype for tensor in (await weights_of(engine)).values()} == {torch.float32}
    np.testing.assert_allclose(log_probs[1], log_probs[0], atol=0.02)
    assert not np.array_equal(log_probs[1], log_probs[0])
    assert norms[1] == pytest.approx(norms[0], rel=0.05)


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
    for name, message in (("bert", "'bert'"), ("deeper", "lacks 12 of its weights"), ("empty", "no model"), ("none", "no model")):
        with pytest.raises(UserError, match=message) as caught:
            torch_engine(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["foo", "npu:0"])
def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(device: str) -> None:
    with pytest.raises(UserError, match=r"train\.device"):
        torch_engine("/nowhere", device=device)


async def test_an_error_in_a_loss_reaches_the_caller_and_the_engine_lives_on(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    def broken(batch: TokenBatch) -> LossSums:
        raise UserError("no reference")

    engine = torch_engine(model_path("qwen2-tiny"))
    with pytest.raises(UserError, match="no reference"):
        await train_on(engine, make_micro_batch(), Sum(broken))
    assert (await train_on(engine, make_micro_batch(), Sum(policy_gradient))).is_finite
    await engine.close()


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
