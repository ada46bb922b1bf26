"""Contracts of the engines. An engine sees neither the queue, nor the algorithm, nor another engine.

    RolloutEngine   prompt token ids -> responses, under one installed policy version at a time
    TrainEngine     micro-batches + a loss -> unnormalised gradient sums -> an optimiser step

Methods are coroutines: the computation runs in the engine's own thread (`asyncflow.threads.ComputeThread`), one thread per
engine, which is also its lock. Cancelling a coroutine drops the answer; the computation itself runs to its end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

import numpy as np

from asyncflow.attestation import Attestation
from asyncflow.types import Array, Layout, LoraSpec, Objective, Old, Ragged, ValueObjective, WeightSource

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings for drawing the tokens of a response.

    `temperature` 0 means greedy decoding. `max_new_tokens` limits one response. `stop_ids`: tokens that end one; None: the end
    tokens of the model's own files.
    `keeps`: another turn is expected after this one, so its keys and values should be kept until then.

    A token is drawn from those that `min_p`, `top_k` and `top_p` leave, in this order: those at least `min_p` times as likely as
    the likeliest one; the `top_k` likeliest (0: all); of these, the likeliest, as few as have the part `top_p` of their
    probability. Tokens as likely as the last one that is left are left, too. A response ends with the token that completes one of
    the texts `stop`, in the text of its tokens without special ones.
    """

    temperature: float = 1.0
    max_new_tokens: int = 64
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] | None = None
    keeps: bool = False

    def of_turn(self, max_new_tokens: int, *, keeps: bool) -> Sampling:
        """Settings of one turn of an episode that is sampled so."""
        return replace(self, max_new_tokens=max_new_tokens, keeps=keeps)

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are never drawn, however likely the model finds them."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


NO_TOKENS: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SampleKey:
    """Key of the sampling noise of one prompt.

    The noise depends on (seed, prompt_index, sample, token position), and never on worker, batch or delivery. So a response that
    was lost can be generated again with the same noise.
    """

    seed: int
    prompt_index: int


@dataclass(frozen=True, slots=True)
class Response:
    """Finished response of L tokens; of an episode, one turn.

    token_ids int64 [L], the end token included when it was reached; logprobs float32 [L], under the distribution that was sampled
    from (temperature and truncation applied; under greedy decoding temperature 1); version_spans int64 [spans, 2], rows of (first
    token offset, policy version), ascending, first offset 0.
    """

    sample: int
    token_ids: Array
    logprobs: Array
    version_spans: Array
    finish_reason: Literal["stop", "length"]


class Timing(NamedTuple):
    """Timed piece of an engine's work: `decode_step` or `prefill`. Start and end in seconds of CLOCK_MONOTONIC.

    `rows`: active slots and drafts of a decode step, or slots that were filled. `tokens`: tokens that a decode step attended to, or
    prompt tokens of a prefill. `calls`: decode steps that were made one after another in this time. `drafts`: draft tokens that
    were verified in them, of which `accepted` were right. All are sums over these steps.
    """

    task: str
    start: float
    end: float
    rows: int
    tokens: int
    calls: int = 1
    drafts: int = 0
    accepted: int = 0


class RolloutEngine(Protocol):
    """Engine that generates responses by continuous batching over `num_slots` slots."""

    num_slots: int
    is_deterministic: bool  # a sample's tokens and log-probs depend, to the bit, on its prompt, key, sampling and weights alone
    why_not_deterministic: str  # one sentence; "" if the engine is deterministic

    def generate(
        self, prompt_ids: Array, *, samples: Sequence[int], sampling: Sampling, key: SampleKey, after: Array = NO_TOKENS
    ) -> AsyncIterator[Response]:
        """Responses to one prompt (int64 [Lp]), one for each number in `samples`.

        `after`: tokens (int64 [n]) that stand between the prompt and the response, which are the episode's turns and observations
        so far. The noise goes on behind them, at position n. The bits are those of an engine that has made these turns itself.
        An engine that has no `after` in its signature generates single turns only.

        Each response is yielded soon after it ends; responses that end at nearly the same time may come together. Samples for
        which no slot is free wait inside the engine. Raises `ValueError` when prompt and response exceed the context.
        """
        ...

    def forget(self, key: SampleKey, sample: int) -> None:
        """Let go of what was kept of a sample: no turn follows. An engine of the user's own may lack this method."""
        ...

    async def prepare(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Do the part of an install that can run beside generation. Optional: `install` does what was not prepared.

        The tensors must not change until this version is installed, or another one is prepared. Raises the errors of `install`.
        """
        ...

    async def install(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` (Hugging Face names) into the weights in place; later tokens are generated under `version`.

        Raises `ValueError`, and changes nothing, when a name, shape or dtype is not the model's.
        """
        ...

    async def attest(self) -> Attestation | None:
        """Sums over the bits of the weights that tokens are now generated with. Optional; None: the engine cannot tell.

        Taken from the buffers that the engine's kernels read, and from nothing that an install was given.
        """
        return None

    async def log_probs(self, token_ids: Array) -> Array | None:
        """Log-probs (float32 [L - 1]) of the tokens of a sequence (int64 [L]) after its first, under what tokens are now generated
        with, at temperature 1; an engine of several servers gives those of each, one after another. Optional; None: it cannot
        tell."""
        return None

    async def export_weights(self) -> WeightSource | None:
        """Installed weights by Hugging Face names, in the engine's own dtype; None if the engine cannot export them.

        The source is valid until the next install. It shows to the bit what an install has made of the tensors.
        """
        ...

    def timings(self) -> Sequence[Timing]:
        """Timed pieces of work since the last call; a sample is enough. An engine of the user's own may lack this method."""
        ...

    async def pause(self) -> None:
        """Stop making tokens until `resume`; return when no token is being made. Does nothing if the engine is paused already.

        Nothing is lost: unfinished responses keep their keys and values and continue later, and new requests wait. All other
        calls work while the engine is paused.
        """
        ...

    async def resume(self) -> None:
        """Make tokens again after `pause`. Does nothing if the engine is not paused."""
        ...

    async def close(self) -> None:
        """Stop the compute thread; pending `generate` calls end with `RuntimeError`."""
        ...


@dataclass(frozen=True, slots=True)
class RolloutEngineOptions:
    """Options that all rollout engines here take, by name (`registry.by_name`): a run gives them, and a key below `rollout.engine`
    replaces each.

    `model_path`: a Hugging Face checkpoint, which is policy `version`. `max_context`: prompt and response tokens of a row, of which
    `num_slots` are generated at once. `num_parked`: more rows may wait for their environments. `stop_ids`: instead of the end
    tokens of the model's files; an empty one makes every response `max_new_tokens` long. `kv_on_install`: whether responses under
    way go on with the keys and values that they have when weights are installed, or have them computed again. `num_threads`: that
    compute on the CPU.
    """

    model_path: Path
    _: KW_ONLY
    num_slots: int
    max_context: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    num_threads: int = 1
    version: int = 0
    stop_ids: Iterable[int] | None = None
    kv_on_install: Literal["keep", "recompute"] = "keep"
    num_parked: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Fixed piece of one group: R rows with one prompt. The rows' indices alone decide how a group is cut into pieces. An engine
    may compute several in one pass.

    indices int64 [R]; prompt_ids int64 [Lp]. The ragged columns have R entries: response_ids int64, loss_mask uint8,
    rollout_logprobs float32. advantages float32: [R], one for each row, or [T], one for each of all T response tokens. staleness
    int64 [R]: of each row's oldest token, in versions. ref_logprobs, ragged float32: only where the reference is a separate task.
    values, ragged float32: only for a critic, and `advantages` are then the returns. target_ids, ragged int64: the tokens whose
    log-probs the loss is given, one for each response token; None: the response tokens themselves. rewards float32 [R].
    row_tokens int64 [R]: loss tokens of each whole row, where other micro-batches have sequences of it, too; None: those here.
    examined_rows: positions of rows of which the result is to have figures token by token; an engine may lack them.
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
    target_ids: Ragged | None = None
    rewards: Array | None = None
    row_tokens: Array | None = None
    examined_rows: tuple[int, ...] = ()

    @property
    def token_advantages(self) -> Array:
        """Advantages float32 [T], one for each response token, rows end to end.

        If there are as many rows as tokens, each row has one token, so both forms of `advantages` mean the same.
        """
        if len(self.advantages) == len(self.response_ids.values):
            return self.advantages
        return np.repeat(self.advantages, self.response_ids.lengths)

    @property
    def has_advantages(self) -> bool:
        """Whether any advantage is not 0."""
        return bool(self.advantages.any())

    @property
    def logical_tokens(self) -> int:
        """Number of tokens when every response is counted with its own prompt (papers: TPSPD)."""
        return len(self.response_ids.values) + len(self.indices) * len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class MicroBatchResult:
    """Result of the forward and backward pass of one micro-batch.

    `metrics`: sums over the loss tokens. `physical_tokens`: tokens that the model computed, without fill tokens. `is_finite`:
    False if the loss or a log-prob was not finite; then nothing was accumulated, or the step will be skipped.

    `logprob_differences`: the number of loss tokens whose log-prob equals the rollout engine's to the bit, and the largest
    difference in nats. `is_computed`: False if no engine computed the micro-batch, because it has no gradient
    (`train.skip_zero_advantages`). `token_figures`: of each row in `MicroBatch.examined_rows`, by its index: numbers by their
    name, one for each response token, as the loss had them.
    """

    loss_sum: float
    loss_tokens: int
    physical_tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_finite: bool = True
    logprob_differences: tuple[int, float] = (0, 0.0)
    is_computed: bool = True
    token_figures: Mapping[int, Mapping[str, Sequence[float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OptimResult:
    """Result of one optimiser step.

    `skipped`: the accumulated gradient was not finite, or nothing was accumulated; the weights are unchanged and the sums are
    cleared. `fill_tokens`: tokens without use that all data-parallel groups computed since the last update, because micro-batches
    were filled up to one length, or because a group had none.
    """

    grad_norm: float
    learning_rate: float
    skipped: bool = False
    fill_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters:
    """Hyperparameters of AdamW, where they are chosen update by update. `max_grad_norm` None: gradients are not clipped."""

    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    max_grad_norm: float | None


LearningRateSchedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEngineOptions:
    """Options that every train engine takes. config.py lists the allowed values and the defaults.

    `learning_rate` rises linearly over the first `warmup_steps` updates; then it goes by `learning_rate_schedule`, to
    `min_learning_rate` after `num_updates` of them. `weight_decay` applies to parameters in whose names none of the regular
    expressions `no_weight_decay` is found (None: to matrices, not to biases and norms). `max_grad_norm` None: gradients are not
    clipped. `temperature` is the rollout's sampling temperature: the policy's distribution is the one that was
    sampled from. `seed` is for losses that draw random numbers. The forward and backward passes compute in `dtype`; weights,
    gradient sums and optimiser state are float32 or wider. At most `log_prob_chunk_tokens` rows of logits exist at a time.
    `num_threads`: threads that compute on the CPU.

    `accumulate`: how gradients add up, see train/accumulate.py. `old`, `is_corrected`: see train/model/tri_model.py.
    `has_reference`: keep a copy of the model as it is at the start, as the reference. Old policy and reference are kept in
    `frozen_dtype` (None: in `dtype`), and with `offload` in host memory. `check_shared_prompt`: compute the first micro-batch
    whose prompt is shared without sharing, too, and compare.

    `tokens_per_pass`: packed tokens up to which several micro-batches are computed together; None: each is a pass of its own. With
    `accumulate` "exact" no bit depends on it. An engine may lack it.

    `helpers`: devices of the threads besides the engine's own that may take work of it, see train/helpers.py. An engine may lack
    them.

    `layout`: how the model is sharded over processes. In a pipeline the passes of a call are about `pipeline_micro_batches` of one
    length, and are filled up to it if the fill is at most the fraction `pipeline_fill` of all their tokens.
    `activation_checkpointing`: compute each layer's activations again in the backward pass. `offload_optimizer`: keep the
    optimiser's state in host memory.

    `lora`: train a low-rank adapter, and leave the model's own weights as they are; None: train these. The adapter is then what is
    exported, saved and restored; the weights are kept in `dtype`, and old policy and reference share them.
    """

    layout: Layout
    pipeline_micro_batches: int
    pipeline_fill: float
    learning_rate: float
    warmup_steps: int
    learning_rate_schedule: LearningRateSchedule
    min_learning_rate: float
    num_updates: int
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    no_weight_decay: Sequence[str] | None
    max_grad_norm: float | None
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
    lora: LoraSpec | None = None
    tokens_per_pass: int | None = None
    helpers: Sequence[str] = ()


class ClassifierEngine(Protocol):
    """Engine that scores whole sequences, such as a reward model."""

    async def score(self, token_ids: Array) -> float:
        """Logit of a sequence (int64 [L]). Raises `ValueError` if it is empty, or longer than the model takes."""
        ...

    async def close(self) -> None:
        """Stop the compute thread."""
        ...


class LogProbEngine(Protocol):
    """Engine that computes log-probs, for a task such as the reference that needs nothing else from a model."""

    async def log_probs(
        self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None = None, temperature: float | None = None
    ) -> Ragged:
        """Log-probs (float32) of the tokens of R responses (int64) to a prompt (int64 [Lp]), without gradient.

        `target_ids`: other tokens whose log-probs are taken in their places, as in `MicroBatch`. `temperature` of the distribution;
        None: the run's.
        """
        ...

    async def close(self) -> None:
        """Stop the compute thread."""
        ...


class ModelTraining(Protocol):
    """Training of one model, a policy or a critic. The gradient of a step is the sum over its `forward_backward` calls."""

    async def begin_step(self) -> None:
        """Begin a step: the micro-batches that follow belong to it, and the present weights are its start."""
        ...

    async def optim_step(self, normaliser: int) -> OptimResult:
        """Divide the sums by `normaliser`, clip, update, clear the sums. With a gradient that is not finite, skip the update."""
        ...

    async def discard(self) -> None:
        """Clear the step's sums without a step."""
        ...

    async def fingerprint(self) -> Mapping[str, str]:
        """SHA-256 of the bytes of each `weights/<name>` and `optimizer/<name>/<state>`, in hexadecimal, by these names.

        Data-parallel rank 0 returns them. The other ranks must call, too, and return an empty mapping.
        """
        ...

    async def save(self, path: Path) -> None:
        """Write the model in Hugging Face format to the folder `path`; a critic's value head to a file beside it."""
        ...

    async def save_state(self, folder: Path) -> Awaitable[None]:
        """Write to files in `folder` all that the present step depends on, which is the one that `begin_step` began last.

        Returns when the engine may be called again; the files are then written in the background. The caller awaits the returned
        awaitable before it saves the next state. The awaitable raises `OSError` or `RunError` if a file could not be written; on
        data-parallel rank 0 it is done when the files of all ranks are there. Gradients that were accumulated and random numbers
        that were drawn since the step began are not part of the state.
        """
        ...

    async def load_state(self, folder: Path) -> None:
        """Restore the state that `save_state` wrote to `folder`, under any layout. Call it before the first step only.

        Raises `RunError` if the state belongs to another model.
        """
        ...

    async def close(self) -> None:
        """Stop the compute thread."""
        ...


class CriticEngine(ModelTraining, Protocol):
    """Engine of a critic: a model of values, and its training."""

    async def values(self, prompt_ids: Array, response_ids: Ragged) -> Ragged:
        """Values (float32) before each token of R responses (int64) to a prompt (int64 [Lp]), without gradient."""
        ...

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: ValueObjective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`. The micro-batches have `values`, and their `advantages` are returns."""
        ...

    async def export_weights(self) -> WeightSource:
        """Current weights, the value head's included, until the next `optim_step` or `discard`."""
        ...

    async def install(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what another engine has exported into the weights. Raises `ValueError`, and changes nothing, when a name, shape or
        dtype is not the model's."""
        ...

    async def attest(self) -> Attestation:
        """Sums over the bits of the weights that values are now computed with, each cast to `CRITIC_DTYPE` of attestation.py."""
        ...


RANKS_STORE = "ASYNCFLOW_RANKS_STORE"
"""Environment variable with the URL where a train engine's processes find each other, in a form that torch.distributed takes."""
RANKS_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the network interface by which Gloo and NCCL connect these processes."""
EXCHANGE_SECONDS: Final = 600.0
"""Seconds that one of these processes waits for the others in one exchange. The death of a process is noticed at once."""


class TrainEngine(ModelTraining, LogProbEngine, Protocol):
    """Engine that trains a policy.

    An engine that is sharded over several processes (`Layout`) is one object in each process. In every data-parallel group one
    process leads: a loop calls it, and all leaders get the same calls, at the same time and in the same order. The other processes
    follow their leader.
    """

    device: str
    data_parallel_rank: int | None  # the leader's, from 0; None in a process that follows

    async def follow(self, objective: Objective, busy: Callable[[str], AbstractContextManager[object]]) -> None:
        """Make the calls that the leader makes, until it closes. Each call runs inside the context `busy(name of the call)`."""
        ...

    async def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """Add the micro-batches' unnormalised gradients to the step's sums; return a result for each micro-batch.

        If the engine has several data-parallel groups, all of them call at the same time, each with its own micro-batches. Their
        numbers may differ, and a group may have none.
        """
        ...

    async def set_hyperparameters(self, chosen: Hyperparameters) -> None:
        """Use these in all updates from now on, in the place of the options' own; they are not part of the state.

        Raises `UserError` if the engine keeps those that it was made with.
        """
        ...

    async def log_probs(
        self,
        prompt_ids: Array,
        response_ids: Ragged,
        target_ids: Ragged | None = None,
        temperature: float | None = None,
        rounded_to: str | None = None,
    ) -> Ragged:
        """See `LogProbEngine.log_probs`. `rounded_to`: under the weights as a version has them that travels in this dtype; None: as
        they are. Nobody reads weights that were exported meanwhile."""
        ...

    async def export_weights(self) -> WeightSource:
        """Current weights. Every leader iterates over them to the end, before the next `optim_step` or `discard`.

        If the engine gathers the weights during the iteration, the loop makes no call before `WeightSource.gathered` returns.
        Otherwise it calls `begin_step` and `forward_backward` of the next step while the weights are read.
        """
        ...
