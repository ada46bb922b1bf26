"""Weights that ranks gather for a publication: what they are held for, and what not. The ranks are a function here."""

from __future__ import annotations

import asyncio
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from asyncflow.engines.train import device_weights
from asyncflow.engines.train.device_weights import HostCopies
from asyncflow.engines.train.leader_engine import _GatheredWeights
from asyncflow.types import HeldWeights, RunError, TensorSpec
from asyncflow.weight_sync import staging
from asyncflow.weight_sync.base import WeightSyncOptions
from asyncflow.weight_sync.shared_memory import SharedMemory
from tests.builders import loop_turns
from tests.patience import patience

NAMES = ["a", "b", "c", "d"]
WEIGHTS = {name: torch.arange(1000.0) + number for number, name in enumerate(NAMES)}


class Gathering:
    """Gathers copies of `WEIGHTS`, or nothing. `asked`: for these, in order. `most` were there at once; `fails`: not to be had."""

    def __init__(self, *, is_first: bool = True, fails: str = "") -> None:
        self.asked: list[str] = []
        self.most, self._is_first, self._fails = 0, is_first, fails
        self._num_alive = 0

    def source(self) -> _GatheredWeights:
        return _GatheredWeights({name: TensorSpec.of(tensor) for name, tensor in WEIGHTS.items()}, self.gather)

    async def gather(self, name: str) -> Tensor | None:
        self.asked.append(name)
        if name == self._fails:
            raise RunError("a rank has gone")
        if not self._is_first:
            return None
        memory = WEIGHTS[name].numpy().copy()
        self._num_alive += 1
        self.most = max(self.most, self._num_alive)
        weakref.finalize(memory, self._gone)
        return torch.from_numpy(memory)

    def _gone(self) -> None:
        self._num_alive -= 1


async def test_a_tensor_is_gathered_while_the_one_before_is_used_and_two_are_there_at_a_time() -> None:
    gathering = Gathering()
    source, has_come = gathering.source(), list[str]()
    async for name, tensor in source.tensors():
        has_come.append(name)
        await loop_turns(5)
        assert gathering.asked == NAMES[: len(has_come) + 1] and tensor.equal(WEIGHTS[name])
        gathered = asyncio.ensure_future(source.gathered())
        await loop_turns(5)
        assert gathered.done() == (len(has_come) >= len(NAMES) - 1)  # all are there before the last is used
        gathered.cancel()
        del tensor
    assert has_come == NAMES and gathering.most == 2


async def test_on_other_ranks_nothing_comes() -> None:
    gathering = Gathering(is_first=False)
    source = gathering.source()
    assert [name async for name, _ in source.tensors()] == [] and gathering.asked == NAMES
    await asyncio.wait_for(source.gathered(), patience(5))


async def test_a_rank_that_dies_ends_the_reading_and_the_ranks_are_not_free() -> None:
    gathering = Gathering(fails="c")
    source, has_come = gathering.source(), list[str]()
    with pytest.raises(RunError, match="a rank has gone"):
        async for name, _ in source.tensors():
            has_come.append(name)
    assert has_come == ["a", "b"] and gathering.asked == ["a", "b", "c"]
    gathered = asyncio.ensure_future(source.gathered())
    await loop_turns(20)
    assert not gathered.done()
    gathered.cancel()


async def test_what_comes_from_a_device_lies_in_pinned_memory_two_tensors_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_weights, "CPU", "elsewhere")  # the tensors here stand for those of a device
    memories: list[Tensor] = []

    def memory(num_bytes: int) -> Tensor:
        memories.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return memories[-1]

    specs = {name: TensorSpec.of(tensor) for name, tensor in WEIGHTS.items()}
    copies = HostCopies(specs, memory)
    assert not memories  # ranks that have no tensor take none

    async def gather(name: str) -> Tensor:
        return copies.of(WEIGHTS[name][:: 2 if name == "b" else 1])

    specs["b"] = TensorSpec((500,), "float32")
    sender = SharedMemory(WeightSyncOptions(directory=tmp_path / "a")).sender("first")
    manifest = await sender.publish(1, _GatheredWeights(specs, gather))
    await sender.close()
    published = load_file(manifest.address)
    assert len(memories) == 2 and all(len(each) == 4000 for each in memories)
    assert published["b"].equal(WEIGHTS["b"][::2]) and all(published[name].equal(WEIGHTS[name]) for name in "acd")


@pytest.fixture
def may_hash(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set no tensor is hashed, or summed."""
    allowed, real_sum, real_digest = threading.Event(), staging.sum_of, xxhash.xxh3_128

    class Digest:
        def __init__(self) -> None:
            self._digest, self._has_head = real_digest(), False

        def update(self, data: memoryview) -> None:
            if self._has_head:
                assert allowed.wait(patience(10))
            self._digest.update(data)
            self._has_head = True

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    def sum_of(*arguments: Any) -> int:
        assert allowed.wait(patience(10))
        return real_sum(*arguments)

    monkeypatch.setattr(staging.xxhash, "xxh3_128", Digest)
    monkeypatch.setattr(staging, "sum_of", sum_of)
    return allowed


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
async def test_ranks_are_not_held_by_the_hash_and_what_is_published_is_the_same(
    may_hash: threading.Event, tmp_path: Path, dtype: str | None
) -> None:
    options = [WeightSyncOptions(directory=tmp_path / name, dtype=dtype, attested_dtype="bfloat16") for name in "ab"]
    sender, other = (SharedMemory(each).sender("first") for each in options)
    source = Gathering().source()
    publishing = asyncio.create_task(sender.publish(1, source))
    await asyncio.wait_for(source.gathered(), patience(3))
    await asyncio.sleep(0.02)
    assert not publishing.done()
    may_hash.set()
    made = await asyncio.wait_for(publishing, patience(5))
    expected = await other.publish(1, HeldWeights(WEIGHTS))
    assert (made.hash, made.sums, made.tensors) == (expected.hash, expected.sums, expected.tensors) and len(made.sums) == 4
    assert Path(made.address).read_bytes() == Path(expected.address).read_bytes()
    for end in (sender, other):
        await end.close()
