"""A train engine's state on disk: whoever loads it goes on as who saved it would have, to the bit."""

import asyncio
import errno
import os
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file

from asyncflow.engines.train import state
from asyncflow.engines.train.state import StateWriter, load_tensors_into
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.types import RunError
from tests.patience import patience
from tests.unit.engines.train.parallel.training_ranks import Clipped, make_batch
from tests.unit.engines.train.training import ModelPath, torch_engine, train_on


async def step(engine: TorchEngine, number: int) -> None:
    """A step of two micro-batches, which depends on nothing but its number and the engine's state."""
    await engine.begin_step()
    for i in range(2):
        await train_on(engine, make_batch(10 * number + i, (5, 3, 7), 19), Drawing())
    assert not (await engine.optim_step(20)).skipped


class Drawing(Clipped):
    """A loss that draws random numbers."""

    def loss(self, batch: Any) -> Any:
        sums = super().loss(batch)
        return type(sums)(sums.loss * (1 + 0.1 * torch.rand(())), sums.metrics)


@pytest.mark.parametrize("options", [{}, {"old": "previous", "accumulate": "exact"}, {"dtype": "bfloat16"}])
async def test_a_loaded_engine_goes_on_to_the_bit(model_path: ModelPath, tmp_path: Path, options: dict[str, Any]) -> None:
    chosen = {"learning_rate": 1e-3, "warmup_steps": 4, "weight_decay": 0.1, **options}
    engine = torch_engine(model_path("qwen2-tiny"), **chosen)
    await step(engine, 0)
    await step(engine, 1)
    await engine.begin_step()
    await (await engine.save_state(tmp_path / "between"))
    await train_on(engine, make_batch(99, (4,), 9), Drawing())  # of a step that is not finished: nothing of it is in the state
    await (await engine.save_state(tmp_path / "within"))
    other = torch_engine(model_path("qwen2-tiny"), **{**chosen, "seed": 5})
    await engine.discard()
    del engine
    expected = None
    for folder in ("between", "within"):
        await other.load_state(tmp_path / folder)
        prints = [await other.fingerprint()]
        for number in (2, 3):
            await step(other, number)
            prints.append(await other.fingerprint())
        assert expected is None or prints == expected
        expected = prints
    undisturbed = torch_engine(model_path("qwen2-tiny"), **chosen)
    for number in range(4):
        await step(undisturbed, number)
    assert await undisturbed.fingerprint() == expected[-1] != expected[0]
    if "old" in options:
        batch = make_batch(1, (4, 4), 12, staleness=1)
        results = [await train_on(each, batch, Clipped()) for each in (undisturbed, other)]
        assert results[0] == results[1]  # the ratio is to the old policy's log-probs


async def test_a_state_before_the_first_update_and_one_of_another_model(model_path: ModelPath, tmp_path: Path) -> None:
    engine = torch_engine(model_path("qwen2-tiny"), learning_rate=1e-3)
    await (await engine.save_state(tmp_path / "new"))
    await step(engine, 0)
    await (await engine.save_state(tmp_path / "one"))
    after = await engine.fingerprint()
    await engine.load_state(tmp_path / "new")
    await step(engine, 0)
    assert await engine.fingerprint() == after
    with pytest.raises(RunError, match=r"has no weights/.*layernorm|has no weights/.*norm|of shape"):
        await torch_engine(model_path("qwen3-tiny")).load_state(tmp_path / "one")
    with pytest.raises(RunError, match=r"has no old/.*another model or old policy"):
        await torch_engine(model_path("qwen2-tiny"), old="previous").load_state(tmp_path / "one")
    with pytest.raises(RunError, match=r"cannot be read|has no updates"):
        await engine.load_state(tmp_path / "nowhere")


def test_tensors_may_change_as_soon_as_they_are_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor([7])}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    monkeypatch.setattr(state, "FILE_BYTES", 20)
    written = StateWriter().begin(tensors, tmp_path / "state")
    for tensor in tensors.values():
        tensor.zero_()
    written.result(patience(60))
    files = sorted((tmp_path / "state").iterdir())
    assert len(files) == 2 and all(file.suffix == ".safetensors" for file in files)  # nothing else: no pickle
    assert sorted(name for file in files for name in load_file(file)) == ["a", "b", "c"]
    loaded = {name: torch.full_like(tensor, 5) for name, tensor in before.items()}
    load_tensors_into(loaded, tmp_path / "state")
    assert all(torch.equal(loaded[name], before[name]) for name in before)


def test_nothing_is_written_before_the_caller_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes no byte until the tensors have changed holds nobody up."""
    may_write, writers, write_data = threading.Event(), list[threading.Thread](), state._RankWriter.write_data

    def held(*args: Any, **options: Any) -> Any:
        writers.append(threading.current_thread())
        may_write.wait(patience(5))
        return write_data(*args, **options)

    monkeypatch.setattr(state._RankWriter, "write_data", held)
    tensor = torch.ones(3)
    written = StateWriter().begin({"a": tensor}, tmp_path)
    assert not written.done()
    tensor.zero_()
    assert not written.done() and not [*tmp_path.iterdir()]
    may_write.set()
    written.result(patience(60))
    assert len(writers) == 1 and writers[0] is not threading.current_thread()
    assert [load_file(file)["a"].tolist() for file in tmp_path.iterdir()] == [[1, 1, 1]]


def test_torch_does_not_warn_that_a_rank_is_on_its_own(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        StateWriter().begin({"a": torch.ones(2)}, tmp_path).result(patience(60))
        load_tensors_into({"a": torch.zeros(2)}, tmp_path)
    assert not [warning for warning in told if "torch.distributed" in str(warning.message)]


def test_who_holds_a_copy_writes_nothing_but_its_own(tmp_path: Path) -> None:
    own: Mapping[str, torch.Tensor] = {"random/1": torch.tensor([1])}
    StateWriter(1, 2).begin({"a": torch.ones(2)}, tmp_path, own=own).result(patience(60))
    StateWriter(0, 2).begin({"a": torch.zeros(2)}, tmp_path).result(patience(60))
    assert sorted(file.name[:11] for file in tmp_path.iterdir()) == ["shard-00001", "shard-00002"]
    loaded = {"a": torch.ones(2), "random/1": torch.zeros(1, dtype=torch.int64)}
    load_tensors_into(loaded, tmp_path)
    assert loaded["a"].tolist() == [0, 0] and loaded["random/1"].tolist() == [1]


async def test_a_disk_without_room_is_told_to_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(state._RankWriter, "write_data", full)
        with pytest.raises(OSError, match="No space left on device"):
            await asyncio.wrap_future(StateWriter().begin({"a": torch.ones(1)}, tmp_path / "one"))
        other = StateWriter(1, 2).begin({"a": torch.ones(1)}, tmp_path / "two", own={"b": torch.ones(1)})
        with pytest.raises(OSError, match="No space left"):
            other.result(patience(60))
    with pytest.raises(RunError, match=r"rank 1 could not write its part of the checkpoint: .*No space left"):
        StateWriter(0, 2).begin({"a": torch.ones(1)}, tmp_path / "two").result(patience(60))
    make, write_text = Path.mkdir, Path.write_text

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        make(path, *args, **options)
        full()

    def write_nothing(path: Path, text: str) -> int:
        write_text(path, "")
        return full()

    for name, harm in (("mkdir", mkdir), ("write_text", write_nothing)):
        with monkeypatch.context() as patch:
            patch.setattr(state._RankWriter, "write_data", full)
            patch.setattr(Path, name, harm)
            with pytest.raises(OSError, match="No space left"):
                StateWriter(1, 2).begin({}, tmp_path / name, own={"b": torch.ones(1)}).result(patience(60))
        why = "No space left" if name == "mkdir" else "the disk has not even had room for the reason"
        with pytest.raises(RunError, match=f"rank 1 could not write its part of the checkpoint: .*{why}"):
            StateWriter(0, 2).begin({"a": torch.ones(1)}, tmp_path / name).result(patience(5))
    monkeypatch.setattr(state, "WRITE_SECONDS", 0.2)
    with pytest.raises(RunError, match=r"rank 1 has not written its part of the checkpoint within 0\.2 s"):
        StateWriter(0, 2).begin({"a": torch.ones(1)}, tmp_path / "three").result(patience(60))
