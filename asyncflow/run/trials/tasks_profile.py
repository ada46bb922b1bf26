"""Timings of what is beside training, in one process: rollout, weights, rewards, reference and critic of a run's configuration.

    decode_step, prefill      the run's rollout engine, by active slots (rows), and by tokens attended to, or prefilled
    publish, fetch, install   by bytes of the whole model
    score                     one reward by all of the run's scorers, in a reward process
    reference, values, critic_update   by response tokens, in passes of a run's micro-batches; only where the run has them

consumes: a model's folder, the run's data
waits for: the engine; a reward process
is unblocked by: their answers

The tasks are those of a run's own spans, so that costs are fitted to either (`planner/measured.py`). Prompts and responses are
random tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from asyncflow.config import Config, load
from asyncflow.devices import devices_of
from asyncflow.engines.base import MicroBatch, RolloutEngine, SampleKey, Sampling
from asyncflow.rewards.base import RewardFailure, Sample
from asyncflow.run.factories import make_algorithm, reward_pool, tasks_before_training
from asyncflow.run.in_worker.engines import critic_engine, reference_engine, rollout_engine, tensors_of
from asyncflow.run.preparation.prompts import read_source
from asyncflow.run.trials.profile import REQUEST_FILE, ProfileRequest, spans_of, time_weights
from asyncflow.run_dir import CONFIG_FILE
from asyncflow.telemetry.spans import Recorder
from asyncflow.telemetry.trace import SpanLog
from asyncflow.types import Array, Ragged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

PROMPTS = (16, 128)
"""Lengths of prompts, in tokens: the longer one shows what the context costs."""
RESPONSE_TOKENS = 64
"""Response tokens of one request: with a step timed now and then, enough for some of each number of slots."""
REWARDS = 4
"""Rewards of one repetition, since a reward may take less than a millisecond."""


async def profile_tasks(name: str, run_dir: Path) -> None:
    """The main of the process."""
    config = load(run_dir / CONFIG_FILE)
    request = msgspec.json.decode((run_dir / REQUEST_FILE).read_bytes(), type=ProfileRequest)
    log, model = SpanLog(spans_of(run_dir, name)), Path(request.model)
    spans = Recorder(name, time.monotonic, log.append, devices_of(config.rollout.device)[0])
    spans.enter("between")
    weights = await asyncio.to_thread(tensors_of, model)
    await time_weights(config, run_dir, Path(request.weights_dir) / "whole", weights, request.repeats, spans.busy)
    await _time_rollout(config, model, weights, spans, request.repeats)
    await _time_rewards(config, spans, request.repeats)
    await _time_passes(config, model, spans, request)
    spans.flush()
    log.close()


async def _time_rollout(config: Config, model: Path, weights: Mapping[str, Tensor], spans: Recorder, repeats: int) -> None:
    """Generate with one slot, with some and with all of them, with short and with long prompts; then install the weights."""
    context, slots = max(PROMPTS) + RESPONSE_TOKENS, config.rollout.num_slots
    engine = await asyncio.to_thread(rollout_engine, config, model, context, devices_of(config.rollout.device)[0])
    for number, (active, length) in enumerate(itertools.product(sorted({1, -(-slots // 4), slots}), PROMPTS)):
        for repeat in range(repeats + 1):
            await _generate(engine, _tokens(model, length), active, SampleKey(number, repeat))
            for timing in engine.timings():
                if repeat:
                    counts = {"rows": timing.rows, "tokens": timing.tokens, "calls": timing.calls}
                    spans.off_lane(timing.task, timing.start, timing.end, **counts)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    for repeat in range(repeats + 1):
        with spans.busy("install" if repeat else "warm_up", bytes=num_bytes, version=repeat):
            await engine.install(repeat + 1, weights)
    await engine.close()


async def _generate(engine: RolloutEngine, prompt_ids: Array, num_samples: int, key: SampleKey) -> None:
    sampling = Sampling(max_new_tokens=RESPONSE_TOKENS)
    async for _ in engine.generate(prompt_ids, samples=range(num_samples), sampling=sampling, key=key):
        pass


async def _time_rewards(config: Config, spans: Recorder, repeats: int) -> None:
    """Score the data's first prompts, each with its own text for a response. A reward model is not timed."""
    if not config.reward.parts:
        return

    def scored(seconds: float) -> None:
        now = spans.clock()
        spans.off_lane("score", now - seconds, now, rows=1)

    source = read_source(config, "train")
    texts, rows = list(itertools.islice(source.texts(), REWARDS)), list(itertools.islice(source.rows, REWARDS))
    pool = reward_pool(config, "profile", scored)
    await pool.start()
    for _ in range(repeats):
        for text, row in zip(texts, rows, strict=False):
            with suppress(RewardFailure):  # it has nothing to say about such a response
                await pool.score(Sample(text, text, row, True))
    await pool.close()


async def _time_passes(config: Config, model: Path, spans: Recorder, request: ProfileRequest) -> None:
    """Passes of the reference and of the critic over micro-batches of the sizes asked for, where the run has such tasks."""
    tasks, pieces = tasks_before_training(config), config.train.responses_per_micro_batch or config.rollout.group_size
    critic = make_algorithm(config).critic
    batches = [_micro_batch(model, tokens, pieces) for tokens in request.tokens]
    if "reference" in tasks:
        frozen = await asyncio.to_thread(reference_engine, config, model)
        for batch, repeat in itertools.product(batches, range(request.repeats + 1)):
            with spans.busy("reference" if repeat else "warm_up", rows=pieces, tokens=len(batch.response_ids.values)):
                await frozen.log_probs(batch.prompt_ids, batch.response_ids)
        await frozen.close()
    if critic is not None:
        engine = await asyncio.to_thread(partial(critic_engine, config, model, is_trained=True))
        for batch, repeat in itertools.product(batches, range(request.repeats + 1)):
            measure = partial(spans.busy, rows=pieces)
            with measure("values" if repeat else "warm_up", tokens=len(batch.response_ids.values)):
                await engine.values(batch.prompt_ids, batch.response_ids)
            with measure("critic_update" if repeat else "warm_up", tokens=batch.logical_tokens):
                await engine.forward_backward([batch], critic)
        for repeat in range(request.repeats + 1):
            await engine.forward_backward(batches[:1], critic)
            with spans.busy("critic_update_optim_step" if repeat else "warm_up"):
                await engine.optim_step(1)
        await engine.close()


def _micro_batch(model: Path, num_tokens: int, num_responses: int) -> MicroBatch:
    """Micro-batch of a prompt and responses of equal lengths, about `num_tokens` packed together."""
    length = max(1, num_tokens // (num_responses + 1))
    ids = Ragged.from_arrays([_tokens(model, length)] * num_responses, "int64")
    ones = np.ones(len(ids.values), np.float32)
    return MicroBatch(
        indices=np.arange(num_responses),
        prompt_ids=_tokens(model, length),
        response_ids=ids,
        loss_mask=Ragged(ones.astype(np.uint8), ids.offsets),
        rollout_logprobs=Ragged(-ones, ids.offsets),
        advantages=ones,
        staleness=np.zeros(num_responses, np.int64),
        values=Ragged(0 * ones, ids.offsets),
    )


def _tokens(model: Path, length: int) -> Array:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    return np.random.default_rng(length).integers(vocabulary, size=length)
