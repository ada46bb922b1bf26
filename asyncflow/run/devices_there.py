"""Check that the devices of a configuration are on this machine, before any worker is started there."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator

from asyncflow.cluster.torchrun import launch_of
from asyncflow.config import Config
from asyncflow.devices import CPU, kind_of
from asyncflow.loops.evaluation import EVALUATORS
from asyncflow.run.helper_devices import generating_device
from asyncflow.types import UserError


async def check_devices(config: Config) -> None:
    """Ask PyTorch, in a process of its own, since this one imports none. Raises `UserError` naming the key.

    Nothing is asked where all is computed on the CPU, or where the workers are placed on other machines: there they look.
    """
    wanted = list(_wanted(config)) if config.cluster.name in ("local", "inline") else []
    if not wanted:
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncflow.engines.devices", *wanted,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, errors = await process.communicate()
    if process.returncode:
        raise UserError((errors.decode(errors="replace").strip().splitlines() or ["a device is not there"])[-1])


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
