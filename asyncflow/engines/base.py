"""The two engine contracts. An engine sees neither the queue, nor the algorithm, nor the other engine.

    RolloutEngine   prompt token ids -> responses, under one installed policy version at a time
    TrainEngine     micro-batches + a loss -> unnormalised gradient sums -> an optimiser step

Methods are coroutines: the computation runs in the engine's own thread (`asyncflow.threads.ComputeThread`), one thread per
engine, which is also its lock. Cancelling a coroutine abandons the answer, not the computation.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np

from asyncflow.types import Array, Layout, Objective, Old, Ragged, ValueObjective, WeightSource

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
    is_deterministic: bool  # a sample's tokens and log-probs depend, to the bit, on its prompt, key, sampling and weights alone
    why_not_deterministic: str  # one sentence, "" if it is

    def generate(self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey) -> AsyncIterator[Response]:
        """Responses of one prompt (int64 [Lp]), one for each number in `samples`, each yielded soon after it ends: some that
        end within a moment may come together.

        More samples than there are slots left wait inside the engine. Raises `ValueError` when prompt and response exceed the
        context.
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

    async def export_weights(self) -> WeightSource | None:
        """What is installed, by Hugging Face names, in the engine's own dtype; None if it cannot say. Valid until the next install.

        A run asks for it once, at its end, and only where its trainer was lost with the newest weights.
        """
        ...

    async def pause(self) -> None:
        """Make no more tokens until `resume`, and return when none is being made. Pausing what is paused does nothing.

        Nothing is lost: responses under way go on later, with their keys and values, and new ones wait. All other calls work.
        """
        ...

    async def resume(self) -> None:
        """Go on after `pause`. Does nothing if the engine is not paused."""
        ...

    async def close(self) -> None:
        """Stop the compute thread; pending `generate` calls end with `RuntimeError`."""
        ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A fixed piece of one group, a function of indices alone.

    indices int64 [R]; prompt_ids int64 [Lp]; the ragged columns have R entries: response_ids int64, loss_mask uint8,
    rollout_logprobs float32; advantages float32 [R], or [T], a number for each of all response tokens; staleness int64 [R], of each
    row's oldest token, in versions; ref_logprobs ragged float32, where the reference is a task of its own; values ragged float32,
    where there is a critic, for which `advantages` are the returns.
    """

    indices: Array
    prompt_ids: Array
    response_ids: Ragged
    loss_mask: Ragged
    rollout_logprobs: Ragged
    advantages: Array
    staleness: Array
    ref_logprobs: Ragged | None = None
    values: Ragged | None = None

    @property
    def token_advantages(self) -> Array:
        """float32 [T]: each response token's, rows end to end. (As many rows as tokens: a row is a token then.)"""
        if len(self.advantages) == len(self.response_ids.values):
            return self.advantages
        return np.repeat(self.advantages, self.response_ids.lengths)

    @property
    def has_advantages(self) -> bool:
        """Whether any is not 0."""
        return bool(self.advantages.any())

    @property
    def logical_tokens(self) -> int:
        """Every response counted with its prompt (papers: TPSPD)."""
        return len(self.response_ids.values) + len(self.indices) * len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class MicroBatchResult:
    """`metrics`: sums over the loss tokens. `physical_tokens`: those computed, without what fills up. `is_finite`: False if the
    loss or a log-prob was not; nothing was accumulated then.

    `logprob_differences`: loss tokens whose log-prob is the rollout engine's to the bit, and the largest difference in nats.
    `is_computed`: False if no engine has seen it, since it has no gradient (`train.skip_zero_advantages`).
    """

    loss_sum: float
    loss_tokens: int
    physical_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_finite: bool = True
    logprob_differences: tuple[int, float] = (0, 0.0)
    is_computed: bool = True


@dataclass(frozen=True, slots=True)
class OptimResult:
    """`skipped`: the accumulated gradient was not finite; the weights are unchanged and the sums are cleared.

    `fill_tokens`: computed for nothing since the last update, in all data-parallel groups, where micro-batches were brought to one
    length or a group had none.
    """

    grad_norm: float
    learning_rate: float
    skipped: bool = False
    fill_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenOptions:
    """What an engine is told of a model that it does not train. config.py says which values there are, and the defaults.

    The passes compute on `device` in `dtype`, which is what the weights are kept in, too; `offload`: in host memory. `temperature`
    is that of the rollout's sampling. At most `log_prob_chunk_tokens` rows of logits exist at a time. `num_threads` compute on
    the CPU.
    """

    device: str
    dtype: Literal["float32", "bfloat16"]
    temperature: float
    log_prob_chunk_tokens: int
    num_threads: int
    offload: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEngineOptions:
    """What every train engine is told. config.py says which values there are, and the defaults.

    `learning_rate` rises linearly over the first `warmup_steps` updates and stays. `weight_decay` applies to matrices, not to
    biases and norms. `temperature` is that of the rollout's sampling: the policy's distribution is the one sampled from. `seed`
    is for losses that draw numbers. `dtype` is that of the forward and backward passes; weights, gradient sums and optimiser state
    are float32 or more. At most `log_prob_chunk_tokens` rows of logits exist at a time. `num_threads` compute on the CPU.

    `accumulate`: how gradients add up, see train/accumulate.py. `old`, `is_corrected`: see train/model/tri_model.py.
    `has_reference`: keep the model as it is at the start as the reference. Old policy and reference are kept in `frozen_dtype`
    (None: in `dtype`); `offload`: in host memory. `check_shared_prompt`: the first micro-batch whose prompt is shared is computed
    unshared, too, and compared.

    `layout`: how the model is cut over processes; in a pipeline the micro-batches of a call are brought to one length, if no more
    than `pipeline_fill` of all their tokens fill. `activation_checkpointing`: each layer's activations are made again in the
    backward pass. `offload_optimizer`: the optimiser's state is kept in host memory.
    """

    layout: Layout
    pipeline_fill: float
    learning_rate: float
    warmup_steps: int
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    temperature: float
    seed: int
    device: str
    dtype: Literal["float32", "bfloat16"]
    log_prob_chunk_tokens: int
    num_threads: int
    accumulate: Literal["exact", "fp32"]
    old: Old
    is_corrected: bool
    has_reference: bool
    frozen_dtype: Literal["float32", "bfloat16"] | None
    offload: bool
    check_shared_prompt: bool
    activation_checkpointing: bool
    offload_optimizer: bool


class ClassifierEngine(Protocol):
    """Scores whole sequences."""

    async def score(self, token_ids: Array) -> float:
        """The logit of a sequence (int64 [L]). Raises `ValueError` for one that is empty, or longer than the model takes."""
        ...

    async def close(self) -> None:
        """Stop the compute thread."""
        ...


class LogProbEngine(Protocol):
    """What a task of its own, such as the reference, needs of a model."""

    async def log_probs(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """Log-probs (float32) of the tokens of R responses (int64) to a prompt (int64 [Lp]), without gradient."""
        ...

    async def close(self) -> None:
        """Stop the compute thread."""
        ...


class CriticEngine(Protocol):
    """A model of values, and its training. The methods that `TrainEngine` has too do what is said there."""

    async def values(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """The values (float32) before each token of R responses (int64) to a prompt (int64 [Lp]), without gradient."""
        ...

    async def begin_step(self) -> None: ...

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: ValueObjective) -> list[MicroBatchResult]:
        """As `TrainEngine`'s, with another loss: micro-batches have `values`, and returns for advantages."""
        ...

    async def optim_step(self, normaliser: int) -> OptimResult: ...

    async def discard(self) -> None: ...

    async def fingerprint(self) -> Mapping[str, str]: ...

    async def save(self, path: Path) -> None:
        """Write the model in Hugging Face format, with the value head beside it."""
        ...

    async def save_state(self, folder: Path) -> Awaitable[None]: ...

    async def load_state(self, folder: Path) -> None: ...

    async def close(self) -> None: ...


RANKS_STORE = "ASYNCFLOW_RANKS_STORE"
"""The environment variable that says where a train engine's processes find each other: a URL that torch.distributed takes."""
RANKS_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The environment variables that name the network interface by which their libraries connect."""
EXCHANGE_SECONDS: Final = 600.0
"""How long one of these processes waits for the others in one exchange. One that has died is noticed at once."""


class TrainEngine(LogProbEngine, Protocol):
    """Trains one model. The gradient of a step is a sum of `forward_backward` calls, divided once.

    An engine that is cut over several processes (`Layout`) is one object in each. In every data-parallel group one leads: it is
    called by a loop, and all leaders are called alike, at the same time and in the same order. The others follow.
    """

    device: str
    data_parallel_rank: int | None  # of a leader, from 0; None of one that follows

    async def follow(self, objective: Objective, busy: Callable[[str], AbstractContextManager[object]]) -> None:
        """Do what the leader's calls ask for, until it closes. Every call is made within `busy(its name)`."""
        ...

    async def begin_step(self) -> None:
        """The micro-batches that follow are of a new step: the weights are now those of its start."""
        ...

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """Add the micro-batches' unnormalised gradients to the step's sums, and tell what came of each.

        An engine of several data-parallel groups is called by all of them at the same time, each with its own micro-batches: as
        many as it has, which may be none.
        """
        ...

    async def optim_step(self, normaliser: int) -> OptimResult:
        """Divide the sums by `normaliser`, clip, step, clear the sums. A non-finite gradient is skipped, not applied."""
        ...

    async def discard(self) -> None:
        """Clear the step's sums without a step."""
        ...

    async def export_weights(self) -> WeightSource:
        """The current weights. Every leader iterates over them to the end, before the next `optim_step` or `discard`.

        Where the engine gathers them meanwhile, it is not called before `WeightSource.gathered`; where it does not, `begin_step`
        and `forward_backward` of the next step are called while they are read.
        """
        ...

    async def fingerprint(self) -> Mapping[str, str]:
        """SHA-256 of the bytes of `weights/<name>` and of the optimiser's `optimizer/<name>/<state>`, in hexadecimal.

        Of data-parallel rank 0; the others take part, and return nothing.
        """
        ...

    async def save(self, path: Path) -> None:
        """Write the model in Hugging Face format."""
        ...

    async def save_state(self, folder: Path) -> Awaitable[None]:
        """Write all that the step depends on that `begin_step` has begun last to files in `folder`.

        Returns when the engine may go on: the files are written beside it. What is returned is awaited before the next state is
        saved, and raises `OSError` or `RunError` where a file could not be written; that of data-parallel rank 0 is done when the
        files of all ranks are there. Whatever has been accumulated, or drawn at random, since the step began is not in it.
        """
        ...

    async def load_state(self, folder: Path) -> None:
        """Be where the engine was whose `save_state` wrote `folder`, under whatever layout. Before the first step only.

        Raises `RunError` where that was another model's.
        """
        ...
