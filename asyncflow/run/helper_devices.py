"""Devices of a run's generators, and of the helpers of its trainer and its critic: from the configuration alone.

cores of this machine ------------------------> helpers: threads of each rank of the trainer, and of the critic (train.helpers)
plan.shares.helpers=rollout: accelerators ----> a helper on each that generates, while that one has nothing to generate
"""

from __future__ import annotations

from typing import Final

from asyncflow.config import Config
from asyncflow.devices import CPU, devices_of, kind_of
from asyncflow.engines.rollout import ROLLOUT_ENGINE_DEVICES
from asyncflow.loops.evaluation import is_evaluator
from asyncflow.threads import num_cores
from asyncflow.types import UserError

ON_ONE_MACHINE: Final = ("local", "inline")
"""Clusters whose workers are all on the driver's machine."""


def generating_device(config: Config, name: str) -> str:
    """Device of a rollout worker or an evaluator, by its name: of several (`cuda:1-3`) its own, in turn."""
    devices = devices_of(config.evaluators_device if is_evaluator(name) else config.rollout.device)
    return devices[int(name.partition("/")[2]) % len(devices)]


def helper_devices(config: Config) -> tuple[str, ...]:
    """Device of each helper that may compute beside the own thread of the trainer, of each of its ranks where there are several.

    Raises `UserError` where the run asks for some, and can have none.
    """
    train, is_asked = config.train, config.train.helpers not in ("auto", 0)
    on_cores, shares = kind_of(train.device) == CPU, "helpers" in config.plan.shares
    why = _why_none(config)
    if not on_cores and (shares or is_asked):
        why = why or _why_not_on_devices(config)
    if on_cores and shares:
        why = why or "they compute on cores, by train.helpers alone"
    if train.helpers == 0 and shares:
        why = why or "train.helpers=0 says that there are none"
    if why and (is_asked or shares):
        key = "plan.shares.helpers=rollout" if shares else f"train.helpers={train.helpers}"
        raise UserError(f"{key}: {why}: leave it out{', or set it to 0' * (not shares)}")
    if why or train.helpers == 0 or (not on_cores and not shares):
        return ()
    if not on_cores:
        of_workers = [generating_device(config, f"rollout/{i}") for i in range(config.rollout.num_workers)]
        return tuple(dict.fromkeys(of_workers))[: None if train.helpers == "auto" else train.helpers]
    return (train.device,) * _num_fitting(config, config.layout.size)


def num_critic_helpers(config: Config) -> int:
    """Number of helpers that a critic has, on cores: those of a trainer on one device, whatever the run's own is."""
    if kind_of(config.train.critic.device) != CPU or config.cluster.name not in ON_ONE_MACHINE:
        return 0
    return _num_fitting(config, 1)


def num_passing(config: Config) -> int:
    """Number of the trainer's helpers that take whole passes: with several ranks none does."""
    return num_helpers(config) if config.layout.size == 1 else 0


def _num_fitting(config: Config, num_workers: int) -> int:
    """Number of helpers of each of so many workers, on cores: by itself as many as fit on the rollout workers'."""
    train, rollout = config.train, config.rollout
    if train.helpers != "auto":
        return train.helpers
    if kind_of(rollout.device) != CPU:
        return 0
    each = num_workers * train.least_threads
    return max(0, min(rollout.num_workers * rollout.least_threads, num_cores() - each) // each)


def with_helpers(config: Config) -> Config:
    """Configuration whose trainer has helpers on the devices that generate, if these and the layout allow that; else the same one,
    without any there."""
    shares = {task: other for task, other in config.plan.shares.items() if task != "helpers"}
    asked = config.changed(plan={"shares": {**shares, "helpers": "rollout"}})
    if kind_of(config.train.device) != CPU and config.train.helpers != 0 and not (_why_none(asked) or _why_not_on_devices(asked)):
        return asked
    return config.changed(plan={"shares": shares})


def num_on_devices(config: Config) -> int:
    """Number of the helpers that are on devices of rollout."""
    return len(helper_devices(config)) if "helpers" in config.plan.shares else 0


def num_on_cores(config: Config) -> int:
    """Number of the helpers, of each rank, that are on cores of the trainer's machine."""
    return num_helpers(config) - num_on_devices(config)


def num_helpers(config: Config) -> int:
    """Number of helpers, of each rank. Raises `UserError` as `helper_devices`."""
    return len(helper_devices(config))


def _why_none(config: Config) -> str:
    """Reason why a run can have no helpers at all; "" if it can."""
    train = config.train
    if train.engine.name != "torch":
        return "only train.engine=torch has them"
    if config.cluster.name not in ON_ONE_MACHINE:
        return f"with cluster={config.cluster.name} it is not known which cores or devices of the trainer's machine are free"
    return ""


def _why_not_on_devices(config: Config) -> str:
    """Reason why helpers cannot be on the devices that generate; "" if they can."""
    train, rollout = config.train, config.rollout
    if config.layout.size > 1:
        return "a trainer of several ranks has none on devices"
    if "helpers" not in config.plan.shares:
        return f"train.device={train.device}, and no other device is theirs to compute on: plan.shares.helpers=rollout names some"
    if rollout.engine.name in ROLLOUT_ENGINE_DEVICES:
        return f"rollout.engine={rollout.engine.name} takes all memory of its devices"
    if kind_of(rollout.device) != kind_of(train.device):
        return f"rollout.device={rollout.device} is of another kind than train.device={train.device}"
    if ":" not in rollout.device:
        return f"rollout.device={rollout.device} does not say which devices generate: {rollout.device}:1-3 would, for three workers"
    own = train.device if ":" in train.device else f"{train.device}:0"
    if own in devices_of(rollout.device):
        return f"train.device={train.device} is one of the devices that generate"
    return ""
