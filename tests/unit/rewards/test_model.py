"""A reward model's answers, and what becomes of a sample that has none."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from asyncflow.engines.train.reward_model import RewardModelEngine
from asyncflow.rewards.base import RewardFailure, Sample
from asyncflow.rewards.model import by_model


def sample(response: str) -> Sample:
    return Sample("", response, {}, True, [], [])


async def compute(given: Sample) -> float:
    what, _, rest = given.response.partition(" ")
    if what == "raise":
        raise RuntimeError("a kernel failed")
    if what == "eat":
        raise MemoryError("4096 tokens")
    if what == "sleep":
        await asyncio.sleep(float(rest))
        return 7.0
    return float(rest)


@pytest.mark.parametrize(
    ("response", "kind", "words"),
    [
        ("raise", "raised", "reward model judge raised RuntimeError: a kernel failed"),
        ("eat", "memory", "reward model judge ran out of memory: 4096 tokens"),
        ("number nan", "invalid", "reward model judge returned nan, which is no finite number"),
        ("number inf", "invalid", "reward model judge returned inf, which is no finite number"),
        ("sleep 60", "timeout", "reward model judge answered nobody for 0.2 s (reward.deadline_seconds)"),
    ],
)
async def test_a_sample_without_an_answer_fails_and_is_counted(response: str, kind: str, words: str) -> None:
    failures: Counter[str] = Counter()
    score = by_model(compute, "judge", failures, 0.2)
    with pytest.raises(RewardFailure) as failure:
        await score(sample(response))
    assert (failure.value.kind, str(failure.value)) == (kind, words) and failures == {kind: 1}
    assert (await score(sample("number 2.5"))).reward == 2.5 and failures.total() == 1


async def test_who_waits_for_its_turn_is_not_late_while_others_are_answered() -> None:
    turn = asyncio.Lock()

    async def one_by_one(given: Sample) -> float:
        async with turn:
            return await compute(given)

    score = by_model(one_by_one, "judge", Counter(), 0.5)
    scores = await asyncio.gather(*(score(sample("sleep 0.1")) for _ in range(10)))
    assert [each.reward for each in scores] == [7.0] * 10


async def test_all_who_wait_for_a_model_that_hangs_fail_together() -> None:
    turn = asyncio.Lock()

    async def one_by_one(given: Sample) -> float:
        async with turn:
            return await asyncio.shield(compute(given))

    failures: Counter[str] = Counter()
    score = by_model(one_by_one, "judge", failures, 0.3)
    async with asyncio.timeout(2.0):
        found = await asyncio.gather(*(score(sample("sleep 60")) for _ in range(20)), return_exceptions=True)
    assert all(isinstance(each, RewardFailure) for each in found) and failures == {"timeout": 20}


async def test_the_engine_says_that_memory_was_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    engine = RewardModelEngine(tmp_path, device="cpu", dtype="float32", num_threads=1)
    assert math.isfinite(await engine.score(np.arange(5)))

    def forward(**given: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._model, "forward", forward)
    with pytest.raises(MemoryError, match="5 tokens: CUDA out of memory"):
        await engine.score(np.arange(5))
    await engine.close()
