"""Passes of several micro-batches: with exact sums no bit depends on the company, and what is not finite adds nothing."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asyncflow.engines.base import MicroBatch
from asyncflow.engines.train import passes as module_of_passes
from asyncflow.engines.train.model import log_probs
from asyncflow.engines.train.model.kernels import CpuFlash
from asyncflow.engines.train.pass_gradients import PassGradients
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.types import LoraSpec, LossSums, Ragged, TokenBatch
from tests.depth import in_gate
from tests.unit.engines.train.conftest import micro_batch
from tests.unit.engines.train.training import MakeMicroBatch, ModelPath, Sum, one_rank, policy_gradient, torch_engine, untied

SHAPES = [((5, 1, 9, 5), 6), ((3, 3), 40), ((1,), 1), ((30, 2, 17), 5), ((2,), 1), ((8, 8, 8, 8, 8), 2), ((4, 70), 11)]
"""Lengths of responses and of the prompt: shared or not, and of fewer than four tokens."""


def batches() -> list[MicroBatch]:
    return [micro_batch(i, lengths, prompt) for i, (lengths, prompt) in enumerate(SHAPES)]


def with_entropy(batch: TokenBatch) -> LossSums:
    sums = policy_gradient(batch)
    return LossSums(sums.loss - 0.01 * (batch.mask_T * batch.entropy_T).sum(), sums.metrics)


async def trained(path: Path | str, order: list[MicroBatch], objective: Any, **changes: Any) -> tuple[Mapping[str, str], Any]:
    """Hashes of weights and optimiser after an update by these micro-batches, and their results by advantages."""
    engine = torch_engine(path, **{"accumulate": "exact", "learning_rate": 1e-3, **changes})
    assert engine.remark == ""
    results = await engine.forward_backward(order, objective)
    await engine.optim_step(40)
    found = await engine.fingerprint()
    await engine.close()
    return found, {batch.advantages.tobytes(): result for batch, result in zip(order, results, strict=True)}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("qwen2-tiny", {}),
        ("qwen2-tiny", {"dtype": "bfloat16", "activation_checkpointing": True}),
        ("qwen3-tiny", {"activation_checkpointing": True, "has_reference": True}),
        ("llama-tiny", {"dtype": "bfloat16", "old": "step_start"}),
        ("llama-tiny", {"log_prob_chunk_tokens": 16, "temperature": 0.7}),
        ("untied", {}),
        ("qwen2-tiny", {"lora": LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))}),
    ],
)
@pytest.mark.parametrize("is_token_local", in_gate(True, of=[True, False]))
async def test_bits_do_not_depend_on_who_is_in_the_pass(
    name: str, changes: dict[str, Any], is_token_local: bool, model_path: ModelPath, tmp_path: Path
) -> None:
    path = untied(model_path("qwen2-tiny"), tmp_path / "untied") if name == "untied" else model_path(name)
    objective = Sum(with_entropy, is_token_local)
    expected, results = await trained(path, batches(), objective, **changes)
    for seed, tokens in ((0, 10_000), (1, 60), (2, 130)):
        order = random.Random(seed).sample(batches(), len(SHAPES))
        found, in_passes = await trained(path, order, objective, tokens_per_pass=tokens, **changes)
        assert in_passes == results, tokens  # losses, metrics and the log-probs behind them
        assert found == expected, [key for key in found if found[key] != expected[key]]


async def test_a_pass_has_as_many_micro_batches_as_there_is_room_for(
    model_path: ModelPath, make_micro_batch: MakeMicroBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = torch_engine(model_path("llama-tiny"), tokens_per_pass=60, check_shared_prompt=False)
    sizes = []
    policy = one_rank(engine).policy
    hidden = policy.hidden
    monkeypatch.setattr(policy, "hidden", lambda packed: sizes.append(packed.num_tokens) or hidden(packed))
    await engine.forward_backward([make_micro_batch(i) for i in range(5)], Sum(policy_gradient))  # of 26 tokens
    await engine.forward_backward([make_micro_batch(0, (90,), 3)], Sum(policy_gradient))
    assert sizes == [52, 52, 26, 93]
    await engine.close()


@pytest.mark.parametrize("accumulate", ["exact", "fp32"])
@pytest.mark.parametrize("is_token_local", [True, False])
async def test_of_a_pass_the_micro_batch_that_is_not_finite_adds_nothing(
    model_path: ModelPath, accumulate: str, is_token_local: bool
) -> None:
    good, objective = batches()[:4], Sum(with_entropy, is_token_local)
    bad = replace(good[1], advantages=np.array([1.0, np.inf], np.float32))
    options = {"accumulate": accumulate, "learning_rate": 1e-3}
    path, made = model_path("qwen2-tiny"), []
    for order, tokens in (([good[0], good[2], good[3]], None), ([good[0], bad, good[2], good[3]], 10_000)):
        engine = torch_engine(path, tokens_per_pass=tokens, **options)
        results = await engine.forward_backward(order, objective)
        assert [result.is_finite for result in results] == [one is not bad for one in order]
        norm = (await engine.optim_step(40)).grad_norm
        made.append((norm, await engine.fingerprint()))
        await engine.close()
    (expected, of_others), (found, of_all) = made
    assert found == pytest.approx(expected, rel=1e-5)
    assert accumulate == "fp32" or of_all == of_others


async def test_plain_sums_over_a_pass_are_those_of_its_micro_batches_but_for_rounding(model_path: ModelPath) -> None:
    norms = []
    for tokens in (None, 10_000):
        engine = torch_engine(model_path("qwen3-tiny"), tokens_per_pass=tokens)
        await engine.forward_backward(batches(), Sum(policy_gradient))
        norms.append((await engine.optim_step(40)).grad_norm)
        await engine.close()
    assert norms[0] != norms[1] and norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("shows", ["long", "few"])
async def test_where_the_company_shows_in_the_bits_each_micro_batch_is_computed_by_itself(
    shows: str, model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, product = CpuFlash.forward, log_probs.rows_by_transposed

    def shaky(self: CpuFlash, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Rounds otherwise in a long sequence, as a kernel that cuts it into blocks."""
        out, lse = forward(self, *arguments)
        return (torch.nextafter(out, out + 1) if len(out) > 60 else out), lse

    def shaky_for_few(rows_PI: Tensor, *arguments: Any) -> Tensor:
        """Rounds otherwise where there are few rows, as a library that has a kernel of its own for these."""
        made_PO = product(rows_PI, *arguments)
        return torch.nextafter(made_PO, made_PO + 1) if len(rows_PI) < 5 else made_PO

    if shows == "long":
        monkeypatch.setattr(CpuFlash, "forward", shaky)
    else:
        monkeypatch.setattr(log_probs, "rows_by_transposed", shaky_for_few)
    engine = torch_engine(model_path("qwen2-tiny"), accumulate="exact", tokens_per_pass=500)
    assert engine.remark.startswith("micro-batches are computed one by one") and "other bits than alone" in engine.remark
    passes = one_rank(engine).passes
    assert passes.summed.most_tokens is None and passes.sums.is_zero()  # type: ignore[attr-defined]
    await engine.close()


async def test_a_model_with_weights_of_another_kind_is_computed_one_by_one(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnLinear(nn.Linear):
        pass

    def changed(*arguments: Any, **others: Any) -> Any:
        model = causal_model(*arguments, **others)
        model.module.model.layers[1].mlp.down_proj.__class__ = OwnLinear
        return model

    causal_model = module_of_passes.CausalModel
    monkeypatch.setattr(module_of_passes, "CausalModel", changed)
    engine = torch_engine(model_path("qwen2-tiny"), accumulate="exact", tokens_per_pass=500)
    assert engine.remark.endswith("it has weights in model.layers.1.mlp.down_proj, a OwnLinear")
    await engine.close()
    assert not torch_engine(model_path("qwen2-tiny"), tokens_per_pass=500).remark  # plain sums take any


async def test_the_embeddings_padding_has_no_gradient(model_path: ModelPath, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine_of(tokens: int | None) -> TorchEngine:
        def padded(*arguments: Any, **others: Any) -> Any:
            model = causal_model(*arguments, **others)
            model.module.get_input_embeddings().padding_idx = 7
            return model

        monkeypatch.setattr(module_of_passes, "CausalModel", padded)
        return torch_engine(model_path("llama-tiny"), accumulate="exact", tokens_per_pass=tokens, learning_rate=1e-3)

    causal_model = module_of_passes.CausalModel
    batch = micro_batch(0)
    batch = replace(
        batch, prompt_ids=np.array([7, 9, 7, 8, 6, 5]), response_ids=Ragged(batch.response_ids.values, batch.response_ids.offsets)
    )
    found = []
    for tokens in (None, 500):
        engine = engine_of(tokens)
        await engine.forward_backward([batch, micro_batch(1)], Sum(policy_gradient))
        await engine.optim_step(40)
        found.append(await engine.fingerprint())
        await engine.close()
    assert found[0] == found[1]
    assert PassGradients.why_not(one_rank(engine_of(None)).policy) == ""
