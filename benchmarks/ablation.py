"""AF's Table 1: what streaming and what the delayed update gain over one task at a time, and how much of it there is to be gained.

    python benchmarks/ablation.py [--parts sleeping real sharing] [--steps 14] [--dir FOLDER] [--json FILE]

Rollout, reward, reference and update are tasks of their own, on workers of their own:

    one task at a time              synchronous: a task starts when the one before it has done the whole batch
    streaming through the queue     periodic: a task starts with the first group
    delayed update                  delayed: rollout goes on under the old weights as well

The bound is what the durations of the first run allow. With done_i, when group i was generated (from the start of generation, in
order), and task_i, what each task took for it, a batch has passed all tasks after

    L = update_n, where  x_0 = done_i,  x_k = max(x_k, x_k-1) + task_k_i  for reward, reference, update in turn

and with W = optimiser step + publish + fetch + install no step is shorter than

    streaming   L + W
    delayed     max(rollout + install, reward, reference, update + optimiser step, (L + W) / 2)

rollout being the mean over its workers; weights are published and fetched beside the rest; the last term, because step s + 2
begins with the weights that step s makes. A run can be a little better than that: under `delayed`, a worker that is done early
takes more of the next batch. Of real engines, all on the same cores, no step is shorter than what all tasks compute / number of
cores, either.

Sleeping engines, in virtual time. AF tells its ratios, 1 : 2.01 : 2.74 (7B, 512 devices), and not what its tasks take. The costs
below are such that the durations allow about these ratios: the longest task takes 0.38 of the sum, as 2.74 demands, and responses
are lognormal and begin all at once, so that groups come late, as 2.01 demands.

Real engines: a tiny random model, on as many cores as there are.

Sharing (PA's Table 3 without its confound): {synchronous, periodic} x {8 responses share their prompt; each has its own}, with
micro-batches of as many packed tokens: prompts are six times as long as responses, so Lp + 8 Lr = 2 (Lp + Lr). PA compared with
micro-batches of one response, which are told, too.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from figures import Figure, finish, parser, run_name, runs_folder
from lognormal import make_model
from whole_runs import Run, run_real, run_sleeping

from asyncflow.engines.costs import Costs, Lengths

RUNGS = {"synchronous": "one task at a time", "periodic": "streaming through the queue", "delayed": "delayed update"}
PAPER = {"synchronous": 1.0, "periodic": 2.01, "delayed": 2.74}
PARTS = ("sleeping", "real", "sharing")
TASKS = ("reward", "reference", "forward_backward")
COSTS = Costs(
    decode_step_seconds=0.02,
    decode_slot_seconds=0.0001,
    reward_seconds=0.026,
    reference_token_seconds=9e-5,
    train_token_seconds=1.9e-4,
    optim_step_seconds=0.5,
    publish_seconds=0.3,
    fetch_seconds=0.6,
    install_seconds=0.1,
    lengths=Lengths(prompt=128, response_median=400, response_sigma=0.5),
)
HERE = Path(__file__).parent
MEDIAN, SIGMA = 20, 0.6
EXAMPLES = 3 * "A box holds 12 pens. How many pens do 7 boxes hold? 84\n"
"""With these, prompts have some 142 tokens: six times the mean response, exp(sigma^2 / 2) * median = 24."""
SHARING_PROMPTS = 16


def tree(folder: Path, name: str, schedule: str, steps: int, sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": steps, "dir": str(folder), "name": name, "overwrite": True},
        "data": {"path": "generated:arithmetic", "limit": 2000},
        "telemetry": {"trackers": [], "samples_per_step": 0, "flush_seconds": 0.05},
        "rollout": {"group_size": 8},
        "train": {"prompts_per_step": 32, "learning_rate": 1e-6},
        "algorithm": {"name": "grpo"},
    }
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}} | {"schedule": schedule}


def separate(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Every task on a worker of its own."""
    apart: dict[str, dict[str, Any]] = {
        "reward": {"place": "task"},
        "algorithm": {"kl_coefficient": 0.1},
        "train": {"reference": "task"},
    }
    return {name: {**sections.get(name, {}), **apart.get(name, {})} for name in {*sections, *apart}}


def real(model: Path) -> dict[str, dict[str, Any]]:
    engine = {"path": f"{HERE / 'lognormal.py'}:LognormalSlots", "median": MEDIAN, "sigma": SIGMA}
    return {
        "model": {"path": str(model)},
        "rollout": {"engine": engine, "num_slots": 64, "max_new_tokens": 96},
    }


# -- bounds ---------------------------------------------------------------------------------------------------------------------


def latency(run: Run, step: int) -> float:
    """L of the module's head."""
    groups = [span for span in run.spans if span.task == "generate_group" and span.step == step]
    began = min(span.start for span in groups)
    taken = [run.seconds(task, step) for task in TASKS]
    x = [0.0] * len(TASKS)
    for span in sorted(groups, key=lambda span: span.end):
        passed = span.end - began
        for k, of_task in enumerate(taken):
            passed = x[k] = max(x[k], passed) + of_task[span.group]
    return x[-1]


def durations(run: Run) -> dict[str, float]:
    """Mean seconds of a step by task; of `generate` and `install` by worker."""
    lanes = ("generate", "install", *TASKS, "optim_step")
    found = {
        task: statistics.fmean(run.activity(worker).busy.get(task, 0.0) for worker in run.workers(_pool(task))) / len(run.measured)
        for task in lanes
    }
    for task in ("publish", "fetch"):
        ended = [
            span.end - span.start
            for span in run.spans
            if span.task == task and any(start <= span.end <= end for start, end in run.windows)
        ]
        found[task] = statistics.fmean(ended)
    return found


def _pool(task: str) -> str:
    return {"generate": "rollout", "install": "rollout", "reward": "reward", "reference": "reference"}.get(task, "trainer")


def bounds(run: Run, cores: int | None = None) -> dict[str, float]:
    """Seconds that no step can be shorter than, by schedule, from a run of one task at a time."""
    took = durations(run)
    passed = statistics.fmean(latency(run, step) for step in run.measured)
    streaming = passed + took["optim_step"] + took["publish"] + took["fetch"] + took["install"]
    update = took["forward_backward"] + took["optim_step"]
    delayed = max(took["generate"] + took["install"], took["reward"], took["reference"], update, streaming / 2)
    computed = 0.0 if cores is None else (took["generate"] + took["reference"] + update) / cores
    return {"synchronous": run.mean("perf/step_seconds"), "periodic": max(streaming, computed), "delayed": max(delayed, computed)}


# -- what is printed --------------------------------------------------------------------------------------------------------------


def told(what: str, runs: Mapping[str, Run], least: Mapping[str, str], cores: int | None = None) -> list[Figure]:
    """A table of the three rungs, where their time went, and their figures."""
    one = runs["synchronous"]
    base, allowed, took = one.mean("perf/step_seconds"), bounds(one, cores), durations(one)
    print(f"\n{what}: one task at a time takes {base:.3f} s a step, of which")
    print("  " + ", ".join(f"{task} {seconds / base:.1%}" for task, seconds in took.items() if seconds / base >= 0.0005))
    print(f"\n{'':28}  s a step  ratio  paper  bound  of bound")
    figures = []
    for mode, name in RUNGS.items():
        seconds = runs[mode].mean("perf/step_seconds")
        reached = allowed[mode] / seconds
        print(
            f"{name:28}  {seconds:8.3f}  {base / seconds:5.2f}  {PAPER[mode]:5.2f}  {base / allowed[mode]:5.2f}  {reached:8.1%}",
            flush=True,
        )
        if mode != "synchronous":
            figures.append(Figure(f"{what}: {name}, ratio", base / seconds, ""))
            figures.append(Figure(f"{what}: {name}, of the bound", reached, "", least.get(mode)))
    where_it_went(runs)
    return figures


def where_it_went(runs: Mapping[str, Run]) -> None:
    """Of each worker's step: what it was busy for, and what it waited for."""
    reasons = ("data", "slowest group", "interval", "weights")
    print(f"\n{'where the rest went':40}      busy" + "".join(f"  {reason:>13}" for reason in reasons))
    for mode, run in runs.items():
        for worker in (worker for pool in ("rollout", "reward", "reference", "trainer") for worker in run.workers(pool)):
            waited = "".join(f"  {run.share(worker, reason):13.1%}" for reason in reasons)
            print(f"  {RUNGS[mode]:27}  {worker:9}  {1 - run.idle(worker):8.1%}{waited}")


def sharing(folder: Path, model: Path, steps: int) -> list[Figure]:
    """PA's Table 3, at equal packed tokens."""
    unshared = {"engine": {"path": f"{HERE / 'unshared.py'}:Unshared"}}
    ways: dict[str, dict[str, Any]] = {
        "shared": {"responses_per_micro_batch": 8},
        "not shared": {"responses_per_micro_batch": 2, **unshared},
        "not shared, one response": {"responses_per_micro_batch": 1},
    }
    tpspd: dict[tuple[str, str], float] = {}
    print(f"\n{'':12}  {'':25}  s a step   TPSPD  packed tokens a micro-batch")
    for mode in ("synchronous", "periodic"):
        for way, train in ways.items():
            sections = real(model)
            sections["data"] = {"prompt_template": EXAMPLES + "{question}\n"}
            sections["train"] = {"prompts_per_step": SHARING_PROMPTS, **train}
            run = run_real(tree(folder, run_name("sharing", mode, way), mode, steps, sections))
            tpspd[mode, way] = run.mean("perf/tpspd")
            print(
                f"{mode:12}  {way:25}  {run.mean('perf/step_seconds'):8.3f}  {tpspd[mode, way]:6.0f}  "
                f"{packed_tokens(run, 8 // train['responses_per_micro_batch']):27.0f}",
                flush=True,
            )
    base = tpspd["synchronous", "not shared"]
    return [Figure(f"{mode}, {way}: TPSPD / synchronous, not shared", value / base, "") for (mode, way), value in tpspd.items()]


def packed_tokens(run: Run, pieces: int) -> float:
    """Of a micro-batch; a group has so many."""
    spans = [span for span in run.spans if span.task == "forward_backward" and span.step in run.measured]
    logical = sum(span.tokens for span in spans) / (len(run.measured) * SHARING_PROMPTS * pieces)
    return logical * run.mean("perf/physical_tokens_ratio")


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, metavar="NAME")
    arguments.add_argument("--steps", type=int, default=14)
    given = arguments.parse_args()
    steps: int = given.steps
    figures: list[Figure] = []
    with runs_folder(given.dir) as folder:
        if "sleeping" in given.parts:
            asleep = separate({"model": {"path": "none"}, "rollout": {"num_workers": 4, "num_slots": 64, "max_new_tokens": 2048}})
            sleeping = {mode: run_sleeping(tree(folder, f"sleeping-{mode}", mode, steps, asleep), COSTS) for mode in RUNGS}
            figures += told("sleeping engines", sleeping, {"periodic": ">= 0.85", "delayed": ">= 0.9"})
        model = make_model(folder / "model")
        if "real" in given.parts:
            awake = {mode: run_real(tree(folder, f"real-{mode}", mode, steps, separate(real(model)))) for mode in RUNGS}
            figures += told("real tiny model", awake, {}, cores=os.cpu_count())
        if "sharing" in given.parts:
            figures += sharing(folder, model, steps)
    return finish(figures, given.json)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
