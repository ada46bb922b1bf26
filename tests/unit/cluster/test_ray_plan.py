"""Who may be on which node of a Ray cluster, and in which order room is taken."""

from __future__ import annotations

from typing import Any

import pytest

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.ray_plan import RayOptions
from asyncflow.config import Config, parse
from asyncflow.types import UserError

LISTENS = {"queue": {"listen": "tls:h:0"}}
NETWORK = {**LISTENS, "weight_sync": {"name": "network", "listen": "tls:h:0"}}


def config(tree: dict[str, Any]) -> Config:
    return parse({"model": {"path": "m"}, "data": {"path": "d"}, **tree})


@pytest.mark.parametrize(
    ("pool", "tree", "why"),
    [
        ("trainer", LISTENS, "trainers stay on this machine, as cluster.trainers=driver"),
        ("critic", NETWORK, "the critic stays on this machine"),
        ("rollout", {}, "as queue.listen is not set"),
        ("rollout", LISTENS, "as weight_sync.listen is not set"),
        ("rollout", NETWORK, None),
        ("reward", LISTENS, None),
        ("storage", LISTENS, None),
        ("storage", {}, "storage workers stay on this machine, as queue.listen is not set"),
        ("reference", {}, "as queue.listen is not set"),
    ],
)
def test_who_may_be_on_another_machine(pool: str, tree: dict[str, Any], why: str | None) -> None:
    found = RayOptions().why_here(pool, config(tree))
    assert why in found if why else not found


@pytest.mark.parametrize(
    ("tree", "trainers", "order"),
    [
        ({}, "driver", ["trainer", "reference", "reward", "rollout", "storage"]),
        (LISTENS, "driver", ["trainer", "rollout", "reference", "reward", "storage"]),  # it may not be elsewhere
        (LISTENS, "anywhere", ["trainer", "rollout", "reference", "reward", "storage"]),
        (NETWORK, "driver", ["trainer", "reference", "reward", "rollout", "storage"]),
    ],
)
def test_who_must_stay_is_placed_first_and_always_in_this_order(tree: dict[str, Any], trainers: Any, order: list[str]) -> None:
    names = ("storage/0", "rollout/0", "rollout/1", "reward", "reference", "trainer/0")
    assert RayOptions(trainers=trainers).in_order([WorkerSpec(name, "m:f") for name in names], config(tree)) == order


@pytest.mark.parametrize(
    ("options", "tree", "sentence"),
    [
        ({}, {}, "trainers on other nodes do not find this machine: set queue.listen to tls:HOST:0"),
        ({"shares_files": False}, LISTENS, "which other nodes do not see by cluster.shares_files=false: share it"),
    ],
)
def test_trainers_anywhere_that_could_not_work_are_refused(options: dict[str, Any], tree: dict[str, Any], sentence: str) -> None:
    chosen = RayOptions(trainers="anywhere", **options)
    with pytest.raises(UserError, match=sentence):
        chosen.check("trainer", 2, config(tree))
    chosen.check("trainer", 1, config(tree))  # the first one stays
    RayOptions(trainers="anywhere", placement={"trainer": "STRICT_SPREAD"}).check("trainer", 2, config(LISTENS))
