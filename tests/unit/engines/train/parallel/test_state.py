"""A state that was saved on one layout, loaded on others: the same tensors, to the bit."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncflow.engines.train.state import load_tensors_into
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.types import Layout
from tests.depth import few, in_gate
from tests.unit.engines.train.parallel.processes import Processes
from tests.unit.engines.train.parallel.training_ranks import Clipped, make_batch
from tests.unit.engines.train.training import torch_engine

OPTIONS: dict[str, Any] = {"learning_rate": 1e-2, "old": "previous"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    processes = Processes(4)
    yield processes
    processes.close()


def saved(path: Path, layout: Layout, folder: Path) -> dict[str, str] | None:
    """On each rank: two steps, then the state; the first rank's fingerprint."""
    return asyncio.run(_saved(torch_engine(path, layout=layout, **OPTIONS), folder))


async def _saved(engine: TorchEngine, folder: Path) -> dict[str, str] | None:
    if engine.data_parallel_rank is None:
        await engine.follow(Clipped(), lambda what: contextlib.nullcontext())
        return None
    for number in range(2):
        await engine.begin_step()
        await engine.forward_backward([make_batch(number + 10 * engine.data_parallel_rank, (5, 3), 12)], Clipped())
        await engine.optim_step(10)
    await (await engine.save_state(folder))
    prints = await engine.fingerprint()
    await engine.close()
    return dict(prints)


def loaded(path: Path, layout: Layout, folder: Path) -> dict[str, str] | None:
    """On each rank: the state that is there; the first rank's fingerprint."""
    return asyncio.run(_loaded(torch_engine(path, layout=layout, **OPTIONS), folder))


async def _loaded(engine: TorchEngine, folder: Path) -> dict[str, str] | None:
    if engine.data_parallel_rank is None:
        await engine.follow(Clipped(), lambda what: contextlib.nullcontext())
        return None
    await engine.load_state(folder)
    prints = await engine.fingerprint()
    await engine.close()
    return dict(prints)


LAYOUTS = few(
    [Layout(), Layout(dp=2), Layout(tp=2, pp=2)],
    [Layout(), Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(dp=2, tp=2), Layout(tp=2, pp=2)],
)


@pytest.mark.parametrize("of", in_gate(Layout(dp=2, tp=2), of=[Layout(dp=2), Layout(dp=2, tp=2), Layout(pp=2), Layout()]), ids=str)
def test_whatever_layout_loads_it(ranks: Processes, model_path: Callable[[str], Path], tmp_path: Path, of: Layout) -> None:
    path = model_path("qwen2-tiny")
    expected, *others = ranks.run(saved, path, of, tmp_path / "state", size=of.size)
    assert expected and not any(others)
    assert not [file for file in (tmp_path / "state").iterdir() if file.suffix != ".safetensors"]
    for layout in LAYOUTS:
        found, *_ = ranks.run(loaded, path, layout, tmp_path / "state", size=layout.size)
        assert found == expected, layout
    # The old policy is one update behind: it is in no fingerprint, but in the state.
    shapes = dict(load_file(path / "model.safetensors"))
    tensors = {f"{kind}/{name}": torch.zeros_like(tensor) for name, tensor in shapes.items() for kind in ("weights", "old")}
    load_tensors_into(tensors, tmp_path / "state")
    assert all(not torch.equal(tensors[f"old/{name}"], tensors[f"weights/{name}"]) for name in shapes)


@pytest.mark.parametrize(("of", "by"), [(Layout(pp=3), Layout()), (Layout(), Layout(pp=3))], ids=str)
def test_a_stage_in_the_middle_saves_and_loads_its_part(
    ranks: Processes, model_path: Callable[[str], Path], tmp_path: Path, of: Layout, by: Layout
) -> None:
    """Of a model whose head is its embedding."""
    path = model_path("qwen2-small")
    expected, *_ = ranks.run(saved, path, of, tmp_path / "state", size=of.size)
    assert expected and len(expected) == 4 * len(load_file(path / "model.safetensors"))
    assert ranks.run(loaded, path, by, tmp_path / "state", size=by.size) == [expected] + [None] * (by.size - 1)
