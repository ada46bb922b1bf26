"""Episodes of several turns: keys that stay between turns, environments that are slow, processes that are killed.

    python benchmarks/agents.py [--parts kept slow killed recipes] [--moments N] [--json FILE]

kept      the embedded engine plays 64 episodes of 8 turns, and generates 64 single turns of the same length
slow      256 episodes at once on 64 slots, environments that take 0.5 s a turn (lognormal): a sleeping engine, then the real one
killed    recipes/calculator.yaml, 4 steps, killed at 20 moments (rollout worker, environment process, driver with --resume, in
          turn): the fingerprints of all steps beside those of a run that nobody disturbs; some minutes, so only by name
recipes   the two recipes, seeds 0, 1, 2: held-out accuracy before and after; a quarter of an hour, so only by name

The bound of a slow part is what full decode steps would take for all its tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import psutil
from figures import Figure, finish, parser, runs_folder

from asyncflow.cluster.clock import VirtualLoop
from asyncflow.engines.base import NO_TOKENS, SampleKey, Sampling
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.sleeping.rollout import SleepingRolloutEngine
from asyncflow.environments.sleeping import SleepingEnvironments, SleepingFormat

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "recipes" / "models" / "tiny-arithmetic"
SLOTS, TURNS, TURN_TOKENS, OBSERVED = 64, 8, 24, 8
AT_ONCE, SLOW_TURNS, EPISODES = 256, 4, 1024
CONTEXT = 512
TURN_SECONDS = 0.32
"""What a turn of the policy takes between two of slow environments: 256 episodes then want 1.4 times the slots that there are."""
PROMPT = np.arange(20, 60)


async def turn(engine: Any, key: SampleKey, after: np.ndarray, length: int, *, keeps: bool) -> np.ndarray:
    """One turn of sample 0. Returns its tokens."""
    stream = engine.generate(PROMPT, samples=[0], sampling=Sampling(1.0, length, keeps=keeps), key=key, after=after)
    (made,) = [response async for response in stream]
    return made.token_ids


async def play(engine: Any, number: int, turns: int, length: int, observe: Callable[[int], Awaitable[None]]) -> None:
    """An episode of so many turns, with an observation between two of them."""
    key, after = SampleKey(0, number), NO_TOKENS
    for count in range(turns):
        made = await turn(engine, key, after, length, keeps=count + 1 < turns)
        await observe(number)
        after = np.concatenate([after, made, np.full(OBSERVED, 7)])
    engine.forget(key, 0)


async def kept() -> list[Figure]:
    """Episodes beside single turns of the same length, in turn, three times each."""
    length = TURNS * TURN_TOKENS + (TURNS - 1) * OBSERVED
    engine = SlotEngine(MODEL, num_slots=SLOTS, num_parked=SLOTS, max_context=len(PROMPT) + length + OBSERVED, stop_ids=())

    async def at_once(_: int) -> None:
        """An environment that answers at once."""

    async def seconds(turns: int, tokens: int, first: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(play(engine, first + number, turns, tokens, at_once) for number in range(SLOTS)))
        return time.perf_counter() - began

    await seconds(1, 8, 10_000)
    ratios, computed, one, many = [], 0, [], []
    for repeat in range(3):
        one.append(await seconds(1, length, 1000 * repeat))
        before = engine.num_computed
        many.append(await seconds(TURNS, TURN_TOKENS, 1000 * repeat + 500))
        computed = engine.num_computed - before
        ratios.append(many[-1] / one[-1])
    await engine.close()
    return [
        Figure("8 turns: tokens computed / tokens in the episodes", computed / (SLOTS * (len(PROMPT) + length)), "", "<= 1.05"),
        Figure("8 turns: seconds / seconds of one turn of the same length", statistics.median(ratios), "", "<= 1.15"),
        Figure("one turn of the same length", statistics.median(one), "s"),
    ]


class Steady(NamedTuple):
    """Episodes over slow environments, until the last of them begins: in a run the next step's take the place of those that end."""

    slots_busy: float
    tokens: int
    seconds: float

    def figures(self, what: str, step_seconds: float) -> list[Figure]:
        """Figures; the bound is what a full decode step takes, for each `SLOTS` tokens."""
        bound = self.tokens / SLOTS * step_seconds
        return [
            Figure(f"slow environments, {what}: slots busy", self.slots_busy, "", ">= 0.85"),
            Figure(f"slow environments, {what}: seconds / bound", self.seconds / bound, "", "<= 1.1"),
            Figure(f"slow environments, {what}: tokens a second", self.tokens / self.seconds, "1/s"),
        ]


async def slow(engine: Any, num_active: Callable[[], int], step_seconds: float) -> Steady:
    """Play `EPISODES` episodes, `AT_ONCE` at a time."""
    clock = asyncio.get_running_loop().time
    environments = SleepingEnvironments(seconds=0.5, sigma=0.5, turns=10**9, deadline_seconds=60.0)
    action, room = SleepingFormat(OBSERVED).action(np.array([1]), is_finished=True), asyncio.Semaphore(AT_ONCE)
    seen: list[tuple[float, int, int]] = []  # when, active slots, tokens computed
    last_begun = 0.0

    async def episode(number: int) -> None:
        nonlocal last_begun
        async with room:
            last_begun = clock()
            environment, _ = await environments.begin({}, number)

            async def observe(_: int) -> None:
                await environment.step(action)

            await play(engine, number, SLOW_TURNS, turn_tokens(step_seconds), observe)

    async def watch() -> None:
        while True:
            seen.append((clock(), num_active(), engine.num_computed))
            await asyncio.sleep(0.005)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(episode(number) for number in range(EPISODES)))
    watching.cancel()
    steady = [each for each in seen if seen[0][0] + 1.0 <= each[0] <= last_begun]
    seconds, computed = steady[-1][0] - steady[0][0], steady[-1][2] - steady[0][2]
    return Steady(statistics.fmean(n for _, n, _ in steady) / SLOTS, computed, seconds)


def turn_tokens(step_seconds: float) -> int:
    """Tokens of a turn of `TURN_SECONDS`, as far as all turns fit into the context."""
    return min(round(TURN_SECONDS / step_seconds), (CONTEXT - len(PROMPT)) // SLOW_TURNS - OBSERVED)


def slow_asleep() -> list[Figure]:
    """Sleeping engines, in virtual time: a step takes 10 ms, however many slots are active."""
    costs = Costs(decode_step_seconds=0.01, decode_slot_seconds=0.0, prefill_token_seconds=0.01 / SLOTS)
    costs = msgspec.structs.replace(costs, lengths=Lengths(response_median=10.0**6))

    async def asleep() -> list[Figure]:
        engine = SleepingRolloutEngine(costs, num_slots=SLOTS, num_parked=AT_ONCE - SLOTS, max_context=CONTEXT)
        try:
            return (await slow(engine, lambda: len(engine._active), 0.01)).figures("asleep", 0.01)
        finally:
            await engine.close()

    loop = VirtualLoop()
    try:
        return loop.run_until_complete(asleep())
    finally:
        loop.close()


async def full_step(engine: SlotEngine, number: int) -> float:
    """Seconds of a decode step of `SLOTS` slots, alone."""
    engine.timings()  # of what was before
    sampling = Sampling(1.0, CONTEXT - len(PROMPT))
    async for _ in engine.generate(PROMPT, samples=range(SLOTS), sampling=sampling, key=SampleKey(1, number)):
        pass
    full = [timing for timing in engine.timings() if timing.task == "decode_step" and timing.rows == SLOTS * timing.calls]
    return statistics.median((timing.end - timing.start) / timing.calls for timing in full)


async def slow_real() -> list[Figure]:
    """The embedded engine. Its step is the mean of before and after: on a machine that others use, one alone is chance."""
    engine = SlotEngine(MODEL, num_slots=SLOTS, num_parked=AT_ONCE - SLOTS, max_context=CONTEXT, stop_ids=())
    try:
        before = await full_step(engine, 0)
        steady = await slow(engine, lambda: engine._slots._rows.num, before)
        return steady.figures("real", statistics.fmean((before, await full_step(engine, EPISODES))))
    finally:
        await engine.close()


def train(folder: Path, name: str, *overrides: str) -> subprocess.Popen[bytes]:
    """A run of a recipe, as a user starts it, in a session of its own."""
    command = [sys.executable, "-m", "asyncflow", "train", *overrides, f"run.dir={folder}", f"run.name={name}"]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def prints(folder: Path, name: str) -> dict[int, Any]:
    """The fingerprint of each step, whatever the order of its groups; of one that was made again after a resume, the last one."""
    steps = [json.loads(line) for line in (folder / name / "fingerprints.jsonl").read_text().splitlines()]
    return {step["step"]: {**step, "groups": sorted(step["groups"], key=lambda group: group["group"])} for step in steps}


def killed(folder: Path, moments: int) -> list[Figure]:
    """Kill one of three kinds of process at each moment of a run of 4 steps."""
    recipe = ["recipes/calculator.yaml", "run.steps=4", "train.prompts_per_step=16", "eval.path=null"]
    recipe += ["telemetry.fingerprints=true", "checkpoint.every_steps=1"]
    began = time.monotonic()
    assert train(folder, "undisturbed", *recipe).wait() == 0, (folder / "undisturbed.log").read_text()[-800:]
    whole, expected = time.monotonic() - began, prints(folder, "undisturbed")
    rng, equal, hit = random.Random(0), 0, 0
    for moment in range(moments):
        kind, name = ("rollout", "environment", "driver")[moment % 3], f"killed-{moment}"
        run = train(folder, name, *recipe)
        time.sleep(rng.uniform(0.4, 0.95) * whole)
        environments = [
            p for p in psutil.Process(run.pid).children(recursive=True) if "asyncflow.environments.worker" in p.cmdline()
        ]
        victim = run.pid if kind == "driver" else 0
        if environments and kind != "driver":
            victim = environments[0].pid if kind == "environment" else environments[0].ppid()
        if victim:
            hit += 1
            os.kill(victim, signal.SIGKILL)
        run.wait()
        if kind == "driver":
            train(folder, name, *recipe, "--resume").wait()
        equal += prints(folder, name) == expected
        print(f"moment {moment}: {kind} {'killed' if victim else 'was not there'}", flush=True)
    return [
        Figure(f"killed at {moments} moments: runs whose steps have equal bits", equal, "runs", f">= {moments}"),
        Figure("of these, moments at which there was somebody to kill", hit, "runs"),
    ]


def recipes(folder: Path) -> list[Figure]:
    """Held-out accuracy, of sampled answers, before and after."""
    figures = []
    for recipe in ("calculator", "guess"):
        for seed in range(3):
            name, began = f"{recipe}-{seed}", time.monotonic()
            code = train(folder, name, f"recipes/{recipe}.yaml", f"run.seed={seed}").wait()
            assert code == 0, (folder / f"{name}.log").read_text()[-800:]
            rows = [json.loads(line) for line in (folder / name / "eval.jsonl").read_text().splitlines()]
            first, last = rows[0]["accuracy/sampled"], rows[-1]["accuracy/sampled"]
            figures += [
                Figure(f"{recipe}, seed {seed}: held-out accuracy before", first, "", "<= 0.40"),
                Figure(f"{recipe}, seed {seed}: held-out accuracy after", last, "", ">= 0.90"),
                Figure(f"{recipe}, seed {seed}: whole run", time.monotonic() - began, "s"),
            ]
    return figures


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--parts", nargs="+", default=["kept", "slow"], choices=["kept", "slow", "killed", "recipes"])
    arguments.add_argument("--moments", type=int, default=20, help="at which something is killed")
    given = arguments.parse_args()
    figures: list[Figure] = []
    with runs_folder(given.dir) as folder:
        for part in given.parts:
            if part == "kept":
                figures += asyncio.run(kept())
            elif part == "slow":
                figures += [*slow_asleep(), *asyncio.run(slow_real())]
            else:
                figures += killed(folder, given.moments) if part == "killed" else recipes(folder)
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
