"""The two engine contracts. An engine sees neither the queue, nor the algorithm, nor the other engine.

    RolloutEngine   prompt token ids -> responses, under one installed policy version at a time
    TrainEngine     micro-batches + a loss -> unnormalised gradient sums -> an optimiser step

Methods are coroutines: the computation runs in the engine's own thread (`asyncflow.threads.ComputeThread`), one thread per
engine, which is also its lock. Cancelling a coroutine abandons the answer, not the computation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from asyncflow.types import Array, LossFunction, Ragged

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy. The end tokens are those of the model's own files."""

    temperature: float = 1.0
    max_new_tokens: int = 64


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Sampling noise is keyed on (seed, prompt_index, sample, token position): never on worker, batch or attempt."""

    seed: int
    prompt_index: int


@dataclass(frozen=True, slots=True)
class Response:
    """One finished response.

    token_ids int64 [L], the end token included when it was reached; logprobs float32 [L] of the distribution sampled from
    (temperature applied; under greedy decoding, that of temperature 1); version_spans int64 [spans, 2], rows (first token offset,
    policy version), ascending, first offset 0.
    """

    sample: int
    token_ids: Array
    logprobs: Array
    version_spans: Array
    finish_reason: Literal["stop", "length"]


class RolloutEngine(Protocol):
    """Generates responses by continuous batching over `num_slots` slots."""

    num_slots: int
    is_deterministic: bool

    @property
    def free_slots(self) -> int:
        """Slots that neither hold nor await a response (never negative)."""
        ...

    def generate(self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey) -> AsyncIterator[Response]:
        """Responses of one prompt (int64 [Lp]), one for each number in `samples`, each yielded as soon as it ends.

        More samples than free slots wait inside the engine. Raises `ValueError` when prompt and response exceed the context.
        """
        ...

    async def prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Do what of an install can be done beside generation. Optional: `install` does what was not prepared.

        The tensors are not to change until that version is installed, or another one prepared. Raises as `install`.
        """
        ...

    async def install(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` (Hugging Face names) into the weights in place; later tokens are generated under `version`.

        Raises `ValueError`, changing nothing, when a name, shape or dtype is not the model's.
        """
        ...

    async def close(self) -> None:
        """Stop the compute thread; pending `generate` calls end with `RuntimeError`."""
        ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A fixed piece of one group, a function of indices alone.

    indices int64 [R]; prompt_ids int64 [Lp]; the ragged columns have R entries: response_ids int64, loss_mask uint8,
    rollout_logprobs float32; advantages float32 [R].
    """

    indices: Array
    prompt_ids: Array
    response_ids: Ragged
    loss_mask: Ragged
    rollout_logprobs: Ragged
    advantages: Array

    @property
    def logical_tokens(self) -> int:
        """Every response counted with its prompt (papers: TPSPD)."""
        return len(self.response_ids.values) + len(self.indices) * len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class MicroBatchResult:
    """`metrics`: sums over the loss tokens. `is_finite`: False if the loss or a log-prob was not; nothing was accumulated then."""

    loss_sum: float
    loss_tokens: int
    physical_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_finite: bool = True


@dataclass(frozen=True, slots=True)
class OptimResult:
    """`skipped`: the accumulated gradient was not finite; the weights are unchanged and the sums are cleared."""

    grad_norm: float
    learning_rate: float
    skipped: bool = False


class TrainEngine(Protocol):
    """Trains one model. The gradient of a step is a sum of `forward_backward` calls, divided once."""

    device: str

    async def forward_backward(self, micro_batch: MicroBatch, loss: LossFunction) -> MicroBatchResult:
        """Add the micro-batch's unnormalised gradient to the step's sums."""
        ...

    async def optim_step(self, normaliser: int) -> OptimResult:
        """Divide the sums by `normaliser`, clip, step, clear the sums. A non-finite gradient is skipped, not applied."""
        ...

    async def discard(self) -> None:
        """Clear the step's sums without a step."""
        ...

    async def log_probs(self, micro_batch: MicroBatch) -> Ragged:
        """Log-probs (float32, R entries) of the response tokens under the current weights, without gradient."""
        ...

    async def export_weights(self) -> Mapping[str, Tensor]:
        """The current weights by their Hugging Face names, on the CPU, not to be changed before the next `optim_step`."""
        ...

    async def save(self, path: Path) -> None:
        """Write the model in Hugging Face format."""
        ...

    async def close(self) -> None:
        """Stop the compute thread."""
        ...
