"""Helpers of a trainer, and the devices that they and the generating workers compute on, by the configuration."""

from __future__ import annotations

from typing import Any

import pytest

from asyncflow.config import parse
from asyncflow.run import helper_devices as helper_devices_module
from asyncflow.run.device_shares import check_shares
from asyncflow.run.factories import tokens_per_pass, update_plan
from asyncflow.run.helper_devices import (
    generating_device,
    helper_devices,
    num_critic_helpers,
    num_helpers,
    num_passing,
)
from asyncflow.run.preparation.notes import pass_note
from asyncflow.types import UserError

NEEDED: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}


@pytest.mark.parametrize(
    ("cores", "sections", "expected"),
    [
        (1, {}, 0),
        (2, {}, 1),
        (64, {}, 1),  # as many as the rollout worker has
        (8, {"rollout": {"num_workers": 3, "num_threads": 2}}, 6),
        (6, {"rollout": {"num_workers": 3, "num_threads": 2}, "train": {"num_threads": 2}}, 2),
        (2, {"train": {"helpers": 0}}, 0),
        (1, {"train": {"helpers": 3}}, 3),
        (2, {"rollout": {"num_workers": 0}}, 0),
        (2, {"rollout": {"device": "cuda"}}, 0),
        (2, {"train": {"device": "cuda"}}, 0),
        (2, {"train": {"engine": "outside"}}, 0),
        (2, {"plan": {"train": {"dp": 2}}}, 0),
        (3, {"plan": {"train": {"dp": 2}}, "rollout": {"num_workers": 2}}, 0),  # one for all ranks, or for none
        (4, {"plan": {"train": {"dp": 2}}, "rollout": {"num_workers": 2}}, 1),
        (64, {"plan": {"train": {"tp": 2, "pp": 2}}, "rollout": {"num_workers": 9}}, 2),
        (1, {"plan": {"train": {"pp": 2}}, "train": {"helpers": 3}}, 3),
        (2, {"cluster": "ray"}, 0),
        (2, {"model": {"path": "model", "lora": {"rank": 2}}}, 1),
        (2, {"model": {"path": "model", "lora": {"rank": 2}}, "train": {"old": "step_start"}}, 1),
    ],
)
def test_helpers_are_as_many_as_the_rollout_workers_have_cores_for(
    cores: int, sections: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_devices_module, "num_cores", lambda: cores)
    config = parse({**NEEDED, **sections})
    assert num_helpers(config) == expected
    fields = {"hidden_size": 576}
    if (tokens := tokens_per_pass(config, fields)) is not None:
        in_round = config.train.pipeline_micro_batches if config.layout.pp > 1 else 1 + num_passing(config)
        assert num_passing(config) == (expected if config.layout.size == 1 else 0)
        assert update_plan(config, fields).tokens_per_round == tokens * in_round
        assert ("train.helpers" in pass_note(config, fields)) == bool(num_passing(config))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"plan": {"train": {"tp": 2}}, "train": {"device": "cuda"}}, "a trainer of several ranks has none on devices"),
        ({"train": {"engine": "deepspeed"}}, "only train.engine=torch has them"),
        ({"train": {"device": "cuda:1"}}, "train.device=cuda:1, and no other device is theirs .* plan.shares.helpers=rollout"),
        ({"cluster": "ray"}, "with cluster=ray it is not known"),
    ],
)
def test_helpers_that_cannot_be_are_refused_with_the_reason(sections: dict[str, Any], words: str) -> None:
    config = parse({**NEEDED, **sections, "train": {**sections.get("train", {}), "helpers": 2}})
    with pytest.raises(UserError, match=f"train.helpers=2: .*{words}.*: leave it out, or set it to 0"):
        num_helpers(config)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, 2),
        ({"train": {"helpers": 3}}, 3),
        ({"train": {"helpers": 0}}, 0),
        ({"train": {"critic": {"device": "cuda"}}}, 0),
        ({"train": {"device": "cuda"}}, 2),  # the policy's: the critic is where it was
        ({"train": {"engine": "deepspeed"}, "plan": {"train": {"dp": 4}}}, 2),
        ({"rollout": {"device": "cuda"}}, 0),
        ({"cluster": "ray"}, 0),
    ],
)
def test_a_critic_has_the_helpers_of_a_trainer_on_one_device(
    sections: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_devices_module, "num_cores", lambda: 8)
    rollout = {"num_workers": 2, **sections.get("rollout", {})}
    assert num_critic_helpers(parse({**NEEDED, "algorithm": "ppo", **sections, "rollout": rollout})) == expected


GPUS: dict[str, Any] = {"train": {"device": "cuda"}, "rollout": {"device": "cuda:1-3", "num_workers": 3}}
SHARED = {"shares": {"helpers": "rollout"}}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"plan": SHARED}, ("cuda:1", "cuda:2", "cuda:3")),
        ({"plan": SHARED, "train": {"device": "cuda", "helpers": 2}}, ("cuda:1", "cuda:2")),
        ({"plan": SHARED, "rollout": {"device": "cuda:1-2", "num_workers": 5}}, ("cuda:1", "cuda:2")),
        ({"train": {"device": "cuda", "helpers": 0}}, ()),
        ({"plan": SHARED, "train": {"device": "cuda:4"}}, ("cuda:1", "cuda:2", "cuda:3")),
        ({}, ()),  # by themselves they are on no device
    ],
)
def test_helpers_are_on_the_devices_that_the_plan_gives_them(sections: dict[str, Any], expected: tuple[str, ...]) -> None:
    train, fields = sections.get("train", GPUS["train"]), {"hidden_size": 576}
    exact, fp32 = (
        parse({**NEEDED, **GPUS, **sections, "train": {**train, "accumulate": accumulate}}) for accumulate in ("exact", "fp32")
    )
    assert helper_devices(exact) == helper_devices(fp32) == expected
    check_shares(exact)
    assert tokens_per_pass(exact, fields) is None  # a pass is one micro-batch; a round has some for each helper all the same
    assert (update_plan(exact, fields).tokens_per_round is not None) == bool(expected)
    assert ("helpers on idle devices" in pass_note(fp32, fields)) == bool(expected)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"rollout": {"device": "cuda"}},
            "rollout.device=cuda does not say which devices generate: cuda:1-3 would",
        ),
        ({"rollout": {"device": "npu:1"}}, "rollout.device=npu:1 is of another kind than train.device=cuda"),
        (
            {"train": {"device": "cuda:2"}, "rollout": {"device": "cuda:1-2"}},
            "train.device=cuda:2 is one of the devices",
        ),
        ({"rollout": {"device": "cuda:1", "engine": "vllm"}}, "rollout.engine=vllm takes all memory of its devices"),
        ({"cluster": "ray"}, "with cluster=ray it is not known which cores or devices"),
        ({"plan": {**SHARED, "train": {"dp": 2}}}, "a trainer of several ranks has none on devices"),
        ({"train": {"device": "cuda", "helpers": 0}}, "train.helpers=0 says that there are none"),
        ({"train": {"device": "cpu"}}, "they compute on cores, by train.helpers alone"),
    ],
)
def test_helpers_that_cannot_be_on_devices_are_refused_with_the_reason(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"plan.shares.helpers=rollout: .*{words}.*: leave it out$"):
        check_shares(parse({**NEEDED, **GPUS, "plan": SHARED, **sections}))


@pytest.mark.parametrize("shares", [{"helpers": "train"}, {"reference": "rollout"}])
def test_devices_of_rollout_are_for_helpers_alone(shares: dict[str, str]) -> None:
    with pytest.raises(UserError, match="helpers of the trainer compute on devices of rollout, and nothing else does"):
        parse({**NEEDED, "plan": {"shares": shares}})


@pytest.mark.parametrize(
    ("sections", "name", "expected"),
    [
        ({"rollout": {"device": "cuda:1-3"}}, "rollout/2", "cuda:3"),
        ({"rollout": {"device": "cuda:1-3"}}, "rollout/4", "cuda:2"),  # one that has joined
        ({"rollout": {"device": "cuda:1"}}, "rollout/2", "cuda:1"),
        ({"rollout": {"device": "cuda"}}, "rollout/2", "cuda"),
        ({}, "rollout/2", "cpu"),
        ({"rollout": {"device": "cuda:1-3"}}, "evaluator/1", "cuda:2"),
        ({"rollout": {"device": "cuda:1"}, "eval": {"device": "cuda:4-5"}}, "evaluator/1", "cuda:5"),
    ],
)
def test_each_worker_that_generates_has_the_next_one_of_several_devices(sections: dict[str, Any], name: str, expected: str) -> None:
    assert generating_device(parse({**NEEDED, **sections}), name) == expected


@pytest.mark.parametrize("device", ["cuda:3-1", "cuda:1-", "cuda-3", "gpu:1-3"])
def test_a_range_of_devices_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(UserError, match=r"there is no device .* or with several, cuda:1-3"):
        parse({**NEEDED, "rollout": {"device": device}})
