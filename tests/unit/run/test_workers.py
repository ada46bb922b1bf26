"""What workers make of their run's configuration, and keep of what they make."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from asyncflow.config import dump, parse
from asyncflow.loops.evaluation import EvaluationSettings, HeldOut
from asyncflow.loops.samples import Prompt, Shape
from asyncflow.run.in_worker.connection import RunConnection, config_of
from asyncflow.run.workers import _sample_filter


@pytest.mark.parametrize("greedy", [True, False])
def test_of_every_evaluation_the_same_prompts_are_kept(greedy: bool) -> None:
    kept: list[dict[str, Any]] = []
    held_out = HeldOut(
        [Prompt(np.arange(2), {}) for _ in range(5)],
        EvaluationSettings(last_version=9, every_steps=1, samples=4, greedy=greedy),
        on_row=lambda row: None,
    )
    run = SimpleNamespace(
        shape=Shape(8, 8, 3, 0, 1.0, 16, 8, samples_per_step=3),
        job=SimpleNamespace(num_held_out=5),
        reporter=SimpleNamespace(keep_sample=kept.append),
    )
    keep = _sample_filter(cast(RunConnection, run))
    for version in range(10):
        for meta in held_out.admission(version)[0]:
            for number in range(meta.size):
                keep({"row": (meta.group << 3) | number, "purpose": "eval", "version": version, "group": meta.group})
    firsts = [held_out.admission(version)[0][i].group for version in range(10) for i in range(3)]
    assert [(sample["version"], sample["group"]) for sample in kept] == [(i // 3, group) for i, group in enumerate(firsts)]
    kept.clear()
    for row in range(16 << 3):
        keep({"row": row, "purpose": "train"})
    assert [sample["row"] >> 3 for sample in kept] == [*[0] * 8, 1, 2, *[8] * 8, 9, 10]  # all of the first prompt


@pytest.mark.parametrize("sees_its_own_alone", [True, False])
def test_a_worker_that_sees_its_own_devices_alone_takes_them_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees_its_own_alone: bool
) -> None:
    run = {"dir": str(tmp_path.parent), "name": tmp_path.name}
    train = {"device": "npu:3", "critic": {"device": "cuda:2"}}
    reward = {"place": "task", "model": {"path": "r", "device": "cuda:4"}}
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "run": run, "rollout": {"device": "cuda:1"}, "train": train}
    (tmp_path / "config.yaml").write_text(dump(given := parse({**tree, "reward": reward})))
    if sees_its_own_alone:
        monkeypatch.setenv("ASYNCFLOW_OWN_DEVICES", "1")
    config = config_of(tmp_path)
    assert config.reward.model is not None
    devices = [each.device for each in (config.rollout, config.train, config.train.critic, config.reward.model)]
    if sees_its_own_alone:
        assert devices == ["cuda", "npu", "cuda", "cuda"] and config.rollout.num_slots == given.rollout.num_slots
    else:
        assert devices == ["cuda:1", "npu:3", "cuda:2", "cuda:4"] and config == given


def test_a_worker_without_a_reward_model_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCFLOW_OWN_DEVICES", "1")
    run = {"dir": str(tmp_path.parent), "name": tmp_path.name}
    (tmp_path / "config.yaml").write_text(dump(given := parse({"model": {"path": "m"}, "data": {"path": "d"}, "run": run})))
    assert config_of(tmp_path) == given
