"""Configurations for simulated runs: of every mode, in all sizes, drawn by a seed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from asyncflow.config import Config, parse
from asyncflow.control import SCHEDULES
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.registry import build
from asyncflow.run.factories import make_algorithm

MODES: dict[str, dict[str, Any]] = {name: {"name": name} for name in SCHEDULES} | {
    "bounded, first come": {"name": "bounded", "membership": "first_come"},
}

VARIED = Path(__file__).parent / "varied.py"


def drawn(mode: str, seed: int) -> tuple[Config, Costs]:
    """A run of some steps, enough for rows to get too old, with 1 to 64 workers, mostly few, and what everything costs in it."""
    rng = random.Random(f"{mode}/{seed}")
    workers = 64 if seed % 100 == 99 else rng.randint(7, 40) if seed % 10 == 9 else rng.randint(1, 6)
    tree: dict[str, Any] = {
        "run": {"name": "simulated", "steps": 3, "seed": seed, "stall_timeout_seconds": 300},
        "model": {"path": "none"},
        "data": {"path": "generated:arithmetic"},
        "schedule": MODES[mode] | ({"max_staleness": rng.randint(1, 3)} if MODES[mode]["name"] == "bounded" else {}),
        "algorithm": {"name": "grpo", "kl_coefficient": rng.choice((0.0, 0.1))},
        "reward": {
            "place": rng.choice(("rollout", "task")),
            "deadline_seconds": 3.0,
            "num_workers": rng.randint(1, 4),
            "max_failed_fraction": 1.0,
        },
        "rollout": {
            "num_workers": workers,
            "num_slots": rng.choice((2, 4, 16)),
            "group_size": rng.choice((2, 2, 4)) if workers < 7 else 2,
            "max_new_tokens": 200,
            "kv_on_install": rng.choice(("keep", "recompute")),
            "max_restarts": 10,
        },
        "train": {"prompts_per_step": max(workers, round(rng.uniform(0.5, 1.5) * 4))},
        "queue": {"lease_seconds": rng.choice((2.0, 120.0, 120.0)), "num_units": rng.choice((1, 1, 2))},
        "telemetry": {"samples_per_step": 0},
        "eval": {"path": rng.choice((None, "generated:arithmetic")), "num_prompts": 2, "every_steps": rng.choice((None, None, 1))},
    }
    if tree["eval"]["path"] is None:
        del tree["eval"]["every_steps"]
    else:
        tree["eval"]["num_workers"] = random.Random(f"{mode}/{seed}/evaluators").choice((0, 0, 1, 2))
    if tree["algorithm"]["kl_coefficient"]:
        tree["train"]["reference"] = rng.choice(("fused", "task"))
    costs = Costs(
        decode_step_seconds=rng.choice((0.0, 0.005, 0.01)),
        forward_backward_seconds=rng.choice((0.0, 0.02, 0.2)),
        publish_seconds=rng.choice((0.0, 0.05, 0.5)),
        fetch_seconds=rng.choice((0.0, 0.1, 1.0)),
        install_seconds=rng.choice((0.0, 0.02, 0.5)),
        reward_seconds=rng.choice((0.0, 0.01, 0.2)),
        load_seconds=rng.choice((0.0, 1.0)),
        lengths=Lengths(prompt=16, response_median=rng.choice((20.0, 80.0)), response_sigma=rng.choice((0.3, 1.2))),
    )
    layouts: tuple[dict[str, int], ...] = ({}, {}, {"dp": 2}, {"dp": 3}, {"pp": 2}, {"dp": 2, "pp": 2})
    layout = rng.choice([layout for layout in layouts if layout.get("dp", 1) <= tree["train"]["prompts_per_step"]])
    tree["train"]["pipeline_micro_batches"] = rng.randint(1, 4)
    options = {key: value for key, value in tree["schedule"].items() if key != "name"}
    staleness = build("schedule", tree["schedule"]["name"], options, SCHEDULES).max_staleness
    tree["run"]["steps"] = 3 + 2 * staleness if staleness > 1 else 3 + staleness
    _draw_updates(tree, layout.get("dp", 1), random.Random(f"{mode}/{seed}/updates"))
    _draw_candidates(tree, random.Random(f"{mode}/{seed}/candidates"))
    tree["plan"] = {"train": layout}
    algorithm = make_algorithm(parse(tree))
    if algorithm.critic is not None:
        tree["plan"]["values"] = {"num_workers": random.Random(f"{mode}/{seed}/values").choice((0, 1, 3))}
    may_skip = algorithm.is_zero_without_advantages
    tree["train"]["skip_zero_advantages"] = may_skip and random.Random(f"{mode}/{seed}/skipping").random() < 0.6
    return parse(tree), costs


def _draw_updates(tree: dict[str, Any], num_ranks: int, rng: random.Random) -> None:
    """Some runs have several updates a step, some a critic, some advantages that wait for the whole batch."""
    prompts, train, algorithm = tree["train"]["prompts_per_step"], tree["train"], tree["algorithm"]
    parts = [count for count in (1, 2, 3, 4) if prompts % count == 0 and prompts // count >= num_ranks]
    if rng.random() < 0.4:
        train |= {"epochs": rng.randint(1, 2), "mini_batches": rng.choice(parts), "old": "rollout"}
    if tree["schedule"].get("membership") != "first_come" and rng.random() < 0.4:
        algorithm |= {"name": "ppo", "kl_place": "loss", "held_steps": rng.randint(0, 1)}
        algorithm["normalise_advantages"] = rng.random() < 0.3
    elif rng.random() < 0.3:
        algorithm |= {"name": "reinforce_plus_plus", "baseline": "group"}


def _draw_candidates(tree: dict[str, Any], rng: random.Random) -> None:
    """Some runs choose the groups that they train."""
    train, algorithm = tree["train"], tree["algorithm"]
    if tree["schedule"].get("membership") == "first_come" or rng.random() < 0.6:
        return
    train |= {"oversampling": rng.choice((1.0, 1.3, 2.0)), "max_candidates": 20 + 20 * train["prompts_per_step"]}
    if algorithm["name"] == "grpo":
        algorithm |= {"name": "dapo", "dynamic_sampling": True}
    else:
        train["old"] = "rollout"
        algorithm["path"] = f"{VARIED}:{'VariedPPO' if algorithm.pop('name') == 'ppo' else 'VariedReinforce'}"
