"""A run's tasks as a graph: how long each pool is busy with a step, and what each task waits for. Made from the run's own Config.

    rollout -> [reward] -> [reference] -> [values] -> train | critic_update -> weights -> rollout of a later step

A task is the work of one pool. Times are seconds of one step, and least ones: no order of the work, and no share of it, needs less.
They are exact for costs that are straight lines, as `cost.py` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from asyncflow.config import Config
from asyncflow.control import SCHEDULES
from asyncflow.control.modes import Synchronous
from asyncflow.control.schedule import Schedule
from asyncflow.engines.base import SampleKey
from asyncflow.engines.sleeping import Costs
from asyncflow.registry import build
from asyncflow.run.factories import tasks_before_training
from asyncflow.types import Array


@dataclass(frozen=True, slots=True)
class Task:
    """Work of one pool in a step, in seconds.

    `busy`: of its busiest worker. `span`: from the first row until the last is done, if all rows are there at the beginning.
    `first` and `last`: until the first group is done, and how long after its arrival the last one is.
    """

    name: str
    busy: float
    span: float
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Graph:
    """Tasks that rows pass, in order. `weights`: seconds from the last micro-batch until its weights serve."""

    tasks: tuple[Task, ...]
    weights: float
    max_staleness: int
    is_streamed: bool  # a task may start on a step before the task before it has done all of it


@dataclass(frozen=True)
class Drawn:
    """Lengths of the responses of some steps, as a simulated run draws them: int64 [steps, prompts, group]."""

    tokens: Array

    @classmethod
    def of(cls, config: Config, costs: Costs, steps: int) -> Drawn:
        """Lengths of the first `steps` steps of a run without candidates."""
        prompts, group, most = config.train.prompts_per_step, config.rollout.group_size, config.rollout.max_new_tokens
        keys = [SampleKey(config.run.seed, prompt) for prompt in range(steps * prompts)]
        drawn = [costs.lengths.draw(key, sample, most)[0] for key in keys for sample in range(group)]
        return cls(np.array(drawn, np.int64).reshape(steps, prompts, group))


def graph(config: Config, costs: Costs, drawn: Drawn) -> Graph:
    """Graph of a step: the mean over the drawn steps."""
    schedule: Schedule = build("schedule", config.schedule.name, config.schedule.options, SCHEDULES)
    tasks = [rollout(config, costs, drawn, in_flight=schedule.installs_in_flight)]
    tasks += [before_training(config, costs, drawn, name) for name in between(config)]
    tasks.append(train(config, costs, drawn))
    return Graph(tuple(tasks), weights(costs), schedule.max_staleness, not isinstance(schedule, Synchronous))


def between(config: Config) -> list[str]:
    """Tasks between rollout and training that take time."""
    return [name for name in tasks_before_training(config) if name not in ("rollout", "select")]


def weights(costs: Costs) -> float:
    """Seconds from a step's last micro-batch until its weights serve."""
    return costs.optim_step_seconds + costs.publish_seconds + costs.fetch_seconds + costs.install_seconds


def rollout(config: Config, costs: Costs, drawn: Drawn, *, in_flight: bool) -> Task:
    """Generation by workers that each have about the same number of groups.

    A worker makes at least as many decode steps as its longest response has tokens, and as its tokens fill its slots. The mean over
    workers of the longest is least if the groups with the longest responses come together. `in_flight`: a worker's steps go on over
    an installation, so its slots stay full.
    """
    workers, slots, prompts = config.rollout.num_workers, config.rollout.num_slots, config.train.prompts_per_step
    share = -(-prompts // workers)
    most = slots if in_flight else min(slots, share * config.rollout.group_size)
    one = costs.decode_step(1)
    slot = (costs.decode_step(most) - one) / (most - 1) if most > 1 else 0.0
    step, tokens = one - slot, drawn.tokens.sum((1, 2)) / workers
    prefill = costs.prefill(prompts * costs.lengths.prompt) / workers
    longest_of_groups = np.sort(drawn.tokens.max(2), 1)[:, ::-1]
    longest = longest_of_groups[:, ::share].sum(1) / workers
    steps = tokens / slots if in_flight else np.maximum(longest, tokens / slots)
    busy = float((step * steps + slot * tokens).mean()) + prefill + costs.install_seconds
    tail = float(longest_of_groups[:, 0].mean()) * one + costs.prefill(costs.lengths.prompt)
    first = float(longest_of_groups[:, -1].mean()) * one
    return Task("rollout", busy, max(busy - costs.install_seconds, tail), first, tail)


def train(config: Config, costs: Costs, drawn: Drawn) -> Task:
    """Training by data-parallel groups, each of which has about the same number of groups of rows."""
    group, updates = config.rollout.group_size, config.train.epochs * config.train.mini_batches
    pieces = -(-group // (config.train.responses_per_micro_batch or group))
    fixed = costs.forward_backward(0)
    token = costs.forward_backward(1) - fixed
    of_group = pieces * (fixed + token * costs.lengths.prompt) + token * drawn.tokens.sum(2)
    whole = config.train.epochs * float(of_group.sum(1).mean()) / config.layout.dp
    whole += (updates - 1) * costs.optim_step_seconds
    least = float(of_group.min(1).mean())
    return Task("train", whole + costs.optim_step_seconds, whole, least, least)


def before_training(config: Config, costs: Costs, drawn: Drawn, name: str) -> Task:
    """A task between rollout and training, which one worker does: `reward`, `reference` or `values`."""
    if name == "reward":
        rows, at_once = drawn.tokens[0].size, config.reward.num_workers
        one = costs.reward_seconds + config.reward.delays.mean_seconds
        return Task(name, rows * one / at_once, rows * one / at_once, one, one)
    of_group = costs.log_probs(1) * (drawn.tokens.sum(2) + costs.lengths.prompt)
    whole, least = float(of_group.sum(1).mean()), float(of_group.min(1).mean())
    return Task(name, whole, whole, least, least)
