"""The critic's engine: its values, its gradient against a plain computation, its state and its files."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from asyncflow.algorithms.ppo import PPO
from asyncflow.attestation import fault_of
from asyncflow.bit_sums import sum_of
from asyncflow.engines.base import MicroBatch, MicroBatchResult, OptimResult
from asyncflow.engines.train.critic_engine import HEAD, HEAD_FILE, CriticPasses, TorchCritic
from asyncflow.engines.train.helpers import Helpers
from asyncflow.types import Ragged, RunError, UserError
from tests.patience import patience
from tests.unit.engines.train.conftest import micro_batch
from tests.unit.engines.train.training import (
    MakeMicroBatch,
    ModelPath,
    hold_back,
    leave_pieces_to_helpers,
    train_options,
    untied,
)

CRITIC = PPO(value_clip=None).critic


def critic(path: Path, **changes: Any) -> TorchCritic:
    return TorchCritic(path, train_options(**{"learning_rate": 1e-3, **changes}))


def of_critic(batch: MicroBatch, seed: int = 3) -> MicroBatch:
    """With values, and returns for advantages."""
    rng, count = np.random.default_rng(seed), len(batch.response_ids.values)
    values = Ragged(rng.normal(size=count).astype(np.float32), batch.response_ids.offsets)
    return replace(batch, advantages=rng.normal(size=count).astype(np.float32), values=values)


async def stepped(engine: TorchCritic, batch: MicroBatch) -> float:
    await engine.begin_step()
    (result,) = await engine.forward_backward([batch], CRITIC)
    assert not (await engine.optim_step(result.loss_tokens)).skipped
    return result.loss_sum


async def test_values_are_0_at_first_and_become_the_returns(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    engine, batch = critic(model_path("qwen2-tiny"), learning_rate=5e-3), of_critic(make_micro_batch())
    first = await engine.values(batch.prompt_ids, batch.response_ids)
    assert not first.values.any() and first.values.dtype == np.float32 and first.lengths.tolist() == [5, 1, 9, 5]
    losses = [await stepped(engine, batch) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]  # the first tokens of all responses have one state, and returns of their own
    await engine.close()


@pytest.mark.parametrize("lengths", [(5, 1, 9, 5), (2, 3)])
async def test_values_and_gradient_are_those_of_each_response_alone(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, lengths: tuple[int, ...]
) -> None:
    """With transformers' own model, a pass for each response, and a head of another sort of numbers than 0."""
    path = model_path("qwen2-tiny")
    engine, batch = critic(path), of_critic(make_micro_batch(lengths=lengths, num_prompt_tokens=30))
    head_H = torch.linspace(-1, 1, 128)
    with torch.no_grad():
        engine.training.model.parameters[HEAD].copy_(head_H[None])
    plain = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    loss, values = torch.zeros(()), []
    for i, response in enumerate(batch.response_ids):
        tokens = torch.tensor([*batch.prompt_ids, *response])
        states = plain(tokens[None], use_cache=False).last_hidden_state[0]
        own = states[len(batch.prompt_ids) - 1 : -1] @ head_H
        start, end = batch.response_ids.offsets[i : i + 2]
        mask, returns = torch.tensor(batch.loss_mask[i]), torch.tensor(batch.advantages[start:end])
        loss = loss + 0.5 * (mask * (own - returns) ** 2).sum()
        values.append(own.detach())
    loss.backward()
    (result,) = await engine.forward_backward([batch], CRITIC)
    assert result.loss_sum == pytest.approx(loss.item(), rel=1e-4) and result.loss_tokens == int(batch.loss_mask.values.sum())
    computed = await engine.values(batch.prompt_ids, batch.response_ids)
    torch.testing.assert_close(torch.tensor(computed.values), torch.cat(values), rtol=1e-4, atol=1e-4)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(engine.training.model.parameters[f"model.{name}"].grad, parameter.grad, rtol=1e-3, atol=1e-3)
    await engine.close()


async def test_a_loaded_critic_goes_on_to_the_bit(model_path: ModelPath, make_micro_batch: MakeMicroBatch, tmp_path: Path) -> None:
    engines = [critic(model_path("qwen2-tiny"), accumulate="exact", warmup_steps=4) for _ in range(2)]
    batch = of_critic(make_micro_batch())
    await stepped(engines[0], batch)
    await engines[0].begin_step()
    await (await engines[0].save_state(tmp_path / "state"))
    await engines[1].load_state(tmp_path / "state")
    for engine in engines:
        await stepped(engine, batch)
    prints = [await engine.fingerprint() for engine in engines]
    assert prints[0] == prints[1] and f"optimizer/{HEAD}/exp_avg" in prints[0]
    with pytest.raises(RunError, match=r"has no weights/.*was written by a run with another model"):
        await critic(model_path("qwen3-tiny")).load_state(tmp_path / "state")


async def test_a_saved_critic_is_one_to_start_from(model_path: ModelPath, make_micro_batch: MakeMicroBatch, tmp_path: Path) -> None:
    engine, batch = critic(model_path("qwen2-tiny")), of_critic(make_micro_batch())
    await stepped(engine, batch)
    await engine.save(tmp_path / "saved")
    other = critic(tmp_path / "saved")
    expected, found = [await each.values(batch.prompt_ids, batch.response_ids) for each in (engine, other)]
    assert expected.values.any() and (expected.values == found.values).all()
    assert [*load_file(tmp_path / "saved" / HEAD_FILE)] == [HEAD]
    (tmp_path / "saved" / HEAD_FILE).unlink()
    other = critic(tmp_path / "saved")
    assert not (await other.values(batch.prompt_ids, batch.response_ids)).values.any()


def test_a_head_of_another_model_is_refused(model_path: ModelPath, tmp_path: Path) -> None:
    shutil.copytree(model_path("qwen2-tiny"), tmp_path / "other")
    save_file({HEAD: torch.zeros(1, 7)}, tmp_path / "other" / HEAD_FILE)
    with pytest.raises(UserError, match=r"value head of shape \(1, 7\), and the model needs \(1, 128\)"):
        critic(tmp_path / "other")


async def test_what_is_not_finite_adds_nothing(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    engine, batch = critic(model_path("qwen2-tiny")), of_critic(make_micro_batch())
    bad = replace(batch, advantages=np.full_like(batch.advantages, np.nan))
    before = await engine.fingerprint()
    (result,) = await engine.forward_backward([bad], CRITIC)
    assert not result.is_finite
    await engine.forward_backward([batch], CRITIC)
    clean = critic(model_path("qwen2-tiny"))
    await clean.forward_backward([batch], CRITIC)
    assert (await engine.optim_step(5)).grad_norm == (await clean.optim_step(5)).grad_norm > 0
    assert await engine.fingerprint() == await clean.fingerprint() != before
    await engine.forward_backward([bad], CRITIC)
    before = await engine.fingerprint()
    assert (await engine.optim_step(5)).skipped and await engine.fingerprint() == before
    with pytest.raises(ValueError, match="has no values"):
        await engine.forward_backward([replace(batch, values=None)], CRITIC)
    with pytest.raises(ValueError, match="cannot be divided by 0"):
        await engine.optim_step(0)
    await engine.close()


async def test_bfloat16_and_recomputed_activations(model_path: ModelPath, make_micro_batch: MakeMicroBatch) -> None:
    batch, norms = of_critic(make_micro_batch()), []
    variants: list[dict[str, Any]] = [{}, {"activation_checkpointing": True}, {"dtype": "bfloat16"}]
    for options in variants:
        engine = critic(model_path("qwen2-tiny"), **options)
        with torch.no_grad():
            engine.training.model.parameters[HEAD].fill_(0.05)
        await engine.forward_backward([batch], CRITIC)
        norms.append((await engine.optim_step(20)).grad_norm)
        await engine.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] == pytest.approx(norms[2], rel=0.05)


async def test_another_engine_gives_the_same_values_with_what_was_exported(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch
) -> None:
    path, batch = model_path("qwen2-tiny"), of_critic(make_micro_batch())
    trained, other = critic(path, learning_rate=5e-3), critic(path)
    await stepped(trained, batch)
    exported = {name: tensor.clone() async for name, tensor in (await trained.export_weights()).tensors()}
    assert HEAD in exported and "lm_head.weight" not in exported
    sums = {name: sum_of(name, tensor.float()) for name, tensor in exported.items()}
    assert "with other weights than those of version 1 in" in fault_of(await other.attest(), 1, sums)
    await other.install(exported)
    assert not fault_of(await other.attest(), 1, sums)
    values = [await engine.values(batch.prompt_ids, batch.response_ids) for engine in (trained, other)]
    assert values[0].values.any() and values[0].values.tobytes() == values[1].values.tobytes()
    await stepped(trained, batch)  # no memory is shared
    assert (await other.values(batch.prompt_ids, batch.response_ids)).values.tobytes() == values[1].values.tobytes()
    for changed, name in (
        ({name: tensor for name, tensor in exported.items() if name != HEAD}, HEAD),
        (exported | {HEAD: exported[HEAD].double()}, HEAD),
        (exported | {"more": exported[HEAD]}, "more"),
    ):
        with pytest.raises(ValueError, match=f"{name} is not the critic's"):
            await other.install({other_name: torch.zeros_like(tensor) for other_name, tensor in changed.items()})
    assert (await other.values(batch.prompt_ids, batch.response_ids)).values.tobytes() == values[1].values.tobytes()
    await trained.close()
    await other.close()


SHAPES = [((5, 1, 9, 5), 6), ((3, 3), 40), ((1,), 1), ((30, 2, 17), 5), ((2,), 1), ((8, 8, 8, 8, 8), 2), ((4, 70), 11)]
"""Lengths of responses and of the prompt."""


async def trained_in_passes(
    path: Path, batches: list[MicroBatch], monkeypatch: pytest.MonkeyPatch, broken: int | None = None, **changes: Any
) -> tuple[Mapping[str, str], float, list[MicroBatchResult], list[int]]:
    """Hashes after an update by these micro-batches, the norm, their results, and the tokens of each pass. `broken`: token whose
    embedding is not finite."""
    engine = critic(path, **changes)
    assert engine.remark == ""
    head_1H, model, sizes = engine.training.model.parameters[HEAD], engine.training.model, []
    with torch.no_grad():
        assert not head_1H.any()  # the probe's is gone
        head_1H.copy_(torch.linspace(-0.3, 0.3, head_1H.numel())[None])
        if broken is not None:
            model.module.get_input_embeddings().weight[broken] = torch.inf
    values = model.values
    monkeypatch.setattr(model, "values", lambda packed, *others: sizes.append(packed.num_tokens) or values(packed, *others))
    results = await engine.forward_backward(batches, CRITIC)
    norm = (await engine.optim_step(40)).grad_norm
    found = await engine.fingerprint()
    await engine.close()
    return found, norm, results, sizes


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2-tiny", {}),
        ("llama-tiny", {"dtype": "bfloat16", "activation_checkpointing": True}),
        ("untied", {"num_threads": 1}),
    ],
)
async def test_bits_do_not_depend_on_who_is_in_the_pass(
    name: str, changes: dict[str, Any], model_path: ModelPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = untied(model_path("qwen2-tiny"), tmp_path / "untied") if name == "untied" else model_path(name)
    batches = [of_critic(micro_batch(i, lengths, prompt), seed=i) for i, (lengths, prompt) in enumerate(SHAPES)]
    expected, norm, results, alone = await trained_in_passes(path, batches, monkeypatch, accumulate="exact", **changes)
    assert len(alone) == len(batches) and norm > 0
    for seed, tokens, num_passes in ((0, 10_000, 1), (1, 60, None), (2, 130, None)):
        order = random.Random(seed).sample(range(len(batches)), len(batches))
        changes |= {"accumulate": "exact", "tokens_per_pass": tokens}
        found, _, in_passes, sizes = await trained_in_passes(path, [batches[i] for i in order], monkeypatch, **changes)
        assert sum(sizes) == sum(alone) and len(sizes) == num_passes if num_passes else len(sizes) < len(batches)
        assert in_passes == [results[i] for i in order]
        assert found == expected, [key for key in found if found[key] != expected[key]]


@pytest.mark.parametrize("accumulate", ["exact", "fp32"])
@pytest.mark.parametrize("is_embedding", [False, True])
async def test_of_a_pass_the_micro_batch_that_is_not_finite_adds_nothing(
    accumulate: str, is_embedding: bool, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [of_critic(micro_batch(i, lengths, prompt), seed=i) for i, (lengths, prompt) in enumerate(SHAPES[:4])]
    good = [batches[0], *batches[2:]]
    known = {int(token) for batch in good for token in (*batch.prompt_ids, *batch.response_ids.values)}
    other = next(token for token in range(64) if token not in known)
    if is_embedding:
        bad = replace(batches[1], prompt_ids=np.append(batches[1].prompt_ids, other))
    else:
        bad = replace(batches[1], advantages=np.full_like(batches[1].advantages, np.nan))
    options = {"accumulate": accumulate, "broken": other if is_embedding else None}
    path, in_pass = model_path("qwen2-tiny"), options | {"tokens_per_pass": 10_000}
    expected, norm, *_ = await trained_in_passes(path, good, monkeypatch, **in_pass)
    found, of_all, results, _ = await trained_in_passes(path, [batches[0], bad, *batches[2:]], monkeypatch, **in_pass)
    assert [result.is_finite for result in results] == [True, False, True, True]
    assert of_all == pytest.approx(norm, rel=1e-5) and (accumulate == "fp32" or found == expected)
    alone, of_alone, *_ = await trained_in_passes(path, good, monkeypatch, **options)
    assert of_alone == pytest.approx(norm, rel=1e-5) and (accumulate == "fp32") == (alone != expected)
    _, of_none, results, _ = await trained_in_passes(path, [bad, bad], monkeypatch, **in_pass)
    assert not any(result.is_finite for result in results) and of_none == 0.0


async def updated(engine: TorchCritic, num_updates: int = 2) -> tuple[Mapping[str, str], list[MicroBatchResult]]:
    """Hashes after updates of two rounds each, and the results; the engine is closed."""
    batches = [of_critic(micro_batch(i, lengths, prompt), seed=i) for i, (lengths, prompt) in enumerate(SHAPES)]
    with torch.no_grad():
        engine.training.model.parameters[HEAD].copy_(torch.linspace(-0.3, 0.3, 128)[None])
    results = []
    for _ in range(num_updates):
        await engine.begin_step()
        for some in (batches[:4], batches[4:]):
            results += await engine.forward_backward(some, CRITIC)
        assert not (await engine.optim_step(40)).skipped
    found = await engine.fingerprint()
    await engine.close()
    return found, results


def helpers_of(engine: TorchCritic) -> Helpers[CriticPasses]:
    assert engine.helpers is not None
    return engine.helpers


HELPED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2-tiny", {}),
    ("qwen3-tiny", {"tokens_per_pass": None}),
    ("llama-tiny", {"dtype": "bfloat16", "activation_checkpointing": True}),
    ("untied", {}),
]


@pytest.mark.parametrize(("name", "changes"), HELPED)
async def test_bits_do_not_depend_on_who_has_computed_a_pass_of_it(
    name: str, changes: dict[str, Any], model_path: ModelPath, tmp_path: Path
) -> None:
    """The compute thread takes no second pass of a round before helpers have computed so many."""
    path = untied(model_path("qwen2-tiny"), tmp_path / "untied") if name == "untied" else model_path(name)
    options = {"accumulate": "exact", "tokens_per_pass": 40, **changes}
    expected = await updated(critic(path, **options))
    for count in (1, 2):
        engine = critic(path, **options, helpers=("cpu",) * count)
        hold_back(engine, count)
        assert await updated(engine) == expected


async def test_a_helper_of_it_that_leaves_after_a_pass_has_the_same_bits(model_path: ModelPath) -> None:
    options = {"accumulate": "exact", "tokens_per_pass": 40}
    expected = await updated(critic(model_path("qwen2-tiny"), **options))
    engine = critic(model_path("qwen2-tiny"), **options, helpers=("cpu",))
    made, computed, has_left = helpers_of(engine), list[float](), threading.Event()
    next_of_own = made._next

    def leave(start: float, end: float) -> None:
        computed.append(end - start)
        made.allow(())
        has_left.set()

    def held() -> int | None:
        assert has_left.wait(patience(60))
        return next_of_own()

    made.on_pass, made._next = leave, held  # type: ignore[method-assign]
    made.allow(range(1))
    assert await updated(engine) == expected
    assert len(computed) == 1


@pytest.mark.parametrize("most", [None, 5])
@pytest.mark.parametrize("accumulate", ["exact", "fp32"])
@pytest.mark.parametrize(("name", "changes"), HELPED[::2])
async def test_helpers_take_pieces_of_its_only_pass_and_of_its_update_with_the_same_bits(
    name: str, changes: dict[str, Any], accumulate: str, most: int | None, model_path: ModelPath
) -> None:
    """`most`: pieces after which the only helper leaves, in the middle of a pass."""
    options = {"accumulate": accumulate, "tokens_per_pass": 10_000, "max_grad_norm": 0.1, **changes}
    expected = await updated(critic(model_path(name), **options))
    engine = critic(model_path(name), **options, helpers=("cpu",) * (1 if most else 2))
    made, training, in_updates = helpers_of(engine), engine.training, 0
    made.allow(range(2))
    takers, optim_step = leave_pieces_to_helpers(made, most), training.optim_step

    def counted(normaliser: int) -> OptimResult:
        nonlocal in_updates
        before = len(takers)
        result = optim_step(normaliser)
        in_updates += len(takers) - before
        return result

    training.optim_step = counted  # type: ignore[method-assign]
    training.passes.summed.cut = lambda packed, *_: [slice(0, len(packed))]  # type: ignore[method-assign]
    assert await updated(engine) == expected
    of_helpers = [taker for taker in takers if taker.startswith("train-helper")]
    if most is None:
        assert 0 < in_updates < len(of_helpers) == len(takers)
    else:
        assert len(of_helpers) == most and not in_updates


async def test_an_error_of_a_helper_of_it_is_the_call_s(model_path: ModelPath) -> None:
    engine = critic(model_path("qwen2-tiny"), helpers=("cpu",), tokens_per_pass=None)
    good = [of_critic(micro_batch(i), seed=i) for i in range(2)]
    hold_back(engine, 1)
    with pytest.raises(ValueError, match="has no values"):
        await engine.forward_backward([good[0], replace(good[1], values=None)], CRITIC)
    await engine.discard()
    assert len(await engine.forward_backward(good, CRITIC)) == 2
    await engine.close()
