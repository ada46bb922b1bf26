"""The result: a plan of a run, why it is the best, what it rests on, and the files that keep it.

    config, hardware, devices --request--> PlanRequest --find_plan--> Found --write--> plan.yaml, plan.html, predicted/
    asyncflow train CONFIG plan=plan.yaml     takes the `settings` of the file, below what the command line says itself

A plan is a prediction, written before the run. Its numbers are of the simulated part of the machine, and of costs that say where
each is from.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from asyncflow.config import Config
from asyncflow.devices import CPU, kind_of
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.loops.samples import VALUES_TASK
from asyncflow.model_folder import read_json
from asyncflow.planner import cost, hardware
from asyncflow.planner.cost import UNIT, Model, devices_of_rollout
from asyncflow.planner.measured import Measurement
from asyncflow.planner.pieces import PIECES
from asyncflow.planner.search import ROWS_OF_SEARCH, Found, Plan, search, simulated, simulated_config, simulated_costs
from asyncflow.planner.space import MOST_PROCESSES
from asyncflow.run.device_shares import num_devices
from asyncflow.run.factories import critic_folder, tasks_before_training
from asyncflow.run.models.model_source import SHAPES
from asyncflow.run.preparation.checks import check_shapes
from asyncflow.run.preparation.memory import Shapes, own_shapes
from asyncflow.run.preparation.prepare import prepare
from asyncflow.settings import to_yaml
from asyncflow.simulation.run import simulate
from asyncflow.simulation.seeds import Simulators
from asyncflow.telemetry.report import page_style, script_json
from asyncflow.types import UserError

PLAN_FILE: Final = "plan.yaml"
PAGE_FILE: Final = "plan.html"
PREDICTED: Final = "predicted"
"""The simulated run of the best plan, with its report."""
STRETCHES: Final = (0.5, 1.0, 2.0, 4.0)
"""Response lengths that the page tries, over the expected ones."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A question to the planner. `fields`: of the model's config.json. `assumptions`: one sentence each."""

    config: Config
    model: Model
    fields: Mapping[str, Any]
    devices: int
    assumptions: tuple[str, ...]


async def request(
    config: Config, *, devices: int | None = None, device: str | None = None, nodes: int | None = None, per_node: int | None = None
) -> PlanRequest:
    """Question for a configuration; what is not given is as `plan` has it. Raises `UserError` for what cannot be planned."""
    named = device or config.plan.hardware or ("cpu-core" if kind_of(config.rollout.device) == CPU else None)
    if named is None:
        raise UserError(
            f"say what the devices are: --hardware NAME or FILE, or plan.hardware; {', '.join(hardware.known())} are known"
        )
    chosen = hardware.find(named)
    if per_node is not None:
        chosen = chosen.changed(per_node=per_node)
    number = devices or (nodes * chosen.per_node if nodes is not None else None) or config.plan.devices or num_devices(config)
    if config.model.path.startswith(SHAPES):
        fields, prompt = check_shapes(config), None
    else:
        with tempfile.TemporaryDirectory(prefix="asyncflow-") as scratch:
            prepared = await prepare(config, Path(scratch))
            fields, prompt = read_json(prepared.model / "config.json"), fmean(len(each.ids) for each in prepared.prompts)
    lengths, assumptions = _lengths(config, prompt)
    share = chosen.efficiency
    assumptions += [
        f"{chosen.name} reaches {share.compute:.0%} of its peak operations, {share.memory:.0%} of its memory's rate and "
        f"{share.links:.0%} of its links'",
        f"{cost.GATHERS_EXPOSED:.0%} of FSDP's gathers are hidden by no computation",
        f"a reward takes {Costs().reward_seconds:g} s of a reward process, and the host of an accelerator has cores for "
        f"{MOST_PROCESSES} of them beside each worker",
        f"a storage unit takes {1e3 * UNIT['unit_seconds']:g} ms a request, {1e6 * UNIT['unit_row_seconds']:g} us a row and "
        f"{1e9 * UNIT['unit_byte_seconds']:g} ns a byte (benchmarks/transfer_queue.py on two cores)",
        f"{chosen.usable_memory:.0%} of {chosen.memory_gib:g} GiB can be used, and every slot reaches its full context",
    ]
    of_critic, reward = own_shapes(critic_folder(config), None), config.reward.model
    of_reward = None if reward is None else own_shapes(Path(reward.path), None)
    if reward is not None and of_reward is None:
        assumptions.append("the reward model is as large as the policy: its folder is not here")
    model = Model(Shapes.of(fields), lengths, chosen, of_critic=of_critic, of_reward=of_reward)
    return PlanRequest(config, model, fields, number, tuple(assumptions))


def _lengths(config: Config, prompt: float | None) -> tuple[Lengths, list[str]]:
    """Lengths that the configuration expects, or assumed ones. `prompt`: mean tokens of its prompts, if they are known."""
    if (given := config.plan.lengths) is not None:
        lengths = Lengths(**given.model_dump())
        return lengths, [
            f"prompts have {lengths.prompt} tokens, responses {lengths.response_median:g} in the median (plan.lengths)"
        ]
    median = config.rollout.max_new_tokens / 3
    assumed = round(prompt) if prompt is not None else max(1, (config.data.max_prompt_tokens or 256) // 2)
    assumption = f"responses have {median:.0f} tokens in the median, a third of rollout.max_new_tokens, and sigma 0.6"
    if prompt is None:
        assumption += f"; prompts have {assumed}"
    return Lengths(prompt=assumed, response_median=median), [f"{assumption}: set plan.lengths to what you know"]


def calibrated(asked: PlanRequest, measurement: Measurement, where: Config) -> PlanRequest:
    """The question with what has been measured: computed numbers are scaled to those that a run of `where` has shown for them."""
    seen = measurement.costs
    made = cost.estimate(where, replace(asked.model, lengths=seen.lengths)).costs
    factors: dict[str, float] = {}
    fixed = {"reward_seconds": seen.reward_seconds}
    for piece in (residual.name for residual in measurement.residuals):
        for name in PIECES[piece].terms:
            if name.endswith("_byte_seconds") or name == "reward_seconds":
                continue
            whole = {"publish": Costs.publish, "fetch": Costs.fetch, "install": Costs.install}.get(piece)
            measured, computed = (whole(each) if whole else getattr(each, name) or 0.0 for each in (seen, made))
            if computed:
                factors[name] = measured / computed
            else:
                fixed[name] = measured
    model = replace(asked.model, lengths=seen.lengths, factors=factors, measured=fixed, contention=seen.contention)
    assumption = "computed costs are scaled to measured ones: " + ", ".join(
        f"{name} x {factor:.2g}" for name, factor in factors.items()
    )
    rest = f"what no cost covers made measured steps {measurement.left_out:.2f} times as long as simulated ones; this is left out"
    return replace(asked, model=model, assumptions=(assumption, rest, *asked.assumptions[-1:]))


async def find_plan(asked: PlanRequest, *, processes: int = 2, rows: int = ROWS_OF_SEARCH) -> Found:
    """Search, with so many simulating processes. Raises `UserError` when no plan fits."""
    async with Simulators(processes) as simulators:
        return await search(asked.config, asked.model, asked.fields, asked.devices, simulators, processes, rows)


def settings(plan: Plan) -> dict[str, Any]:
    """Keys of the configuration that the plan has chosen, as nested mappings."""
    config = plan.config
    engine = {"name": config.rollout.engine.name, **config.rollout.engine.options}
    train = ("responses_per_micro_batch", "activation_checkpointing")
    return {
        "schedule": {"name": config.schedule.name, **config.schedule.options},
        "plan": {
            "train": config.plan.train.model_dump(),
            "reference": config.plan.reference.model_dump(),
            "values": config.plan.values.model_dump(),
            "reward": config.plan.reward.model_dump(),
            "shares": dict(config.plan.shares),
            "predicted": {
                "step_seconds": round(plan.step_seconds, 4),
                "tpspd": round(plan.tpspd, 2),
                "busy": {pool: round(share, 3) for pool, share in plan.busy.items()},
            },
        },
        "rollout": {"num_workers": config.rollout.num_workers, "num_slots": config.rollout.num_slots, "engine": engine},
        "train": {name: getattr(config.train, name) for name in train},
        "reward": {"num_workers": config.reward.num_workers},
        "queue": {"num_units": config.queue.num_units},
        "weight_sync": {"name": config.weight_sync.name, **config.weight_sync.model_dump(exclude_defaults=True)},
    }


def described(plan: Plan) -> str:
    """The plan in a line."""
    config, layout, (tp, instances) = plan.config, plan.config.layout, devices_of_rollout(plan.config)
    shards = f" x {instances} of tp {tp}" if tp * instances > 1 else ""
    again = ", checkpointing" if config.train.activation_checkpointing else ""
    pools = ", ".join(f"{count} {name}" for name, count in pools_of_tasks(config).items() if count)
    pools += "".join(f", {task} on devices of {other}" for task, other in config.plan.shares.items())
    return (
        f"{config.schedule.name}; train dp {layout.dp} x tp {layout.tp} x pp {layout.pp}, {config.train.responses_per_micro_batch} "
        f"responses a micro-batch{again}; generate on {config.rollout.num_workers}{shards}, {config.rollout.num_slots} slots; "
        f"{pools}; {config.weight_sync.name}"
    )


def pools_of_tasks(config: Config) -> dict[str, int]:
    """Workers of the tasks that have some of their own, and reward processes, by what they are called."""
    tasks, is_task = tasks_before_training(config), config.reward.place == "task"
    return {
        "reference workers": config.plan.reference.num_workers * ("reference" in tasks),
        "values workers": config.plan.values.num_workers * (VALUES_TASK in tasks),
        "reward workers": config.plan.reward.num_workers * is_task,
        f"reward processes beside each {'of these' if is_task else 'that generates'}": config.reward.num_workers
        * bool(config.reward.parts),
        "storage units": config.queue.num_units * (config.queue.place == "workers"),
    }


def why(found: Found) -> str:
    """Reason why the best plan is the best, in two sentences."""
    best = found.plans[0]
    most = max(best.busy, key=lambda pool: best.busy[pool])
    other = next((plan for plan in found.plans[found.ties :] if split(plan) != split(best)), None)
    first = (
        f"A step takes {best.step_seconds:.3g} s, of which the {most} pool works {best.busy[most]:.0%}; this plan cannot be under "
        f"{best.bound.seconds:.3g} s, which its {best.bound.binds} needs."
    )
    if other is None:
        return f"{first} No plan that divides the devices otherwise comes near it."
    return (
        f"{first} The best plan that divides the devices otherwise ({described(other)}) takes "
        f"{other.step_seconds / best.step_seconds - 1:.0%} longer: its {other.bound.binds} needs {other.bound.seconds:.3g} s."
    )


def split(plan: Plan) -> tuple[int, int]:
    """Devices that train, and devices that generate."""
    tp, instances = devices_of_rollout(plan.config)
    return plan.config.layout.size, plan.config.rollout.num_workers * tp * instances


def tree(found: Found, asked: PlanRequest) -> dict[str, Any]:
    """Content of plan.yaml."""
    best = found.plans[0]
    unproven = f"{found.counts['left']} plans left, of which none can be under {found.left_bound:.4g} s"
    return {
        "plan": described(best),
        "why": why(found),
        "devices": {"given": asked.devices, "used": best.devices, "hardware": asked.model.hardware.name},
        "predicted": {
            "step_seconds": round(best.step_seconds, 4),
            "step_seconds_at_least": round(best.bound.seconds, 4),
            "binds": best.bound.binds,
            "tpspd": round(best.tpspd, 2),
            "memory_gib_per_device": {pool: round(gib, 2) for pool, gib in best.memory_gib.items()},
            "busy": {pool: round(share, 3) for pool, share in best.busy.items()},
            "simulated_share_of_the_machine": f"1/{best.part}",
        },
        "search": {**found.counts, "ties": found.ties, "ended": unproven if found.counts["left"] else "no plan left could win"},
        "assumptions": list(asked.assumptions),
        "costs": {
            figure.name: f"{figure.seconds:.6g} s, {figure.origin}"
            for figure in sorted(best.estimate.figures, key=lambda f: f.name)
        },
        "settings": settings(best),
        "others": [
            {"plan": described(plan), "step_seconds": round(plan.step_seconds, 4), "binds": plan.bound.binds}
            for plan in found.plans[1:10]
        ],
    }


async def write(found: Found, asked: PlanRequest, folder: Path, *, processes: int = 2) -> None:
    """Write plan.yaml, and the page with the simulated run of the best plan."""
    folder.mkdir(parents=True, exist_ok=True)
    content = tree(found, asked)
    (folder / PLAN_FILE).write_text(f"# asyncflow train CONFIG plan={folder / PLAN_FILE} takes the settings.\n{to_yaml(content)}")
    best = found.plans[0]
    simulated_run = partial(simulate, simulated_config(best), costs=simulated_costs(best), run_dir=folder / PREDICTED)
    await asyncio.to_thread(simulated_run)  # it has an event loop of its own
    charts = [await _devices_chart(found, asked, processes), await _lengths_chart(found.plans, asked, processes)]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(resources.files(__package__).joinpath("plan.html.j2").read_text(encoding="utf-8"))
    page = template.render(
        style=page_style(),
        name=asked.config.run.name,
        why=content["why"],
        predicted=content["predicted"],
        plans=[(described(plan), f"{plan.step_seconds:.4g}", f"{plan.tpspd:.1f}", plan.bound.binds) for plan in found.plans[:10]],
        assumptions=asked.assumptions,
        settings=to_yaml(content["settings"]),
        report=f"{PREDICTED}/report.html",
        charts=script_json(charts),
        plotly_js=Markup(get_plotlyjs()),
        nonce=secrets.token_urlsafe(16),
    )
    (folder / PAGE_FILE).write_text(page, encoding="utf-8")


async def _devices_chart(found: Found, asked: PlanRequest, processes: int) -> dict[str, Any]:
    """The Pareto front: the shortest step of fewer devices, by a search with a small part of the simulated rows."""
    points = {found.plans[0].devices: found.plans[0].step_seconds}
    for part in (2, 4, 8):
        if (number := asked.devices // part) < num_devices(asked.config) - asked.config.rollout.num_workers:
            break
        try:
            fewer = await find_plan(replace(asked, devices=number), processes=processes, rows=ROWS_OF_SEARCH // 8)
        except UserError:  # none fits
            break
        points[fewer.plans[0].devices] = fewer.plans[0].step_seconds
    shown = sorted(points)
    return {
        "title": "Pareto front: devices and seconds of a step",
        "x": "devices",
        "lines": [["best plan", shown, [points[n] for n in shown]]],
    }


async def _lengths_chart(plans: Sequence[Plan], asked: PlanRequest, processes: int) -> dict[str, Any]:
    """Seconds of a step if responses are shorter or longer than expected, of the best plan and of another split of the devices."""
    chosen = [plans[0], *[plan for plan in plans[1:] if split(plan) != split(plans[0])][:1]]
    lines = []
    async with Simulators(processes) as simulators:
        for plan in chosen:
            seconds = []
            for stretch in STRETCHES:
                lengths = asked.model.lengths
                longer = msgspec.structs.replace(lengths, response_median=stretch * lengths.response_median)
                estimate = cost.estimate(plan.config, replace(asked.model, lengths=longer))
                seconds.append((await simulated(replace(plan, estimate=estimate), simulators)).step_seconds)
            lines.append([described(plan), list(STRETCHES), seconds])
    return {"title": "Seconds of a step if responses are longer", "x": "length / expected length", "lines": lines}
