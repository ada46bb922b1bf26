"""The workers of a run, and what their processes are started with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from asyncflow.cluster.base import OWN_DEVICES, WorkerSpec
from asyncflow.config import Config
from asyncflow.devices import COUNTED_AS, CPU, SHOWN_BY, kind_of
from asyncflow.engines.base import RANKS_STORE
from asyncflow.loops.evaluation import EVALUATORS, is_evaluator
from asyncflow.loops.samples import VALUES_TASK
from asyncflow.run.device_shares import device_key, device_of, own_devices_each, shared_devices
from asyncflow.run.factories import tasks_before_training
from asyncflow.run.services.rendezvous import AT_DRIVER
from asyncflow.run.worker_start import MAINS, generating, imports, rollout_imports, train_imports, training
from asyncflow.threads import thread_environment

_UNIT_RESTARTS: Final = 3


def devices(device: str, num_threads: int, count: int = 1) -> dict[str, float]:
    """Devices and cores of its machine that a worker needs which computes on `count` devices of a kind (cpu, cuda:1, ...), by the
    names that clusters count them by."""
    accelerator = COUNTED_AS.get(kind_of(device))
    return {"CPU": float(num_threads)} | ({accelerator: float(count)} if accelerator is not None and count else {})


def asked(key: str, device: str) -> str:
    """Device that PyTorch is asked for, where the worker is placed; empty where that is a CPU."""
    return "" if kind_of(device) == CPU else f"{key}={kind_of(device)}"


def workers(config: Config, weights_dir: Path, *, is_training: bool, are_trainers_there: bool) -> list[WorkerSpec]:
    """Specifications of all workers that a run starts with. `is_training`: trainers are among them, unless torchrun has started
    them (`are_trainers_there`)."""
    tasks = tasks_before_training(config)
    specs = [storage_unit(i) for i in range(config.queue.num_units)] if config.queue.place == "workers" else []
    specs += [rollout_worker(config, f"rollout/{i}") for i in range(config.rollout.num_workers)]
    specs += [rollout_worker(config, f"{EVALUATORS}/{i}") for i in range(config.eval.num_workers)]
    if "reward" in tasks:
        device, num_threads = ("cpu", 1) if (model := config.reward.model) is None else (model.device, model.least_threads)
        needs, known, environment = devices(device, num_threads), imports(device=device), thread_environment(num_threads)
        there = asked("reward.model.device", device)
        specs += [
            WorkerSpec(f"reward/{i}", f"{MAINS}:reward_worker", environment, needs=needs, imports=known, device=there)
            for i in range(config.plan.reward.num_workers)
        ]
    if is_training and not are_trainers_there:
        specs += trainers(config, f"{MAINS}:train_worker", weights_dir)
    if is_training and "reference" in tasks:
        specs += [_training(config, "reference", f"reference/{i}") for i in range(config.plan.reference.num_workers)]
    if is_training and VALUES_TASK in tasks:
        specs.append(_training(config, "critic", "critic"))
        specs += [_training(config, VALUES_TASK, f"values/{i}") for i in range(config.plan.values.num_workers)]
    hosts = shared_devices(config)
    return [_sharing(config, spec, hosts[spec.name]) if spec.name in hosts else spec for spec in specs]


def _sharing(config: Config, spec: WorkerSpec, host: str) -> WorkerSpec:
    """The worker on the devices of another one. On this machine it sees these alone; elsewhere its cluster says which they are."""
    kind = kind_of(spec.device.partition("=")[2])
    if not spec.device or config.cluster.name != "local":
        return replace(spec, shares=host)
    task = "train" if host.startswith("trainer/") else host.partition("/")[0]
    number = device_of(config, task).partition(":")[2] or (host.partition("/")[2] if task == "train" else "0")
    seen = [name for name in os.environ.get(SHOWN_BY[kind], "").split(",") if name]
    shown = seen[int(number)] if int(number) < len(seen) else number
    return replace(spec, shares=host, environment={**spec.environment, SHOWN_BY[kind]: shown, OWN_DEVICES: "1"})


def rollout_worker(config: Config, name: str) -> WorkerSpec:
    """Specification of a rollout worker, of those that a run starts with or that join it, or of an evaluator, by its name."""
    rollout, key, device = config.rollout, "rollout.device", config.rollout.device
    if is_evaluator(name):
        key, device = "eval.device", config.evaluators_device
    num_devices = own_devices_each(config)
    needs, there = devices(device, rollout.least_threads, num_devices), asked(key, device) if num_devices else ""
    return WorkerSpec(
        name,
        f"{MAINS}:rollout_worker",
        generating(config),
        rollout.max_restarts,
        needs,
        imports=rollout_imports(config, device),
        device=there,
        may_stay=config.cluster.name == "local" and config.queue.place == "driver",
    )


def _training(config: Config, task: str, name: str) -> WorkerSpec:
    """Specification of a worker of a task that computes as the trainer does."""
    device, num_threads = device_of(config, task), config.train.least_threads
    return WorkerSpec(
        name,
        f"{MAINS}:{task}_worker",
        training(config),
        needs=devices(device, num_threads),
        imports=train_imports(config, device),
        device=asked(device_key(task), device),
    )


def storage_unit(number: int) -> WorkerSpec:
    """Storage unit of the queue, in a process of its own. One that replaces it asks its storage for the rows that are left."""
    needs = devices("cpu", 1)
    name, main = f"storage/{number}", f"{MAINS}:unit_worker"
    return WorkerSpec(name, main, thread_environment(1), _UNIT_RESTARTS, needs, outlives_others=True, imports=imports())


def trainers(config: Config, entry: str, folder: Path) -> list[WorkerSpec]:
    """Workers of the trainer, one for each rank of the layout. They find each other in `folder`, which is theirs alone, or, on
    several machines, at the driver."""
    size, spec = config.layout.size, replace(_training(config, "train", "trainer"), entry=entry, apart={RANKS_STORE: AT_DRIVER})
    environment = {**spec.environment, RANKS_STORE: f"file://{folder}/ranks"}
    return [replace(spec, name=f"trainer/{rank}", environment=environment | _rank(rank, size)) for rank in range(size)]


def _rank(rank: int, size: int) -> dict[str, str]:
    """Variables that name a rank, as torchrun does."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(number) for name, number in numbers.items()}
