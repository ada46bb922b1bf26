"""Scoring of responses below a worker: by reward processes, by a reward model, or by both.

consumes: samples
waits for: a reward process, the model's thread
is unblocked by: their answers; a sample's deadline
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np

from asyncflow.config import RewardModelConfig
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.base import ClassifierEngine
from asyncflow.engines.train import CLASSIFIER_ENGINES
from asyncflow.own_metrics import add, step_scored
from asyncflow.registry import build
from asyncflow.rewards.base import RewardFailure, Sample, Score
from asyncflow.rewards.scorings import Scoring, by_environment, by_model, delayed, together, with_fallback
from asyncflow.run.factories import reward_pool
from asyncflow.run.in_worker.connection import RunConnection, background
from asyncflow.run.services.cores import following_threads
from asyncflow.telemetry.hub import UnscoredResponse

SCORE_SECONDS = 0.1
"""Seconds from one reward that is recorded to the next."""


@asynccontextmanager
async def scoring(run: RunConnection, name: str) -> AsyncIterator[Callable[[Sample], Awaitable[Score]]]:
    """The reward processes below a worker, which end with it. None are started where another worker scores."""
    config, delays = run.config.reward, run.config.reward.delays
    failures: Counter[str] = Counter()
    scorings: list[tuple[Scoring, int]] = []  # with the number of their parts
    async with AsyncExitStack() as stack:
        is_here = config.place == "rollout" or name.startswith("reward/")
        if config.parts and is_here:
            pool = reward_pool(run.config, name, _sampled(run))
            stack.push_async_callback(pool.close)
            await pool.start()
            failures = pool.failures
            scorings.append((pool.score, len(config.parts)))
        if config.model is not None and is_here:
            run.reporter.recorder.enter("load")
            engine = await asyncio.to_thread(_reward_model, config.model)
            stack.push_async_callback(engine.close)
            following, why = following_threads(run.config, run.cores, "reward", engine)
            run.reporter.why_not_deterministic = run.reporter.why_not_deterministic or why
            await stack.enter_async_context(background(*following))
            compute = _computing(engine, run, config.model)
            scorings.append((by_model(compute, config.model.path, failures, config.deadline_seconds), 1))
        if config.environment is not None and is_here:
            scorings.append((by_environment, 1))
        run.reporter.reward_failures = failures
        scorings = [(_reported(scoring, run), count) for scoring, count in scorings]
        weights = list(config.weights.values())
        is_pool_alone = len(scorings) == 1 and bool(config.parts)  # which weights its parts itself
        score = scorings[0][0] if is_pool_alone else together([each for each, _ in scorings], weights, [n for _, n in scorings])
        if config.value_on_failure is not None:
            score = with_fallback(score, value=config.value_on_failure, attempts=config.max_attempts, num_parts=len(weights))
        yield delayed(score, mean_seconds=delays.mean_seconds, salt=delays.salt) if delays.mean_seconds else score


def _reported(scoring: Scoring, run: RunConnection) -> Scoring:
    """`scoring`, whose failures are sent to the driver with the responses, and whose rewards are counted there."""

    async def score(sample: Sample) -> Score:
        try:
            found = await scoring(sample)
        except RewardFailure as failure:
            if failure.kind != "skipped":
                run.reporter.keep_unscored(
                    UnscoredResponse(
                        failure.kind, str(failure), failure.trace, sample.prompt, sample.response, dict(sample.example)
                    )
                )
            raise
        run.reporter.num_scored += 1
        if found.metrics and (step := step_scored.get()) is not None:
            add(run.reporter.own_metrics.setdefault(step, {}), found.metrics)
        return found

    return score


def _sampled(run: RunConnection) -> Callable[[float], None]:
    """Records rewards as spans, all since the one before together: their seconds one after another, without waiting for a process.

    Some alone would not do: the first of several that come at once finds its process asleep, and takes several times as long."""
    spans, due, count, total = run.reporter.recorder, 0.0, 0, 0.0

    def scored(seconds: float) -> None:
        nonlocal due, count, total
        count, total = count + 1, total + seconds
        if (now := spans.clock()) >= due:
            spans.off_lane("score", now - total, now, rows=count, calls=count)
            due, count, total = now + SCORE_SECONDS, 0, 0.0

    return scored


def _reward_model(model: RewardModelConfig) -> ClassifierEngine:
    options = {"model_path": Path(model.path), "device": model.device, "dtype": model.dtype, "num_threads": model.least_threads}
    return cast(ClassifierEngine, build("reward model engine", "torch", options, CLASSIFIER_ENGINES))


def _computing(engine: ClassifierEngine, run: RunConnection, model: RewardModelConfig) -> Callable[[Sample], Awaitable[float]]:
    """The model's logit of a sample: of its own token ids, if the model has the policy's tokenizer, or else of the text."""
    files = [(Path(folder) / "tokenizer.json") for folder in (run.job.model, model.path)]
    has_same = files[1].is_file() and files[0].read_bytes() == files[1].read_bytes()
    if model.template is None and has_same:
        return lambda sample: engine.score(np.array([*sample.prompt_ids, *sample.token_ids], np.int64))
    tokenizer, template = CheckpointTokenizer(Path(model.path), generates=False), model.template or "{prompt}{response}"

    async def compute(sample: Sample) -> float:
        before, _, after = template.partition("{response}")
        text = before.replace("{prompt}", sample.prompt) + sample.response + after.replace("{prompt}", sample.prompt)
        return await engine.score(tokenizer.encode(text))

    return compute
