"""Devices of a run's generators, and of the helpers that its trainer has on them: from the configuration alone.

cores of this machine ------------------------> helpers: threads of the trainer (train.helpers)
plan.shares.helpers=rollout: accelerators ----> a helper on each that generates, while that one has nothing to generate
"""

from __future__ import annotations

from typing import Final

from asyncflow.config import Config
from asyncflow.devices import CPU, kind_of
from asyncflow.engines.rollout import ROLLOUT_ENGINE_DEVICES
from asyncflow.loops.evaluation import EVALUATORS
from asyncflow.threads import num_cores
from asyncflow.types import UserError

ON_ONE_MACHINE: Final = ("local", "inline")
"""Clusters whose workers are all on the driver's machine."""


def generating_device(config: Config, name: str) -> str:
    """Device of a rollout worker or an evaluator, by its name. A number in the configuration is that of the first one's: each has
    the next one, and evaluators without a device of their own follow the rollout workers."""
    pool, _, number = name.partition("/")
    device, before = config.rollout.device, 0
    if pool == EVALUATORS:
        device, before = config.evaluators_device, config.rollout.num_workers if config.eval.device is None else 0
    kind, _, first = device.partition(":")
    if not first or config.rollout.engine.name in ROLLOUT_ENGINE_DEVICES:  # its own options say which
        return device
    return f"{kind}:{int(first) + before + int(number)}"


def helper_devices(config: Config) -> tuple[str, ...]:
    """Device of each helper that may compute beside the trainer's own thread.

    Raises `UserError` where the run asks for some, and can have none.
    """
    train, is_asked = config.train, config.train.helpers not in ("auto", 0)
    on_cores, shares = kind_of(train.device) == CPU, "helpers" in config.plan.shares
    if train.helpers == 0:
        return ()
    why = _why_none(config)
    if not why and not on_cores and (shares or is_asked):
        why = _why_not_on_devices(config)
    if why and (is_asked or shares):
        key = f"train.helpers={train.helpers}" if is_asked else "plan.shares.helpers=rollout"
        raise UserError(f"{key}: {why}: leave it out{', or set it to 0' * is_asked}")
    if why or (not on_cores and not shares):
        return ()
    if not on_cores:
        devices = [generating_device(config, f"rollout/{i}") for i in range(config.rollout.num_workers)]
        return tuple(devices if train.helpers == "auto" else devices[: train.helpers])
    if train.helpers != "auto":
        return (CPU,) * train.helpers
    if kind_of(config.rollout.device) != CPU:
        return ()
    of_rollout = config.rollout.num_workers * config.rollout.least_threads
    return (CPU,) * max(0, min(of_rollout, num_cores() - train.least_threads) // train.least_threads)


def with_helpers(config: Config) -> Config:
    """Configuration whose trainer has helpers on all devices that generate, if the devices and the layout allow that; else the same
    one, without any there."""
    shares = {task: other for task, other in config.plan.shares.items() if task != "helpers"}
    asked = config.model_copy(update={"plan": config.plan.model_copy(update={"shares": {**shares, "helpers": "rollout"}})})
    if kind_of(config.train.device) != CPU and config.train.helpers != 0 and not (_why_none(asked) or _why_not_on_devices(asked)):
        return asked
    return config.model_copy(update={"plan": config.plan.model_copy(update={"shares": shares})})


def num_on_devices(config: Config) -> int:
    """Number of the helpers that are on devices of rollout."""
    return len(helper_devices(config)) if "helpers" in config.plan.shares and kind_of(config.train.device) != CPU else 0


def num_helpers(config: Config) -> int:
    """Number of helpers. Raises `UserError` as `helper_devices`."""
    return len(helper_devices(config))


def _why_none(config: Config) -> str:
    """Why a run can have no helpers at all; "" if it can."""
    train = config.train
    if train.engine.name != "torch" or config.layout.size > 1:
        return "only train.engine=torch on one device has them"
    if config.cluster.name not in ON_ONE_MACHINE:
        return f"with cluster={config.cluster.name} nobody knows which cores or devices of the trainer's machine are free"
    if config.lora is not None and train.old in ("step_start", "previous"):
        return f"with model.lora the old policy (train.old={train.old}) is computed by exchanging the adapter that they all read"
    return ""


def _why_not_on_devices(config: Config) -> str:
    """Why helpers cannot be on the devices that generate; "" if they can."""
    train, rollout = config.train, config.rollout
    if "helpers" not in config.plan.shares:
        return f"train.device={train.device}, and no other device is theirs to compute on: plan.shares.helpers=rollout names some"
    if rollout.engine.name in ROLLOUT_ENGINE_DEVICES:
        return f"rollout.engine={rollout.engine.name} takes all memory of its devices"
    if kind_of(rollout.device) != kind_of(train.device):
        return f"rollout.device={rollout.device} is of another kind than train.device={train.device}"
    if ":" not in rollout.device:
        return f"rollout.device={rollout.device} does not say which devices generate: {rollout.device}:1 would, of the first worker"
    own = train.device if ":" in train.device else f"{train.device}:0"
    if own in [generating_device(config, f"rollout/{i}") for i in range(rollout.num_workers)]:
        return f"train.device={train.device} is one of the devices that generate"
    return ""
