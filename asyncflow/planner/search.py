"""Search for the plan with the shortest step: enumerate, drop, simulate the rest, best bound first.

    trainer's halves  dp x tp x pp, responses per micro-batch, checkpointing   --+-- those that fit in memory, and that no other
    rollout's halves  devices of an instance, instances, slots                 --+   half of the same devices beats in every cost
    plans             pairs that share the devices, x schedules, x weight syncs  --> bounds --> simulated, until no other can win

A half is what one pool alone decides, so memory, costs and the terms of the bound are computed for a few hundred halves, and only
added up for tens of thousands of plans. Simulated are the real loops, on a part of the machine where all pools can be divided: a
quarter of the prompts, workers and data-parallel groups has a quarter of the work, but for the luck of the longest response.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import msgspec

from asyncflow.config import Config, parse
from asyncflow.control.schedule import Schedule
from asyncflow.engines.costs import Costs
from asyncflow.engines.families import check_layout
from asyncflow.planner import cost
from asyncflow.planner.bounds import Bound, bound
from asyncflow.planner.cost import Estimate, Figure, Model, Moments, cut_of_rollout
from asyncflow.planner.graph import Drawn, Graph, Task, before_training, between, rollout, train, weights
from asyncflow.run.factories import devices_each, make_schedule, num_devices, schedule_of, tasks_before_training
from asyncflow.run.memory import GIB, reference_parts, rollout_parts, training_parts
from asyncflow.settings import Choice
from asyncflow.simulation.seeds import Order, Outcome, Simulators
from asyncflow.types import Layout, RunError, UserError

ROWS: Final = 256
"""Rows of a simulated step, at least, unless the run's has fewer."""
STEPS: Final = 3
"""Steps of a simulated run, at most, and two at least. The first is not counted: nothing is under way before it."""
ROWS_OF_RUN: Final = 2_048
"""Rows of a simulated run that there are fewer steps for."""
ROWS_OF_SEARCH: Final = 20_000
"""Rows that a search simulates, about; one or two thousand take a second of one core."""
TIE: Final = 0.01
"""Plans whose steps differ by less than this share are not told apart."""


@dataclass(frozen=True, slots=True)
class Half:
    """Half of a plan: the configuration with what one pool decides, the devices and workers of the pool, GiB of each device, costs.

    `times`: numbers of which none may be larger in a better half of the same devices and workers. `reference_gib`: of each device
    of a reference that is a task of its own, whose passes are as long as the trainer's.
    """

    config: Config
    devices: int
    workers: int
    memory_gib: float
    figures: tuple[Figure, ...]
    times: tuple[float, ...]
    reference_gib: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a run. `config`: with all that is chosen. `part`: the share of the machine that is simulated is 1 / `part`."""

    config: Config
    devices: int
    memory_gib: Mapping[str, float]
    estimate: Estimate
    bound: Bound
    part: int
    outcome: Outcome | None = None

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: simulated, or else at least."""
        return self.bound.seconds if self.outcome is None else self.outcome.step_seconds

    @property
    def tpspd(self) -> float:
        """Trained tokens per second per device, of a simulated plan."""
        if self.outcome is None:
            return 0.0
        return self.outcome.tpspd * num_devices(simulated_config(self)) * self.part / self.devices

    @property
    def busy(self) -> dict[str, float]:
        """Share of time in which each pool works, of a simulated plan."""
        return {} if self.outcome is None else {pool: 1 - idle for pool, idle in sorted(self.outcome.idle.items())}


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search: simulated plans, the fastest first, and numbers of plans. `left_bound`: of the best that is neither
    simulated nor excluded; infinite if there is none."""

    plans: tuple[Plan, ...]
    counts: Mapping[str, int]
    left_bound: float
    broken: tuple[str, ...] = ()
    """Plans whose simulated run broke a law, and which: mistakes of this program."""

    @property
    def ties(self) -> int:
        """Number of plans that are not told apart from the best."""
        return sum(plan.step_seconds <= self.plans[0].step_seconds * (1 + TIE) for plan in self.plans)


async def search(
    config: Config,
    model: Model,
    fields: Mapping[str, Any],
    num: int,
    simulators: Simulators,
    at_once: int,
    most_rows: int = ROWS_OF_SEARCH,
) -> Found:
    """Best plans for up to `num` devices. `fields`: the model's config.json. `most_rows`: to be simulated, about.

    The same inputs give the same plans, also with another number `at_once`, which only changes how many are simulated in vain.

    Raises `UserError` when no plan fits, with the nearest miss.
    """
    counts: Counter[str] = Counter()
    own, *larger = _pools(config, num)
    found = list(_bounded(own, model, fields, num, counts))
    for pools in larger:
        with contextlib.suppress(UserError):  # such pools leave too few devices for the other workers
            found += _bounded(pools, model, fields, num, counts)
    candidates = sorted(found, key=lambda each: (each[0].seconds, each[1]))
    done: list[Plan] = []
    broken: list[str] = []
    rows = 0
    while candidates and rows < most_rows:
        best = min((plan.step_seconds for plan in done), default=math.inf)
        if candidates[0][0].seconds >= best:
            break
        wave, candidates = candidates[:at_once], candidates[at_once:]
        plans = [make() for _, _, make in wave]
        rows += sum(simulated_rows(plan.config, plan.part) for plan in plans)
        for plan in await asyncio.gather(*(simulated(plan, simulators) for plan in plans)):
            assert plan.outcome is not None
            if plan.outcome.violations:
                broken.append(f"a plan is left out, since its simulated run broke a law: {plan.outcome.violations[0]}")
            else:
                done.append(plan)
    if not done:
        raise RunError(f"no plan could be simulated: {broken[0]}")
    done.sort(key=lambda plan: plan.step_seconds)  # stable: of equal ones the better bound comes first
    left = [each for each in candidates if each[0].seconds < done[0].step_seconds]
    counts["simulated"], counts["left"] = len(done), len(left)
    counts["bounded away"] = len(candidates) - len(left)
    return Found(tuple(done), dict(counts), left[0][0].seconds if left else math.inf, tuple(broken))


async def simulated(plan: Plan, simulators: Simulators) -> Plan:
    """The plan with what its simulation gave."""
    order = Order(simulated_config(plan).model_dump(mode="json"), simulated_costs(plan), [0], False)
    outcomes = [outcome async for outcome in simulators.outcomes(order)]
    return replace(plan, outcome=outcomes[0])


def part_of(config: Config, dp: int, workers: int) -> int:
    """How many equal parts the machine is divided into, of which one is simulated: a power of two that divides all pools."""
    if "values" in (tasks := tasks_before_training(config)) or "select" in tasks:
        return 1  # a critic is trained by one worker; candidates are chosen among all
    parts, rows = math.gcd(dp, workers, config.train.prompts_per_step), config.train.prompts_per_step * config.rollout.group_size
    part = 1
    while parts % (2 * part) == 0 and rows // (2 * part) >= ROWS:
        part *= 2
    return part


def simulated_config(plan: Plan) -> Config:
    """Configuration of the simulated part: without a machine, a model, evaluations, and ranks that only follow."""
    tree, part = plan.config.model_dump(mode="json"), plan.part
    layout, workers = plan.config.layout, plan.config.rollout.num_workers // part
    tree["run"]["steps"] = steps_of(plan.config, part)
    tree["plan"] |= {"train": {"dp": layout.dp // part, "tp": 1, "pp": layout.pp}}
    tree["rollout"] |= {"engine": {"name": "slots"}, "num_workers": workers, "device": "cpu"}
    tree["train"] |= {"prompts_per_step": plan.config.train.prompts_per_step // part, "device": "cpu", "engine": {"name": "torch"}}
    tree["weight_sync"] |= {"min_healthy_workers": 1}
    for section in ("eval", "checkpoint", "cluster"):
        del tree[section]
    return parse(tree)


def steps_of(config: Config, part: int) -> int:
    """Steps of a simulated run, more where weights come later."""
    rows = config.train.prompts_per_step * config.rollout.group_size // part
    schedule = make_schedule(config)
    return max(2, min(STEPS, ROWS_OF_RUN // rows)) + schedule.max_staleness


def simulated_rows(config: Config, part: int) -> int:
    """Rows of a simulated run."""
    return steps_of(config, part) * config.train.prompts_per_step * config.rollout.group_size // part


def simulated_costs(plan: Plan) -> Costs:
    """Costs of the simulated part."""
    return _costs_of_part(plan.estimate.costs, plan.config, plan.part)


def _costs_of_part(costs: Costs, config: Config, part: int) -> Costs:
    """Costs of one part: a pool that is not divided has a part of its rows, so each takes it that many times as long."""
    tasks, slow = tasks_before_training(config), {"reference_token_seconds": "reference", "reward_seconds": "reward"}
    return msgspec.structs.replace(costs, **{name: getattr(costs, name) * part for name, task in slow.items() if task in tasks})


# -- enumeration ------------------------------------------------------------------------------------------------------------

Candidate = tuple[Bound, tuple, Callable[[], Plan]]
"""A plan's bound, its place among equals, and what makes it."""


def _bounded(config: Config, model: Model, fields: Mapping[str, Any], num: int, counts: Counter[str]) -> Iterator[Candidate]:
    """Plans that fit in memory, with their bounds."""
    others = num_devices(config) - config.rollout.num_workers * devices_each(config) - config.layout.size
    if num < others + 2:
        raise UserError(
            f"{num} devices are too few for this run: one has to train, one to generate, and {others} are for its other workers: "
            f"take {others + 2} or more"
        )
    usable = model.hardware.usable_bytes / GIB
    training = list(_training_halves(config, model, fields, num - others - 1))
    if (least := min(half.reference_gib for half in training)) > usable:
        raise UserError(
            f"the reference fits on no device: its task is not cut over devices, and needs at least {least:.1f} GiB of one, of "
            f"which {usable:.1f} GiB are usable: take train.reference=fused, which is cut as training is, or train.offload=true"
        )
    fitting = _fitting(
        [half for half in training if half.reference_gib <= usable], usable, f"each device that trains, on up to {num - others - 1}"
    )
    by_devices = {of: list(_rollout_halves(config, model, num - others - of)) for of in sorted({half.devices for half in training})}
    _fitting([half for halves in by_devices.values() for half in halves], usable, "each device that generates")
    choices = [(schedule, sync) for schedule in _schedules(config) for sync in _weight_syncs(config, model, num)]
    kept = [half for halves in _grouped(fitting) for half in _unbeaten(halves)]
    kept_by_devices = {
        devices: [half for same in _grouped([half for half in halves if half.memory_gib <= usable]) for half in _unbeaten(same)]
        for devices, halves in by_devices.items()
    }
    enumerated = len(choices) * sum(len(by_devices[half.devices]) for half in training)
    fit = len(choices) * sum(sum(each.memory_gib <= usable for each in by_devices[half.devices]) for half in fitting)
    counts["enumerated"] += enumerated
    counts["too large"] += enumerated - fit
    counts["beaten"] += fit - len(choices) * sum(len(kept_by_devices[half.devices]) for half in kept)

    @cache
    def drawn(part: int) -> Drawn:
        smaller = config.train.model_copy(update={"prompts_per_step": config.train.prompts_per_step // part})
        divided = config.model_copy(update={"train": smaller})
        every = Drawn.of(divided, Costs(lengths=model.lengths), steps_of(config, part))
        return Drawn(every.tokens[1:])  # as simulated steps are counted

    @cache
    def rollout_task(devices: int, i: int, part: int, in_flight: bool) -> Task:
        half = kept_by_devices[devices][i]
        return rollout(_divided(half.config, part), cost.joined(model, half.figures).costs, drawn(part), in_flight=in_flight)

    @cache
    def train_task(i: int, part: int) -> Task:
        return train(_divided(kept[i].config, part), cost.joined(model, kept[i].figures).costs, drawn(part))

    @cache
    def task_between(name: str, i: int, devices: int, j: int, part: int) -> Task:
        of_part = _divided(config.model_copy(update={"rollout": kept_by_devices[devices][j].config.rollout}), part)
        costs = _costs_of_part(cost.joined(model, kept[i].figures).costs, config, part)
        return before_training(of_part, costs, drawn(part), name)

    names = between(config)
    for i, half in enumerate(kept):
        for j, other in enumerate(kept_by_devices[half.devices]):
            part = part_of(config, half.config.layout.dp, other.workers)
            for k, (schedule, sync) in enumerate(choices):
                whole = half.config.model_copy(
                    update={"rollout": other.config.rollout, "schedule": schedule[0], "weight_sync": sync}
                )
                figures = (*half.figures, *other.figures, *cost.weights(whole, model))
                costs = cost.joined(model, figures).costs
                tasks = [rollout_task(half.devices, j, part, schedule[1].installs_in_flight)]
                tasks += [task_between(name, i, half.devices, j, part) for name in names]
                tasks.append(train_task(i, part))
                found = bound(Graph(tuple(tasks), weights(costs), schedule[1].max_staleness, schedule[1].is_streamed))
                devices = half.devices + other.devices + others
                yield (
                    found,
                    (devices, config.plan.reference.num_workers, config.plan.values.num_workers, i, j, k),
                    _maker(whole, devices, half, other, found, part, figures, model),
                )


def _maker(
    whole: Config, devices: int, half: Half, other: Half, found: Bound, part: int, figures: Sequence[Figure], model: Model
) -> Callable[[], Plan]:
    def make() -> Plan:
        memory = {"train": half.memory_gib, "rollout": other.memory_gib}
        if half.reference_gib:
            memory["reference"] = half.reference_gib
        checked_config = parse(whole.model_dump(mode="json"))
        return Plan(checked_config, devices, memory, cost.joined(model, figures), found, part)

    return make


def _divided(config: Config, part: int) -> Config:
    """Configuration of one of `part` equal parts of a half, unchecked."""
    layout = config.plan.train.model_copy(update={"dp": max(1, config.layout.dp // part)})
    return config.model_copy(
        update={
            "plan": config.plan.model_copy(update={"train": layout}),
            "rollout": config.rollout.model_copy(update={"num_workers": max(1, config.rollout.num_workers // part)}),
            "train": config.train.model_copy(update={"prompts_per_step": config.train.prompts_per_step // part}),
        }
    )


def _pools(config: Config, num: int) -> list[Config]:
    """The configuration with pools of the reference and of a critic's values, where they have tasks of their own: its own, and
    larger ones, by powers of two, up to a quarter of the devices."""
    plan, tasks = config.plan, tasks_before_training(config)
    chosen = {name: _sizes(getattr(plan, name).num_workers, num) for name in ("reference", "values") if name in tasks}
    pools = [dict(zip(chosen, sizes, strict=True)) for sizes in itertools.product(*chosen.values())]
    return [
        config.model_copy(
            update={
                "plan": plan.model_copy(
                    update={name: getattr(plan, name).model_copy(update={"num_workers": size}) for name, size in sizes.items()}
                )
            }
        )
        for sizes in pools
    ]


def _sizes(own: int, num: int) -> list[int]:
    """Sizes of a pool: its own, and larger ones. A pool of none may get workers."""
    least = max(own, 1)
    return sorted({own, *(least * n for n in _powers(max(1, num // (4 * least))))})


def _training_halves(config: Config, model: Model, fields: Mapping[str, Any], most: int) -> Iterator[Half]:
    """Layouts of up to `most` devices, each with every size of micro-batch, with and without checkpointing."""
    train, group, prompts = config.train, config.rollout.group_size, config.train.prompts_per_step // config.train.mini_batches
    longest, moments = longest_prompt(config, model), Moments.of(model.lengths, config.rollout.max_new_tokens)
    pieces = [n for n in range(1, group + 1) if group % n == 0]
    has_reference = "reference" in tasks_before_training(config)
    for layout in _layouts(fields, most, model.hardware.per_node, prompts, train.engine.name):
        for number in pieces:
            for checkpoints in sorted({train.activation_checkpointing, True}):
                cut = config.plan.train.model_copy(update={"dp": layout.dp, "tp": layout.tp, "pp": layout.pp})
                chosen = {"responses_per_micro_batch": number, "activation_checkpointing": checkpoints}
                tried = config.model_copy(
                    update={
                        "plan": config.plan.model_copy(update={"train": cut}), "train": train.model_copy(update=chosen)
                    }
                )  # fmt: skip
                memory = sum(part.num_bytes for part in training_parts(tried, model.shapes, longest)) / GIB
                of_reference = reference_parts(tried, model.shapes, longest) if has_reference else []
                figures = tuple(cost.training(tried, model))
                fixed, token, gathers, reference, update = (figure.seconds for figure in figures)
                count = group // number
                in_round = -(-train.pipeline_micro_batches // count) if layout.pp > 1 else 1
                whole = count * (fixed + token * model.lengths.prompt) + group * token * moments.mean
                times = (whole, gathers / in_round, update, reference, in_round)
                reference_gib = sum(part.num_bytes for part in of_reference) / GIB
                yield Half(tried, layout.size, layout.dp, memory, figures, times, reference_gib)


def _layouts(fields: Mapping[str, Any], most: int, per_node: int, prompts: int, engine: str) -> Iterator[Layout]:
    """Layouts that the model can be cut by: tensor parallel within a node, stages by powers of two, data parallel by numbers with
    small factors."""
    is_cut = engine != "deepspeed"  # which has data parallelism alone
    for tp in _powers(min(per_node, most)) if is_cut else [1]:
        for pp in _powers(min(16, most // tp)) if is_cut else [1]:
            try:
                check_layout(fields, Layout(tp=tp, pp=pp))
            except UserError:
                continue
            for dp in _numbers(min(prompts, most // (tp * pp))):
                yield Layout(dp=dp, tp=tp, pp=pp)


def _rollout_halves(config: Config, model: Model, num: int) -> Iterator[Half]:
    """Instances of a model on up to `num` devices: a worker for each of them, or for each node; every power of two of slots, up to
    all that a worker generates of a step."""
    rollout, per_node, prompts = config.rollout, model.hardware.per_node, config.train.prompts_per_step
    context = longest_prompt(config, model) + rollout.max_new_tokens
    is_cut = rollout.engine.name == "vllm"
    for tp in _powers(min(per_node, num)) if is_cut else [1]:
        if model.shapes.heads % tp:
            continue
        for instances in sorted({1, max(1, min(per_node, num) // tp)}) if is_cut else [1]:
            workers = min(prompts, num // (tp * instances))
            most = -(-prompts // workers) * rollout.group_size
            for slots in sorted({min(instances * n, most) for n in _powers(1024)} | {most}):
                options = {**rollout.engine.options, "tensor_parallel": tp, "instances": instances} if is_cut else None
                engine = rollout.engine if options is None else Choice(name="vllm", options=options)
                chosen = rollout.model_copy(update={"engine": engine, "num_workers": workers, "num_slots": slots})
                tried = config.model_copy(update={"rollout": chosen})
                memory = sum(part.num_bytes for part in rollout_parts(tried, model.shapes, context)) / GIB
                figures = tuple(cost.rollout(tried, model))
                times = (*(figure.seconds for figure in figures), 1.0 / tp, 1.0 / slots)
                yield Half(tried, workers * tp * instances, workers, memory, figures, times)


def longest_prompt(config: Config, model: Model) -> int:
    """Tokens that the longest prompt may have: what the configuration says, or twice what is expected."""
    return config.data.max_prompt_tokens or 2 * model.lengths.prompt


def _schedules(config: Config) -> list[tuple[Choice, Schedule]]:
    """The on-policy schedules, and the configuration's own."""
    chosen = {each.name: each for each in (Choice(name="periodic"), Choice(name="synchronous"), config.schedule)}
    return [(each, schedule_of(each)) for each in chosen.values()]


def _weight_syncs(config: Config, model: Model, num: int) -> list[Any]:
    """The configuration's own, or, where that ends at one machine and the devices do not fit in one, those that go on."""
    sync = config.weight_sync
    if sync.name != "shared_memory" or num <= model.hardware.per_node:
        return [sync]
    return [sync.model_copy(update={"name": name}) for name in ("network", "collective")]


def _fitting(halves: Sequence[Half], usable: float, of_what: str) -> list[Half]:
    """Halves that fit in memory. Raises `UserError` when none does."""
    if fitting := [half for half in halves if half.memory_gib <= usable]:
        return fitting
    least = min(halves, key=lambda half: half.memory_gib)
    layout, (tp, _) = least.config.layout, cut_of_rollout(least.config)
    cut = f"tensor_parallel {tp}" if "generates" in of_what else f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp}"
    raise UserError(
        f"the model fits nowhere: {of_what} needs at least {least.memory_gib:.1f} GiB ({cut}), and {usable:.1f} GiB are usable: "
        f"take more devices, hardware with more memory, or shorter responses"
    )


def _grouped(halves: Sequence[Half]) -> list[list[Half]]:
    """Halves by their devices and workers, which divide the work alike."""
    groups: dict[tuple[int, int], list[Half]] = {}
    for half in halves:
        groups.setdefault((half.devices, half.workers), []).append(half)
    return list(groups.values())


def _unbeaten(halves: Sequence[Half]) -> list[Half]:
    """Halves that no other one of them beats: none of its times is larger, and one is less, or it comes first."""
    kept: list[Half] = []
    for half in sorted(halves, key=lambda each: each.times):
        if not any(all(a <= b for a, b in zip(other.times, half.times, strict=True)) for other in kept):
            kept.append(half)
    return kept


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _numbers(most: int) -> list[int]:
    """Powers of two, three times a power of two, and all numbers up to 8."""
    return sorted(n for n in {*range(1, 9), *_powers(most), *(3 * n for n in _powers(most))} if n <= most)
