"""Who is asked for weights at a run's end, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.engines.base import RolloutEngine
from asyncflow.run.rescue import Rescue, give_back
from asyncflow.telemetry.hub import Hub
from asyncflow.transport import client_name
from asyncflow.types import HeldWeights
from asyncflow.weight_sync.base import Manifest

TENSORS = {"b": torch.arange(3 << 20).to(torch.bfloat16), "a": torch.rand(5, 7), "c": torch.tensor(3.0)}


class World:
    """A run at its end: `trainers` are connected, `file` is where its newest version 7 was published."""

    def __init__(self, folder: Path) -> None:
        self.file, self.trainers, self.has_saved, self.said = folder / "weights-7.safetensors", 1, False, list[str]()
        self.workers = ["rollout/0", "rollout/1"]
        versions = SimpleNamespace(newest=Manifest("first", 7, str(self.file), "", 7, {}))
        self.has_failed = True
        self.rescue = Rescue(
            folder,
            cast(PolicyVersions, versions),
            cast(Hub, self),
            5.0,
            has_failed=lambda: self.has_failed,
            has_saved=lambda: self.has_saved,
            says=self.said.append,
        )

    @property
    def states(self) -> Mapping[str, None]:
        return {f"trainer/{number}": None for number in range(self.trainers)} | dict.fromkeys(self.workers)

    async def have_left(self, names: str, seconds: float) -> bool:
        assert names == "trainer/" and seconds == 5.0
        for _ in range(10):
            if not self.trainers:
                return True
            await asyncio.sleep(0.01)
        return False


def engine(tensors: Mapping[str, Tensor] | None = TENSORS) -> RolloutEngine:
    async def export_weights() -> HeldWeights | None:
        return None if tensors is None else HeldWeights(tensors)

    return cast(RolloutEngine, SimpleNamespace(export_weights=export_weights))


async def by(worker: str, world: World, with_engine: RolloutEngine) -> None:
    client_name.set(worker)
    await give_back(world.rescue, with_engine, 7)


async def test_a_version_that_is_nowhere_else_is_given_back_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    unfinished = tmp_path / "weights-8.safetensors.tmp"
    unfinished.write_bytes(b"half")
    assert world.rescue.may_be_needed()
    world.trainers = 0
    await asyncio.gather(*(by(worker, world, engine()) for worker in world.workers))
    published = world.rescue.published
    assert published is not None and published.version == 7 and published.num_bytes == Path(published.address).stat().st_size
    given = load_file(published.address)
    assert given.keys() == TENSORS.keys() and all(torch.equal(given[name], TENSORS[name]) for name in TENSORS)
    assert not unfinished.exists() and len(list(tmp_path.iterdir())) == 1 and not world.said


async def test_none_but_the_newest_version_is_taken(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.trainers = 0
    for version in (6, 8):
        await give_back(world.rescue, engine(), version)
    assert world.rescue.published is None and not list(tmp_path.iterdir())


async def test_who_dies_in_giving_is_followed_by_another(tmp_path: Path) -> None:
    class Stuck(HeldWeights):
        async def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
            yield "a", TENSORS["a"]
            await asyncio.Event().wait()

    async def export_weights() -> Any:
        return Stuck(TENSORS)

    world = World(tmp_path)
    world.trainers = 0
    stuck = cast(RolloutEngine, SimpleNamespace(export_weights=export_weights))
    first = asyncio.create_task(by("rollout/0", world, stuck))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(by("rollout/1", world, engine()))
    await asyncio.sleep(0.2)
    assert not second.done() and world.rescue.published is None  # one is enough, as long as it lives
    first.cancel()
    world.workers.remove("rollout/0")
    await second
    published = world.rescue.published
    assert published is not None and load_file(published.address).keys() == TENSORS.keys()
    world.rescue.close()


async def test_nobody_is_asked_for_what_is_there_or_may_be_saved(tmp_path: Path) -> None:
    world = World(tmp_path)
    await give_back(world.rescue, engine(), 7)  # the trainers do not end
    world.trainers, world.has_saved = 0, True
    await give_back(world.rescue, engine(), 7)
    world.has_saved, world.has_failed = False, False
    await give_back(world.rescue, engine(), 7)  # a worker that is to leave, or the end of a run in order
    world.has_failed = True
    await give_back(world.rescue, engine(None), 7)  # an engine that cannot say
    await give_back(world.rescue, engine(), 0)  # the run's own files
    world.file.write_bytes(b"whole")
    assert not world.rescue.may_be_needed()
    await give_back(world.rescue, engine(), 7)
    assert world.rescue.published is None and list(tmp_path.iterdir()) == [world.file]


async def test_where_there_is_no_room_it_is_said_and_what_ends_early_does_not_count(tmp_path: Path) -> None:
    class Breaks(HeldWeights):
        async def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
            yield "a", TENSORS["a"]
            raise RuntimeError("the engine is gone")

    async def export_weights() -> Any:
        return Breaks(TENSORS)

    world = World(tmp_path)
    world.trainers = 0
    broken = asyncio.create_task(give_back(world.rescue, cast(RolloutEngine, SimpleNamespace(export_weights=export_weights)), 7))
    assert isinstance((await asyncio.gather(broken, return_exceptions=True))[0], RuntimeError)
    assert world.rescue.published is None
    world.rescue.close()
    full = World(tmp_path / "not there")
    full.trainers = 0
    await give_back(full.rescue, engine(), 7)
    assert full.rescue.published is None and "no room" in full.said[0]
