"""Devices of a run: how many there are, and which workers share one."""

from __future__ import annotations

from asyncflow.config import Config
from asyncflow.devices import CPU, kind_of
from asyncflow.engines.rollout import ROLLOUT_ENGINE_DEVICES, ROLLOUT_ENGINE_OWN_DEVICES
from asyncflow.loops.samples import VALUES_TASK
from asyncflow.registry import build
from asyncflow.run.factories import tasks_before_training
from asyncflow.run.helper_devices import ON_ONE_MACHINE, num_helpers
from asyncflow.threads import num_cores
from asyncflow.types import UserError


def num_devices(config: Config) -> int:
    """Number of the run's devices: those that generate or train, and those of reference, critic, values and reward model, where
    these have devices of their own."""
    generating, shares = config.rollout.num_workers + config.eval.num_workers, config.plan.shares
    own = sum(len(names) for task, names in workers_with_devices(config).items() if task not in shares)
    return generating * devices_each(config) + own


def workers_with_devices(config: Config) -> dict[str, list[str]]:
    """Names of the workers that compute on one device each, by task: the ranks that train, and whatever stands beside them."""
    tasks, plan = tasks_before_training(config), config.plan
    found = {"train": [f"trainer/{rank}" for rank in range(config.layout.size)]}
    if "reference" in tasks:
        found["reference"] = [f"reference/{i}" for i in range(plan.reference.num_workers)]
    if VALUES_TASK in tasks:
        found["critic"] = ["critic"]
        found[VALUES_TASK] = [f"values/{i}" for i in range(plan.values.num_workers)]
    if config.reward.model is not None:
        found["reward"] = [f"reward/{i}" for i in range(plan.reward.num_workers)]
    return found


def shared_devices(config: Config) -> dict[str, str]:
    """Worker on whose device another one computes, by the name of the latter (`plan.shares`). Those of a task are spread evenly."""
    workers, found = workers_with_devices(config), dict[str, str]()
    for task, other in config.plan.shares.items():
        hosts, guests = workers.get(other, []), workers.get(task, [])
        found |= {name: hosts[i * len(hosts) // len(guests)] for i, name in enumerate(guests)}
    return found


def device_key(task: str) -> str:
    """Key of the configuration that says where a task computes."""
    of_critic = "train.critic.device"
    known = {"critic": of_critic, VALUES_TASK: of_critic, "reward": "reward.model.device"}
    return known.get(task, "train.device")


def device_of(config: Config, task: str) -> str:
    """Device of a task's workers."""
    if task == "reward" and config.reward.model is not None:
        return config.reward.model.device
    return config.train.critic.device if task in ("critic", VALUES_TASK) else config.train.device


def check_shares(config: Config) -> None:
    """Check that the tasks that share devices are there, and find such devices. Raises `UserError`."""
    workers = workers_with_devices(config)
    num_helpers(config)
    for task, other in config.plan.shares.items():
        if task == "helpers":
            continue
        setting = f"plan.shares.{task}={other}"
        for each in (task, other):
            if not workers.get(each):
                raise UserError(f"{setting}, but no worker of this run with a device of its own has the task {each}: leave it out")
        if (count := len(workers[task])) > (there := len(workers[other])):
            raise UserError(f"{setting}: {count} workers would be on {there} devices: take {there} workers or fewer")
        devices = {each: device_of(config, each) for each in (task, other)}
        if kind_of(devices[task]) != kind_of(devices[other]):
            raise UserError(
                f"{setting}, but {device_key(task)}={devices[task]} and {device_key(other)}={devices[other]}: set them to the same"
            )
        if ":" in devices[task]:
            raise UserError(f"{setting} says which device it is: set {device_key(task)}={kind_of(devices[task])}, without a number")
        if config.cluster.name == "inline" and kind_of(devices[task]) != CPU:
            raise UserError(
                f"{setting}: with cluster=inline all workers are one process, which sees all devices: take cluster=local"
            )


def is_on_cores(config: Config) -> bool:
    """Whether all workers of the run compute on one machine's cores."""
    return config.cluster.name in ON_ONE_MACHINE and kind_of(config.train.device) == CPU == kind_of(config.rollout.device)


def shared_cores(config: Config) -> int | None:
    """Number of the machine's cores, if all workers of the run compute on them, each with as many threads at any time."""
    return num_cores() if is_on_cores(config) and config.rollout.num_threads != "auto" else None


def devices_each(config: Config) -> int:
    """Number of devices that one rollout worker, or evaluator, generates with."""
    return _asked(config, ROLLOUT_ENGINE_DEVICES)


def own_devices_each(config: Config) -> int:
    """Number of those devices that the cluster must give the worker; the others are already in use by its servers."""
    return _asked(config, ROLLOUT_ENGINE_OWN_DEVICES)


def _asked(config: Config, known: dict[str, str]) -> int:
    chosen = config.rollout.engine
    if chosen.name not in known:
        return 1
    count: int = build("rollout engine", chosen.name, chosen.options, known)
    return count
