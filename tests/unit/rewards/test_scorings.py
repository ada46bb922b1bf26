"""A reward model's answers, and what becomes of a sample that has none. Injected delays are a function of salt and sample, and hold
up nobody else."""

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
from asyncflow.rewards.base import RewardFailure, Sample, Score
from asyncflow.rewards.scorings import by_model, delay_seconds, delayed
from tests.patience import patience


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
        ("sleep 60", "timeout", "reward model judge answered no request for 0.2 s (reward.deadline_seconds)"),
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
    async with asyncio.timeout(patience(2.0)):
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


def numbered(number: int) -> Sample:
    return Sample("what?", f"it is {number}", {}, True)


def test_delays_are_exponential_and_another_salt_has_others() -> None:
    first, second = ([delay_seconds(numbered(i), 0.2, salt) for i in range(4000)] for salt in (1, 2))
    assert first == [delay_seconds(numbered(i), 0.2, 1) for i in range(4000)]
    for delays in (first, second):
        assert (
            min(delays) >= 0.0 and np.mean(delays) == pytest.approx(0.2, rel=0.1) and np.std(delays) == pytest.approx(0.2, rel=0.1)
        )
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1
    assert [delay_seconds(numbered(i), 0.4, 1) for i in range(9)] == pytest.approx([2 * d for d in first[:9]])


async def test_a_reward_comes_late_and_a_failure_at_once_and_neither_waits_for_another() -> None:
    in_scorer: list[int] = []

    async def score(given: Sample) -> Score:
        number = int(given.response.split()[-1])
        in_scorer.append(number)
        if number < 0:
            raise RewardFailure("raised", "no")
        return Score(float(number), ())

    ended: list[float] = []
    late = delayed(score, mean_seconds=0.03, salt=5)

    async def one(number: int) -> None:
        ended.append((await late(numbered(number))).reward)

    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(RewardFailure):
        await late(numbered(-1))
    assert loop.time() - began < 0.02
    delays = [delay_seconds(numbered(i), 0.03, 5) for i in range(20)]
    began = loop.time()
    await asyncio.gather(*map(one, range(20)))
    taken = loop.time() - began
    assert in_scorer == [-1, *range(20)]  # all were with the scorer before the first reward came
    assert max(delays) - 0.005 <= taken < sum(delays) / 2
    assert sorted(ended) == [*range(20)] and ended != sorted(ended)
