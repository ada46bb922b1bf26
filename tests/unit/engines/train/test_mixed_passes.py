"""Passes with rows of several adapters over one base: each gets what it would get alone."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncflow.engines.base import MicroBatchResult
from asyncflow.engines.train.mixed_passes import ShareOfPass, forward_backward, may_join
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.types import LoraSpec, LossSums, RunError, TokenBatch
from tests.unit.engines.train.conftest import micro_batch
from tests.unit.engines.train.training import ModelPath, Sum, one_rank, policy_gradient, torch_engine

SPECS = [
    LoraSpec(rank=4, alpha=8.0),
    LoraSpec(rank=2, alpha=2.0, targets=("q_proj", "down_proj")),
    LoraSpec(rank=3, alpha=6.0, targets=("v_proj",)),
]
BATCHES = [micro_batch(0, (5, 1, 9, 5), 6), micro_batch(1, (3, 3), 40), micro_batch(2, (1,), 1)]


def squared(batch: TokenBatch) -> LossSums:
    return LossSums((batch.mask_T * batch.logprobs_T**2).sum(), {})


OBJECTIVES = [Sum(policy_gradient), Sum(squared, is_token_local=False), Sum(policy_gradient)]


def engines(path: Path, **changes: Any) -> list[TorchEngine]:
    """Of the three adapters, none of which is zero."""
    made = []
    for seed, spec in enumerate(SPECS):
        options = {"lora": spec, "learning_rate": 1e-2, "check_shared_prompt": False, "seed": seed, **changes}
        engine = torch_engine(path, **options)
        with torch.no_grad():
            for number, (_, weight) in enumerate(sorted(one_rank(engine).policy.parameters.items())):
                weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight) * (1 + number % 3))
        made.append(engine)
    return made


async def ended(made: list[TorchEngine]) -> list[tuple[float, Mapping[str, str]]]:
    """Norm of the gradient, and hashes after an update, of each."""
    found = []
    for engine in made:
        norm = (await engine.optim_step(40)).grad_norm
        found.append((norm, await engine.fingerprint()))
        await engine.close()
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": "exact", "tokens_per_pass": 1000},
        {"accumulate": "exact", "tokens_per_pass": 1000, "dtype": "bfloat16", "activation_checkpointing": True},
        {"accumulate": "fp32"},
        {"accumulate": "fp32", "tokens_per_pass": 1000},
    ],
    ids=lambda value: "-".join(map(str, value.values())),
)
async def test_each_adapter_gets_the_bits_that_it_gets_alone(changes: dict[str, Any], model_path: ModelPath) -> None:
    path, batches = model_path("qwen2-tiny"), BATCHES
    alone = engines(path, **changes)
    expected: list[MicroBatchResult] = []
    for engine, batch, objective in zip(alone, batches, OBJECTIVES, strict=True):
        expected += await engine.forward_backward([batch], objective)
    of_alone = await ended(alone)
    for seed in range(2):
        mixed, order = engines(path, **changes), [1, 2]
        random.Random(seed).shuffle(order)
        order = [0, *order]
        assert all(may_join(mixed[0], mixed[i]) for i in order[1:]) and not may_join(mixed[1], mixed[0])
        assert not may_join(mixed[0], mixed[0])
        found = await forward_backward([ShareOfPass(mixed[i], batches[i], OBJECTIVES[i]) for i in order])
        assert found == [expected[i] for i in order]
        assert not one_rank(mixed[0]).policy.lora.rows  # type: ignore[union-attr]
        of_mixed = await ended(mixed)
        if changes["accumulate"] == "exact":
            assert of_mixed == of_alone
        assert [norm for norm, _ in of_mixed] == pytest.approx([norm for norm, _ in of_alone], rel=1e-5)


@pytest.mark.parametrize("accumulate", ["exact", "fp32"])
async def test_what_is_not_finite_of_one_adds_nothing_to_any(accumulate: str, model_path: ModelPath) -> None:
    path = model_path("qwen2-tiny")
    alone, mixed = (engines(path, accumulate=accumulate, tokens_per_pass=1000) for _ in range(2))
    for engine, number in zip(alone, (0, 1, 2), strict=True):
        if number != 1:
            await engine.forward_backward([BATCHES[number]], OBJECTIVES[number])
    with torch.no_grad():
        for each in (alone[1], mixed[1]):
            weight = next(iter(one_rank(each).policy.parameters.values()))
            weight[:] = torch.inf
    found = await forward_backward([ShareOfPass(*each) for each in zip(mixed, BATCHES, OBJECTIVES, strict=True)])
    assert [result.is_finite for result in found if isinstance(result, MicroBatchResult)] == [True, False, True]
    assert all(weight.grad is None for weight in one_rank(mixed[1]).policy.parameters.values())
    expected, of_mixed = await ended(alone), await ended(mixed)
    assert expected[1][0] == of_mixed[1][0] == 0.0  # skipped
    assert [norm for norm, _ in of_mixed] == pytest.approx([norm for norm, _ in expected], rel=1e-5)
    assert accumulate == "fp32" or of_mixed == expected


async def test_sums_that_do_not_hold_a_gradient_are_the_fault_of_one_alone(model_path: ModelPath) -> None:
    made = engines(model_path("qwen2-tiny"), accumulate="exact", tokens_per_pass=1000)
    huge = replace(BATCHES[1], advantages=np.full_like(BATCHES[1].advantages, 1e12))
    steep = [OBJECTIVES[0], Sum(policy_gradient), OBJECTIVES[2]]
    found = await forward_backward([ShareOfPass(*each) for each in zip(made, [BATCHES[0], huge, BATCHES[2]], steep, strict=True)])
    assert isinstance(found[1], RunError) and "exact sums take none above" in str(found[1])
    assert all(isinstance(found[number], MicroBatchResult) for number in (0, 2))
    for engine in made:
        await engine.close()


async def test_engines_with_anything_of_their_own_share_no_pass(model_path: ModelPath, tmp_path: Path) -> None:
    host = torch_engine(model_path("qwen2-tiny"), lora=SPECS[0])
    others = {
        "whole": torch_engine(model_path("qwen2-tiny")),
        "base": torch_engine(model_path("llama-tiny"), lora=SPECS[0]),
        "dtype": torch_engine(model_path("qwen2-tiny"), lora=SPECS[0], dtype="bfloat16"),
        "temperature": torch_engine(model_path("qwen2-tiny"), lora=SPECS[0], temperature=0.5),
        "reference": torch_engine(model_path("qwen2-tiny"), lora=SPECS[0], has_reference=True),
        "unproven bits": torch_engine(model_path("qwen2-tiny"), lora=SPECS[0], accumulate="exact"),
    }
    for name, other in others.items():
        assert not may_join(host, other) and not may_join(other, host), name
        await other.close()
    await host.close()
