"""Types that all rooms share: rows, columns, batches, version intervals, and what a loss receives.

A *row* is one response. A *group* is the rows of one prompt. A row's index is fixed at admission:

    index = (prompt_index << group_bits) | sample

`prompt_index` counts admissions over the whole run; `group_bits` is fixed for the run by its largest group.

Nothing here imports torch: the driver uses this module and must stay light.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import msgspec
import numpy as np

from asyncflow.errors import RunError as RunError
from asyncflow.errors import UserError as UserError

if TYPE_CHECKING:
    from torch import Tensor

Array = np.ndarray
CheckpointPlace = Literal["disk", "memory"]
"""Place of a checkpoint: in the run's folder, or in shared memory of the driver's machine."""
E = TypeVar("E", bound=Exception)
CROSSING: dict[str, type[Exception]] = {e.__name__: e for e in (UserError, RunError, ValueError, LookupError, TimeoutError)}
"""The exceptions that reach a caller in another process as themselves. All others arrive as one that names them."""


def crosses(error: type[E]) -> type[E]:
    """Register an exception of a service's contract in `CROSSING`."""
    CROSSING[error.__name__] = error
    return error


def first_error(error: BaseException) -> BaseException:
    """First error in an exception group. Loops run in task groups, and the first failure causes the others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


ARRAY_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"
)  # fmt: skip
"""The dtypes of columns, and of arrays in messages."""


def group_bits_for(largest_group: int) -> int:
    """Number of bits that hold every sample number of the largest group of a run."""
    return max(1, (largest_group - 1).bit_length())


def row_index(prompt_index: int, sample: int, group_bits: int) -> int:
    """Index (int64) of a row; the module's docstring defines it."""
    return (prompt_index << group_bits) | sample


@dataclass(frozen=True, slots=True)
class Column:
    """Declaration of a column.

    `dtype` is a numpy dtype name. A dense column holds an array of `shape` for every entry (`()`: a scalar), a ragged one an array
    [length, *shape] of its own length. `per` says whether there is an entry for every row, or one for every group (a prompt is
    stored once). The lengths of columns that `counts_tokens` add up to what a row weighs in token budgets and balances.
    """

    name: str
    dtype: str
    ragged: bool = False
    per: Literal["row", "group"] = "row"
    shape: tuple[int, ...] = ()
    counts_tokens: bool = False


class Ragged:
    """Arrays of unequal lengths, end to end: `values` [total, ...], `offsets` int64 [n + 1], first 0, last `total`."""

    __slots__ = ("offsets", "values")

    def __init__(self, values: Array, offsets: Array) -> None:
        self.values = values
        self.offsets = offsets

    @classmethod
    def from_arrays(cls, arrays: Sequence[Array], dtype: str) -> Ragged:
        """Concatenate one-dimensional arrays (copying)."""
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        values = np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> Array:
        """Entry `i` as a view."""
        return self.values[self.offsets[i] : self.offsets[i + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> Array:
        """Lengths of the arrays, int64 [n]."""
        return np.diff(self.offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.values.nbytes

    def take(self, positions: Sequence[int] | Array) -> Ragged:
        """Copy of the arrays at `positions`."""
        chosen = np.asarray(positions, np.int64)
        lengths = self.offsets[chosen + 1] - self.offsets[chosen]
        offsets = np.zeros(len(chosen) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if not len(chosen):
            return Ragged(self.values[:0].copy(), offsets)
        firsts = np.flatnonzero(np.diff(chosen, prepend=chosen[0] - 2) != 1)  # of runs of neighbours, each of which is one slice
        lasts = np.append(firsts[1:], len(chosen)) - 1
        starts, ends = self.offsets[chosen[firsts]].tolist(), self.offsets[chosen[lasts] + 1].tolist()
        values = np.empty((offsets[-1], *self.values.shape[1:]), self.values.dtype)
        for to, start, end in zip(offsets[firsts].tolist(), starts, ends, strict=True):
            values[to : to + end - start] = self.values[start:end]
        return Ragged(values, offsets)

    def __repr__(self) -> str:
        return f"Ragged({len(self)} entries, {len(self.values)} {self.values.dtype} values)"


Values = np.ndarray | Ragged


@dataclass(frozen=True, slots=True)
class Batch:
    """Columns by name, over some rows and the groups that they belong to.

    `indices` int64 [n]: the rows. `groups` int64 [g]: their prompt indices, each once, in the order of first appearance.
    A column declared `per="row"` has n entries, one declared `per="group"` has g.
    """

    indices: Array
    groups: Array
    columns: Mapping[str, Values]

    def __len__(self) -> int:
        return len(self.indices)

    def dense(self, name: str) -> Array:
        """Dense column of this name. Raises `TypeError` if it is ragged."""
        values = self.columns[name]
        if isinstance(values, Ragged):
            raise TypeError(f"column {name!r} is ragged")
        return values

    def ragged(self, name: str) -> Ragged:
        """Ragged column of this name. Raises `TypeError` if it is dense."""
        values = self.columns[name]
        if not isinstance(values, Ragged):
            raise TypeError(f"column {name!r} is dense")
        return values


MAX_CANDIDATES = 1 << 20
"""Prompts that a step may go through, where it chooses its own among them: each step numbers its groups from a multiple of this."""

Old = Literal["current", "step_start", "previous", "rollout"]
"""The old policy of the probability ratio (`train.old`); engines/train/model/tri_model.py says what each is and is right for."""
SAMPLED_UP_TO: Mapping[Old, int] = {"current": 0, "step_start": 0, "previous": 1}
"""Up to which staleness each old policy is the one that sampled; `rollout` always is."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a train engine over devices: `dp` data-parallel groups (FSDP) of `pp` pipeline stages of `tp` devices each."""

    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.dp * self.tp * self.pp


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Low-rank adapter (LoRA): what is trained in the place of a model's own weights.

    y = x W^T + (alpha / rank) (x A^T) B^T for each linear layer that a name in `targets` ends, `()`: for all but the output layer.
    A [rank, inputs] and B [outputs, rank] are trained, float32; W stays as it is. `path`: folder of PEFT's files that the adapter
    starts from; None: A is random and B 0, so that the model is the base.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    path: str | None = None

    @property
    def scaling(self) -> float:
        """Factor of the adapter's product."""
        return self.alpha / self.rank

    def has_target(self, linear: str) -> bool:
        """Whether the linear layer of this name is one of the targets, by the last parts of its name, as PEFT takes them."""
        return not self.targets or any(linear == target or linear.endswith(f".{target}") for target in self.targets)


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Shape and dtype of a tensor. `dtype` is torch's name without `torch.`, such as `bfloat16`."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Spec of this tensor."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


class WeightSource(Protocol):
    """Weights of a model, one tensor at a time, so that no process has to hold a second model to pass them on.

    A model that is sharded over processes has a source in each that exports. All of them iterate, since each tensor is gathered
    from all; what is gathered comes out of one of them, that of data-parallel rank 0, and the others' iterations yield nothing.
    """

    specs: Mapping[str, TensorSpec]
    """By Hugging Face names, known before any tensor is there, the same in every process. They come in its order: sorted by name is
    how a file of one dtype is written, and therefore the fastest."""

    are_lasting: bool
    """Whether the tensors exist without having been gathered, so that they cost nothing to keep until the next `optim_step`."""

    are_gathered: bool
    """Whether the engine computes nothing until the last one has come: what can wait is best done afterwards."""

    def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
        """Pairs (name, tensor) of `specs`, in that order. Tensors are on the CPU, contiguous, and as their specs say.

        A tensor is valid until the next one is asked for, or, if they `are_lasting`, until the next `optim_step`. A reader that
        begins goes on to the end.
        """
        ...

    async def gathered(self) -> None:
        """Wait until the engine may be called again. If tensors `are_gathered`, that is when the last one has been gathered.

        At once if they are not. Either way `optim_step` and `discard` have to wait for the end of `tensors`.
        """
        ...


class HeldWeights:
    """`WeightSource` of tensors that are already there. Contiguous tensors on the CPU are not copied, others are copied one at a
    time."""

    are_gathered = False

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(sorted(tensors.items()))
        self.specs: Mapping[str, TensorSpec] = {name: TensorSpec.of(tensor) for name, tensor in self._tensors.items()}
        self.are_lasting = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in self._tensors.values())

    async def tensors(self) -> AsyncIterator[tuple[str, Tensor]]:
        """See `WeightSource.tensors`."""
        for name, tensor in self._tensors.items():
            yield name, tensor.detach().cpu().contiguous()

    async def gathered(self) -> None:
        """See `WeightSource.gathered`; nothing is gathered here."""


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """The policy versions, both included, that may generate a group."""

    low: int
    high: int

    def __contains__(self, version: int) -> bool:
        return self.low <= version <= self.high


class GroupMeta(msgspec.Struct, frozen=True, array_like=True):
    """Facts of an admitted group other than its columns. They never change, except that an interval may get narrower.

    `size`: rows. `topic` and `partition`: tasks see the groups of a topic, and requests may be for one partition of it. In a run
    the topic is `train`, whose partitions are the training steps, or `eval`, whose partitions are the evaluated versions.
    `priority`: lower ones go first.
    """

    group: int
    size: int
    partition: int
    interval: Interval
    topic: str = "train"
    priority: int = 0


Advantages = np.ndarray | Ragged
"""Advantages of a group: float32 [R], a number a row; or ragged float32, a number for each token of each response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """Input of an algorithm: the R rows of one complete group. Ragged columns have an entry per response token.

    rewards float32 [R]; truncated uint8 [R], 1 where the length limit ended the response; loss_mask uint8, 1 where the policy
    itself produced the token; rollout_logprobs float32, of the engine that sampled, which is the policy that the tokens were drawn
    from; ref_logprobs float32, of the frozen reference, None unless it is a task of its own; values float32, what a critic expects
    of the response before each token, None where there is no critic. In a run with an environment: turns int64, flat, of each turn
    its first token, its number of tokens, tools called and failed; turn_rewards float32, an entry per turn, NaN: none.
    """

    rewards: Array
    truncated: Array
    loss_mask: Ragged
    rollout_logprobs: Ragged
    ref_logprobs: Ragged | None = None
    values: Ragged | None = None
    turns: Ragged | None = None
    turn_rewards: Ragged | None = None

    @property
    def response_lengths(self) -> Array:
        """Lengths of the responses in tokens, int64 [R], tokens that the policy did not produce included."""
        return self.loss_mask.lengths


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A loss's input from one micro-batch, or from a piece of one: an entry per response token, rows end to end, no padding.

    T = response tokens, R = the rows of the whole micro-batch. A loss that is token-local (`Algorithm.is_token_local`) is given
    pieces, and may use of a row only what is here for each of its tokens, or for the row as a whole in `row_tokens_R`.
    """

    logprobs_T: Tensor  # float32, the policy's, with gradient
    old_logprobs_T: Tensor  # float32, of the old policy (`train.old`); no gradient
    rollout_logprobs_T: Tensor  # float32, of the engine that sampled
    ref_logprobs_T: Tensor | None  # float32, of the frozen reference; None without a KL term
    entropy_T: Tensor  # float32, the policy's, with gradient, which costs nothing until a loss uses it
    advantages_T: Tensor  # float32
    mask_T: Tensor  # float32 0 or 1: the tokens that the policy itself produced
    row_T: Tensor  # int64, in 0..R-1: the row that a token belongs to
    row_tokens_R: Tensor  # float32: the masked tokens of each row, with those of its sequences that other micro-batches have

    @property
    def sequence_tokens_R(self) -> Tensor:
        """Masked tokens of each row in this micro-batch, where a row is one sequence, float32. Not of a piece of one."""
        return self.mask_T.new_zeros(len(self.row_tokens_R)).index_add(0, self.row_T, self.mask_T)


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """Input of a critic's loss from one micro-batch: an entry per response token, rows end to end, as in `TokenBatch`."""

    values_T: Tensor  # float32, the critic's, with gradient
    old_values_T: Tensor  # float32, those that the step's advantages were made from; no gradient
    returns_T: Tensor  # float32, what the values are to become
    mask_T: Tensor  # float32 0 or 1
    row_T: Tensor  # int64, in 0..R-1
    row_tokens_R: Tensor  # float32


@dataclass(frozen=True, slots=True)
class LossSums:
    """Unnormalised sums of a loss: `loss` is the sum whose gradient is accumulated (the normaliser of the step divides once, at
    `optim_step`).

    `metrics` are sums over the masked tokens, without gradient; dividing by the step's token count gives the logged mean. One whose
    name ends in `/max` is a maximum over them instead, and is logged as it is. `tokens`: numbers of each token [T], without
    gradient, such as whether it is clipped, which the live page shows of the responses that are kept.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    tokens: Mapping[str, Tensor] = field(default_factory=dict)


def is_maximum(metric: str) -> bool:
    """Whether parts of this metric of `LossSums` are joined by their maximum instead of their sum."""
    return metric.endswith("/max")


class Objective(Protocol):
    """The part of an algorithm that an engine needs."""

    is_token_local: bool
    """Whether the loss is a sum over tokens of what depends on that token's numbers (and on `row_tokens_R`) alone.

    It is then given the micro-batch in pieces, and its gradient is made while the logits of a piece are there, not by making them
    again. False is always right; it is needed for ratios of whole sequences.
    """

    def loss(self, batch: TokenBatch) -> LossSums:
        """Unnormalised loss, a differentiable scalar, and its metrics (sums over the masked tokens).

        Of one micro-batch, or, if it is token-local, of pieces of one.
        """
        ...


class ValueObjective(Protocol):
    """The part of a critic's loss that an engine needs."""

    def loss(self, batch: ValueBatch) -> LossSums:
        """Unnormalised loss of one micro-batch, a differentiable scalar, and its metrics (sums over the masked tokens)."""
        ...
