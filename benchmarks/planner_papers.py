"""The planner beside the figures of the two papers, simulated by computed costs; and how long it searches 1,024 devices.

    python benchmarks/planner_papers.py [--parts scaling tables search plans] [--models 7B 32B] [--sizes 32 64] [--json FILE]

scaling   AsyncFlow's Figure 10: 7B and 32B on 32 to 1,024 devices; half of them train, half generate, and weights are one version
          old (`delayed`). The baseline has all tasks on all devices, one after another, at the same costs.
tables    Periodic Asynchrony's Tables 1 to 4: ratios of trained tokens per second and device, of the recipes in recipes/papers.
search    The best plan for 1,024 devices: seconds, and numbers of plans. Its aim, a minute, is absolute: it is how long somebody
          waits for a plan.
plans     The planner's own on-policy plan at each size of Figure 10, beside the paper's division.

Assumptions, since neither paper's text says them: the device (ascend-910b-64gb.yaml), 512 prompts a step with 16 responses for
Figure 10, whatever the number of devices, the cut of models (LAYOUTS) and lengths of responses (in each configuration below).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from figures import Figure, finish, parser

from asyncflow.config import Config, load
from asyncflow.planner import cost
from asyncflow.planner.bounds import Bound
from asyncflow.planner.part import part_of
from asyncflow.planner.plan import PlanRequest, described, find_plan, request
from asyncflow.planner.search import Plan, simulated
from asyncflow.settings import Choice
from asyncflow.simulation.seeds import Simulators

RECIPES = Path("recipes/papers")
DEVICE = "ascend-910b-64gb"
SIZES = (32, 64, 128, 256, 512, 1024)
LAYOUTS = {"7B": (4, 1, 2), "32B": (8, 2, 8)}
"""Tensor parallel and pipeline stages of training, tensor parallel of generation."""
MODELS = {"7B": "qwen2.5-7b-gsm8k.yaml", "32B": "deepseek-r1-distill-qwen-32b-64-devices.yaml"}
LINEARITY = {"7B": 0.65, "32B": 0.88}
OF_FIGURE_10 = [
    "model.max_context_tokens=4096", "data.max_prompt_tokens=1024", "rollout.max_new_tokens=3072", "rollout.group_size=16",
    "rollout.num_slots=128", "train.prompts_per_step=512", "train.responses_per_micro_batch=1",
    "train.activation_checkpointing=true",
    "plan.lengths={prompt: 300, response_median: 1000, response_sigma: 0.6}",
]  # fmt: skip
LENGTHS_8B = "plan.lengths={prompt: 150, response_median: 5000, response_sigma: 0.6}"
LENGTHS_32B = "plan.lengths={prompt: 150, response_median: 2500, response_sigma: 0.6}"
LENGTHS_7B = "plan.lengths={prompt: 104, response_median: 220, response_sigma: 0.5}"
EAGER = {"pass_microseconds": 180_000.0, "launch_microseconds": 15_000.0}
"""Fixed times of Periodic Asynchrony's system, whose kernels are started one by one: assumptions from three of its figures, of 7B.
Micro-batches of one response (354 tokens; 54.5 tokens a second and device) take 0.81 s, those of 16 (4,104 tokens; 435.6) 1.62 s:
0.73 s that do not depend on the tokens, in four passes. What a synchronous step (218.4) takes longer than an asynchronous one, 103
s, is generation: some 25 ms a decode step, of which the weights explain 10. So two ratios of 7B are no predictions; those of 8B and
32B are."""
UNKNOWN_HALVES = "its times of training and of generation are not in the text, and the ratio is 2 only if they are equal"
UNKNOWN_BATCH = "whether its batch grows with the devices is not in the text"
MISSING = {
    "8B asynchronous / synchronous": UNKNOWN_HALVES,
    "7B asynchronous / synchronous": UNKNOWN_HALVES,
    "32B asynchronous / synchronous": "its layout on 48 devices and its lengths are not in the text",
    "7B shared prompt / one response a micro-batch": "the fixed time of its micro-batch, which one response pays alone, is unknown",
    "8B 32 / 16 devices, the same batch": UNKNOWN_BATCH,
    "8B 64 / 16 devices, the same batch": UNKNOWN_BATCH,
    "8B 32 / 16 devices, twice the batch": UNKNOWN_BATCH,
    "8B 64 / 16 devices, four times the batch": UNKNOWN_BATCH,
}
"""For a ratio that is more than 15% off: the assumption of the paper that is missing."""


async def asked_for(recipe: str, overrides: list[str]) -> PlanRequest:
    asked = await request(load(RECIPES / recipe, [*overrides]), device=DEVICE)
    train = asked.config.train.model_copy(update={"engine": Choice(name="megatron")})  # both papers train with Megatron's like
    return replace(asked, config=asked.config.model_copy(update={"train": train}))


async def rate(config: Config, asked: PlanRequest, devices: int, simulators: Simulators) -> float:
    """Trained tokens per second and device of a configuration that is given, not searched."""
    part = part_of(config, config.layout.dp, config.rollout.num_workers)
    plan = Plan(config, devices, {}, cost.estimate(config, asked.model), Bound(0.0, ""), part)
    done = await simulated(plan, simulators)
    assert done.outcome is not None
    if done.outcome.violations:
        raise SystemExit(f"{described(plan)}: {done.outcome.violations[0]}")
    return done.tpspd


def divided(model: str, size: int, *, is_colocated: bool) -> list[str]:
    """Settings of Figure 10: half of the devices for each pool, or all for both, one after the other."""
    tp, pp, of_rollout = LAYOUTS[model]
    own = size if is_colocated else size // 2
    return [
        *OF_FIGURE_10,
        f"plan.train={{dp: {own // (tp * pp)}, tp: {tp}, pp: {pp}}}",
        f"rollout.engine={{name: vllm, tensor_parallel: {of_rollout}, instances: 1}}",
        f"rollout.num_workers={own // of_rollout}",
        f"schedule={'synchronous' if is_colocated else 'delayed'}",
    ]


async def rates(model: str, sizes: Sequence[int], simulators: Simulators, *, is_colocated: bool) -> list[float]:
    """Throughput of Figure 10 by number of devices, per device."""
    every = [await asked_for(MODELS[model], divided(model, size, is_colocated=is_colocated)) for size in sizes]
    return await asyncio.gather(*(rate(asked.config, asked, size, simulators) for asked, size in zip(every, sizes, strict=True)))


async def scaling(models: list[str], simulators: Simulators) -> list[Figure]:
    """Throughput by number of devices, its linearity, and its ratio to the co-located baseline."""
    figures = []
    for model in models:
        apart, together = [await rates(model, SIZES, simulators, is_colocated=is_colocated) for is_colocated in (False, True)]
        for size, ours, baseline in zip(SIZES, apart, together, strict=True):
            rest = f"co-located {baseline * size:12,.0f}: {ours / baseline:.2f}x"
            print(f"{model:4} {size:5} devices: {ours * size:12,.0f} tokens/s, {rest}")
        at = SIZES.index(512)  # over 16 times as many as at first
        linearity = apart[at] / apart[0]
        print(f"{model:4} linearity over 16 times the devices {linearity:.2f} (paper: {LINEARITY[model]})")
        mean = sum(ours / baseline for ours, baseline in zip(apart, together, strict=True)) / len(SIZES)
        figures += [
            Figure(f"{model} linearity, 32 to 512 devices (paper {LINEARITY[model]})", linearity, ""),
            Figure(f"{model} over co-located, mean (paper 1.59, both models)", mean, "x"),
        ]
    return figures


async def tables(simulators: Simulators) -> list[Figure]:
    """Ratios of the second paper beside ours, and where they differ by more than 15%, what is missing."""
    small, large = "qwen3-8b-deepscaler.yaml", "deepseek-r1-distill-qwen-32b-48-npus.yaml"
    of_8b, of_7b, of_32b = [LENGTHS_8B], [LENGTHS_7B], [LENGTHS_32B]
    runs: dict[str, tuple[str, list[str], int]] = {
        "8B periodic": (small, of_8b, 16),
        "8B synchronous": (small, [*of_8b, "schedule=synchronous"], 16),
        "7B periodic": ("qwen2.5-7b-gsm8k.yaml", of_7b, 16),
        "7B synchronous": ("qwen2.5-7b-gsm8k.yaml", [*of_7b, "schedule=synchronous"], 16),
        "7B unshared": ("qwen2.5-7b-gsm8k.yaml", [*of_7b, "train.responses_per_micro_batch=1"], 16),
        "32B periodic": (large, of_32b, 48),
        "32B synchronous": (large, [*of_32b, "schedule=synchronous"], 48),
        "8B 32": (small, [*of_8b, "plan.train.dp=2", "rollout.num_workers=8"], 32),
        "8B 64": (small, [*of_8b, "plan.train.dp=4", "rollout.num_workers=16"], 64),
        "8B 32, 64 prompts": (small, [*of_8b, "plan.train.dp=2", "rollout.num_workers=8", "train.prompts_per_step=64"], 32),
        "8B 64, 128 prompts": (small, [*of_8b, "plan.train.dp=4", "rollout.num_workers=16", "train.prompts_per_step=128"], 64),
    }

    async def one(recipe: str, overrides: list[str], devices: int) -> float:
        asked = await asked_for(recipe, overrides)
        asked = replace(asked, model=replace(asked.model, hardware=asked.model.hardware.model_copy(update=EAGER)))
        return await rate(asked.config, asked, devices, simulators)

    seen = dict(zip(runs, await asyncio.gather(*(one(*run) for run in runs.values())), strict=True))
    for name, value in seen.items():
        print(f"{name:20} {value:8.1f} tokens a second and device")
    ratios = {
        "8B asynchronous / synchronous": ("8B periodic", "8B synchronous", 192.3 / 100.0),
        "7B asynchronous / synchronous": ("7B periodic", "7B synchronous", 435.6 / 218.4),
        "32B asynchronous / synchronous": ("32B periodic", "32B synchronous", 33.4 / 26.2),
        "7B shared prompt / one response a micro-batch": ("7B periodic", "7B unshared", 435.6 / 54.5),
        "8B 32 / 16 devices, the same batch": ("8B 32", "8B periodic", 171.8 / 188.2),
        "8B 64 / 16 devices, the same batch": ("8B 64", "8B periodic", 163.2 / 188.2),
        "8B 32 / 16 devices, twice the batch": ("8B 32, 64 prompts", "8B periodic", 171.8 / 188.2),
        "8B 64 / 16 devices, four times the batch": ("8B 64, 128 prompts", "8B periodic", 163.2 / 188.2),
    }
    figures = []
    for name, (above, below, paper) in ratios.items():
        ours = seen[above] / seen[below]
        figures.append(Figure(f"{name} (paper {paper:.2f})", ours, "x"))
        if abs(ours / paper - 1) > 0.15:
            print(f"{name}: {ours:.2f}, in the paper {paper:.2f}: {MISSING[name]}")
    return figures


async def search_figures() -> list[Figure]:
    """Seconds and counts of a search over 1,024 devices."""
    asked = replace(await asked_for(MODELS["7B"], OF_FIGURE_10), devices=1024)
    began = time.monotonic()
    found = await find_plan(asked)
    seconds = time.monotonic() - began
    print(f"best for 1,024 devices: {described(found.plans[0])}; {json.dumps(found.counts)}")
    return [
        Figure("search over 1,024 devices", seconds, "s", "<= 60"),
        *(Figure(f"search: {name}", count, "plans") for name, count in found.counts.items()),
    ]


async def plan_figures(models: list[str], sizes: list[int], simulators: Simulators) -> list[Figure]:
    """The planner's own plan at each size, over the paper's division."""
    figures = []
    for model in models:
        for size, paper in zip(sizes, await rates(model, sizes, simulators, is_colocated=False), strict=True):
            asked = replace(await asked_for(MODELS[model], OF_FIGURE_10), devices=size)
            found = await find_plan(asked, rows=8_000)
            best = found.plans[0]
            gain = best.tpspd * best.devices / size / paper
            print(f"{model:4} {size:5} devices: {gain:.2f}x by {described(best)}", flush=True)
            figures.append(Figure(f"{model} on {size}: planned, on-policy, over the paper's division", gain, "x"))
    return figures


async def run(parts: list[str], models: list[str], sizes: list[int]) -> list[Figure]:
    figures: list[Figure] = []
    async with Simulators(2) as simulators:
        if "scaling" in parts:
            figures += await scaling(models, simulators)
        if "tables" in parts:
            figures += await tables(simulators)
        if "plans" in parts:
            figures += await plan_figures(models, sizes, simulators)
    if "search" in parts:
        figures += await search_figures()
    return figures


def main() -> Any:
    arguments = parser(__doc__)
    every = ["scaling", "tables", "search", "plans"]
    arguments.add_argument("--parts", nargs="+", choices=every, default=every)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS], help="of Figure 10")
    arguments.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=[*SIZES], help="devices of `plans`")
    given = arguments.parse_args()
    return finish(asyncio.run(run(given.parts, given.models, given.sizes)), given.json)


if __name__ == "__main__":
    raise SystemExit(main())
