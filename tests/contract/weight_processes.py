"""The ends of a weight sync as processes, for tests that stop and kill them.

    python -m tests.contract.weight_processes sender KIND OPTIONS
        publishes a version for each number that it reads, and writes its manifest
    python -m tests.contract.weight_processes receiver KIND OPTIONS NAME SIGNAL AT_BYTES
        fetches each manifest that it reads, and writes the hash of the tensors; sends itself SIGNAL when AT_BYTES have arrived, or,
        where it reads a file, when it holds that

OPTIONS: those of `WeightSyncOptions`, as JSON. A line is a number, a manifest as JSON, a hash, or an error after `!`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from asyncflow.registry import load
from asyncflow.types import Array, HeldWeights
from asyncflow.weight_sync import WEIGHT_SYNCS
from asyncflow.weight_sync.base import Manifest, WeightSync, WeightSyncError, WeightSyncOptions
from asyncflow.weight_sync.files import FileReader
from asyncflow.weight_sync.staging import Arriving

ROOT = Path(__file__).parents[2]
NUM_BYTES = 64 << 20


def weights(version: int) -> dict[str, torch.Tensor]:
    """64 MiB, in 16 tensors."""
    generator = torch.Generator().manual_seed(version)
    return {f"layer.{i}": torch.randn(NUM_BYTES // 64, generator=generator) for i in range(16)}


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    hashed = xxhash.xxh3_128()
    for name in sorted(tensors):
        hashed.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def make(kind: str, options: Mapping[str, Any]) -> WeightSync:
    paths = {name: Path(options[name]) for name in ("directory", "key")}
    made: WeightSync = load("weight sync", WEIGHT_SYNCS[kind])(WeightSyncOptions(**{**options, **paths}))
    return made


class End:
    """A process, as a test holds it."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "tests.contract.weight_processes", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    async def answer(self) -> str:
        """The next line that it writes; empty: it has ended."""
        assert self._process.stdout is not None
        return (await asyncio.wait_for(asyncio.to_thread(self._process.stdout.readline), 60)).strip()

    async def ask(self, line: str) -> str:
        self.tell(line)
        return await self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def running(*arguments: str) -> Iterator[End]:
    end = End(*arguments)
    try:
        yield end
    finally:
        end.end()


async def sender(kind: str, options: str) -> None:
    end = make(kind, json.loads(options)).sender(f"process {os.getpid()}")
    while line := await asyncio.to_thread(sys.stdin.readline):
        manifest = await end.publish(int(line), HeldWeights(weights(int(line))))
        print(msgspec.json.encode(manifest).decode(), flush=True)


async def receiver(kind: str, options: str, name: str, signal: str, at_bytes: str) -> None:
    end = make(kind, json.loads(options)).receiver(name)
    if int(at_bytes):
        signal_itself(int(signal), int(at_bytes))
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            print(digest(await end.fetch(msgspec.json.decode(line, type=Manifest))), flush=True)
        except WeightSyncError as error:
            print(f"!{error}", flush=True)


def signal_itself(number: int, at_bytes: int) -> None:
    """In the middle of a transfer, whatever the machine's speed."""
    arrived, write, hold = 0, Arriving.write, FileReader.hold

    def counted(self: Arriving, piece: Array) -> None:
        nonlocal arrived
        write(self, piece)
        if arrived < at_bytes <= arrived + len(piece):
            os.kill(os.getpid(), number)
        arrived += len(piece)

    def holding(self: FileReader, manifest: Manifest) -> Array:
        file = hold(self, manifest)
        os.kill(os.getpid(), number)
        return file

    Arriving.write, FileReader.hold = counted, holding  # type: ignore[method-assign]


if __name__ == "__main__":
    asyncio.run({"sender": sender, "receiver": receiver}[sys.argv[1]](*sys.argv[2:]))
