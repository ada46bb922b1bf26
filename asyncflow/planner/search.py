"""Search for the plan with the shortest step: enumerate, drop, simulate the rest, best bound first.

    space.py  pools, pairs of halves, candidates, each with what none of its plans can be under
                 |  least first: pools become pairs, a pair becomes candidates, a candidate is simulated (part.py)
                 v
    search    until no plan that is left can win

Simulated are the real loops, on a part of the machine where all pools can be divided.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from asyncflow.config import Config, parse
from asyncflow.engines.costs import Costs
from asyncflow.planner import cost
from asyncflow.planner.bounds import Bound
from asyncflow.planner.cost import Estimate, Model
from asyncflow.planner.part import config_of_part, costs_of_part, rows_of
from asyncflow.planner.space import TIE, Candidate, Halves, Pair, Space, pools_of
from asyncflow.run.device_shares import num_devices
from asyncflow.simulation.seeds import Order, Outcome, Simulators
from asyncflow.types import RunError, UserError

ROWS_OF_SEARCH: Final = 20_000
"""Rows that a search simulates, about; one or two thousand take a second of one core."""
MOST_REFINED: Final = 4_000
"""Pairs whose whole bound is computed when the search has ended, to tell how many plans are left: two seconds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a run. `config`: with all that is chosen. `part`: the share of the machine that is simulated is 1 / `part`.
    `place`: that of its candidate."""

    config: Config
    devices: int
    memory_gib: Mapping[str, float]
    estimate: Estimate
    bound: Bound
    part: int
    outcome: Outcome | None = None
    place: tuple[int, ...] = ()

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
    frontier = Frontier(config, model, fields, num)
    done: list[Plan] = []
    broken: list[str] = []
    rows = 0
    while rows < most_rows:
        best = min((plan.step_seconds for plan in done), default=math.inf)
        wave = frontier.take(at_once, best)
        if not wave:
            break
        plans = [_plan(candidate, model) for candidate in wave]
        rows += sum(rows_of(plan.config, plan.part) for plan in plans)
        for plan in await asyncio.gather(*(simulated(plan, simulators) for plan in plans)):
            assert plan.outcome is not None
            if plan.outcome.violations:
                broken.append(f"a plan is left out, since its simulated run broke a law: {plan.outcome.violations[0]}")
            else:
                done.append(plan)
    if not done:
        raise RunError(f"no plan could be simulated: {broken[0]}")
    done.sort(key=lambda plan: plan.step_seconds)  # stable: of equal ones the better bound comes first
    counts = frontier.counts
    counts["simulated"] = len(done)
    counts["left"], counts["bounded away"], left_bound = frontier.left(done[0].step_seconds)
    return Found(_fewest(done), dict(counts), left_bound, tuple(broken))


class Frontier:
    """Plans that are neither simulated nor excluded, those with the least bound first."""

    def __init__(self, config: Config, model: Model, fields: Mapping[str, Any], num: int) -> None:
        """Raises `UserError` when no plan fits."""
        self.counts: Counter[str] = Counter()
        halves = Halves(config, model, fields, num)
        self._heap: list[tuple[float, tuple[int, ...], Space, Pair | Candidate | None]] = []
        own, *others = [Space(halves, pools, number, self.counts) for number, pools in enumerate(pools_of(config, num))]
        for space in others:
            heapq.heappush(self._heap, (space.least(), (0, 0, space.number), space, None))
        try:
            self._add_pairs(own)
        except UserError:  # perhaps there are plans in which tasks share devices
            while self._heap and self._heap[0][-1] is None:
                self._expand(heapq.heappop(self._heap)[2], None)
            if not self._heap:
                raise

    def take(self, number: int, below: float) -> list[Candidate]:
        """The next candidates, up to so many; none if no plan that is left can take less than `below` seconds."""
        taken: list[Candidate] = []
        while self._heap and len(taken) < number and (taken or self._heap[0][0] < below):
            _, _, space, what = heapq.heappop(self._heap)
            if isinstance(what, Candidate):
                taken.append(what)
            else:
                self._expand(space, what)
        return taken

    def left(self, best: float) -> tuple[int, int, float]:
        """Numbers of plans that may be under `best` seconds, and that may not, and seconds that all of the first are over. Of
        very many only the cheap bounds are known."""
        left: list[float] = []
        num_expanded = 0
        while self._heap and self._heap[0][0] < best:
            seconds, _, space, what = heapq.heappop(self._heap)
            if isinstance(what, Candidate) or (what is not None and num_expanded >= MOST_REFINED):
                left.append(seconds)
            else:
                num_expanded += 1
                self._expand(space, what)
        return len(left), sum(what is not None for _, _, _, what in self._heap), min(left, default=math.inf)

    def _expand(self, space: Space, pair: Pair | None) -> None:
        if pair is None:
            with contextlib.suppress(UserError):  # such pools leave too few devices for the other workers
                self._add_pairs(space)
            return
        for each in space.candidates(pair):
            heapq.heappush(self._heap, (each.bound.seconds, each.place, space, each))

    def _add_pairs(self, space: Space) -> None:
        for pair in space.pairs():
            heapq.heappush(self._heap, (pair.seconds, pair.place, space, pair))


def _plan(candidate: Candidate, model: Model) -> Plan:
    """The candidate's plan, not simulated yet."""
    config = parse(candidate.config.model_dump(mode="json"))
    estimate = cost.joined(model, candidate.figures)
    return Plan(config, candidate.devices, candidate.memory_gib, estimate, candidate.bound, candidate.part, None, candidate.place)


def _fewest(plans: list[Plan]) -> tuple[Plan, ...]:
    """Plans without those that another one ties with, which has all the same but fewer processes."""
    kept = []
    for plan in plans:
        same = [other for other in plans if other.place[:-1] == plan.place[:-1] and other.place[-1] < plan.place[-1]]
        if not any(other.step_seconds <= plan.step_seconds * (1 + TIE) for other in same):
            kept.append(plan)
    return tuple(kept)


async def simulated(plan: Plan, simulators: Simulators) -> Plan:
    """The plan with what its simulation gave."""
    order = Order(simulated_config(plan).model_dump(mode="json"), simulated_costs(plan), [0], False)
    outcomes = [outcome async for outcome in simulators.outcomes(order)]
    return replace(plan, outcome=outcomes[0])


def simulated_config(plan: Plan) -> Config:
    """Configuration of the simulated part."""
    return config_of_part(plan.config, plan.part)


def simulated_costs(plan: Plan) -> Costs:
    """Costs of the simulated part."""
    return costs_of_part(plan.estimate.costs, plan.config, plan.part)
