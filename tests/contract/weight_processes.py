"""The ends of a weight sync as processes, for tests that stop and kill them.

    End("sender", KIND, OPTIONS)
        publishes a version for each number that it reads, and writes its manifest
    End("receiver", KIND, OPTIONS, NAME, SIGNAL, AT_BYTES)
        fetches each manifest that it reads, and writes the hash of the tensors; sends itself SIGNAL when AT_BYTES have arrived, or,
        where it reads a file, when it holds that

OPTIONS: those of `WeightSyncOptions`, as JSON. A line is a number, a manifest as JSON, a hash, or an error after `!`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
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
from tests.forked import context
from tests.patience import patience

NUM_BYTES = 32 << 20


def weights(version: int) -> dict[str, torch.Tensor]:
    """32 MiB, in 16 tensors, no two alike."""
    numbers = torch.arange(NUM_BYTES // 64, dtype=torch.float32)
    return {f"layer.{i}": numbers + (version * 16 + i) for i in range(16)}


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
        makes = context()
        questions, answers = makes.Pipe(duplex=False), makes.Pipe(duplex=False)
        self._process = makes.Process(target=_serve, args=(arguments, questions[0], answers[1]), daemon=True)
        self._process.start()
        self._questions = open(os.dup(questions[1].fileno()), "w")  # noqa: SIM115
        self._answers = open(os.dup(answers[0].fileno()))  # noqa: SIM115
        for end in (*questions, *answers):
            end.close()

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def tell(self, line: str) -> None:
        print(line, file=self._questions, flush=True)

    async def answer(self) -> str:
        """The next line that it writes; empty: it has ended."""
        return (await asyncio.wait_for(asyncio.to_thread(self._answers.readline), patience(60))).strip()

    async def ask(self, line: str) -> str:
        self.tell(line)
        return await self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        for stream in (self._questions, self._answers):
            with suppress(BrokenPipeError):
                stream.close()


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


def _serve(arguments: tuple[str, ...], questions: Connection, answers: Connection) -> None:
    """The process of an end."""
    for number, end in enumerate((questions, answers)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    asyncio.run({"sender": sender, "receiver": receiver}[arguments[0]](*arguments[1:]))
