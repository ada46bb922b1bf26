"""One suite over every train engine in one process: a step's gradient is a sum, divided once, and what else `TrainEngine` says."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncflow.engines.base import TrainEngine
from asyncflow.engines.train import TRAIN_ENGINES
from asyncflow.engines.train.model import attention, micro_step
from asyncflow.registry import build
from asyncflow.types import Layout, LossSums, Ragged, RunError, TokenBatch, UserError
from tests.contract.devices import ROUNDING, alike
from tests.unit.engines.train.training import (
    MakeMicroBatch,
    ModelPath,
    Sum,
    assert_same,
    moved_less,
    policy_gradient,
    reference_log_probs,
    reference_steps,
    rows_of,
    train_on,
    train_options,
    untied,
    weights_of,
)

# What is small is cut like what is large.
ZERO3 = {"stage": 3, "zero": {"param_persistence_threshold": 0}}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch", {}),
    "deepspeed-zero1": ("deepspeed", {"stage": 1}),
    "deepspeed-zero2": ("deepspeed", {"stage": 2}),
    "deepspeed-zero3": ("deepspeed", ZERO3),
    "megatron": ("megatron", {}),
}
PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron"}
ON_DEVICE = {("megatron", "npu"): "mindspeed"}
MakeEngine = Callable[..., TrainEngine]


def needed(name: str, device: str = "cpu") -> None:
    """Skip where the engine's package is not installed, or what it needs beside it on the device."""
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make .venv-adapters/installed")
    beside = ON_DEVICE.get((name, device))
    if beside is not None and importlib.util.find_spec(beside) is None:
        pytest.skip(f"{name} on {device} needs {beside}, which is not installed")


def make(kind: str, path: Path | str, own: dict[str, Any], **changes: Any) -> TrainEngine:
    """As a worker builds it."""
    engine: TrainEngine = build(
        "train engine", kind, {**own, "model_path": path, "options": train_options(**changes)}, TRAIN_ENGINES
    )
    return engine


@pytest.fixture(params=list(ENGINES))
def make_engine(request: pytest.FixtureRequest, device: str) -> MakeEngine:
    """On a device, by the configuration's defaults, with changes."""
    kind, own = ENGINES[request.param]
    needed(kind, device)
    return lambda path, **changes: make(kind, path, own, **{"device": device, **changes})


async def same_training(engine: TrainEngine, other: TrainEngine, before: Any, device: str) -> None:
    """Weights and optimiser state are the same to the bit on a CPU; elsewhere weights have moved alike from `before`."""
    if device == "cpu":
        assert await engine.fingerprint() == await other.fingerprint()
    else:
        moved_less(await weights_of(engine), await weights_of(other), before, 2e-2)


@pytest.mark.parametrize(
    ("family", "clip"), [("qwen2-tiny", 1e9), ("qwen2-tiny", 0.05), ("qwen3-tiny", 0.05), ("llama-tiny", 0.05), ("untied", 1e9)]
)
async def test_updates_are_those_of_plain_adamw(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, family: str, clip: float, tmp_path: Path
) -> None:
    path = untied(model_path("llama-tiny"), tmp_path / "model") if family == "untied" else model_path(family)
    steps = [[make_micro_batch(0), make_micro_batch(1, (3, 8))], [make_micro_batch(2)], [make_micro_batch(3, (2, 2, 2), 9)]]
    normalisers, rates = [25, 16, 6], [0.5e-3, 1e-3, 1e-3]
    expected, norms = reference_steps(path, steps, normalisers, rates, clip)
    engine = make_engine(path, learning_rate=1e-3, warmup_steps=2, max_grad_norm=clip)
    results = []
    for batches, normaliser in zip(steps, normalisers, strict=True):
        await engine.begin_step()
        assert all(result.is_finite for result in await engine.forward_backward(batches, Sum(policy_gradient)))
        results.append(await engine.optim_step(normaliser))
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-4)
    assert [r.learning_rate for r in results] == rates and not any(r.skipped for r in results)
    before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    moved_less(await weights_of(engine), {name: tensor.detach() for name, tensor in expected.items()}, before, 2e-2)


@pytest.mark.smoke
@pytest.mark.parametrize("is_token_local", [True, False])
async def test_neither_order_nor_cut_nor_turns_change_a_step(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, is_token_local: bool
) -> None:
    whole, other = make_micro_batch(0), make_micro_batch(1)
    parts = [rows_of(whole, slice(0, 1)), rows_of(whole, slice(1, 4))]
    before = AutoModelForCausalLM.from_pretrained(model_path("qwen2-tiny"), dtype=torch.float32).state_dict()
    losses, norms, weights = [], [], []
    for turns in ([[whole, other]], [[other], [], [parts[1], parts[0]]]):
        engine = make_engine(model_path("qwen2-tiny"), learning_rate=1e-3, log_prob_chunk_tokens=7)
        results = [await engine.forward_backward(turn, Sum(policy_gradient, is_token_local)) for turn in turns]
        assert [len(result) for result in results] == [len(turn) for turn in turns]
        losses.append(sum(result.loss_sum for turn in results for result in turn))
        norms.append((await engine.optim_step(7)).grad_norm)
        weights.append(await weights_of(engine))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    moved_less(*weights, before, 2e-2)


async def test_passes_of_several_micro_batches_make_the_same_step(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four micro-batches: each by itself, in two passes, and in one."""
    path, sizes = model_path("qwen2-tiny"), list[int]()
    plain = micro_step.losses

    def counted(known: Any, *others: Any, **more: Any) -> Any:
        sizes.append(len(known))
        return plain(known, *others, **more)

    monkeypatch.setattr(micro_step, "losses", counted)
    batches = [make_micro_batch(0), make_micro_batch(1, (3, 8)), make_micro_batch(2), make_micro_batch(3, (1,), 2)]
    before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    made = []
    for tokens, expected in ((None, [1, 1, 1, 1]), (50, [2, 2]), (1000, [4])):
        sizes.clear()
        engine = make_engine(path, learning_rate=1e-3, tokens_per_pass=tokens, has_reference=True, old="step_start")
        results = await engine.forward_backward(batches, Sum(policy_gradient))
        assert sizes == expected
        made.append((results, (await engine.optim_step(20)).grad_norm, await weights_of(engine)))
    for results, norm, weights in made[1:]:
        assert norm == pytest.approx(made[0][1], rel=1e-5)
        for ours, theirs in zip(results, made[0][0], strict=True):
            assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-5, abs=1e-5)
            assert (ours.loss_tokens, ours.physical_tokens) == (theirs.loss_tokens, theirs.physical_tokens)
        moved_less(weights, made[0][2], before, 2e-2)


async def test_results_tell_of_each_micro_batch_in_its_place(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, device: str
) -> None:
    engine = make_engine(model_path("qwen2-tiny"))
    batches = [make_micro_batch(0), make_micro_batch(1, (3, 8))]
    own = await engine.log_probs(batches[1].prompt_ids, batches[1].response_ids)
    batches[1] = replace(batches[1], rollout_logprobs=own)
    results = await engine.forward_backward(batches, Sum(policy_gradient))
    assert [result.loss_tokens for result in results] == [int(batch.loss_mask.values.sum()) for batch in batches]
    assert results[1].physical_tokens == 6 + 3 + 8  # the prompt once
    num_equal, difference = results[1].logprob_differences
    alike(difference, 0.0, device)
    assert num_equal == results[1].loss_tokens or device != "cpu", "training's log-probs are those of log_probs, to the bit"
    assert results[0].logprob_differences[1] > 0.1
    assert all(result.metrics["policy/entropy"] > result.loss_tokens for result in results)


async def test_tokens_that_are_predicted_may_be_others_than_those_that_follow(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, device: str
) -> None:
    """The same response with other targets in places: there the log-prob is the target's, elsewhere it is as before."""
    engine, batch = make_engine(model_path("qwen2-tiny")), make_micro_batch(0)
    response = batch.response_ids
    other = response.values.copy()
    other[::3] = (other[::3] + 1) % 50
    targets = Ragged(other, response.offsets)
    model = AutoModelForCausalLM.from_pretrained(model_path("qwen2-tiny"), dtype=torch.float32)
    expected = []
    for ids, of_row in zip(response, targets, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(np.concatenate([batch.prompt_ids, ids]))[None]).logits[0]
        from_prompt = logits[len(batch.prompt_ids) - 1 : -1].log_softmax(-1)
        expected.append(from_prompt.gather(1, torch.tensor(of_row)[:, None])[:, 0].numpy())
    found = await engine.log_probs(batch.prompt_ids, response, targets)
    assert np.abs(found.values - np.concatenate(expected)).max() < 1e-4
    seen: list[torch.Tensor] = []

    def seeing(tokens: TokenBatch) -> LossSums:
        seen.append(tokens.logprobs_T.detach())
        return policy_gradient(tokens)

    await engine.forward_backward([replace(batch, target_ids=targets)], Sum(seeing, False))
    assert seen[0].cpu().numpy() == pytest.approx(found.values, abs=1e-5)
    with pytest.raises(ValueError, match="have targets of"):
        await engine.log_probs(batch.prompt_ids, response, targets.take([0]))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_are_of_the_distribution_sampled_from(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, temperature: float
) -> None:
    batch = make_micro_batch()
    model = AutoModelForCausalLM.from_pretrained(model_path("qwen3-tiny"), dtype=torch.float32).eval()
    engine = make_engine(model_path("qwen3-tiny"), temperature=temperature, log_prob_chunk_tokens=7)
    for own in (None, 1.3):  # that of the run, or another one
        with torch.no_grad():
            expected = torch.cat(reference_log_probs(model, batch, own or temperature)).numpy()
        found = await engine.log_probs(batch.prompt_ids, batch.response_ids, temperature=own)
        assert found.values.dtype == np.float32 and found.offsets.tolist() == batch.response_ids.offsets.tolist()
        np.testing.assert_allclose(found.values, expected, atol=1e-5)


async def test_a_loss_that_is_not_finite_adds_nothing(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, device: str
) -> None:
    def infinite(batch: TokenBatch) -> LossSums:
        return LossSums(loss=batch.logprobs_T.sum() * math.inf, metrics={})

    norms = []
    for has_bad in (False, True):
        engine = make_engine(model_path("qwen2-tiny"))
        await train_on(engine, make_micro_batch(0), Sum(policy_gradient))
        if has_bad:
            assert not (await train_on(engine, make_micro_batch(1), Sum(infinite))).is_finite
        norms.append((await engine.optim_step(10)).grad_norm)
    alike(*norms, device)
    assert norms[0] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_gradient_that_is_not_finite_is_skipped_and_forgotten(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, dtype: str, device: str
) -> None:
    def infinite_gradient(batch: TokenBatch) -> LossSums:
        return LossSums(loss=(batch.logprobs_T - batch.old_logprobs_T).abs().sqrt().sum(), metrics={})

    results, engines = [], []
    for has_bad in (False, True):
        try:
            engine = make_engine(model_path("qwen2-tiny"), learning_rate=1e-3, warmup_steps=3, dtype=dtype)
        except UserError as error:
            pytest.skip(str(error))
        before = await weights_of(engine)
        if has_bad:
            assert (await train_on(engine, make_micro_batch(1), Sum(infinite_gradient))).is_finite
            assert (await engine.optim_step(10)).skipped
            assert_same(await weights_of(engine), before)
        await train_on(engine, make_micro_batch(0), Sum(policy_gradient))
        results.append(await engine.optim_step(10))
        engines.append(engine)
    assert not results[0].skipped and not results[1].skipped and results[0].learning_rate == results[1].learning_rate
    alike(results[0].grad_norm, results[1].grad_norm, device)
    await same_training(engines[0], engines[1], before, device)


async def test_a_discarded_step_leaves_nothing(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, device: str
) -> None:
    engines = []
    for is_discarded in (False, True):
        engine = make_engine(model_path("qwen2-tiny"), learning_rate=1e-3)
        before = await weights_of(engine)
        for seed in (0, 1):
            if is_discarded:
                await engine.forward_backward([make_micro_batch(5), make_micro_batch(6)], Sum(policy_gradient))
                await engine.discard()
            await train_on(engine, make_micro_batch(seed), Sum(policy_gradient))
            assert not (await engine.optim_step(10)).skipped
        engines.append(engine)
    await same_training(engines[0], engines[1], before, device)


@pytest.mark.parametrize("is_token_local", [True, False])
async def test_a_rows_figures_are_told_token_by_token_and_change_no_bit(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, is_token_local: bool
) -> None:
    def told_of(batch: TokenBatch) -> LossSums:
        return replace(policy_gradient(batch), tokens={"twice": 2 * batch.advantages_T})

    path, silent, objective = model_path("qwen2-tiny"), make_micro_batch(0), Sum(told_of, is_token_local)
    silent, other = replace(silent, indices=silent.indices + 40), make_micro_batch(1)
    engines = [make_engine(path, log_prob_chunk_tokens=7, old="rollout") for _ in range(2)]
    plain = await engines[0].forward_backward([silent, other], objective)
    told = await engines[1].forward_backward([replace(silent, examined_rows=(0, 2)), other], objective)
    assert [replace(result, token_figures={}) for result in told] == plain
    await engines[0].optim_step(9)
    await engines[1].optim_step(9)
    assert await engines[0].fingerprint() == await engines[1].fingerprint()
    assert set(told[0].token_figures) == {40, 42} and told[1].token_figures == {}
    of_model = reference_log_probs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), silent)
    for row in (0, 2):
        figures = {name: np.array(values) for name, values in told[0].token_figures[40 + row].items()}
        assert {len(values) for values in figures.values()} == {len(silent.response_ids[row])}
        np.testing.assert_allclose(figures["log-prob of the trainer"], of_model[row].detach().numpy(), atol=1e-4)
        differences = figures["log-prob of the trainer"] - silent.rollout_logprobs[row]
        np.testing.assert_allclose(figures["ratio"], np.exp(differences), rtol=1e-5)
        np.testing.assert_allclose(figures["advantage"], np.full(len(differences), silent.advantages[row]))
        np.testing.assert_array_equal(figures["twice"], 2 * figures["advantage"])
        assert (figures["entropy"] > 0).all()


async def test_a_step_without_gradients_is_skipped(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    engine = make_engine(model_path("qwen2-tiny"), weight_decay=0.1)
    before = await weights_of(engine)
    assert (await engine.optim_step(3)).skipped
    await train_on(engine, make_micro_batch(), Sum(policy_gradient))
    await engine.discard()
    assert (await engine.optim_step(3)).skipped
    assert_same(await weights_of(engine), before)
    with pytest.raises(ValueError, match="divided by 0"):
        await engine.optim_step(0)


async def test_weight_decay_spares_biases_and_norms(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    engine = make_engine(model_path("qwen2-tiny"), learning_rate=1e-2, weight_decay=0.5)
    before = await weights_of(engine)
    await train_on(engine, make_micro_batch(), Sum(lambda batch: LossSums(loss=0 * batch.logprobs_T.sum(), metrics={})))
    await engine.optim_step(1)
    for name, tensor in (await weights_of(engine)).items():
        torch.testing.assert_close(tensor, before[name] * (1 - 1e-2 * 0.5 if tensor.ndim > 1 else 1), msg=name)


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["qwen2-tiny", "qwen3-tiny", "llama-tiny"])
async def test_weights_leave_by_their_hugging_face_names(make_engine: MakeEngine, model_path: ModelPath, family: str) -> None:
    expected = dict(AutoModelForCausalLM.from_pretrained(model_path(family), dtype=torch.float32).named_parameters())
    source = await make_engine(model_path(family)).export_weights()
    names = []
    async for name, tensor in source.tensors():
        names.append(name)
        assert tensor.equal(expected[name]) and tensor.is_contiguous() and tensor.device.type == "cpu"
        assert (source.specs[name].shape, source.specs[name].dtype) == (tuple(tensor.shape), "float32")
    assert names == list(source.specs) and set(names) == expected.keys()


async def test_a_saved_model_is_loaded_as_it_was_left(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, tmp_path: Path
) -> None:
    engine = make_engine(model_path("qwen3-tiny"), learning_rate=1e-2)
    await train_on(engine, make_micro_batch(), Sum(policy_gradient))
    await engine.optim_step(10)
    await engine.save(tmp_path / "model")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.dtype == torch.float32
    exported = await weights_of(engine)
    assert_same(dict(model.named_parameters()), exported)
    assert model.generation_config.eos_token_id is not None
    assert (tmp_path / "model" / "config.json").is_file()


async def test_fingerprints_tell_one_update_from_another(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, device: str
) -> None:
    found = []
    for seeds in ([0, 1], [0, 1], [0, 2]):
        engine = make_engine(model_path("qwen2-tiny"), learning_rate=1e-3)
        of_run = [await engine.fingerprint()]
        for seed in seeds:
            await train_on(engine, make_micro_batch(seed), Sum(policy_gradient))
            await engine.optim_step(10)
            of_run.append(await engine.fingerprint())
        found.append(of_run)
    assert found[0][0] == found[1][0]
    assert device != "cpu" or (found[0] == found[1] and found[0][1] == found[2][1])
    weights = [name for name in found[0][1] if name.startswith("weights/")]
    assert len(found[0][0]) == len(weights) and len(found[0][1]) == 4 * len(weights)
    assert all(found[0][2][name] != found[2][2][name] for name in weights)
    assert all(found[0][0][name] != found[0][1][name] for name in weights)


@pytest.mark.smoke
async def test_the_same_state_goes_on_to_the_same_weights(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, tmp_path: Path, device: str
) -> None:
    async def step(engine: TrainEngine, seed: int) -> None:
        await engine.begin_step()
        await train_on(engine, make_micro_batch(seed), Sum(policy_gradient))
        await engine.optim_step(10)

    options: dict[str, Any] = {"learning_rate": 1e-3, "warmup_steps": 4, "old": "previous"}
    engine, other = (make_engine(model_path("qwen2-tiny"), **options) for _ in range(2))
    await step(engine, 0)
    await step(engine, 1)
    await engine.begin_step()
    await train_on(engine, make_micro_batch(7), Sum(policy_gradient))  # not in it
    await (await engine.save_state(tmp_path / "state"))
    await engine.discard()
    await other.load_state(tmp_path / "state")
    assert await other.fingerprint() == await engine.fingerprint()
    before = await weights_of(engine)
    for each in (engine, other):
        await step(each, 2)
    await same_training(other, engine, before, device)
    with pytest.raises(RunError):
        await make_engine(model_path("qwen3-tiny")).load_state(tmp_path / "state")


@pytest.mark.parametrize("old", ["current", "step_start", "previous"])
async def test_old_policy_and_reference_are_what_they_are_named(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, old: str, device: str
) -> None:
    seen: list[TokenBatch] = []

    def loss(batch: TokenBatch) -> LossSums:
        seen.append(batch)
        return policy_gradient(batch)

    staleness = int(old == "previous")
    engine = make_engine(model_path("qwen2-tiny"), learning_rate=1e-2, old=old, has_reference=True, check_shared_prompt=False)
    batch = make_micro_batch(0)
    batch = replace(batch, staleness=batch.staleness + staleness)
    at_start = (await engine.log_probs(batch.prompt_ids, batch.response_ids)).values
    expected = []
    for _ in range(3):
        await engine.begin_step()
        expected.append((await engine.log_probs(batch.prompt_ids, batch.response_ids)).values)
        await train_on(engine, batch, Sum(loss, is_token_local=False))
        await engine.optim_step(10)
    assert not np.allclose(expected[0], expected[1])
    for number, found in enumerate(seen):
        bound = max(1e-6, ROUNDING[device])
        np.testing.assert_allclose(found.ref_logprobs_T.cpu(), at_start, atol=bound)
        np.testing.assert_allclose(found.old_logprobs_T.cpu(), expected[max(0, number - staleness)], atol=bound)
        np.testing.assert_allclose(found.logprobs_T.detach().cpu(), expected[number], atol=bound)
    if old == "current":
        stale = replace(batch, staleness=batch.staleness + 1)
        with pytest.raises(ValueError, match=r"train\.old=rollout"):
            await train_on(engine, stale, Sum(loss))


async def test_bfloat16_passes_keep_float32_weights(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    batch, norms, log_probs = make_micro_batch(), [], []
    for dtype in ("float32", "bfloat16"):
        try:
            engine = make_engine(model_path("qwen2-tiny"), dtype=dtype, learning_rate=1e-6)
        except UserError as error:
            pytest.skip(str(error))
        before = await weights_of(engine)
        log_probs.append((await engine.log_probs(batch.prompt_ids, batch.response_ids)).values)
        for _ in range(3):
            await train_on(engine, batch, Sum(policy_gradient))
            norms.append((await engine.optim_step(16)).grad_norm)
        after = await weights_of(engine)
        # An update of 1e-6 is lost on a weight in bfloat16.
        moved = (after["model.embed_tokens.weight"] - before["model.embed_tokens.weight"]).abs().max()
        assert 2e-6 < moved < 4e-6 and after["model.norm.weight"].dtype == torch.float32
    assert norms[3] == pytest.approx(norms[0], rel=0.05) and norms[3] != norms[0]
    assert 1e-4 < np.abs(log_probs[0] - log_probs[1]).max() < 0.2


async def test_activation_checkpointing_computes_layers_again_and_changes_no_number(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    calls, kernel_for = [0], attention.kernel_for

    def counted(*of: Any) -> Any:
        calls[-1] += 1
        return kernel_for(*of)

    monkeypatch.setattr(attention, "kernel_for", counted)
    engines = []
    for is_on in (False, True):
        calls.append(0)
        engine = make_engine(
            model_path("qwen3-tiny"), learning_rate=1e-3, activation_checkpointing=is_on, check_shared_prompt=False
        )
        before = await weights_of(engine)
        await train_on(engine, make_micro_batch(), Sum(policy_gradient))
        await engine.optim_step(10)
        engines.append(engine)
    await same_training(engines[0], engines[1], before, device)
    assert calls[2] == calls[1] + 2, "each of two layers once more"


async def test_an_optimiser_in_host_memory_makes_the_same_updates(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    norms, weights = [], []
    for offload in (False, True):
        try:
            engine = make_engine(model_path("qwen2-tiny"), learning_rate=1e-3, max_grad_norm=0.5, offload_optimizer=offload)
        except UserError as error:
            pytest.skip(str(error))
        for seeds in ((0, 1), (2,), (3, 4)):
            await engine.forward_backward([make_micro_batch(5)], Sum(policy_gradient))
            await engine.discard()
            await engine.forward_backward([make_micro_batch(seed) for seed in seeds], Sum(policy_gradient))
            norms.append((await engine.optim_step(20)).grad_norm)
        weights.append(await weights_of(engine))
    assert norms[:3] == pytest.approx(norms[3:], rel=1e-5)
    before = AutoModelForCausalLM.from_pretrained(model_path("qwen2-tiny"), dtype=torch.float32).state_dict()
    moved_less(*weights, before, 1e-2)


async def test_an_error_in_a_loss_reaches_the_caller_and_the_engine_lives_on(
    make_engine: MakeEngine, model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    def broken(batch: TokenBatch) -> LossSums:
        raise UserError("no reference")

    engine = make_engine(model_path("qwen2-tiny"))
    with pytest.raises(UserError, match="no reference"):
        await train_on(engine, make_micro_batch(), Sum(broken))
    assert (await train_on(engine, make_micro_batch(), Sum(policy_gradient))).is_finite
    assert not (await engine.optim_step(10)).skipped


def test_what_an_engine_does_not_do_is_refused_in_a_sentence(
    make_engine: MakeEngine, model_path: ModelPath, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for path, changes in ((tmp_path / "empty", {}), (tmp_path / "none", {}), (model_path("qwen2-tiny"), {"device": "cuda:9"})):
        if changes and torch.cuda.is_available():
            continue
        with pytest.raises(UserError) as caught:
            make_engine(path, **changes)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "own", "changes", "message"),
    [
        ("deepspeed", {"stage": 4}, {}, "train.engine.stage"),
        ("deepspeed", {"stages": 2}, {}, "has no option 'stages': did you mean 'stage'"),
        ("deepspeed", {}, {"accumulate": "exact"}, "train.accumulate"),
        ("deepspeed", {}, {"layout": Layout(1, 2, 1)}, "plan.train.tp"),
        ("deepspeed", {"stage": 1}, {"dtype": "bfloat16"}, "stage to 2"),
        ("megatron", {}, {"accumulate": "exact"}, "train.accumulate"),
        ("megatron", {}, {"offload": True}, "train.offload "),
        ("megatron", {}, {"offload_optimizer": True}, "train.offload_optimizer"),
        ("megatron", {}, {"layout": Layout(1, 1, 3)}, "plan.train.pp=3 does not divide"),
        ("megatron", {}, {"layout": Layout(1, 4, 1)}, "plan.train.tp=4 does not divide the model's 2 key heads"),
    ],
)
def test_an_adapter_says_what_it_leaves_out(
    model_path: ModelPath, kind: str, own: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    needed(kind)
    with pytest.raises(UserError, match=message) as caught:
        make(kind, model_path("qwen2-tiny"), own, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", list(PACKAGES))
def test_an_engine_that_is_not_installed_says_what_to_install(
    model_path: ModelPath, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name.partition(".")[0] == PACKAGES[kind] else find(name)
    )
    with pytest.raises(UserError, match=rf"asyncflow-rl\[{kind}\]"):
        make(kind, model_path("qwen2-tiny"), {})
