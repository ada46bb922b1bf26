"""What the planner foretells, beside what happens: step times, simulated runs, the order of plans, what-ifs, a planted flaw.

    python benchmarks/planner.py [--parts steps sleeping order what_if flaw] [--few] [--seconds N] [--dir FOLDER] [--json FILE]

Predictions are in FOLDER/predictions.json before anything that they foretell is run, measurements in FOLDER/measured.json. With
`--seconds` no run begins later than that: another call with the same folder continues. A machine's speed drifts, by more than the
errors that are looked for. So a configuration is predicted as a multiple of a base run's step time, the base is run again before
and after every three configurations, and what is measured is a multiple of their mean: a ratio inside one call. A run beside which
other programs have computed is made again. `--few`: the first configuration of each kind alone, to try the program.

steps      The quickstart's model, of 0.44M parameters, with dp 1 and 2, and a random one of 4M are calibrated by a base run each.
           Then configurations are predicted that differ from it in schedule, workers and slots, or in prompts, group size and
           lengths. Responses are as long as they are drawn, so that learning does not change them.
sleeping   Real processes with engines that sleep, against the simulation of the same. What is not simulated is the time that loops,
           queue and processes take.
order      Twelve plans of one workload, which are among those of `steps`: the one predicted to be the fastest against the fastest.
what_if    From the quickstart's own run to other configurations of it, whose models learn.
flaw       Costs measured with dp 2, and the same with the collectives counted twice, held against the run's pieces.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from figures import Figure, finish, parser, run_name, runs_folder
from lognormal import DrawnLengths, make_model

from asyncflow.config import Config, load, parse
from asyncflow.control import SCHEDULES
from asyncflow.engines.costs import Costs
from asyncflow.planner.measured import Measurement, Prediction, fitted, means, predicted, residuals, what_if
from asyncflow.planner.pieces import read_run, samples
from asyncflow.run.job import Job
from asyncflow.simulation.run import simulate
from asyncflow.telemetry.report import REPORT_FILE

ROOT = Path(__file__).parents[1]
TINY = ROOT / "recipes/models/tiny-arithmetic"
DRAWN, SLEEPING_ROLLOUT, SLEEPING_TRAIN = (
    f"{ROOT}/benchmarks/{name}"
    for name in ("lognormal.py:LognormalSlots", "sleeping_engines.py:SleepingRollout", "sleeping_engines.py:SleepingTrain")
)
STEPS = 7
ATTEMPTS = 2
OTHERS = 0.5
"""Cores that other programs may take while a run is measured. It is made again where they take more, up to `ATTEMPTS` times."""
PROMPT_TOKENS = 30

Override = Mapping[str, Any]
"""Of a base configuration: keys with dots; `sigma` of the lengths; and in multiples of the base's, `median` of the lengths,
`prompts` of a step, and `slots`."""

PLANS: Sequence[Override] = [
    {"schedule": schedule, "rollout.num_workers": workers, "slots": slots}
    for schedule in ("synchronous", "periodic", "delayed")
    for workers in (1, 2)
    for slots in (0.5, 2)
]
OTHER_WORK: Sequence[Override] = (
    {"schedule": "synchronous", "prompts": 1.5, "median": 0.67},
    {"schedule": "sub_step", "rollout.num_workers": 2, "rollout.group_size": 4, "prompts": 2},
    {"schedule": "periodic", "prompts": 0.5, "median": 2, "sigma": 0.9},
)
BASES: Sequence[tuple[str, int, Sequence[Override]]] = (("tiny", 1, OTHER_WORK), ("tiny", 2, OTHER_WORK), ("4m", 1, PLANS))
"""Model, data-parallel ranks, and what is predicted from its base."""
WHAT_IFS: Sequence[Override] = (
    {"schedule": "delayed"},
    {"schedule": "delayed", "rollout.num_workers": 1},
    {"train.prompts_per_step": 16},
    {"rollout.num_slots": 48},
)


@dataclass(frozen=True)
class Case:
    """A configuration, with what its run is predicted and then measured to take, in multiples of its base's step."""

    name: str
    config: Config
    predicted: float
    measured: float = 0.0

    @property
    def error(self) -> float:
        """|predicted - measured| / measured."""
        return abs(self.predicted / self.measured - 1)


# -- runs ---------------------------------------------------------------------------------------------------------------------


def of_base(folder: Path, name: str, model: str, dp: int = 1) -> dict[str, Any]:
    """Base of the workloads whose lengths are drawn, as a tree. The larger model has less to do, in about as many seconds."""
    group, prompts, slots, median = (8, 16, 32, 48.0) if model == "tiny" else (4, 8, 16, 32.0)
    engine = {"path": DRAWN, "median": median, "sigma": 0.6}
    return {
        "run": {"name": name, "dir": str(folder), "steps": STEPS, "overwrite": True},
        "model": {"path": str(models(folder)[model])},
        "data": {"path": "generated:arithmetic", "prompt_template": "{question}\n"},
        "reward": {"scorer": "final_answer"},
        "algorithm": "grpo",
        "schedule": "periodic",
        "rollout": {"engine": engine, "num_workers": 1, "num_slots": slots, "group_size": group, "max_new_tokens": 256},
        "train": {
            "prompts_per_step": prompts,
            "learning_rate": 1e-6,
            "skip_zero_advantages": False,
        },  # what is cut off has no reward
        "telemetry": {"trackers": []},
        "plan": {"train": {"dp": dp}},
    }


def varied(tree: Mapping[str, Any], name: str, override: Override) -> dict[str, Any]:
    """The tree with these overrides, under another name."""
    made: dict[str, Any] = json.loads(json.dumps(tree))
    made["run"]["name"] = name
    rollout, train = made["rollout"], made["train"]
    for key, value in override.items():
        match key:
            case "sigma":
                rollout["engine"]["sigma"] = float(value)
            case "median":
                rollout["engine"]["median"] *= value
            case "slots":
                rollout["num_slots"] = round(value * rollout["num_slots"])
            case "prompts":
                train["prompts_per_step"] = round(value * train["prompts_per_step"])
            case _:
                _put(made, key, value)
    return made


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Put a value below a key with dots."""
    *path, last = key.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
    tree[last] = value


class Records:
    """Numbers by name that earlier calls with the same folder have made, and the time until which runs may begin."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.few = folder, False
        self._ends = time.monotonic() + seconds
        self._files = {name: folder / f"{name}.json" for name in ("predictions", "measured")}
        read = {name: json.loads(file.read_text()) if file.exists() else {} for name, file in self._files.items()}
        self.predictions: dict[str, dict[str, float]] = read["predictions"]
        self.measured: dict[str, float] = read["measured"]

    def keep(self) -> None:
        """Write the files."""
        self._files["predictions"].write_text(json.dumps(self.predictions, indent=1))
        self._files["measured"].write_text(json.dumps(self.measured, indent=1))

    def run(self, config: Config, attempts: int = ATTEMPTS) -> Prediction:
        """Run a configuration, and return what it measures; again where other programs have computed meanwhile. Raises `TimeIsUp`
        where no run may begin any more."""
        for _ in range(attempts):
            if time.monotonic() > self._ends:
                raise TimeIsUp
            began, own, all_programs = time.monotonic(), own_seconds(), machine_seconds()
            assert asyncio.run(Job(config).run()), "the run was interrupted"
            others = (machine_seconds() - all_programs - own_seconds() + own) / (time.monotonic() - began)
            print(f"  {config.run.name}: other programs took {others:.2f} cores", flush=True)
            if others < OTHERS:
                break
        return means(read_run(config.run_dir)[2])

    def run_once(self, config: Config) -> None:
        """Run a configuration, unless an earlier call has done so."""
        if not (config.run_dir / REPORT_FILE).exists():
            self.run(config)

    def told(self, part: str, cases: Sequence[Case]) -> list[Case]:
        """Cases as they are predicted in the file, where they are noted unless they are there."""
        known = self.predictions.setdefault(part, {case.name: case.predicted for case in cases})
        self.keep()
        return [replace(case, predicted=known[case.name]) for case in cases]

    def measure(self, base: Config, cases: Sequence[Case]) -> list[Case]:
        """Cases with what is measured, as multiples of the mean of the base's runs before and after each three of them."""
        left = [case for case in cases if case.name not in self.measured]
        before = self.run(base).step_seconds if left else 0.0
        for start in range(0, len(left), 3):
            some = [(case, self.run(case.config).step_seconds) for case in left[start : start + 3]]
            after = self.run(base).step_seconds
            self.measured |= {case.name: 2 * seconds / (before + after) for case, seconds in some}
            self.keep()
            before = after
        done = [replace(case, measured=self.measured[case.name]) for case in cases]
        for case in done:
            print(f"    {case.name}: {case.predicted:.3f} predicted, {case.measured:.3f} measured ({case.error:.1%})", flush=True)
        return done


def own_seconds() -> float:
    """CPU seconds of this process and of all below it, those that have ended included."""
    parents: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has just ended
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
                seconds[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    below, total = [os.getpid()], 0.0
    while below:
        process = below.pop()
        total += seconds.get(process, 0.0)
        below += parents.get(process, [])
    return total


def machine_seconds() -> float:
    """CPU seconds of all programs of the machine, and those that its host has taken away."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


class TimeIsUp(Exception):
    """No run may begin any more in this call."""


def calibrated(records: Records, tree: Mapping[str, Any], known: Costs | None = None) -> Measurement:
    """Costs of a base, by a run of it; its lengths are those that are drawn. `known`: see `fitted`."""
    config = parse(varied(tree, f"{tree['run']['name']}-calibration", {}))
    records.run_once(config)
    found = fitted(*read_run(config.run_dir), known=known)
    found = msgspec.structs.replace(found, costs=with_lengths(found.costs, config))
    simulated = predicted(config, msgspec.structs.replace(found, simulated_seconds=0.0))
    found = msgspec.structs.replace(found, simulated_seconds=simulated.step_seconds)
    print("\n".join(f"    {line}" for line in found.lines()), flush=True)
    return found


def with_lengths(costs: Costs, config: Config) -> Costs:
    """Costs whose lengths are those that the configuration's engine draws."""
    drawn = config.rollout.engine.options
    lengths = DrawnLengths(prompt=costs.lengths.prompt, response_median=drawn["median"], response_sigma=drawn["sigma"])
    return msgspec.structs.replace(costs, lengths=lengths)


def errors(part: str, done: Sequence[Case], median: float, most: float, least: int | None = None) -> list[Figure]:
    """Median error, and the one that nine of ten are within. `least`: configurations that there are to be."""
    found = sorted(case.error for case in done)
    ninth = found[max(0, -(-9 * len(found) // 10) - 1)]
    return [
        Figure(f"{part}: configurations", len(found), "", f">= {least}" if least else None),
        Figure(f"{part}: median error", 100 * statistics.median(found), "%", f"<= {median:g}"),
        Figure(f"{part}: nine of ten within", 100 * ninth, "%", f"<= {most:g}"),
    ]


# -- parts --------------------------------------------------------------------------------------------------------------------


def cases_of(
    records: Records, part: str, tree: Mapping[str, Any], overrides: Sequence[Override], known: Costs | None = None
) -> tuple[Config, Measurement, list[Case]]:
    """A base, calibrated, and its predicted variations, which are noted for this part. `known`: see `fitted`."""
    base, found, cases = parse(tree), calibrated(records, tree, known), []
    for override in overrides:
        name = run_name(base.run.name, *(f"{key.split('.')[-1]}={value}" for key, value in override.items()))
        config = parse(varied(tree, name, override))
        costs = msgspec.structs.replace(found, costs=with_lengths(found.costs, config))
        cases.append(Case(name, config, predicted(config, costs).step_seconds / found.step_seconds))
    return base, found, records.told(f"{part}: {base.run.name}", cases)


def steps(records: Records) -> list[Figure]:
    """Step times of configurations that were not used for the calibration."""
    done: list[Case] = []
    known: dict[str, Costs] = {}
    for name, dp, overrides in BASES:
        tree = of_base(records.folder, f"{name}-dp{dp}", name, dp)
        base, measurement, cases = cases_of(records, "steps", tree, overrides[:1] if records.few else overrides, known.get(name))
        known.setdefault(name, measurement.costs)
        done += records.measure(base, cases)
    return errors("steps", done, 7, 15, None if records.few else 16)


def order(records: Records) -> list[Figure]:
    """The predicted best of twelve plans against the measured best."""
    base, _, cases = cases_of(records, "order", of_base(records.folder, "4m-dp1", "4m"), PLANS[::5] if records.few else PLANS)
    done = records.measure(base, cases)
    chosen, best = min(done, key=lambda case: case.predicted), min(done, key=lambda case: case.measured)
    print(f"  predicted best: {chosen.name}; measured best: {best.name}")
    return [Figure("order: predicted best over measured best", chosen.measured / best.measured, "", "<= 1.05")]


def from_quickstart(records: Records) -> list[Figure]:
    """What-ifs from the quickstart's own run."""
    own = [
        f"run.dir={records.folder}",
        "run.overwrite=true",
        f"model.path={TINY}",
        "eval.path=null",
        "telemetry.trackers=[]",
    ]
    base, cases = load(ROOT / "recipes/quickstart.yaml", own), []
    first = load(ROOT / "recipes/quickstart.yaml", [*own, f"run.name={base.run.name}-calibration"])
    records.run_once(first)
    for override in WHAT_IFS[:1] if records.few else WHAT_IFS:
        words = [f"{key}={value}" for key, value in override.items()]
        name = run_name("what-if", *(word.split(".")[-1] for word in words))
        found = what_if(first.run_dir, words)
        config = load(ROOT / "recipes/quickstart.yaml", [*own, *words, f"run.name={name}"])
        cases.append(Case(name, config, found.predicted.step_seconds / found.measured.step_seconds))
    done = records.measure(base, records.told("what_if", cases))
    return [Figure("what_if: largest error", 100 * max(case.error for case in done), "%", "<= 10")]


def sleeping(records: Records) -> list[Figure]:
    """Real processes with sleeping engines against the simulation of the same configuration."""
    costs = {
        "decode_step_seconds": 0.02, "decode_slot_seconds": 0.0005, "prefill_seconds": 0.02, "prefill_token_seconds": 0.0,
        "forward_backward_seconds": 0.05, "train_token_seconds": 0.0001, "optim_step_seconds": 0.1, "publish_seconds": 0.0,
        "fetch_seconds": 0.0, "install_seconds": 0.05, "reward_seconds": 0.0, "load_seconds": 0.0,
        "lengths": {"prompt": PROMPT_TOKENS, "response_median": 40.0, "response_sigma": 0.6},
    }  # fmt: skip
    cases = []
    for workers in (4,) if records.few else (4, 16):
        for schedule in ("delayed",) if records.few else SCHEDULES:
            tree = of_base(records.folder, run_name("sleeping", schedule, str(workers)), "tiny")
            tree["schedule"], tree["run"]["steps"] = schedule, 8
            tree["rollout"] |= {"engine": {"path": SLEEPING_ROLLOUT, "costs": costs}, "num_workers": workers, "num_slots": 16}
            tree["train"] |= {"engine": {"path": SLEEPING_TRAIN, "costs": costs}, "prompts_per_step": 4 * workers}
            config = parse(tree)
            simulated = means(simulate(config, costs=msgspec.convert(costs, Costs)).rows).step_seconds
            cases.append(Case(config.run.name, config, simulated))
    done = []
    for case in records.told("sleeping", cases):
        if case.name not in records.measured:
            records.measured[case.name] = records.run(case.config, attempts=1).step_seconds  # it computes next to nothing
            records.keep()
        done.append(replace(case, measured=records.measured[case.name]))
        shown = f"{case.predicted:.3f} s simulated, {done[-1].measured:.3f} s by the clock ({done[-1].error:.1%})"
        print(f"    {case.name}: {shown}", flush=True)
    return errors("sleeping", done, 3, 7)


def flaw(records: Records) -> list[Figure]:
    """Costs with the collectives counted twice are reported, and those without are not."""
    known = calibrated(records, of_base(records.folder, "tiny-dp1", "tiny")).costs
    tree = of_base(records.folder, "tiny-dp2", "tiny", dp=2)
    found, config = calibrated(records, tree, known), parse(varied(tree, "tiny-dp2-calibration", {}))
    pieces = samples(config, read_run(config.run_dir)[1], found.costs.lengths.prompt)
    flawed = msgspec.structs.replace(found.costs, collectives_seconds=2 * found.costs.collectives_seconds)
    seen = {}
    for name, costs in (("as measured", found.costs), ("collectives twice", flawed)):
        (of_training,) = residuals(costs, {"forward_backward": pieces["forward_backward"]})
        seen[name] = of_training
        print(f"  {name}: {of_training.line()}  {of_training.warning()}")
    return [
        Figure("flaw: warnings without it", float(seen["as measured"].is_bad), "", "<= 0"),
        Figure("flaw: warnings with it", float(seen["collectives twice"].is_bad), "", ">= 1"),
    ]


@cache
def models(folder: Path) -> dict[str, Path]:
    """Models by name: of 0.44M and of 4M parameters."""
    return {"tiny": TINY, "4m": make_model(folder.resolve() / "model-4m", "random:qwen2-small")}


PARTS: dict[str, Callable[[Records], list[Figure]]] = {
    "steps": steps,
    "sleeping": sleeping,
    "order": order,
    "what_if": from_quickstart,
    "flaw": flaw,
}


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="which of the figures to make")
    arguments.add_argument("--few", action="store_true", help="the first configuration of each kind alone")
    arguments.add_argument("--seconds", type=float, default=math.inf, help="begin no run later; the same call continues")
    given = arguments.parse_args()
    figures: list[Figure] = []
    left = list(given.parts)
    with runs_folder(given.dir) as folder:
        records = Records(folder, given.seconds)
        records.few = given.few
        with suppress(TimeIsUp):
            while left:
                print(f"{left[0]}:", flush=True)
                figures += PARTS[left[0]](records)
                del left[0]
    if left:
        print(f"the time is up: {', '.join(left)} left")
    return max(finish(figures, given.json), bool(left))


if __name__ == "__main__":
    sys.exit(main())
