"""Who may be on which node of a Ray cluster, and in which order room is taken."""

from __future__ import annotations

import math
from typing import Any

import pytest

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.ray.requirements import RayOptions, options_of
from asyncflow.config import Config, parse
from asyncflow.types import UserError

LISTENS = {"queue": {"listen": "tls:h:0"}}
SERVERS = {"engine": {"name": "vllm", "addresses": ["http://127.0.0.1:8000"]}}
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
        ("evaluator", {}, "evaluator workers stay on this machine, as queue.listen is not set"),
        ("evaluator", LISTENS, "as weight_sync.listen is not set"),
        ("evaluator", NETWORK, None),
        ("values", {}, "values workers stay on this machine, as queue.listen is not set"),
        ("values", LISTENS, "as weight_sync.listen is not set"),
        ("values", NETWORK, None),
        ("values", {**NETWORK, "train": {"critic": {"path": "m"}}}, "as the model of train.critic.path is on it"),
        ("reward", LISTENS, None),
        ("storage", LISTENS, None),
        ("storage", {}, "storage workers stay on this machine, as queue.listen is not set"),
        ("reference", {}, "as queue.listen is not set"),
        ("rollout", {**NETWORK, "rollout": SERVERS}, "as the servers of rollout.engine.addresses are on it"),
        ("rollout", {**NETWORK, "rollout": {"engine": {"name": "vllm", "instances": 2}}}, None),
        ("reward", {**NETWORK, "rollout": SERVERS}, None),
    ],
)
def test_who_may_be_on_another_machine(pool: str, tree: dict[str, Any], why: str | None) -> None:
    found = RayOptions().why_here(pool, config(tree))
    assert why in found if why else not found


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "127.1", "[::ffff:127.0.0.1]"])
@pytest.mark.parametrize(
    ("address", "is_alone"),
    [
        (None, True),
        ("127.0.0.1:6379", True),
        ("[::1]:6379", True),
        ("localhost:6379", True),
        ("10.0.0.1:6379", False),
        ("head.cluster:6379", False),
        ("auto", False),
    ],
)
def test_nobody_is_sent_where_a_door_on_loopback_is_not_reached(host: str, address: str | None, is_alone: bool) -> None:
    options, here, there = RayOptions(address=address, trainers="anywhere"), f"tls:{host}:0", "tls:10.0.0.1:0"
    for queue, weights, closed in ((here, there, "queue"), (there, here, "weight_sync")):
        told = config({"queue": {"listen": queue}, "weight_sync": {"name": "network", "listen": weights}})
        why = options.why_here("rollout", told)
        assert not why if is_alone else why.endswith(f"as others do not reach {closed}.listen={here}")
        assert bool(options.why_here("reward", told)) == (closed == "queue" and not is_alone)
        if closed == "queue" and not is_alone:
            with pytest.raises(UserError, match="trainers on other nodes do not find this machine, as others do not reach queue"):
                options.check("trainer", 2, told)
        else:
            options.check("trainer", 2, told)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"resources": {"reward": {"CPU": -1}}}, "cluster.resources.reward.CPU=-1 cannot be given to a worker: take 0, or 0.0001"),
        ({"resources": {"reward": {"x": 0.00001}}}, "cluster.resources.reward.x=1e-05 cannot be given"),
        ({"resources": {"reward": {"CPU": math.nan}}}, "cluster.resources.reward.CPU=nan cannot be given"),
        ({"resources": {"reward": {"CPU": math.inf}}}, "cluster.resources.reward.CPU=inf cannot be given"),
        ({"resources": {"rollout": {"GPU": 1.5}}}, "rollout.GPU=1.5 is neither a part of one device nor .*: take 1 or 2"),
        ({"resources": {"rollout": {"NPU": 2.5}}}, "rollout.NPU=2.5 is neither a part .*: take 2 or 3"),
        ({"start_seconds": -1}, "cluster.start_seconds=-1 is no time to wait"),
        ({"start_seconds": 0}, "cluster.start_seconds=0 is no time to wait"),
        ({"start_seconds": math.inf}, "cluster 'ray': start_seconds must be a number, not .inf"),
    ],
)
def test_amounts_that_nobody_can_be_given_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"^.*{sentence}"):
        options_of(given)
    options_of({"resources": {"rollout": {"CPU": 0, "GPU": 0.5, "NPU": 2, "x": 1.5, "memory": 1e9}}, "start_seconds": 0.5})


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
    names = ("storage/0", "rollout/0", "rollout/1", "reward/0", "reference/0", "trainer/0")
    assert RayOptions(trainers=trainers).in_order([WorkerSpec(name, "m:f") for name in names], config(tree)) == order


@pytest.mark.parametrize(
    ("options", "tree", "sentence"),
    [
        ({}, {}, "trainers on other nodes do not find this machine, as queue.listen is not set: set it to tls:HOST:0"),
        ({"shares_files": False}, LISTENS, "which other nodes do not see by cluster.shares_files=false: share it"),
    ],
)
def test_trainers_anywhere_that_could_not_work_are_refused(options: dict[str, Any], tree: dict[str, Any], sentence: str) -> None:
    chosen = RayOptions(trainers="anywhere", **options)
    with pytest.raises(UserError, match=sentence):
        chosen.check("trainer", 2, config(tree))
    chosen.check("trainer", 1, config(tree))  # the first one stays
    RayOptions(trainers="anywhere", placement={"trainer": "STRICT_SPREAD"}).check("trainer", 2, config(LISTENS))
