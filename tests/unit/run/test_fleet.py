"""What a run's workers are, and how many devices they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncflow.config import Config, parse
from asyncflow.run.device_shares import check_shares, num_devices, shared_devices
from asyncflow.run.fleet import workers
from asyncflow.types import UserError


def config(**sections: Any) -> Config:
    return parse({"model": {"path": "model"}, "data": {"path": "data"}, **sections})


@pytest.mark.parametrize(
    ("engine", "each"),
    [
        ("slots", (1, 1)),
        ("my_engine.py:MyEngine", (1, 1)),
        ("vllm", (1, 1)),
        ({"name": "vllm", "instances": 3, "tensor_parallel": 2, "pause_mode": "wait"}, (6, 6)),
        ({"name": "vllm", "addresses": ["unix:a", "unix:b"], "tensor_parallel": 4}, (8, 0)),  # others have started the servers
        ({"name": "vllm", "addresses": ["unix:a", "unix:b"], "transfer": "nccl"}, (2, 1)),
        ({"name": "vllm", "instances": 2, "transfer": "nccl"}, (2, 3)),  # and one that weights are sent from
    ],
)
def test_a_rollout_worker_has_the_devices_of_all_that_its_engine_drives(engine: Any, each: tuple[int, int]) -> None:
    rollout = {"engine": engine, "num_workers": 2, "device": "cuda", "num_threads": 3}
    plan = {"train": {"dp": 2, "tp": 2}, "reference": {"num_workers": 3}}
    found = config(rollout=rollout, plan=plan, train={"reference": "task", "device": "cuda:1"})
    assert num_devices(found) == 2 * each[0] + 4 + 3
    needs = {spec.name: spec.needs for spec in workers(found, Path(), is_training=True, are_trainers_there=False)}
    assert needs["rollout/0"] == needs["rollout/1"] == {"CPU": 3.0} | ({"GPU": float(each[1])} if each[1] else {})
    others = [*(f"trainer/{rank}" for rank in range(4)), *(f"reference/{i}" for i in range(3))]
    assert [needs[name] for name in others] == [{"CPU": 1.0, "GPU": 1.0}] * 7


def test_values_have_workers_beside_the_critic_where_they_are_asked_for() -> None:
    for count in (0, 2):
        found = config(
            algorithm="ppo", plan={"values": {"num_workers": count}}, train={"critic": {"device": "cuda:1"}, "num_threads": 2}
        )
        assert num_devices(found) == 1 + 1 + 1 + count
        specs = {spec.name: spec for spec in workers(found, Path(), is_training=True, are_trainers_there=False)}
        pool = [name for name in specs if name.startswith("values/")]
        assert pool == [f"values/{i}" for i in range(count)] and specs["critic"].entry == "asyncflow.run.workers:critic_worker"
        for name in pool:
            assert specs[name].entry == "asyncflow.run.workers:values_worker" and not specs[name].max_restarts
            assert (specs[name].needs, specs[name].environment) == (specs["critic"].needs, specs["critic"].environment)
        evaluating = workers(found, Path(), is_training=False, are_trainers_there=False)
        assert [spec.name for spec in evaluating] == ["rollout/0"]


def test_evaluators_are_started_as_rollout_workers_are_on_devices_that_count() -> None:
    rollout = {"num_workers": 2, "device": "cuda", "num_threads": 3, "max_restarts": 7}
    held_out = {"path": "d", "num_workers": 2}
    for device, needs in ((None, {"CPU": 3.0, "GPU": 1.0}), ("cuda:3", {"CPU": 3.0, "GPU": 1.0}), ("cpu", {"CPU": 3.0})):
        found = config(rollout=rollout, eval={**held_out, "device": device})
        specs = {spec.name: spec for spec in workers(found, Path(), is_training=True, are_trainers_there=False)}
        assert num_devices(found) == 2 + 2 + 1
        assert [name for name in specs if name.startswith("evaluator")] == ["evaluator/0", "evaluator/1"]
        one, other = specs["evaluator/0"], specs["rollout/0"]
        assert (one.needs, one.max_restarts, one.environment) == (needs, 7, other.environment)
        assert one.entry == other.entry == "asyncflow.run.workers:rollout_worker"


def test_options_that_say_no_number_of_devices_are_refused() -> None:
    with pytest.raises(UserError, match="instances must be a whole number, not"):
        num_devices(config(rollout={"engine": {"name": "vllm", "instances": "two", "addresses": 3}}))


def test_each_worker_computes_with_as_many_threads_as_it_is_given() -> None:
    found = config(rollout={"num_threads": 3}, train={"num_threads": 2, "reference": "task"}, reward={"place": "task"})
    specs = {spec.name: spec.environment for spec in workers(found, Path(), is_training=True, are_trainers_there=False)}
    threads = {name: (environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) for name, environment in specs.items()}
    assert threads == {"rollout/0": ("3", "3"), "trainer/0": ("2", "2"), "reference/0": ("2", "2"), "reward/0": ("1", "1")}
    keeping = [name for name, environment in specs.items() if "MALLOC_TRIM_THRESHOLD_" in environment]
    assert sorted(keeping) == ["reference/0", "rollout/0", "trainer/0"], "freed memory, which they need again at once"


def test_what_may_be_imported_for_several_workers_is_imported_on_a_cpu_alone_for_ours_and_for_files_of_ones_own() -> None:
    def imports(**sections: Any) -> dict[str, bool]:
        specs = workers(config(**sections), Path(), is_training=True, are_trainers_there=False)
        return {spec.name: bool(spec.imports) for spec in specs}

    assert imports() == {"rollout/0": True, "trainer/0": True}
    assert imports(rollout={"device": "cuda"}, train={"device": "cuda"}) == {"rollout/0": False, "trainer/0": False}
    own = {"engine": "my_engine.py:MyEngine"}
    assert imports(rollout=own, train=own) == {"rollout/0": True, "trainer/0": True}
    strangers = imports(rollout={"engine": {"name": "vllm", "python": "python"}}, train={"engine": "deepspeed"})
    assert strangers == {"rollout/0": False, "trainer/0": False}


def test_each_worker_names_the_device_that_pytorch_must_find_where_it_is() -> None:
    """None where it computes on the CPU, or others have the devices that its engine drives."""
    found = config(rollout={"device": "cuda"}, train={"device": "cuda:1"}, eval={"path": "data", "num_workers": 1, "device": "cpu"})
    asked = {spec.name: spec.device for spec in workers(found, Path(), is_training=True, are_trainers_there=False)}
    assert asked == {"rollout/0": "rollout.device=cuda", "trainer/0": "train.device=cuda", "evaluator/0": ""}
    of_others = config(rollout={"device": "cuda", "engine": {"name": "vllm", "addresses": ["unix:a"]}})
    assert [spec.device for spec in workers(of_others, Path(), is_training=False, are_trainers_there=False)] == [""]


SHARED = {
    "algorithm": "ppo",
    "train": {"reference": "task", "device": "cuda", "critic": {"device": "cuda"}},
    "plan": {"train": {"dp": 2, "tp": 2}, "reference": {"num_workers": 2}, "shares": {"reference": "train", "critic": "train"}},
}


def test_workers_that_share_devices_are_on_them_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = config(**SHARED)
    assert num_devices(found) == 1 + 4
    assert shared_devices(found) == {"reference/0": "trainer/0", "reference/1": "trainer/2", "critic": "trainer/0"}
    specs = {spec.name: spec for spec in workers(found, Path(), is_training=True, are_trainers_there=False)}
    assert [specs[name].shares for name in ("trainer/0", "reference/1", "critic")] == ["", "trainer/2", "trainer/0"]
    assert [specs[f"reference/{i}"].environment["CUDA_VISIBLE_DEVICES"] for i in range(2)] == ["4", "6"]
    assert "CUDA_VISIBLE_DEVICES" not in specs["trainer/0"].environment
    on_ray = workers(config(**SHARED, cluster="ray"), Path(), is_training=True, are_trainers_there=False)
    assert not any("CUDA_VISIBLE_DEVICES" in spec.environment for spec in on_ray), "Ray says which they are"


@pytest.mark.parametrize(
    ("shares", "changes", "sentence"),
    [
        ({"values": "train"}, {}, "no worker of this run with a device of its own has the task values"),
        ({"reference": "critic"}, {}, "2 workers would be on 1 devices: take 1 workers or fewer"),
        ({"reference": "train"}, {"device": "cuda:1"}, "set train.device=cuda, without a number"),
        ({"critic": "train"}, {"critic": {"device": "cpu"}}, "train.critic.device=cpu and train.device=cuda: set them to the same"),
    ],
)
def test_devices_that_cannot_be_shared_are_refused(shares: dict[str, str], changes: dict[str, Any], sentence: str) -> None:
    tree = {**SHARED, "train": SHARED["train"] | changes, "plan": SHARED["plan"] | {"shares": shares}}
    with pytest.raises(UserError, match=sentence):
        check_shares(config(**tree))


@pytest.mark.parametrize(("shares", "why"), [({"critic": "critic"}, "the same"), ({"values": "critic", "critic": "train"}, "none")])
def test_a_task_without_devices_of_its_own_has_none_to_share(shares: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        config(plan={"shares": shares})
