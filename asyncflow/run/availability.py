"""Check that devices and engines can be had on this machine, before any worker is started there."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.local import spawn
from asyncflow.cluster.supervised import name_of_signal
from asyncflow.cluster.torchrun import launch_of
from asyncflow.config import Config
from asyncflow.devices import CPU, kind_of
from asyncflow.engines.check import ASKED_FILE, AskedEngine
from asyncflow.engines.rollout import ROLLOUT_ENGINE_ENVIRONMENTS, ROLLOUT_ENGINES
from asyncflow.engines.train import TRAIN_ENGINE_CHECKS, TRAIN_ENGINES
from asyncflow.loops.evaluation import EVALUATORS
from asyncflow.registry import build
from asyncflow.run.helper_devices import ON_ONE_MACHINE, generating_device
from asyncflow.run.worker_start import generating, rollout_imports, train_imports, training
from asyncflow.types import RunError, UserError

IMPORT_SECONDS: Final = 300.0
_OF_ROLLOUT = ("model_path", "num_slots", "max_context", "dtype", "device", "num_threads", "kv_on_install")


async def check_devices(config: Config) -> None:
    """Have PyTorch look for the configuration's devices. Raises `UserError` naming the key.

    Nothing is asked where all is computed on the CPU, or where the workers are placed on other machines: there they look.
    """
    if config.cluster.name in ON_ONE_MACHINE and (wanted := list(_wanted(config))):
        process = await asyncio.create_subprocess_exec(  # this one imports no torch
            sys.executable, "-m", "asyncflow.engines.devices", *wanted,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            _, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        _raise_for(process.returncode, errors, "a device is not there")


async def check_engines(config: Config, *, is_training: bool = True) -> None:
    """Import their classes, and check their options. Raises `UserError`.

    Nothing is asked of a built-in engine without options or with a check of its own (`TRAIN_ENGINE_CHECKS`), or where the workers
    are placed on other machines.
    """
    if config.cluster.name not in ON_ONE_MACHINE:
        return
    chosen = config.rollout.engine
    if chosen.name in ROLLOUT_ENGINE_ENVIRONMENTS and config.rollout.num_workers:
        await asyncio.to_thread(build, "rollout engine", chosen.name, chosen.options, ROLLOUT_ENGINE_ENVIRONMENTS)
    if asked := [each for each in _asked(config) if is_training or each.kind == "rollout engine"]:
        names = " and ".join(f"{each.kind} {each.name!r}" for each in asked)
        try:
            async with asyncio.timeout(IMPORT_SECONDS):
                await _check_apart(config, asked, f"{names} cannot be imported")
        except TimeoutError:
            raise UserError(f"{names} was not imported within {IMPORT_SECONDS:g} s: does the file wait for something?") from None


async def _check_apart(config: Config, asked: Sequence[AskedEngine], otherwise: str) -> None:
    """Check engines in a process that begins as the worker of the last one will, if it has one of its own."""
    is_train, modules = asked[-1].kind == "train engine", tuple[str, ...]()
    environment = training(config) if is_train else generating(config)
    if config.cluster.name == "local":
        modules = train_imports(config, config.train.device) if is_train else rollout_imports(config, config.rollout.device)
    with TemporaryDirectory(prefix="asyncflow-check-") as name:
        folder = Path(name)
        (folder / ASKED_FILE).write_bytes(msgspec.msgpack.encode(asked))
        with (folder / "log").open("w+b") as log:
            spec = WorkerSpec("check", "asyncflow.engines.check:check", environment, imports=modules)
            process = await spawn(spec, folder, log.fileno())
            try:
                await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                if process.stdin is not None:
                    process.stdin.close()
            log.seek(0)
            _raise_for(process.returncode, log.read(), otherwise)


def _raise_for(status: int | None, said: bytes, otherwise: str) -> None:
    """Raise a process's last words, or `otherwise` if there are none: `UserError` if it ended with 2, `RunError` if with anything
    else but 0."""
    if status and status < 0:
        raise RunError(f"{otherwise}: the process that has tried was ended by {name_of_signal(-status)}")
    if status:
        last = (said.decode(errors="replace").strip().splitlines() or [otherwise])[-1]
        raise (UserError if status == 2 else RunError)(last)


def _wanted(config: Config) -> Iterator[str]:
    """`key=device=count` for every device that is not the CPU: so many processes take one each, if it has no number."""
    devices = [("rollout.device", generating_device(config, f"rollout/{i}"), 1) for i in range(config.rollout.num_workers)]
    devices += [("eval.device", generating_device(config, f"{EVALUATORS}/{i}"), 1) for i in range(config.eval.num_workers)]
    if config.reward.model is not None:
        devices.append(("reward.model.device", config.reward.model.device, 1))
    if not launch_of(os.environ):  # else the trainers may be on other machines
        devices.append(("train.device", config.train.device, config.layout.size))
        devices.append(("train.critic.device", config.train.critic.device, 1))
    for key, device, count in dict.fromkeys(devices):
        if kind_of(device) != CPU:
            yield f"{key}={device}={count}"


def _asked(config: Config) -> Iterator[AskedEngine]:
    rollout, train = config.rollout.engine, config.train.engine
    if rollout.options or rollout.name not in ROLLOUT_ENGINES:
        parked = [] if config.environment is None else ["num_parked"]
        given = [*_OF_ROLLOUT, *parked, *([] if config.lora is None else ["lora"])]
        yield AskedEngine("rollout engine", rollout.name, rollout.options, dict(ROLLOUT_ENGINES), given)
    if train.name not in TRAIN_ENGINE_CHECKS:
        yield AskedEngine("train engine", train.name, train.options, dict(TRAIN_ENGINES), ["model_path", "options"])
