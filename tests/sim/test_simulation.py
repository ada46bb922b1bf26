"""The whole queue under a virtual clock: whatever breaks, every row that was acknowledged comes to its end and has its effect once.

`make soak` runs ten times as many seeds. A seed that fails prints the command that replays it.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.depth import few
from tests.sim.run import report
from tests.sim.world import simulate

CHUNK = 50
FINDERS = {
    58: "06-no-clock",
    139: "24-partial-drop-forgotten-by-resync",
    211: "18-winner-told-that-it-lost",
    237: "32-dropped-taken-for-lost",
}
"""The first seeds that find these faults (tests/mutants): the gate runs them, too."""
IN_GATE = (*range(CHUNK), *FINDERS)
SEEDS = few(IN_GATE, range(2000))
COUNTED: dict[int, Counter[str]] = {}

AT_LEAST = {
    "break": 2000,
    "crash": 1000,
    "pause": 1000,
    "partition": 1000,
    "replacement": 500,
    "duplicate": 500,
    "reorder": 200,
    "request lost": 1000,
    "reply lost": 100,
    "late request served": 50,
    "handler cancelled": 1000,
    "storage failure": 300,
    "restart of a unit": 200,
    "restart of a controller": 200,
    "restart of a feeder": 50,
    "restart of a rollout": 200,
    "restart of a trainer": 200,
    "superseded": 500,
    "away": 100,
    "back": 50,
    "resync: new session": 1000,
    "resync: restart of a unit": 200,
    "resync: the log is too short": 80,
    "news": 10000,
    "raised StaleToken": 500,
    "completion refused": 500,
    "marks refused": 100,
    "redelivery": 1000,
    "expired": 500,
    "dead letter": 200,
    "filtered": 200,
    "admission wait": 100,
    "snapshot": 300,
    "row in a snapshot": 1000,
    "lost": 200,
    "loss named": 100,
    "trained": 10000,
}
"""How often, over 2,000 seeds, what is to be tested has to happen: a simulation must not stop testing something without a word."""


@pytest.mark.parametrize("first", range(0, len(SEEDS), CHUNK))
def test_no_law_is_broken(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS[first : first + CHUNK]:
        result = simulate(seed)
        assert not result.violations, report(result)
        counts += result.counts
    COUNTED[first] = counts


def test_everything_that_can_happen_has_happened_often() -> None:
    if len(COUNTED) < math.ceil(len(SEEDS) / CHUNK):
        pytest.skip("only some of the seeds have run")
    counts = sum(COUNTED.values(), Counter())
    share = len(SEEDS) / 2000 * few(0.5, 1)  # what is rare may be rarer in a few seeds
    assert {what: counts[what] for what, least in AT_LEAST.items() if counts[what] < least * share} == {}


def test_a_seed_is_the_same_each_time_and_in_every_process() -> None:
    """Whatever is hashed how, and wherever in memory it lies: in some of these seeds many tasks are cancelled at once."""
    seeds = [*range(7, 12), 21, 50, 53, 82, 98, 107][:: few(3, 1)]
    program = f"from tests.sim.world import simulate; print(*(simulate(seed).digest for seed in {seeds}))"
    digests = [[simulate(seed).digest for seed in seeds]]
    for number in (1, 2):
        environment = {**os.environ, "PYTHONHASHSEED": str(number)}
        root = Path(__file__).parents[2]
        elsewhere = f"others = [bytes(i % 900) for i in range({number * 7001})][::2]; {program}"
        printed = subprocess.check_output([sys.executable, "-c", elsewhere], cwd=root, env=environment, text=True)
        digests.append(printed.split())
    assert digests[0] == digests[1] == digests[2]
    assert len(set(digests[0])) == len(seeds)
