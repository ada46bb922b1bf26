"""A run's tasks as a graph: how long each pool is busy with a step, and what each task waits for. Made from the run's own Config.

    rollout -> reward -> [reference] -> [values] -> train -> weights -> rollout of a later step
                                            [critic]  storage units                                 (beside)

A task is the work of one pool. Times are seconds of one step, and least ones: no order of the work, and no way to share it among
the pool's workers, needs less, if costs are straight lines, as `cost.py` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from asyncflow.config import Config
from asyncflow.engines.base import SampleKey
from asyncflow.engines.costs import Costs
from asyncflow.loops.samples import VALUES_TASK
from asyncflow.model_folder import read_json
from asyncflow.planner.part import workers_of
from asyncflow.run.factories import (
    critic_fields,
    critic_tokens_per_pass,
    make_schedule,
    tasks_before_training,
    tokens_per_pass,
    update_plan,
)
from asyncflow.run.helper_devices import num_on_devices
from asyncflow.types import Array

BYTES_OF_TOKEN = 13
"""Bytes that a unit keeps of a response's token: its number, its log-prob and its mask."""
GRID = 64
"""Intervals of decode steps in which the number of active responses is taken to be that at the interval's end."""


@dataclass(frozen=True, slots=True)
class Task:
    """Work of one pool in a step, in seconds.

    `busy`: of its busiest worker, in steady state. `span`: until the last row is done, if all rows are there at the beginning.
    `first` and `last`: until the first group is done, and how long after its arrival the last one is. `arrivals`, of rollout:
    when the k-th group is done, [steps, prompts]; `rest`, of the others: work left when k groups are done, [steps, prompts].
    """

    name: str
    busy: float
    span: float
    first: float
    last: float
    arrivals: Array = field(default_factory=lambda: np.zeros((1, 1)))
    rest: Array = field(default_factory=lambda: np.zeros((1, 1)))


@dataclass(frozen=True, slots=True)
class Graph:
    """Tasks that rows pass, in order. `weights`: seconds from the last micro-batch until its weights serve. `side_tasks`: work
    of a step that weights do not wait for."""

    tasks: tuple[Task, ...]
    weights: float
    max_staleness: int
    is_streamed: bool  # a task may start on a step before the task before it has done all of it
    side_tasks: tuple[Task, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """Lengths of the responses of some steps, as a simulated run draws them: int64 [steps, prompts, group]."""

    tokens: Array

    @classmethod
    def of(cls, config: Config, costs: Costs, steps: int) -> Drawn:
        """Lengths of the first `steps` steps of a run without candidates."""
        prompts, group, most = config.train.prompts_per_step, config.rollout.group_size, config.rollout.max_new_tokens
        keys = [SampleKey(config.sampling_seed, prompt) for prompt in range(steps * prompts)]
        drawn = [costs.lengths.draw(key, sample, most)[0] for key in keys for sample in range(group)]
        return cls(np.array(drawn, np.int64).reshape(steps, prompts, group))

    @cached_property
    def decoded(self) -> Array:
        """Tokens that decode steps make: all but the first of a response, which its prefill makes."""
        return self.tokens - 1

    @cached_property
    def longest(self) -> Array:
        """Decode steps of each group's longest response, the fewest first: [steps, prompts]."""
        return np.sort(self.decoded.max(2), 1)

    @cached_property
    def grid(self) -> Array:
        """Numbers of decode steps: [GRID + 1], from 0 to the longest response."""
        return np.linspace(0.0, float(max(1, self.decoded.max())), GRID + 1)

    @cached_property
    def active(self) -> Array:
        """Responses of any k + 1 groups that are active beyond the end of each interval, at least: [steps, prompts, GRID]."""
        longer = np.stack([(self.decoded > end).sum(2) for end in self.grid[1:]], 2)
        return np.cumsum(np.sort(longer, 1), 1)


def graph(config: Config, costs: Costs, drawn: Drawn) -> Graph:
    """Graph of a step: the mean over the drawn steps."""
    schedule = make_schedule(config)
    tasks = [rollout(config, costs, drawn, in_flight=schedule.installs_in_flight)]
    tasks += [before_training(config, costs, drawn, name) for name in between(config)]
    tasks.append(helped(train(config, costs, drawn), num_on_devices(config)))
    aside = [storage(config, costs, drawn)]
    aside += [critic(config, costs, drawn)] if VALUES_TASK in tasks_before_training(config) else []
    aside += on_shared_devices(config, {task.name: task.busy for task in [*tasks, *aside]})
    return Graph(tuple(tasks), weights(costs), schedule.max_staleness, schedule.is_streamed, tuple(aside))


def between(config: Config) -> list[str]:
    """Tasks between rollout and training that take time. Rewards are one wherever they are computed."""
    return ["reward", *(name for name in tasks_before_training(config) if name not in ("rollout", "reward", "select"))]


def critic(config: Config, costs: Costs, drawn: Drawn) -> Task:
    """A critic's work, which computes the values, too, unless a pool does. Weights do not wait for it."""
    group, trained, train = config.rollout.group_size, costs.of_critic(), config.train
    pieces = -(-group // (train.responses_per_micro_batch or group))
    of_group = pieces * costs.lengths.prompt + drawn.tokens.sum(2)
    packed = float(of_group.sum(1).mean())
    fixed, most = trained.forward_backward(0), critic_tokens_per_pass(config, critic_fields(config))
    passes = np.full(of_group.shape, pieces) if most is None else np.minimum(of_group / most, pieces)  # at best all are full
    busy = train.epochs * (float(passes.sum(1).mean()) * fixed + packed * (trained.forward_backward(1) - fixed))
    busy += train.epochs * train.mini_batches * trained.optim_step_seconds
    if not config.plan.values.num_workers:
        fixed = costs.values(0)
        busy += len(of_group[0]) * pieces * fixed + (costs.values(1) - fixed) * packed
    return Task("critic", busy, 0.0, 0.0, 0.0)


def storage(config: Config, costs: Costs, drawn: Drawn) -> Task:
    """Work of the storage units: of each group at least its outputs are stored, and read to be trained. Weights do not wait for
    it. Units in the driver's process are one."""
    units = config.queue.num_units if config.queue.place == "workers" else 1
    once = costs.unit(config.rollout.group_size, 0) * len(drawn.tokens[0])
    num_bytes = BYTES_OF_TOKEN * float(drawn.tokens.sum((1, 2)).mean())
    busy = 2 * (once + costs.unit(0, num_bytes) - costs.unit(0, 0)) / units
    return Task("storage", busy, 0.0, 0.0, 0.0)


def on_shared_devices(config: Config, busy: Mapping[str, float]) -> list[Task]:
    """Work of devices that tasks share (`plan.shares`), on average. `busy`: of each task, of one worker.

    Left out: a reward model's beside reward processes, of which only one may be what takes the time."""
    known = {name: seconds for name, seconds in busy.items() if name != "reward" or not config.reward.parts}
    found = []
    for other in dict.fromkeys(config.plan.shares.values()):
        guests = [task for task, host in config.plan.shares.items() if host == other and task != "helpers"]
        if not guests:
            continue
        own = [known.get(task, 0.0) * min(1.0, workers_of(config, task) / workers_of(config, other)) for task in guests]
        found.append(Task(f"{' and '.join([other, *guests])} on the same devices", known.get(other, 0.0) + sum(own), 0.0, 0.0, 0.0))
    return found


def weights(costs: Costs) -> float:
    """Seconds from a step's last micro-batch until its weights serve."""
    return costs.optim_step_seconds + costs.publish() + costs.fetch() + costs.install()


def rollout(config: Config, costs: Costs, drawn: Drawn, *, in_flight: bool) -> Task:
    """Generation by workers that each have about the same number of groups.

    A worker makes at least as many decode steps as its longest response has tokens, and as its tokens fill its slots. The mean over
    workers of the longest is least if the groups with the longest responses come together. While a worker is at its n-th step, all
    its responses of more tokens are active, or wait: its groups have at least as many as those with the fewest. `in_flight`: a
    worker's steps go on over an installation, so its slots stay full, and its responses do not begin together.
    """
    workers, slots, prompts = config.rollout.num_workers, config.rollout.num_slots, config.train.prompts_per_step
    prompt, num_steps = costs.lengths.prompt, len(drawn.tokens)
    step = costs.decode_step(0)
    slot, context = costs.decode_step(1) - step, costs.decode_step(0, 1.0) - step
    lengths = drawn.decoded.astype(np.float64)
    work = (lengths * (slot + context * prompt) + context * lengths * lengths / 2).sum((1, 2)) / workers
    prefill = costs.prefill(prompts * prompt) / workers
    share = -(-prompts // workers)
    longest = drawn.longest[:, ::-1][:, ::share].sum(1) / workers
    fills = lengths.sum((1, 2)) / (workers * slots)
    busy = float((step * (fills if in_flight else np.maximum(longest, fills)) + work).mean()) + prefill + costs.install()
    active = np.ones((num_steps, GRID)) if in_flight else drawn.active[:, prompts // workers - 1].clip(1, slots)
    widths = np.diff(drawn.grid)
    passed = np.cumsum(widths * (step + active * (slot + context * (prompt + drawn.grid[:-1]))), 1)
    at = np.concatenate([np.zeros((num_steps, 1)), passed], 1)
    arrivals = np.stack([np.interp(drawn.longest[i], drawn.grid, at[i]) for i in range(num_steps)]) + costs.prefill(prompt)
    of_groups = (lengths * (slot + context * prompt + step / slots) + context * lengths * lengths / 2).sum(2)
    arrivals = np.maximum(
        arrivals, np.cumsum(np.sort(of_groups, 1), 1) / workers
    )  # k groups have all their tokens, slots being full
    span = max(busy - costs.install(), float(arrivals[:, -1].mean()))
    return Task("rollout", busy, span, float(arrivals[:, 0].mean()), span, arrivals=arrivals)


def train(config: Config, costs: Costs, drawn: Drawn) -> Task:
    """Training by data-parallel groups, which share the groups of rows, and meet in every round."""
    group, layout, updates = config.rollout.group_size, config.layout, config.train.epochs * config.train.mini_batches
    pieces = -(-group // (config.train.responses_per_micro_batch or group))
    fixed = costs.forward_backward(0)
    token = costs.forward_backward(1) - fixed
    of_group = pieces * token * costs.lengths.prompt + token * drawn.tokens.sum(2)
    fields = read_json(Path(config.model.path) / "config.json")
    if (most := tokens_per_pass(config, fields)) is None:
        of_group = of_group + pieces * fixed
        rounds = -(-config.train.prompts_per_step // (layout.dp * update_plan(config).groups_per_round))
    else:  # at best all passes are full, and a rank has no round that is not
        packed = pieces * costs.lengths.prompt + drawn.tokens.sum(2)
        of_group = of_group + fixed * np.minimum(packed / most, pieces)
        rounds = 1
    meetings = costs.collectives_seconds if layout.dp > 1 else 0.0
    again = (config.train.epochs - 1) * (of_group.sum(1, keepdims=True) / layout.dp + rounds * meetings)
    extra = again + (updates - 1) * costs.optim_step_seconds
    rest = _rest(of_group) / layout.dp + extra + meetings
    whole = float((of_group.sum(1) / layout.dp + rounds * meetings + extra[:, 0]).mean())
    last = float((of_group.min(1) + extra[:, 0]).mean()) + meetings
    return Task("train", whole + costs.optim_step_seconds, whole, last, last, rest=rest)


def helped(training: Task, num_helpers: int) -> Task:
    """Training some of whose passes helpers take, on devices of rollout: at best all of them compute all the time."""
    each = {name: getattr(training, name) / (1 + num_helpers) for name in ("busy", "span", "last", "rest")}
    return replace(training, **each) if num_helpers else training


def before_training(config: Config, costs: Costs, drawn: Drawn, name: str) -> Task:
    """A task between rollout and training: `reward`, `reference` or `values`, by its pool, or else by one worker. The time of
    rewards, which are random, is the expected one. A worker's reward processes and its reward model work side by side."""
    workers = max(1, workers_of(config, name))
    if name == "reward" and config.reward.place == "rollout":
        workers = config.rollout.num_workers
    if name == "reward":
        has_model, scorers = config.reward.model is not None, [part.scorer.name for part in config.reward.parts.values()]
        one = costs.rewards(scorers, has_model=has_model) + config.reward.delays.mean_seconds
        of_group = np.full(drawn.tokens.shape[:2], one * config.rollout.group_size / config.reward.num_workers)
        if has_model:
            read = drawn.tokens.sum(2) + config.rollout.group_size * costs.lengths.prompt
            of_group = np.maximum(of_group, costs.reward_model_token_seconds * read)
    else:
        seconds = costs.values if name == "values" else costs.log_probs
        fixed, group = seconds(0), config.rollout.group_size
        pieces = -(-group // (config.train.responses_per_micro_batch or group))  # one pass each
        of_group = pieces * fixed + (seconds(1) - fixed) * (drawn.tokens.sum(2) + costs.lengths.prompt)
    whole, least = float(of_group.sum(1).mean()) / workers, float(of_group.min(1).mean())
    return Task(name, whole, whole, least, least, rest=_rest(of_group) / workers)


def _rest(of_group: Array) -> Array:
    """Work that is left when k groups have been done, at least: these are the largest. [steps, prompts] both."""
    return np.cumsum(np.sort(of_group, 1), 1)[:, ::-1]
