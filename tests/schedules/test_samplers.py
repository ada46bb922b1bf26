"""A sampler of the user's own decides the order and nothing else: every mode in simulated runs, with faults, keeps every law."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncflow.config import Config, parse
from asyncflow.run.factories import queue_schema
from asyncflow.simulation.seeds import run_seed
from tests.depth import few, in_gate
from tests.schedules.configurations import MODES, drawn

NEWEST = f"{Path(__file__).parent / 'newest.py'}:Newest"
SEEDS, WITH_FAULTS = few((1, 4), range(1, 6)), range(3, 6)


def turned_around(config: Config) -> Config:
    """The same run, whose tasks all begin with what became ready last."""
    tree = config.model_dump(mode="json")
    tree["queue"]["samplers"] = {task.name: {"path": NEWEST} for task in queue_schema(config).tasks}
    return parse(tree)


@pytest.mark.parametrize("mode", in_gate("synchronous", "bounded", of=MODES))
def test_no_law_is_broken_in_another_order(mode: str) -> None:
    is_other = False
    for seed in SEEDS:
        config, costs = drawn(mode, seed)
        outcome = run_seed(turned_around(config), costs, seed, has_faults=seed in WITH_FAULTS)
        assert outcome.violations == [] and outcome.steps == config.run.steps, seed
        is_other = is_other or outcome.seconds != run_seed(config, costs, seed, has_faults=seed in WITH_FAULTS).seconds
    assert is_other, "in another order a run ends at another time"
