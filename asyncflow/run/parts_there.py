"""Check that engines and the queue's storage can be had on this machine, before any worker is started there."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from asyncflow.config import Config
from asyncflow.engines.rollout import ROLLOUT_ENGINE_ENVIRONMENTS, ROLLOUT_ENGINES
from asyncflow.engines.train import TRAIN_ENGINE_CHECKS, TRAIN_ENGINES
from asyncflow.registry import build, check_options
from asyncflow.run.factories import make_storage, queue_schema
from asyncflow.transfer_queue import ASKED_STORAGES
from asyncflow.types import RunError, UserError

HERE: Final = ("local", "inline")
"""Clusters whose workers are on the driver's machine."""
IMPORT_SECONDS: Final = 300.0
_OF_ROLLOUT = ("model_path", "num_slots", "max_context", "dtype", "device", "num_threads", "kv_on_install")


class AskedEngine(msgspec.Struct):
    """Engine that a configuration names, its options, and the names of the arguments that a run gives it."""

    kind: str
    name: str
    options: dict[str, Any]
    known: dict[str, str]
    given: list[str]


async def check_engines(config: Config, *, is_training: bool = True) -> None:
    """Import their classes in a process of its own, since this one imports no torch, and check their options. Raises `UserError`.

    Nothing is asked of a built-in engine without options or with a check of its own (`TRAIN_ENGINE_CHECKS`), or where the workers
    are placed on other machines.
    """
    if config.cluster.name not in HERE:
        return
    chosen = config.rollout.engine
    if chosen.name in ROLLOUT_ENGINE_ENVIRONMENTS and config.rollout.num_workers:
        await asyncio.to_thread(build, "rollout engine", chosen.name, chosen.options, ROLLOUT_ENGINE_ENVIRONMENTS)
    if asked := [each for each in _asked(config) if is_training or each.kind == "rollout engine"]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "asyncflow.run.parts_there",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        names = " and ".join(f"{each.kind} {each.name!r}" for each in asked)
        try:
            _, errors = await asyncio.wait_for(process.communicate(msgspec.msgpack.encode(asked)), IMPORT_SECONDS)
        except TimeoutError:
            process.kill()
            raise UserError(f"{names} was not imported within {IMPORT_SECONDS:g} s: does the file wait for something?") from None
        if process.returncode:
            raise UserError((errors.decode(errors="replace").strip().splitlines() or [f"{names} cannot be imported"])[-1])


async def check_storage(config: Config) -> None:
    """Check that the server of the queue's storage is there, where this machine uses it. Raises `UserError`."""
    is_here = config.queue.place == "driver" or config.cluster.name in HERE
    if config.queue.storage.name not in ASKED_STORAGES or not is_here:
        return
    storage = make_storage(config, 0)
    try:
        await storage.open(queue_schema(config))
    except RunError as error:
        raise UserError(f"queue.storage: {error}") from error
    await storage.close()


def _asked(config: Config) -> Iterator[AskedEngine]:
    rollout, train = config.rollout.engine, config.train.engine
    if rollout.options or rollout.name not in ROLLOUT_ENGINES:
        parked = [] if config.environment is None else ["num_parked"]
        given = [*_OF_ROLLOUT, *parked, *([] if config.lora is None else ["lora"])]
        yield AskedEngine("rollout engine", rollout.name, rollout.options, dict(ROLLOUT_ENGINES), given)
    if train.name not in TRAIN_ENGINE_CHECKS:
        yield AskedEngine("train engine", train.name, train.options, dict(TRAIN_ENGINES), ["model_path", "options"])


def main() -> None:
    """`python -m asyncflow.run.parts_there`: exit 2, with a sentence, for the first engine that cannot be had."""
    for asked in msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[AskedEngine]):
        try:
            check_options(asked.kind, asked.name, asked.options, asked.known, asked.given)
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
