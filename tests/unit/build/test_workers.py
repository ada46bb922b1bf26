"""What a worker makes of its run's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncflow.build.workers import _config_of
from asyncflow.config import dump, parse


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
    config = _config_of(tmp_path)
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
    assert _config_of(tmp_path) == given
