"""The model's files, for workers on machines that do not have them.

    driver: ModelFiles --facts, read(from, to)--> model_here: a folder of that machine, filled once for all workers there

consumes: the folder that the run's model is in
waits for: the next chunk, `CHUNK_SECONDS` at most; for another worker of the machine that is fetching already
is unblocked by: the driver's answers; that other worker's end, however it ends
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import xxhash

from asyncflow.run.preparation.prepare import TOKENIZER_FILES
from asyncflow.transport import remote
from asyncflow.transport.ahead import read_ahead
from asyncflow.types import Array, RunError

CHUNK_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.1


class FileFact(msgspec.Struct, frozen=True):
    """A file of the model; `hash`: xxh3_128 of its bytes, in hexadecimal."""

    name: str
    num_bytes: int
    hash: str


class ModelFiles:
    """The driver's service: what a rollout or reference worker reads of the model's folder, and nothing else of it."""

    def __init__(self, folder: Path, progress: Callable[[], None] = lambda: None) -> None:
        self._folder, self._progress = folder, progress  # `progress` is told that something moves
        self._facts: asyncio.Task[list[FileFact]] | None = None

    @remote
    async def facts(self) -> list[FileFact]:
        """The files. Hashed when they are first asked for, in a thread."""
        if self._facts is None:
            self._facts = asyncio.ensure_future(asyncio.to_thread(_facts_of, self._folder))
        return await asyncio.shield(self._facts)

    @remote
    async def read(self, name: str, begin: int, end: int) -> Array:
        """Bytes of a file: uint8 [end - begin]. Raises `LookupError` for a name that is not among the facts."""
        fact = next((fact for fact in await self.facts() if fact.name == name), None)
        if fact is None or not 0 <= begin < end <= fact.num_bytes:
            raise LookupError(f"the model has no bytes {begin} to {end} of a file {name!r}")
        self._progress()
        return await asyncio.to_thread(_read, self._folder / name, begin, end)


async def model_here(files: ModelFiles, model: Path, folder: Path) -> Path:
    """Folder in which this machine has the run's model: `model`, if the same files are there, or `folder`, where they are fetched
    to.

    Raises `RunError` when the driver does not answer, or when what came is not what it has.
    """
    facts = await files.facts()
    if await asyncio.to_thread(_is_all_there, model, facts):
        return model
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")) as has_lock:
        while not has_lock():  # the process that has it fails, or ends, when no chunk comes
            await asyncio.sleep(_LOOK_SECONDS)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            for fact in facts:
                await _fetch(files, fact, partial / fact.name)
            partial.rename(folder)
    return folder


async def _fetch(files: ModelFiles, fact: FileFact, path: Path) -> None:
    digest, read = xxhash.xxh3_128(), partial(files.read, fact.name)
    try:
        with path.open("wb") as file:
            async with aclosing(read_ahead(read, 0, fact.num_bytes, CHUNK_SECONDS)) as chunks:
                async for chunk in chunks:
                    await asyncio.to_thread(file.write, chunk.data)
                    digest.update(chunk.data)
    except TimeoutError as error:
        raise RunError(f"the driver sent nothing of the model's {fact.name} for {CHUNK_SECONDS:g} s") from error
    if digest.hexdigest() != fact.hash:
        raise RunError(f"{fact.name} of the model was changed while it was fetched: leave the model's folder alone during a run")


@contextmanager
def _locked(path: Path) -> Iterator[Callable[[], bool]]:
    """A file's lock, which ends with this process at the latest. Yields what tries to have it: True, it has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def has_lock() -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        yield has_lock
    finally:
        os.close(fd)


def _facts_of(folder: Path) -> list[FileFact]:
    names = ["config.json", "model.safetensors.index.json", *TOKENIZER_FILES, *(path.name for path in folder.glob("*.safetensors"))]
    return [FileFact(name, (folder / name).stat().st_size, _hash(folder / name)) for name in names if (folder / name).is_file()]


def _is_all_there(folder: Path, facts: Sequence[FileFact]) -> bool:
    paths = [folder / fact.name for fact in facts]
    is_likely = all(path.is_file() and path.stat().st_size == fact.num_bytes for path, fact in zip(paths, facts, strict=True))
    return is_likely and all(_hash(path) == fact.hash for path, fact in zip(paths, facts, strict=True))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _read(path: Path, begin: int, end: int) -> Array:
    with path.open("rb") as file:
        file.seek(begin)
        return np.frombuffer(file.read(end - begin), np.uint8)


def copy_tokenizer(source: Path, target: Path) -> None:
    """A saved model needs the tokenizer that its prompts were written with."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
