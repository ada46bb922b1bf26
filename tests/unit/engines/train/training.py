"""What tests of train engines have in common."""

from asyncflow.engines.base import MicroBatch, MicroBatchResult, TrainEngine
from asyncflow.types import Objective


async def train_on(engine: TrainEngine, micro_batch: MicroBatch, objective: Objective) -> MicroBatchResult:
    """`forward_backward` of one micro-batch."""
    (result,) = await engine.forward_backward([micro_batch], objective)
    return result
