"""What tests of train engines have in common."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncflow.build.workers import train_engine_options
from asyncflow.config import parse
from asyncflow.engines.base import FrozenOptions, MicroBatch, MicroBatchResult, TrainEngine, TrainEngineOptions
from asyncflow.engines.train.frozen_engine import FrozenEngine
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.torch_engine import TorchEngine
from asyncflow.types import Objective


def train_options(**changes: Any) -> TrainEngineOptions:
    """The configuration's defaults, with changes."""
    return replace(train_engine_options(parse({"model": {"path": "model"}, "data": {"path": "data"}})), **changes)


def torch_engine(model_path: Path | str, **changes: Any) -> TorchEngine:
    """An engine by the configuration's defaults, with changes."""
    return TorchEngine(model_path, train_options(**changes))


def one_rank(engine: TorchEngine) -> OneRank:
    """What an engine on one device does in its thread: to look at, and to break."""
    assert engine._one is not None
    return engine._one


def frozen_engine(model_path: Path | str, **changes: Any) -> FrozenEngine:
    """An engine as `torch_engine`'s reference, computed apart."""
    options = train_options(**changes)
    return FrozenEngine(model_path, FrozenOptions(**{name: getattr(options, name) for name in FrozenOptions.__slots__}))


async def train_on(engine: TrainEngine, micro_batch: MicroBatch, objective: Objective) -> MicroBatchResult:
    """`forward_backward` of one micro-batch."""
    (result,) = await engine.forward_backward([micro_batch], objective)
    return result


async def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Copies of what it exports."""
    source = await engine.export_weights()
    return {name: tensor.clone() async for name, tensor in source.tensors()}
