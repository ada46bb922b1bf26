"""The workers of a run, and what their processes are started with."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncflow.build.parts import own_devices_each, tasks_before_training
from asyncflow.build.rendezvous import AT_DRIVER
from asyncflow.cluster.base import WorkerSpec
from asyncflow.config import Config
from asyncflow.devices import COUNTED_AS, kind_of
from asyncflow.engines.base import RANKS_STORE
from asyncflow.workflows.critic import VALUES_TASK
from asyncflow.workflows.evaluation import EVALUATORS

_MAINS: Final = "asyncflow.build.workers"
_UNIT_RESTARTS: Final = 3
# Micro-batches allocate and free the same megabytes over and over: glibc is to keep them, not to map zeroed pages each time.
_KEEP_FREED_MEMORY: Final = {
    "MALLOC_TRIM_THRESHOLD_": str(10**9),
    "MALLOC_MMAP_THRESHOLD_": str(10**9),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def threads(count: int) -> dict[str, str]:
    """The environment of a worker that computes with so many: numerical libraries read it when they are imported."""
    return {name: str(count) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} | {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def training(config: Config) -> dict[str, str]:
    """The environment of a worker that computes as the trainer does."""
    return threads(config.train.num_threads) | _KEEP_FREED_MEMORY


def devices(device: str, num_threads: int, count: int = 1) -> dict[str, float]:
    """What a worker that computes on `count` devices of a kind (cpu, cuda:1, ...) needs of its machine, by the names that clusters
    count it by."""
    accelerator = COUNTED_AS.get(kind_of(device))
    return {"CPU": float(num_threads)} | ({accelerator: float(count)} if accelerator is not None and count else {})


def workers(config: Config, weights_dir: Path, *, is_training: bool, are_trainers_there: bool) -> list[WorkerSpec]:
    """All that a run starts with, one of no steps without who trains. torchrun's trainers are there already."""
    tasks = tasks_before_training(config)
    specs = [storage_unit(i) for i in range(config.queue.num_units)] if config.queue.place == "workers" else []
    specs += [rollout_worker(config, f"rollout/{i}") for i in range(config.rollout.num_workers)]
    specs += [evaluator(config, f"{EVALUATORS}/{i}") for i in range(config.eval.num_workers)]
    if "reward" in tasks:
        device, num_threads = ("cpu", 1) if (model := config.reward.model) is None else (model.device, model.num_threads)
        specs.append(WorkerSpec("reward", f"{_MAINS}:reward_worker", threads(num_threads), needs=devices(device, num_threads)))
    if is_training and not are_trainers_there:
        specs += trainers(config, f"{_MAINS}:train_worker", weights_dir)
    if is_training and "reference" in tasks:
        needs = devices(config.train.device, config.train.num_threads)
        specs.append(WorkerSpec("reference", f"{_MAINS}:reference_worker", training(config), needs=needs))
    if is_training and VALUES_TASK in tasks:
        needs = devices(config.train.critic.device, config.train.num_threads)
        specs.append(WorkerSpec("critic", f"{_MAINS}:critic_worker", training(config), needs=needs))
    return specs


def rollout_worker(config: Config, name: str) -> WorkerSpec:
    """One of those that a run starts with, or that join it."""
    return _generating(config, name, "rollout_worker", config.rollout.device)


def evaluator(config: Config, name: str) -> WorkerSpec:
    """One that does nothing but evaluate."""
    return _generating(config, name, "evaluator", config.evaluators_device)


def _generating(config: Config, name: str, main: str, device: str) -> WorkerSpec:
    rollout = config.rollout
    needs = devices(device, rollout.num_threads, own_devices_each(config))
    return WorkerSpec(name, f"{_MAINS}:{main}", threads(rollout.num_threads), rollout.max_restarts, needs)


def storage_unit(number: int) -> WorkerSpec:
    """One of the queue's, in a process of its own. Whoever takes its place asks its storage for what has outlived it."""
    needs = devices("cpu", 1)
    return WorkerSpec(f"storage/{number}", f"{_MAINS}:unit_worker", threads(1), _UNIT_RESTARTS, needs, outlives_others=True)


def trainers(config: Config, entry: str, folder: Path) -> list[WorkerSpec]:
    """One worker for each rank of the layout. They find each other in `folder`, which is theirs alone, or, on several machines, at
    the driver."""
    size, needs = config.layout.size, devices(config.train.device, config.train.num_threads)
    environment, apart = training(config) | {RANKS_STORE: f"file://{folder}/ranks"}, {RANKS_STORE: AT_DRIVER}
    return [WorkerSpec(f"trainer/{rank}", entry, environment | _rank(rank, size), needs=needs, apart=apart) for rank in range(size)]


def _rank(rank: int, size: int) -> dict[str, str]:
    """torchrun's names."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(number) for name, number in numbers.items()}
