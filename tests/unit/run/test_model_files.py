"""The model's files reach a machine that does not have them: whole, once, and by TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from asyncflow.run.models import model_files
from asyncflow.run.models.model_files import ModelFiles, model_here
from asyncflow.transport import Credentials, Peer, Server, ahead, proxy
from asyncflow.types import Array, RunError

NAMES = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ahead, "CHUNK_BYTES", 1000)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_bytes(b"t" * 1000)
    (folder / "model.safetensors").write_bytes(np.random.default_rng(0).bytes(12_345))
    (folder / "optimizer.pt").write_bytes(b"not a part of it")
    return folder


class Counted(ModelFiles):
    """Counts what is read, and may change it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads = 0
        self.damaged: int | None = None
        self.is_silent = False

    async def read(self, name: str, begin: int, end: int) -> Array:
        if self.is_silent:
            await asyncio.sleep(60)
        chunk = (await super().read(name, begin, end)).copy()
        if self.reads == self.damaged:
            chunk[0] ^= 1
        self.reads += 1
        return chunk

    read.__remote__ = True  # type: ignore[attr-defined]


@asynccontextmanager
async def served(files: ModelFiles, tmp_path: Path) -> AsyncIterator[ModelFiles]:
    """A proxy of them behind mutual TLS."""
    credentials = Credentials.create(tmp_path / "key.pem")
    server = Server({"model": files}, credentials=credentials)
    peer = await Peer.connect(await server.start("tls:127.0.0.1:0"), "w", credentials=credentials)
    try:
        yield proxy(ModelFiles, peer, "model")
    finally:
        await peer.close()
        await server.close()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_what_is_not_there_is_fetched_once_for_all_workers_of_the_machine(model: Path, tmp_path: Path) -> None:
    files = Counted(model)
    async with served(files, tmp_path) as proxied:
        places = await asyncio.gather(*(model_here(proxied, tmp_path / "nowhere", tmp_path / "node" / "model") for _ in range(3)))
    assert set(places) == {tmp_path / "node" / "model"}
    fetched = content(places[0])
    assert sorted(fetched) == NAMES and fetched == {name: (model / name).read_bytes() for name in NAMES}
    assert files.reads == 1 + 1 + 13
    assert (tmp_path / "node").stat().st_mode & 0o077 == 0


async def test_the_same_files_are_not_fetched_and_others_are(model: Path, tmp_path: Path) -> None:
    files, target = Counted(model), tmp_path / "node" / "model"
    async with served(files, tmp_path) as proxied:
        assert await model_here(proxied, model, target) == model and files.reads == 0
        other = tmp_path / "other"
        other.mkdir()
        for name in NAMES:
            (other / name).write_bytes((model / name).read_bytes())
        weights = bytearray((model / "model.safetensors").read_bytes())
        weights[7000] ^= 1  # of the same names and sizes
        (other / "model.safetensors").write_bytes(weights)
        assert await model_here(proxied, other, target) == target and files.reads > 0


async def test_damage_is_found_and_does_not_stay(model: Path, tmp_path: Path) -> None:
    files, target = Counted(model), tmp_path / "node" / "model"
    files.damaged = 5
    async with served(files, tmp_path) as proxied:
        with pytest.raises(RunError, match=r"model.safetensors of the model was changed while it was fetched"):
            await model_here(proxied, tmp_path / "nowhere", target)
        assert not target.exists()
        assert content(await model_here(proxied, tmp_path / "nowhere", target)).keys() == set(NAMES)


async def test_a_driver_that_sends_nothing_is_an_error(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "CHUNK_SECONDS", 0.05)
    files = Counted(model)
    files.is_silent = True
    async with served(files, tmp_path) as proxied:
        with pytest.raises(RunError, match=r"sent nothing of the model's config.json for 0.05 s"):
            await model_here(proxied, tmp_path / "nowhere", tmp_path / "node" / "model")


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [("../key.pem", 0, 1), ("optimizer.pt", 0, 1), ("config.json", 0, 3), ("config.json", 1, 1), ("config.json", -1, 1)],
)
async def test_nothing_else_is_to_be_had(model: Path, name: str, begin: int, end: int) -> None:
    with pytest.raises(LookupError, match="the model has no bytes"):
        await ModelFiles(model).read(name, begin, end)


async def test_what_is_read_is_progress(model: Path) -> None:
    """A machine that fetches a large model is no run that stands still."""
    told: list[None] = []
    files = ModelFiles(model, lambda: told.append(None))
    await files.read("config.json", 0, 1)
    await files.read("config.json", 0, 2)
    assert len(told) == 2
