"""Plans, with what none of them can be under: pairs of halves that share the devices, x pools, x schedules and weight syncs.

    pools       workers of the tasks that are not sharded, by powers of two    `Space.least`: of all their plans
    pairs       a half that trains, one that generates, schedule, weight sync           `Pair.seconds`: cheap, and under the next
    candidates  a pair with reward processes and units, more as long as they bind       `Candidate.bound`: all of bounds.py

Memory, costs and the terms of a bound are computed for a few hundred halves, and only added up for a pair. The whole bound, which
takes half a millisecond, is that of pairs alone whose cheap one has come first in the search.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, Final, NamedTuple, NoReturn

from asyncflow.config import Config
from asyncflow.control.schedule import Schedule
from asyncflow.devices import CPU, devices_of, kind_of
from asyncflow.engines.costs import Costs
from asyncflow.planner import cost
from asyncflow.planner.bounds import Bound, bound
from asyncflow.planner.cost import Figure, Model, devices_of_rollout
from asyncflow.planner.graph import (
    Drawn,
    Graph,
    Task,
    before_training,
    between,
    critic,
    helped,
    on_shared_devices,
    rollout,
    storage,
    train,
    weights,
)
from asyncflow.planner.halves import Half, grouped, powers, rollout_halves, training_halves, unbeaten
from asyncflow.planner.part import costs_of_part, divided, part_of, steps_of, workers_of
from asyncflow.run.device_shares import device_of, devices_each, num_devices
from asyncflow.run.factories import schedule_of, tasks_before_training
from asyncflow.run.helper_devices import num_on_devices
from asyncflow.run.preparation.memory import GIB
from asyncflow.settings import Choice
from asyncflow.types import UserError

TIE: Final = 0.01
"""Plans whose steps differ by less than this share are not told apart."""
LEAST_GAIN: Final = 0.05
"""Share of a step that helpers on devices of rollout may gain, at least, to be worth their memory there."""
MOST_PROCESSES: Final = 16
"""Reward processes beside a worker, at most, where the hardware says nothing of its hosts' cores. An assumption."""
MOST_UNITS: Final = 64
"""Storage units, at most."""
WAYS_OUT: Final[Mapping[str, str]] = {
    "reference": "take train.reference=fused, which is sharded as training is, or train.offload=true",
    "critic": "take train.offload_optimizer=true, a smaller one (train.critic.path), or shorter responses",
    "values": "take a smaller critic (train.critic.path), or shorter responses",
    "reward": "take reward.model.dtype=bfloat16, or a smaller one",
}
"""Advice where a task that is not sharded fits on no device, by the task."""


SharingTasks = Sequence[tuple[str, ...]]
"""Tasks that compute on the same devices: first the one whose devices they are."""


class Candidate(NamedTuple):
    """Plan that is not made yet. `place`: its place among those of the same bound. `services`: reward workers, processes of each,
    storage units."""

    bound: Bound
    place: tuple[int, ...]
    config: Config
    devices: int
    memory_gib: Mapping[str, float]
    part: int
    figures: tuple[Figure, ...]
    services: tuple[int, ...]


class Pair(NamedTuple):
    """Pair of halves, by their numbers, with a schedule and a weight sync, by their number. `seconds`: its steps take more."""

    seconds: float
    place: tuple[int, ...]
    train: int
    devices: int
    generate: int
    choice: int
    part: int


class Halves:
    """Halves of a configuration's plans, and the terms of their bounds, which do not depend on pools."""

    def __init__(self, config: Config, model: Model, fields: Mapping[str, Any], num: int) -> None:
        """`fields`: of the model's config.json. `num`: devices of the run."""
        self.config, self.model, self.num = config, model, num
        self.tasks, self.usable = tasks_before_training(config), model.hardware.usable_bytes / GIB
        self.training = list(training_halves(config, model, fields, num - 1))
        self.side_tasks = tuple(self.training[0].side_gib) if self.training else ()
        self.choices = [(chosen, sync) for chosen in _schedules(config) for sync in _weight_syncs(config, model, num)]
        self.generating, self.that_train = cache(self._generating), cache(self._that_train)
        self.drawn, self.rollout_task, self.train_task = cache(self._drawn), cache(self._rollout_task), cache(self._train_task)
        self.tokens = cache(lambda part: float(self.drawn(part).tokens.sum((1, 2)).mean()))
        self.costs = cache(lambda number: cost.joined(model, self.training[number].figures).costs)

    @cached_property
    def kinds(self) -> list[int]:
        """Numbers of halves that train, one for each way of computing what is not sharded."""
        first: dict[tuple[Any, ...], int] = {}
        for i, half in enumerate(self.training):
            trained = half.config.train
            first.setdefault((trained.responses_per_micro_batch, trained.activation_checkpointing), i)
        return list(first.values())

    def _that_train(self, groups: SharingTasks) -> tuple[list[int], list[int]]:
        """Numbers of the halves that train and fit, as these tasks beside them do; and those of them that no other one beats."""
        fitting = [i for i, half in enumerate(self.training) if self._fit(half, groups)]
        numbers = {id(self.training[i]): i for i in fitting}
        kept = [half for same in grouped([self.training[i] for i in fitting]) for half in unbeaten(same)]
        return fitting, sorted(numbers[id(half)] for half in kept)

    def gib(self, half: Half, group: Sequence[str]) -> float:
        """GiB of a device that these tasks share."""
        return sum(half.memory_gib if task == "train" else half.side_gib[task] for task in group)

    def _fit(self, half: Half, groups: SharingTasks) -> bool:
        return all(self.gib(half, group) <= self.usable for group in groups)

    def raise_no_fit(self, halves: Sequence[Half], groups: SharingTasks, of_what: str) -> NoReturn:
        """Raises `UserError` that says why none of these halves fits, the tasks beside them first."""
        usable = self.usable
        for host, *guests in groups:
            least = min(self.gib(half, [host, *guests]) for half in halves)
            if least <= usable or [host, *guests] == ["train"]:
                continue
            if guests:
                raise UserError(
                    f"{' and '.join([host, *guests])} fit on no device together: they need at least {least:.1f} GiB of one, of "
                    f"which {usable:.1f} GiB are usable: leave {guests[0]} out of plan.shares"
                )
            raise UserError(
                f"the {host} fits on no device: its task is not sharded, and needs at least {least:.1f} GiB of one, "
                f"of which {usable:.1f} GiB are usable: {WAYS_OUT[host]}"
            )
        others = [group for group in groups if group[0] != "train"]
        nearest = min(halves, key=lambda half: half.memory_gib if self._fit(half, others) else math.inf)
        layout, (tp, _) = nearest.config.layout, devices_of_rollout(nearest.config)
        needed = f"tensor_parallel {tp}" if "generates" in of_what else f"dp {layout.dp} x tp {layout.tp} x pp {layout.pp}"
        raise UserError(
            f"the model fits nowhere: {of_what} needs at least {nearest.memory_gib:.1f} GiB ({needed}), and {usable:.1f} GiB are "
            f"usable: take more devices, hardware with more memory, or shorter responses"
        )

    def _generating(self, num: int) -> tuple[list[Half], list[Half], int]:
        """Halves that generate on up to `num` devices: all; those of them that fit and that none beats; how many fit."""
        every = list(rollout_halves(self.config, self.model, num))
        fitting = [half for half in every if half.memory_gib <= self.usable]
        kept = [half for same in grouped(fitting) for half in unbeaten(same)]
        if least := min((half.helper_gib for half in self.training if half.helper_gib), default=0.0):
            others = [half for half in fitting if half.memory_gib + least <= self.usable]  # with fewer slots
            kept += [half for same in grouped(others) for half in unbeaten(same) if half not in kept]
        return every, kept, len(fitting)

    def _drawn(self, part: int) -> Drawn:
        of_part = self.config.changed(train={"prompts_per_step": self.config.train.prompts_per_step // part})
        every = Drawn.of(of_part, Costs(lengths=self.model.lengths), steps_of(self.config, part))
        return Drawn(every.tokens[1:])  # as simulated steps are counted

    def _rollout_task(self, devices: int, number: int, part: int, in_flight: bool) -> Task:
        half = self.generating(devices)[1][number]
        costs = cost.joined(self.model, half.figures).costs
        return rollout(divided(half.config, part), costs, self.drawn(part), in_flight=in_flight)

    def _train_task(self, number: int, part: int) -> Task:
        half = self.training[number]
        return train(divided(half.config, part), cost.joined(self.model, half.figures).costs, self.drawn(part))


class Space:
    """Plans of a configuration with pools of given sizes."""

    def __init__(self, halves: Halves, config: Config, number: int, counts: Counter[str]) -> None:
        """`number`: of these pools among others. `counts`: numbers of plans, which are added to."""
        self.config, self.number, self._halves, self._counts = config, number, halves, counts
        self._others = num_devices(config) - config.rollout.num_workers * devices_each(config) - config.layout.size
        self._names = between(config)
        there = [name for name in halves.side_tasks if name != "values" or config.plan.values.num_workers]
        shares = {str(task): other for task, other in config.plan.shares.items()}
        hosts = ["train", *(name for name in there if name not in shares)]
        self._groups = tuple((host, *(task for task in there if shares.get(task) == host)) for host in hosts)
        self._most_guests = max((workers_of(config, task) for task in self._groups[0][1:]), default=1)

    def least(self) -> float:
        """Seconds that no step of these plans is under: those of the pools that no half decides."""
        return min(max(self.busy(i, 1).values(), default=0.0) for i in self._halves.kinds)

    def busy(self, number: int, part: int) -> dict[str, float]:
        """Seconds of a step in which each pool of these plans works, at least. `number`: of the half that trains."""
        halves, config = self._halves, self.config
        costs, drawn = costs_of_part(halves.costs(number), config, part), halves.drawn(part)
        of_part, group = divided(config, part), config.rollout.group_size
        prompts = len(drawn.tokens[0]) * halves.model.lengths.prompt
        found = {}
        if "reference" in self._names:
            found["reference"] = (
                costs.reference_token_seconds * (halves.tokens(part) + prompts) / of_part.plan.reference.num_workers
            )
        if "values" in self._names:
            valuing = of_part.plan.values.num_workers
            if valuing:
                found["values"] = (costs.values(1) - costs.values(0)) * (halves.tokens(part) + prompts) / valuing
            trained = of_part.changed(train=halves.training[number].config.train)
            found["critic"] = critic(trained, costs, drawn).busy
        if config.reward.model is not None:
            read = costs.reward_model_token_seconds * (halves.tokens(part) + group * prompts)
            found["reward"] = read / of_part.plan.reward.num_workers
        return found

    def pairs(self) -> Iterator[Pair]:
        """All pairs that fit and that none beats. Raises `UserError` where there are none, with the nearest miss."""
        halves, counts, left = self._halves, self._counts, self._halves.num - self._others
        if left < 2:
            raise UserError(
                f"{halves.num} devices are too few for this run: one has to train, one to generate, and {self._others} are for its "
                f"other workers: take {self._others + 2} or more"
            )
        found, least = halves.that_train(self._groups), self._most_guests
        fitting, kept = ([i for i in each if least <= halves.training[i].devices < left] for each in found)
        there = [half for half in halves.training if half.devices < left]
        if not fitting:
            halves.raise_no_fit(there, self._groups, f"each device that trains, on up to {left - 1}")
        by_devices = {of: halves.generating(left - of) for of in {half.devices for half in there}}
        if not any(by_devices[halves.training[i].devices][1] for i in kept):
            every = [half for i in kept for half in by_devices[halves.training[i].devices][0]]
            halves.raise_no_fit(every, (), "each device that generates")
        fit = sum(by_devices[halves.training[i].devices][2] for i in fitting)
        enumerated = sum(len(by_devices[half.devices][0]) for half in there)
        remaining = sum(len(by_devices[halves.training[i].devices][1]) for i in kept)
        for name, count in {"enumerated": enumerated, "too large": enumerated - fit, "beaten": fit - remaining}.items():
            counts[name] += len(halves.choices) * count
        is_asked, num_pairs = "helpers" in self.config.plan.shares, 0
        for i in kept:
            half, busy = halves.training[i], dict[int, float]()
            rest = left - half.devices
            for j, other in enumerate(by_devices[half.devices][1]):
                if half.helper_gib and not self._have_room(half, other):
                    counts["too large"] += len(halves.choices)
                    continue
                part = part_of(self.config, half.workers, other.workers, halves.tasks)
                if part not in busy:
                    busy[part] = max(self.busy(i, part).values(), default=0.0)
                alone, devices = halves.train_task(i, part), half.devices + other.devices + self._others
                training = helped(alone, num_on_devices(self._joined(half, other)))
                for k, ((_, schedule), _) in enumerate(halves.choices):
                    generating = halves.rollout_task(rest, j, part, schedule.installs_in_flight)
                    at_least = _at_least(schedule, generating, training, busy[part])
                    may_gain = is_asked or at_least < (1 - LEAST_GAIN) * _at_least(schedule, generating, alone, busy[part])
                    if training is not alone and not may_gain:
                        counts["beaten"] += 1
                        continue
                    num_pairs += 1
                    place = (-part, devices, self.number, i, j, k)  # of equal bounds that first which is simulated sooner
                    yield Pair(at_least, place, i, rest, j, k, part)
        if not num_pairs:
            raise UserError(
                f"plan.shares.helpers=rollout: no device of rollout.device={self.config.rollout.device}, with {halves.usable:.1f} "
                f"GiB, has room for an engine and a helper: leave it out"
            )

    def _have_room(self, half: Half, other: Half) -> bool:
        """Whether helpers have room beside the engines, each of which has a device of those that the configuration names."""
        named = len(devices_of(self.config.rollout.device))
        return other.memory_gib + half.helper_gib <= self._halves.usable and other.workers <= named

    def _joined(self, half: Half, other: Half) -> Config:
        """Configuration with both halves, and helpers where the one that trains has them."""
        own = {str(task): str(host) for task, host in self.config.plan.shares.items() if task != "helpers"}
        shares = own | ({"helpers": "rollout"} if half.helper_gib else {})
        plan = {"train": half.config.plan.train, "shares": shares}
        return self.config.changed(plan=plan, train=half.config.train, rollout=other.config.rollout)

    def candidates(self, pair: Pair) -> Iterator[Candidate]:
        """Plans of a pair: with the reward processes and storage units of the configuration, and with more, as long as these bind,
        or as the bound falls by more than a tie."""
        halves, model = self._halves, self._halves.model
        half, other = halves.training[pair.train], halves.generating(pair.devices)[1][pair.generate]
        ((chosen, schedule), sync), part = halves.choices[pair.choice], pair.part
        whole = self._joined(half, other).changed(schedule=chosen, weight_sync=sync)
        figures = (*half.figures, *other.figures, *cost.weights(whole, model))
        costs = cost.joined(model, figures).costs
        first = halves.rollout_task(pair.devices, pair.generate, part, schedule.installs_in_flight)
        last = helped(halves.train_task(pair.train, part), num_on_devices(whole))

        def bounded(config: Config) -> tuple[Bound, dict[str, float]]:
            of_part, slowed = divided(config, part), costs_of_part(costs, config, part)
            tasks = [before_training(of_part, slowed, halves.drawn(part), name) for name in self._names]
            units = storage(of_part, slowed, halves.drawn(part))
            aside = [units, *([critic(of_part, slowed, halves.drawn(part))] if "values" in self._names else [])]
            passed = (first, *tasks, last)
            aside += on_shared_devices(of_part, {task.name: task.busy for task in [*passed, *aside]})
            graph = Graph(passed, weights(costs), schedule.max_staleness, schedule.is_streamed, tuple(aside))
            return bound(graph), {"processes": tasks[0].busy, "units": units.busy}

        memory = {group[0]: halves.gib(half, group) for group in self._groups} | {"rollout": other.memory_gib + half.helper_gib}
        sizes: dict[str, list[tuple[int, ...]]] = {"processes": _processes(whole, halves.num), "units": _units(whole)}
        at = dict.fromkeys(sizes, 0)
        config, (found, busy) = whole, bounded(whole)
        for n in itertools.count():
            self._counts["enumerated"] += n > 0
            chosen_sizes = tuple(itertools.chain(*(sizes[name][i] for name, i in at.items())))
            yield Candidate(found, (*pair.place, n), config, pair.place[1], memory, part, figures, chosen_sizes)
            for name in sizes:
                if at[name] + 1 == len(sizes[name]) or busy[name] <= TIE * found.seconds:  # of which more could gain no more
                    continue
                larger = at | {name: at[name] + 1}
                of_larger = _with_services(whole, *(sizes[each][i] for each, i in larger.items()))
                following, less_busy = bounded(of_larger)
                if following.seconds <= (1 - TIE) * found.seconds or busy[name] > found.seconds / 2:
                    at, config, found, busy = larger, of_larger, following, less_busy
                    break
            else:
                return


def _at_least(schedule: Schedule, generating: Task, training: Task, others: float) -> float:
    """Seconds that no step is under: of the busiest pool, `others` among them, and of the rows' way through both halves."""
    path = generating.span + (training.last if schedule.is_streamed else training.span)
    return max(generating.busy, training.busy, others, path / (1 + schedule.max_staleness))


def pools_of(config: Config, num: int) -> list[Config]:
    """The configuration with pools of the reference, of a critic's values and of a reward model, where they have devices of their
    own: its own, and larger ones, by powers of two, up to a quarter of the devices; each as its tasks share devices, and as they
    could."""
    plan, tasks = config.plan, tasks_before_training(config)
    names = [name for name in ("reference", "values") if name in tasks] + ["reward"] * (config.reward.model is not None)
    chosen = {name: _sizes(getattr(plan, name).num_workers, num) for name in names}
    every = []
    for sizes in itertools.product(*chosen.values()):
        pools = {name: {"num_workers": size} for name, size in zip(chosen, sizes, strict=True)}
        unsharded = [name for name, size in zip(chosen, sizes, strict=True) if size] + ["critic"] * ("values" in tasks)
        every += [config.changed(plan={**pools, "shares": shares}) for shares in _shares(config, unsharded)]
    return every


def _shares(config: Config, tasks: Sequence[str]) -> list[dict[str, str]]:
    """Ways in which tasks share devices: the configuration's own; each of them on devices that train, alone or with all others,
    where the kinds of devices are the same."""
    own = {str(task): str(other) for task, other in config.plan.shares.items()}
    could = [task for task in tasks if kind_of(device_of(config, task)) == kind_of(config.train.device) and task not in own]
    if config.cluster.name == "inline":
        return [own]
    found = [own, *(own | {task: "train"} for task in could), own | dict.fromkeys(could, "train")]
    return [each for i, each in enumerate(found) if each not in found[:i] and not {*each} & {*each.values()}]


def _sizes(own: int, num: int) -> list[int]:
    """Sizes of a pool: its own, and larger ones. A pool of none may get workers."""
    least = max(own, 1)
    return sorted({own, *(least * n for n in powers(max(1, num // (4 * least))))})


def _processes(config: Config, cores: int) -> list[tuple[int, ...]]:
    """Reward workers and the processes of each: the configuration's own, and more by powers of two, the fewest first.

    Where a pool of workers has as many processes as their hosts have cores for, it gets more workers, unless each of these takes a
    device. Nobody has more processes than responses at once. `cores`: of the machine, where all is computed on them.
    """
    own, workers, rows = config.reward.num_workers, config.plan.reward.num_workers, config.train.prompts_per_step
    if not config.reward.parts:
        return [(workers, own)]
    is_task, on_cores = config.reward.place == "task", kind_of(config.rollout.device) == CPU
    at_once = rows * config.rollout.group_size // workers if is_task else config.rollout.num_slots
    hosts = workers if is_task else max(1, config.rollout.num_workers)
    at_host = cores // hosts if on_cores else MOST_PROCESSES
    sizes: list[tuple[int, ...]] = [(workers, own * n) for n in powers(max(1, min(at_host, at_once) // own))]
    if is_task and config.reward.model is None and not on_cores:
        sizes += [(workers * n, sizes[-1][1]) for n in powers(max(1, at_once // sizes[-1][1]))[1:]]
    return sizes


def _units(config: Config) -> list[tuple[int, ...]]:
    """Numbers of storage units: the configuration's own, and more by powers of two where each has a process of its own."""
    own, most = config.queue.num_units, min(MOST_UNITS, config.train.prompts_per_step)
    return [(own * n,) for n in powers(max(1, most // own if config.queue.place == "workers" else 1))]


def _with_services(config: Config, rewards: tuple[int, ...], units: tuple[int, ...]) -> Config:
    """The configuration with so many reward workers and processes of each, and so many storage units."""
    workers, processes = rewards
    pool, queue = {"reward": {"num_workers": workers}}, {"num_units": units[0]}
    return config.changed(plan=pool, reward={"num_workers": processes}, queue=queue)


def _schedules(config: Config) -> list[tuple[Choice, Schedule]]:
    """The on-policy schedules, and the configuration's own."""
    chosen = {each.name: each for each in (Choice(name="periodic"), Choice(name="synchronous"), config.schedule)}
    return [(each, schedule_of(each)) for each in chosen.values()]


def _weight_syncs(config: Config, model: Model, num: int) -> list[Any]:
    """The configuration's own, or, where that ends at one machine and the devices do not fit in one, those that go on."""
    sync = config.weight_sync
    if sync.name != "shared_memory" or num <= model.hardware.per_node:
        return [sync]
    return [sync.changed(name=name) for name in ("network", "collective")]
