"""Part of the machine that is simulated: a quarter of the prompts, workers and data-parallel groups has a quarter of the work, but
for the luck of the longest response.

    config, part --divided--> that of one of `part` equal parts, unchecked, for bounds
                 --config_of_part--> the same, as a simulation takes it: without a machine, a model, evaluations
    costs, part  --costs_of_part--> slower, where a pool is not divided: it has a part of its rows
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from asyncflow.config import Config, parse
from asyncflow.devices import kind_of
from asyncflow.engines.costs import Costs
from asyncflow.loops.samples import SELECT_TASK
from asyncflow.run.factories import make_schedule, tasks_before_training
from asyncflow.run.helper_devices import num_on_devices

ROWS: Final = 256
"""Rows of a simulated step, at least, unless the run's has fewer."""
STEPS: Final = 3
"""Steps of a simulated run, at most, and two at least. The first is not counted: nothing is under way before it."""
ROWS_OF_RUN: Final = 2_048
"""Rows of a simulated run that there are fewer steps for."""
POOLS: Final = ("reference", "values", "reward")
"""Tasks with pools of workers that are not sharded: sections of `plan`."""


def sizes_of(config: Config, part: int) -> dict[str, tuple[int, int]]:
    """Sizes of the pools of one of `part` equal parts, and how many times as long each piece of their work takes, where they could
    not be divided. A pool is divided as far as it can be: its workers, then the `processes` of each reward worker."""
    found = {name: _divided(getattr(config.plan, name).num_workers, part) for name in ("reference", "values")}
    found["units"] = _divided(config.queue.num_units, part)
    if config.reward.place == "rollout":  # beside each rollout worker, which is divided
        return found | {"reward": (config.plan.reward.num_workers, 1), "processes": (config.reward.num_workers, 1)}
    found["reward"] = _divided(config.plan.reward.num_workers, part)
    return found | {"processes": _divided(config.reward.num_workers, found["reward"][1])}


def part_of(config: Config, dp: int, workers: int, tasks: Sequence[str] | None = None) -> int:
    """Number of equal parts of the machine, of which one is simulated: a power of two that divides all pools, and an update's
    groups. `tasks`: of the configuration, before training, where they are known."""
    if SELECT_TASK in (tasks or tasks_before_training(config)):
        return 1  # candidates are chosen among all
    train, rows = config.train, config.train.prompts_per_step * config.rollout.group_size
    parts = math.gcd(dp, workers, train.prompts_per_step // train.mini_batches)
    if config.plan.shares:  # each part has as many workers on a device as the whole
        sharing = {*config.plan.shares, *config.plan.shares.values()} - {"train", "helpers", "rollout"}
        parts = math.gcd(parts, *(workers_of(config, task) for task in sharing))
    part = 1
    while parts % (2 * part) == 0 and rows // (2 * part) >= ROWS:
        part *= 2
    return part


def workers_of(config: Config, task: str) -> int:
    """Workers that share a task: each is one device, or, where it is training, a data-parallel group of them."""
    if task in POOLS:
        return int(getattr(config.plan, task).num_workers)
    return config.layout.dp if task == "train" else 1


def divided(config: Config, part: int) -> Config:
    """Configuration of one of `part` equal parts, unchecked: of a whole plan, or of one of its halves."""
    sizes = {name: size for name, (size, _) in sizes_of(config, part).items()}
    return config.changed(
        plan={"train": {"dp": max(1, config.layout.dp // part)}, **{name: {"num_workers": sizes[name]} for name in POOLS}},
        rollout={"num_workers": max(1, config.rollout.num_workers // part)},
        reward={"num_workers": sizes["processes"]},
        queue={"num_units": sizes["units"]},
        train={"prompts_per_step": config.train.prompts_per_step // part},
    )


def config_of_part(config: Config, part: int) -> Config:
    """Configuration of the simulated part: without a machine, a model, evaluations, and ranks that only follow."""
    tree, of_part = config.model_dump(mode="json"), divided(config, part)
    layout = of_part.layout
    tree["run"]["steps"] = steps_of(config, part)
    tree["plan"] |= {"train": {"dp": layout.dp, "tp": layout.tp if config.plan.shares else 1, "pp": layout.pp}}
    tree["plan"] |= {name: getattr(of_part.plan, name).model_dump() for name in POOLS}
    tree["queue"]["num_units"] = of_part.queue.num_units
    tree["reward"]["num_workers"] = of_part.reward.num_workers
    tree["reward"]["deadline_seconds"] *= sizes_of(config, part)["processes"][1]
    devices = (config.train.device, config.rollout.device) if num_on_devices(config) else ("cpu", "cpu")
    if not num_on_devices(config):
        tree["plan"]["shares"].pop("helpers", None)
    tree["rollout"] |= {"engine": {"name": "slots"}, "num_workers": of_part.rollout.num_workers, "device": devices[1]}
    tree["train"] |= {"prompts_per_step": of_part.train.prompts_per_step, "device": devices[0], "engine": {"name": "torch"}}
    tree["train"]["critic"]["device"] = kind_of(devices[0])  # the trainer's, which they may share
    if tree["reward"]["model"] is not None:
        tree["reward"]["model"]["device"] = kind_of(devices[0])
    tree["weight_sync"] |= {"min_healthy_workers": 1}
    for section in ("eval", "checkpoint", "cluster"):
        del tree[section]
    return parse(tree)


def costs_of_part(costs: Costs, config: Config, part: int) -> Costs:
    """Costs of one part: what of a pool is not divided has a part of its rows, so each takes it that many times as long."""
    if part == 1:
        return costs
    slow, trained = {name: times for name, (_, times) in sizes_of(config, part).items()}, costs.of_critic()  # which is one worker
    by_units = slow["units"] if config.queue.place == "workers" else part  # those of the driver's process are one
    return msgspec.structs.replace(
        costs,
        reference_seconds=costs.reference_seconds * slow["reference"],
        reference_token_seconds=costs.reference_token_seconds * slow["reference"],
        critic_seconds=trained.forward_backward_seconds * part,
        critic_token_seconds=trained.train_token_seconds * part,
        value_token_seconds=(costs.values(1) - costs.values(0)) * slow["values"],
        reward_seconds=costs.reward_seconds * slow["processes"],
        scorer_seconds={name: seconds * slow["processes"] for name, seconds in costs.scorer_seconds.items()},
        reward_model_token_seconds=costs.reward_model_token_seconds * slow["reward"],
        unit_seconds=costs.unit_seconds * by_units,
        unit_row_seconds=costs.unit_row_seconds * by_units,
        unit_byte_seconds=costs.unit_byte_seconds * by_units,
    )


def steps_of(config: Config, part: int) -> int:
    """Steps of a simulated run, more where weights come later."""
    rows = config.train.prompts_per_step * config.rollout.group_size // part
    return max(2, min(STEPS, ROWS_OF_RUN // rows)) + make_schedule(config).max_staleness


def rows_of(config: Config, part: int) -> int:
    """Rows of a simulated run."""
    return steps_of(config, part) * config.train.prompts_per_step * config.rollout.group_size // part


def _divided(size: int, part: int) -> tuple[int, int]:
    """A pool's part, and what of the division is left. Where there is none, one worker does its work."""
    if not size:
        return 0, part
    common = math.gcd(size, part)
    return size // common, part // common
