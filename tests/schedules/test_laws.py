"""Every mode in simulated runs, 100 seeds each (in the gate 6): slow, dying and stalled workers, late rewards, weights that do not
arrive, workers that join and leave.

No law is broken: the version interval of every row, each row trained once, all steps committed, no deadlock, a clean shutdown.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import pytest

from asyncflow.control.critic_versions import CriticVersions
from asyncflow.control.ledger import Candidates, LedgerService
from asyncflow.control.modes import Periodic
from asyncflow.control.policy_versions import PolicyVersions, Target
from asyncflow.loops.admissions import Admissions
from asyncflow.loops.rollout import Rollout
from asyncflow.simulation.seeds import Outcome, run_seed
from asyncflow.transport import remote
from asyncflow.types import Interval
from tests.depth import few
from tests.forked import context
from tests.schedules.configurations import MODES, drawn

SEEDS, CHUNK, PROCESSES = few(range(8, 14), range(100)), few(3, 10), 2
FIRST_WITH_FAULTS = 10
MOST = 100
COUNTED: dict[str, Counter[str]] = {}

AT_LEAST = {
    "deaths": 300,
    "stalls": 200,
    "failed fetches": 100,
    "hanging fetches": 100,
    "groups delivered again": 100,
    "responses that came second": 10,
    "responses of several versions": 200,
    "rows failed": 20,
    "joined": 100,
    "left": 500,
    "leavers that were cut short": 100,
    "rows trained": 20000,
    "values": 5000,
    "degenerate groups": 1000,
    "surplus groups": 200,
}
"""How often, over all modes and 100 seeds each, what is to be tested has to happen."""


def run_seeds(mode: str, seeds: range) -> list[Outcome]:
    gc.freeze()  # a run looks for what nobody took, but not among what was imported
    return [run_seed(*drawn(mode, seed), seed, has_faults=seed >= FIRST_WITH_FAULTS) for seed in seeds]


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(PROCESSES, context()) as pool:
        yield pool


@pytest.mark.parametrize("mode", MODES)
def test_no_law_is_broken(mode: str, pool: ProcessPoolExecutor) -> None:
    chunks = [pool.submit(run_seeds, mode, SEEDS[first : first + CHUNK]) for first in range(0, len(SEEDS), CHUNK)]
    found = [outcome for chunk in chunks for outcome in chunk.result()]
    assert {outcome.seed: outcome.violations for outcome in found if outcome.violations} == {}
    COUNTED[mode] = sum((Counter(outcome.counts) for outcome in found), Counter())


def test_what_is_to_be_tested_has_happened_often() -> None:
    if len(COUNTED) < len(MODES):
        pytest.skip("only some of the modes have run")
    counts = sum(COUNTED.values(), Counter())
    share = len(SEEDS) / MOST * few(0.5, 1)  # what is rare may be rarer in a few seeds
    assert {what: counts[what] for what, least in AT_LEAST.items() if counts[what] < least * share} == {}
    assert COUNTED["periodic"]["responses of several versions"] == COUNTED["delayed"]["responses of several versions"] == 0


def test_a_seed_is_the_same_each_time_and_in_every_process(pool: ProcessPoolExecutor) -> None:
    seeds = range(20, 20 + CHUNK)
    here = run_seeds("bounded", seeds)
    assert here == pool.submit(run_seeds, "bounded", seeds).result()
    assert len({outcome.seconds for outcome in here}) == CHUNK


@remote
async def at_once(self: CriticVersions, step: int) -> Target | None:
    """In the place of `CriticVersions.reaches`."""
    return Target(step, None)


BUGS = {
    "weights change while rows of the old ones are under way": (
        "bounded",
        mock.patch.object(Rollout, "_may_change_to", lambda self, version: True),
        "was made by versions",
    ),
    "the ledger takes rows that are too old": (
        "periodic",
        mock.patch.object(Periodic, "interval", lambda self, step: Interval(max(0, step - 1), step)),
        "outside Interval",
    ),
    "nobody is let at the new weights": (
        "periodic",
        mock.patch.object(Periodic, "may_install", lambda self, version, progress, fleet: False),
        "nothing has moved",
    ),
    "nobody goes back for rows that only old weights may make": (
        "delayed",
        mock.patch.object(PolicyVersions, "_behind", lambda self: None),
        "nothing has moved",
    ),
    "the critic gives values before it has been updated": (
        "delayed",
        mock.patch.object(CriticVersions, "reaches", at_once),
        "was given values by the critic's version",
    ),
    "whoever is fast is a member": (
        "delayed",
        mock.patch.object(
            Candidates,
            "_new_members",
            lambda self: dict.fromkeys([g for g, v in self._is_varied.items() if v and g not in self.members][: self.num_left], 0),
        ),
        "and its members are",
    ),
    "prompts that were not needed do not come again": (
        "periodic",
        mock.patch.object(Admissions, "put_back", lambda self, surplus: None),
        "the data's order is",
    ),
    "rows that have failed stay members of their step": (
        "synchronous",
        mock.patch.object(LedgerService, "fail", lambda self, dead: None),
        "nothing has moved",
    ),
}


FOUND_BY = {
    "nobody goes back for rows that only old weights may make": 37,
    "whoever is fast is a member": 11,
    "prompts that were not needed do not come again": 3,
    "rows that have failed stay members of their step": 12,
}
"""Seeds that find a bug, where the first does not: tried before all others, since a search takes seconds."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    mode, planted, told = BUGS[bug]
    with planted:
        for seed in (FOUND_BY.get(bug, 0), *range(MOST)):
            violations = run_seed(*drawn(mode, seed), seed, has_faults=True).violations
            if violations:
                break
    assert told in violations[0]
